"""Edits of a run's plan, and which steps they reach. Pure: reads and writes nothing.

Must never let a step keep an output that was made from anything else than what the fork says it was shown.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from engine.errors import InputError, RefusedError
from engine.graph import PlanGraph
from engine.plan import Access, Step
from engine.plan.limits import TEXT_BYTES_MAX
from engine.store.forks import ForkSource, SourceStep

SUBTASK_BYTES_MAX: Final = TEXT_BYTES_MAX
UNREAD: Final = "unread"

Fate = Literal["run", "reused", "skipped"]
Why = Literal["task-edited", "edited", "input-changed", "unfinished", "unread", "left-out"]


@dataclass(frozen=True, slots=True)
class StepEdit:
    """What is to be different about the step at a position; None leaves a field as it is."""

    position: int
    worker: str | None = None
    subtask: str | None = None
    access: Access | None = None


@dataclass(frozen=True, slots=True)
class Fates:
    """What becomes of each step: positions that run, that are reused, and that an operator had left out before."""

    runs: frozenset[int]
    reused: frozenset[int]
    left_out: frozenset[int]


def read_subtask(raw: bytes) -> str:
    """The subtask as text; raises InputError for an empty, binary or too long one."""
    if len(raw) > SUBTASK_BYTES_MAX:
        raise InputError(
            "subtask-too-long",
            f"the subtask has {len(raw):,} bytes; the limit is {SUBTASK_BYTES_MAX:,}",
            hint="put long material into the task, or into another step",
        )
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise InputError("subtask-binary", "the subtask is not UTF-8 text", hint="give text") from None
    if "\0" in text:
        raise InputError("subtask-binary", "the subtask holds a NUL character", hint="give text")
    if not text.strip():
        raise InputError("subtask-empty", "the subtask is empty", hint="say what the worker is to do")
    return text


def edited_steps(
    source: ForkSource, edits: Sequence[StepEdit], workers: Collection[str]
) -> tuple[tuple[Step, ...], dict[int, tuple[str, ...]]]:
    """The steps of the edited plan, and the names of the fields that differ by position.

    Raises InputError for an edit that names no step or that changes nothing, and for a plan that is none for a pool
    with these workers.
    """
    steps = [Step(step.position, step.worker, step.subtask, step.access) for step in source.steps]
    edited: dict[int, tuple[str, ...]] = {}
    for edit in edits:
        if not 0 <= edit.position < len(steps):
            raise InputError(
                "step-unknown",
                f"run {source.run_id} has no step {edit.position}",
                hint=f"it has steps 0 to {len(steps) - 1}; `podium show {source.run_id}` shows them",
            )
        if edit.position in edited:
            raise InputError("step-twice", f"step {edit.position} is edited twice", hint="give its edits together")
        before = steps[edit.position]
        steps[edit.position] = after = _edited(before, edit, workers)
        edited[edit.position] = _differing(before, after, is_later_round=source.round > 0)
        if not edited[edit.position]:
            raise InputError(
                "edit-changes-nothing",
                f"step {edit.position} is like that already",
                hint=f"`podium show {source.run_id}` shows its worker and what it reads",
            )
    _check(steps, source, workers)
    return tuple(steps), edited


def _edited(step: Step, edit: StepEdit, workers: Collection[str]) -> Step:
    if edit.worker is not None and edit.worker not in workers:
        raise _no_worker(f"there is no worker {edit.worker[:80]!a}", workers)
    return Step(
        position=step.position,
        worker=step.worker if edit.worker is None else edit.worker,
        subtask=step.subtask if edit.subtask is None else read_subtask(edit.subtask.encode()),
        access=step.access if edit.access is None else _access(edit.position, edit.access),
    )


def _access(position: int, access: Access) -> Access:
    if access == "all":
        return access
    wrong = next((earlier for earlier in access if not 0 <= earlier < position), None)
    if wrong is not None:
        code, text = ("access-self", "itself") if wrong == position else ("access-later", f"step {wrong}")
        earlier = "no step: it is the first" if position == 0 else f"steps 0 to {position - 1}"
        raise InputError(code, f"step {position} cannot read {text}", hint=f"it may read {earlier}")
    return tuple(sorted(set(access)))


def _differing(before: Step, after: Step, *, is_later_round: bool) -> tuple[str, ...]:
    found = {
        "worker": before.worker != after.worker,
        "subtask": before.subtask != after.subtask,
        # "all" and the same positions spelled out show a worker the same, but for the round before a later one.
        "access": before.access != after.access if is_later_round else before.visible() != after.visible(),
    }
    return tuple(name for name, differs in found.items() if differs)


def _check(steps: Sequence[Step], source: ForkSource, workers: Collection[str]) -> None:
    """What the source's plan may no longer be: a plan for this pool, and one that stands on its own."""
    for step in steps:
        if step.worker not in workers:
            raise _no_worker(f"step {step.position} has worker {step.worker}, which the pool does not have", workers)
        if source.round and step.access == "all":
            raise RefusedError(
                "fork-reads-previous-round",
                f'step {step.position} of round {source.round} reads "all", so also the round before',
                hint=f"a fork has one round only; `--step {step.position} --access ...` with positions makes it free",
            )


def _no_worker(text: str, workers: Collection[str]) -> InputError:
    return InputError("worker-unknown", text, hint=f"the pool has {', '.join(workers)}")


def fates(
    source: Sequence[SourceStep], plan: Sequence[Step], edited: Collection[int], unread: Collection[int]
) -> Fates:
    """What becomes of each step of an edited plan.

    What an edit can reach runs: the edited steps and all that read them, directly or through others. What has no
    output in the source runs too; all others are reused. ``unread`` are positions that the policy for unread steps
    leaves out. A step that an operator had left out stays so until an edit reaches it, unless it is the answer.
    """
    graph = PlanGraph.of([step.visible() for step in plan])
    by_operator = {
        step.position
        for step in source
        if step.state == "skipped" and step.reason != UNREAD and step.position != graph.answer
    }
    unfinished = {step.position for step in source if step.attempt_id is None} - by_operator
    reached = set(graph.reach({*edited, *unfinished}))
    open_to_use = set(range(graph.size)) - set(unread)
    return Fates(
        runs=frozenset(reached & open_to_use),
        reused=frozenset(open_to_use - reached - by_operator),
        left_out=frozenset((by_operator - reached) & open_to_use),
    )


def why(position: int, plan: Sequence[Step], found: Fates, edited: Mapping[int, object], *, task_edited: bool) -> Why:
    """Why a step runs or is left out; for a reused one nothing is to be said."""
    if position in found.left_out:
        return "left-out"
    if position not in found.runs:
        return "unread"
    if position in edited:
        return "edited"
    if task_edited:
        return "task-edited"
    if found.runs.intersection(plan[position].visible()):
        return "input-changed"
    return "unfinished"
