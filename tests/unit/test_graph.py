"""The graph of a plan against brute force on random plans."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.graph import PlanGraph


@st.composite
def graphs(draw: st.DrawFn) -> PlanGraph:
    size = draw(st.integers(0, 7))
    return PlanGraph.of(
        [draw(st.lists(st.integers(0, max(0, at - 1)), max_size=4)) if at else [] for at in range(size)]
    )


def sees(graph: PlanGraph, source: int, target: int) -> bool:
    """Whether something of ``source`` can reach ``target``, by trying every chain."""
    return source == target or any(sees(graph, source, middle) for middle in graph.reads[target])


@given(graphs())
def test_readers_unread_useless_and_reach_agree_with_every_chain(graph: PlanGraph) -> None:
    every = range(graph.size)
    for position in every:
        assert graph.readers(position) == tuple(later for later in every if position in graph.reads[later])
        assert graph.reach([position]) == tuple(later for later in every if sees(graph, position, later))
    assert graph.unread() == tuple(at for at in every if at != graph.answer and not graph.readers(at))
    assert graph.useless() == tuple(at for at in every if not sees(graph, at, graph.answer))


@given(graphs(), st.randoms())
def test_any_order_of_finishing_runs_each_step_once_and_never_before_its_inputs(graph: PlanGraph, rng: object) -> None:
    done: set[int] = set()
    begun: set[int] = set()
    while len(done) < graph.size:
        for position in graph.ready(done=done, begun=begun):
            assert position not in begun
            assert set(graph.reads[position]) <= done
            begun.add(position)
        waiting = sorted(begun - done)
        assert waiting, "nothing runs and nothing is ready"
        done.add(rng.choice(waiting))  # type: ignore[attr-defined]  # hypothesis gives a random.Random
    assert graph.ready(done=done, begun=begun) == ()


@given(graphs(), st.lists(st.floats(0, 1000), min_size=7, max_size=7))
def test_the_critical_path_is_the_longest_of_all_chains(graph: PlanGraph, durations_s: list[float]) -> None:
    by_position = dict(enumerate(durations_s))
    found = graph.critical_path(by_position)
    chains = [
        chain
        for length in range(graph.size + 1)
        for chain in itertools.combinations(range(graph.size), length)
        if all(earlier in graph.reads[later] for earlier, later in itertools.pairwise(chain))
    ]
    longest_s = max(sum(durations_s[at] for at in chain) for chain in chains)
    assert found.duration_s == pytest.approx(longest_s)
    assert found.positions in chains
    assert sum(durations_s[at] for at in found.positions) == pytest.approx(longest_s)


@given(graphs())
def test_levels_hold_every_step_once_one_above_its_deepest_input(graph: PlanGraph) -> None:
    levels = graph.levels()
    depth = {position: level for level, positions in enumerate(levels) for position in positions}
    assert sorted(depth) == list(range(graph.size))
    for position, sources in enumerate(graph.reads):
        assert depth[position] == 1 + max((depth[source] for source in sources), default=-1)


@pytest.mark.parametrize("reads", [[[0]], [[], [1]], [[], [2]], [[], [-1]]])
def test_a_step_that_reads_itself_or_what_is_not_earlier_is_refused(reads: list[list[int]]) -> None:
    with pytest.raises(ValueError):
        PlanGraph.of(reads)


def test_missing_durations_count_as_nothing() -> None:
    path = PlanGraph.of([[], [0], [1]]).critical_path({1: 2.0})
    assert path.duration_s == 2.0
    assert PlanGraph.of([]).critical_path({}).positions == ()
