"""Which steps of a fork run: against an oracle that works out what every step would be shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InputError, RefusedError
from engine.operations.fork_edits import SUBTASK_BYTES_MAX, StepEdit, edited_steps, fates, read_subtask, why
from engine.plan import Access, Step
from engine.store.forks import ForkSource, SourceStep

WORKERS = ("alpha", "beta", "gamma")


def source_step(position: int, access: Access = (), **changes: Any) -> SourceStep:
    fields: dict[str, Any] = {
        "id": uuid4(),
        "worker": WORKERS[position % 3],
        "model": "plain",
        "subtask": f"Do {position}.",
        "state": "succeeded",
        "reason": None,
        "attempt_id": uuid4(),
        "output": f"Done {position}.",
        **changes,
    }
    if fields["state"] not in {"succeeded", "reused"}:
        fields |= {"attempt_id": None, "output": None}
    return SourceStep(position=position, access=access, **fields)


def source_of(steps: Sequence[SourceStep], *, round_number: int = 0) -> ForkSource:
    return ForkSource(uuid4(), "succeeded", round_number, "lists", "What?", b"{}", tuple(steps))


def shown(steps: Sequence[Step], *, task: str = "What?") -> list[Any]:
    """For each step all that its output can depend on: what it is asked, and everything behind what it reads."""
    found: list[Any] = []
    for step in steps:
        read = tuple((earlier, steps[earlier].subtask, found[earlier]) for earlier in step.visible())
        found.append((task, step.position, step.worker, step.subtask, read))
    return found


@st.composite
def accesses(draw: st.DrawFn, position: int) -> Access:
    every = st.just("all") | st.sets(st.integers(0, max(position - 1, 0))).map(lambda found: tuple(sorted(found)))
    return draw(every) if position else draw(st.sampled_from(["all", ()]))


@st.composite
def sources(draw: st.DrawFn) -> ForkSource:
    return source_of([source_step(position, draw(accesses(position))) for position in range(draw(st.integers(1, 7)))])


@st.composite
def edits(draw: st.DrawFn, source: ForkSource) -> list[StepEdit]:
    positions = draw(st.sets(st.integers(0, len(source.steps) - 1), min_size=1))
    made = []
    for position in sorted(positions):
        worker = draw(st.none() | st.sampled_from(WORKERS))
        subtask = draw(st.none() | st.just(f"Do {position} better."))
        edit = StepEdit(position, worker, subtask, draw(st.none() | accesses(position)))
        step = source.steps[position]
        own = [Step(position, "", "", access).visible() for access in (step.access, edit.access) if access is not None]
        if subtask is None and worker in {None, step.worker} and own[0] == own[-1]:
            edit = StepEdit(position, subtask="Do it otherwise.")
        made.append(edit)
    return made


@given(st.data())
def test_exactly_the_steps_that_an_edit_can_reach_run_again(data: st.DataObject) -> None:
    source = data.draw(sources())
    before, _ = edited_steps(source, [], WORKERS)
    after, edited = edited_steps(source, data.draw(edits(source)), WORKERS)
    found = fates(source.steps, after, edited, ())
    different = {at for at, (old, new) in enumerate(zip(shown(before), shown(after), strict=True)) if old != new}
    assert found.runs == different
    assert found.reused == set(range(len(after))) - different
    assert found.left_out == frozenset()


@given(st.data())
def test_what_has_no_output_runs_and_what_is_reused_was_made_from_what_the_fork_shows(data: st.DataObject) -> None:
    source = data.draw(sources())
    lost: set[int] = set()
    steps = []
    for had in source.steps:
        # As in any run: a step has an output only if all that it reads has one.
        reads = Step(had.position, had.worker, had.subtask, had.access).visible()
        if lost.intersection(reads) or data.draw(st.booleans()):
            lost.add(had.position)
            state = data.draw(st.sampled_from(["failed", "cancelled", "pending", "running", "waiting"]))
            steps.append(source_step(had.position, had.access, state=state))
        else:
            steps.append(had)
    plan, _ = edited_steps(source_of(steps), [], WORKERS)
    found = fates(steps, plan, (), ())
    assert found.runs == lost
    for position in found.reused:
        assert found.reused.issuperset(plan[position].visible())


def test_a_step_that_an_operator_left_out_stays_so_until_an_edit_reaches_it() -> None:
    steps = [
        source_step(0),
        source_step(1, (0,), state="skipped", reason="operator"),
        source_step(2, (1,)),
        source_step(3, (2,)),
    ]
    plan, edited = edited_steps(source_of(steps), [StepEdit(3, worker="beta")], WORKERS)
    found = fates(steps, plan, edited, ())
    assert (found.runs, found.reused, found.left_out) == ({3}, {0, 2}, {1})
    assert why(1, plan, found, edited, task_edited=False) == "left-out"
    plan, edited = edited_steps(source_of(steps), [StepEdit(0, worker="beta")], WORKERS)
    assert fates(steps, plan, edited, ()).runs == {0, 1, 2, 3}


def test_an_answer_that_an_operator_left_out_is_asked_for_again() -> None:
    steps = [source_step(0), source_step(1, (0,), state="skipped", reason="operator")]
    plan, edited = edited_steps(source_of(steps), [], WORKERS)
    found = fates(steps, plan, edited, ())
    assert (found.runs, found.reused) == ({1}, {0})
    assert why(1, plan, found, edited, task_edited=False) == "unfinished"


def test_a_step_that_nobody_read_runs_once_an_edit_lets_it_be_read() -> None:
    steps = [source_step(0, state="skipped", reason="unread"), source_step(1), source_step(2, (1,))]
    plan, edited = edited_steps(source_of(steps), [StepEdit(2, access=(0, 1))], WORKERS)
    found = fates(steps, plan, edited, ())
    assert (found.runs, found.reused) == ({0, 2}, {1})
    plan, edited = edited_steps(source_of(steps), [StepEdit(2, worker="alpha")], WORKERS)
    found = fates(steps, plan, edited, (0,))
    assert (found.runs, found.reused, found.left_out) == ({2}, {1}, frozenset())
    assert why(0, plan, found, edited, task_edited=False) == "unread"


def test_each_step_that_runs_has_its_reason() -> None:
    steps = [
        source_step(0),
        source_step(1, (0,)),
        source_step(2, state="failed"),
        source_step(3, (2,), state="cancelled"),
    ]
    plan, edited = edited_steps(source_of(steps), [StepEdit(0, worker="gamma", subtask="More.")], WORKERS)
    assert edited == {0: ("worker", "subtask")}
    found = fates(steps, plan, edited, ())
    reasons = [why(position, plan, found, edited, task_edited=False) for position in range(4)]
    assert reasons == ["edited", "input-changed", "unfinished", "input-changed"]
    assert why(2, plan, found, edited, task_edited=True) == "task-edited"


@pytest.mark.parametrize(
    ("edit", "code"),
    [
        (StepEdit(3, worker="beta"), "step-unknown"),
        (StepEdit(-1, worker="beta"), "step-unknown"),
        (StepEdit(2, worker="delta"), "worker-unknown"),
        (StepEdit(2, worker="ALPHA"), "worker-unknown"),
        (StepEdit(1, access=(2,)), "access-later"),
        (StepEdit(1, access=(0, 7)), "access-later"),
        (StepEdit(1, access=(1,)), "access-self"),
        (StepEdit(0, access=(0,)), "access-self"),
        (StepEdit(2, subtask=" \n"), "subtask-empty"),
        (StepEdit(2, subtask="x" * (SUBTASK_BYTES_MAX + 1)), "subtask-too-long"),
        (StepEdit(2, worker="gamma"), "edit-changes-nothing"),
        (StepEdit(2, subtask="Do 2."), "edit-changes-nothing"),
        (StepEdit(2, access="all"), "edit-changes-nothing"),
        (StepEdit(2), "edit-changes-nothing"),
    ],
)
def test_an_edit_that_makes_no_other_plan_is_refused_with_the_reason(edit: StepEdit, code: str) -> None:
    source = source_of([source_step(0), source_step(1, (0,)), source_step(2, (0, 1))])
    with pytest.raises(InputError) as refused:
        edited_steps(source, [edit], WORKERS)
    assert refused.value.code == code
    assert refused.value.hint


def test_a_step_is_edited_once_and_every_worker_is_one_of_the_pool() -> None:
    source = source_of([source_step(0), source_step(1, (0,))])
    with pytest.raises(InputError, match="edited twice"):
        edited_steps(source, [StepEdit(1, worker="gamma"), StepEdit(1, subtask="More.")], WORKERS)
    with pytest.raises(InputError, match="step 0 has worker alpha"):
        edited_steps(source, [StepEdit(1, worker="gamma")], ("beta", "gamma"))
    edited_steps(source, [StepEdit(0, worker="gamma")], ("beta", "gamma"))


def test_a_plan_that_read_the_round_before_is_not_forked_unless_the_edit_frees_it() -> None:
    steps = [source_step(0), source_step(1, "all")]
    with pytest.raises(RefusedError) as refused:
        edited_steps(source_of(steps, round_number=1), [StepEdit(0, worker="beta")], WORKERS)
    assert refused.value.code == "fork-reads-previous-round"
    plan, edited = edited_steps(source_of(steps, round_number=1), [StepEdit(1, access=(0,))], WORKERS)
    assert plan[1].access == (0,)
    assert edited == {1: ("access",)}


def test_positions_are_stored_sorted_and_once() -> None:
    source = source_of([source_step(0), source_step(1), source_step(2)])
    plan, edited = edited_steps(source, [StepEdit(2, access=(1, 0, 1))], WORKERS)
    assert plan[2].access == (0, 1)
    assert edited == {2: ("access",)}


@pytest.mark.parametrize(
    ("raw", "code"), [(b"", "subtask-empty"), (b"\xff", "subtask-binary"), (b"a\0b", "subtask-binary")]
)
def test_a_subtask_is_text(raw: bytes, code: str) -> None:
    with pytest.raises(InputError) as refused:
        read_subtask(raw)
    assert refused.value.code == code
    assert read_subtask(" Übe.\n".encode()) == " Übe.\n"
