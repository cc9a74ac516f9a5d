"""How people and programs see what belongs to a run: the runs below it, and its rounds. Must never read or decide."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from engine.cli.contract import decimal_text, time_text
from engine.cli.render import between, can_draw, counted, duration, money, preview, state_words, tokens
from engine.store.states import RUN_ENDED
from engine.store.trees import children_of, with_below

if TYPE_CHECKING:
    from datetime import datetime

    from engine.store.snapshots import RunSnapshot, StepSnapshot
    from engine.store.trees import Descendant, ParentStep, RoundSnapshot, Totals
    from engine.store.watching import RunProgress

Json = dict[str, Any]


def tree_lines(run: RunSnapshot, step: StepSnapshot) -> list[str]:
    """The run that a step was delegated to, and the runs below that, a line each."""
    child = run.child_of(step)
    return [] if child is None else list(_lines(child, run.below, run.read_at, 2))


def _lines(run: Descendant, below: Sequence[Descendant], now: datetime, depth: int) -> Iterator[str]:
    mark = "└" if can_draw() else "`"
    used = with_below(run, below)
    took = duration(between(run.started_at, run.ended_at or now))
    cost = money(used.cost_usd, complete=used.cost_complete)
    yield (
        f"{'  ' * depth}{mark} run {run.id} {state_words(run.state, run.reason)}: {done_words(run)}, {took}, "
        f"{tokens(used.input_tokens)} tokens in, {tokens(used.output_tokens)} out, cost {cost}"
    )
    for child in children_of(below, run.id):
        where = place_words(child.parent)
        first, *more = _lines(child, below, now, depth + 1)
        yield f"{first} ({where})"
        yield from more


def done_words(run: Descendant) -> str:
    """`round 1, 1 of 3 steps`."""
    steps = f"{run.steps_done} of {counted(run.steps_count, 'step')}" if run.steps_count else "no plan yet"
    return f"round {run.round}, {steps}" if run.round else steps


def place_words(parent: ParentStep) -> str:
    """`step 1`, or `round 1, step 0`."""
    step = f"step {parent.position}"
    return f"round {parent.round}, {step}" if parent.round else step


def round_words(one: RoundSnapshot, run: RunSnapshot) -> str:
    """The head of a round's section; empty for a first round that is the only one."""
    if one.kept:
        return f"round {one.number}: the answer was kept"
    if one.planned_at is not None:
        return f"round {one.number}" if len(run.rounds) > 1 else ""
    if not one.number:
        return ""
    return f"round {one.number}: {'no plan' if run.state in RUN_ENDED else 'being planned'}"


def blame_below(run: RunSnapshot, step: StepSnapshot) -> str:
    """`: run 01a2... failed (auth-failed)`, for a step that failed with the run it was delegated to; else empty."""
    child = run.child_of(step)
    if child is None or child.state not in {"failed", "cancelled"}:
        return ""
    # The reason stands where the first call failed: in the deepest run that has one.
    deepest = next((one for one in children_of(run.below, child.id) if one.state == "failed"), None)
    further = "" if deepest is None else f"; see also run {deepest.id}"
    return f": run {child.id} {state_words(child.state, child.reason)}{further}"


def progress_lines(progress: RunProgress) -> list[tuple[str, str]]:
    """For each run below, what tells it apart and one line on how far it is."""
    lines = []
    for run in progress.below:
        owner = "" if run.parent.run_id == progress.id else f" of run {str(run.parent.run_id)[:8]}"
        state = state_words(run.state, run.reason)
        words = f"{place_words(run.parent)}{owner}: run {str(run.id)[:8]} {state}, {done_words(run)}"
        lines.append((str(run.id), words))
    return lines


def below_object(run: RunSnapshot) -> list[Json]:
    """The runs below a run for `--json`, from the top; the numbers of each are with all that is below it."""
    return [
        {
            "id": str(one.id),
            "parent": parent_object(one.parent),
            "state": one.state,
            "reason": one.reason,
            "execution": one.execution,
            "round": one.round,
            **totals_object(with_below(one, run.below)),
            "started_at": time_text(one.started_at),
            "ended_at": time_text(one.ended_at),
        }
        for one in run.below
    ]


def parent_object(parent: ParentStep | None) -> Json | None:
    """The step that a run was made for, for `--json`."""
    if parent is None:
        return None
    return {"run": str(parent.run_id), "round": parent.round, "step": parent.position}


def totals_object(used: Totals) -> Json:
    """Costs and tokens for `--json`; the cost is null while none of it is known."""
    nothing_known = not used.cost_complete and used.cost_usd == 0
    return {
        "cost_usd": None if nothing_known else decimal_text(used.cost_usd),
        "cost_complete": used.cost_complete,
        "tokens": {"input": used.input_tokens, "output": used.output_tokens},
    }


def rounds_object(run: RunSnapshot) -> list[Json]:
    """The rounds of a run for `--json`."""
    return [
        {
            "round": one.number,
            "plan_digest": None if one.plan_json is None else hashlib.sha256(one.plan_json).hexdigest(),
            "steps": 0 if one.steps_count is None else one.steps_count,
            "kept": one.kept,
            "planned_at": time_text(one.planned_at),
        }
        for one in run.rounds
    ]


def child_preview(parent: ParentStep | None, task: str | None) -> str:
    """A task in a list; of a run below another one it says whose step it is."""
    if parent is None:
        return preview(task)
    # The task of such a run is a whole prompt; where it belongs says more.
    return f"({place_words(parent)} of run {parent.run_id})"
