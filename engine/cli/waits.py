"""What people are told about a run that waits for somebody: what for, since when, and which commands answer.

Pure words. Must never read anything or decide whether a run waits: the record says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from engine.cli.render import between, duration, preview

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from engine.store.snapshots import RunSnapshot, StepSnapshot
    from engine.store.watching import RunProgress, StepProgress

OPERATOR: Final = "operator"
PAUSED: Final = "paused"
UNITS: Final = {"budget-usd": "usd", "budget-tokens": "tokens", "budget-calls": "calls"}
_WHAT: Final = {
    "operator": "waits for an operator",
    "budget-usd": "waits for the budget (dollars)",
    "budget-tokens": "waits for the budget (tokens)",
    "budget-calls": "waits for the budget (calls)",
    "secret-missing": "waits for its key",
    "no-worker": "waits for a worker process",
}
# With more steps than that the commands of each are not spelled out.
STEPS_MAX: Final = 8


def wait_lines(run: RunSnapshot | RunProgress) -> list[str]:
    """A line for each step of the present round that waits: what for, and for how long."""
    return [_line(step, run.read_at) for step in _waiting(run)[:STEPS_MAX]]


def hint_lines(run: RunSnapshot | RunProgress) -> list[str]:
    """The commands that let a waiting run go on; none where it goes on by itself, or where more must be said."""
    lines: list[str] = []
    if run.state == "waiting" and run.reason == PAUSED:
        lines.append(f"podium unpause {run.id}")
    waiting = _waiting(run)
    last = max((step.position for step in run.steps if step.round == run.round), default=-1)
    answerable = [step.position for step in waiting if step.reason == OPERATOR][:STEPS_MAX]
    lines += [_answers(run.id, position, is_last=position == last) for position in answerable]
    reasons = {str(step.reason) for step in waiting} | ({str(run.reason)} if run.state == "waiting" else set())
    lines += [
        f"`podium budget {run.id}` shows what is used, `podium budget {run.id} --{unit} N` sets a new limit"
        for reason, unit in UNITS.items()
        if reason in reasons
    ]
    return lines


def _answers(run_id: UUID, position: int, *, is_last: bool) -> str:
    step = f"{run_id} --step {position}"
    skip = "" if is_last else f", `podium skip {step}`"
    return f"`podium retry {step} [--worker NAME]`{skip} or `podium abort {step}`"


def _waiting(run: RunSnapshot | RunProgress) -> Sequence[StepSnapshot | StepProgress]:
    return [step for step in run.steps if step.state == "waiting" and step.round == run.round]


def _line(step: StepSnapshot | StepProgress, now: datetime) -> str:
    what = _WHAT.get(str(step.reason), f"waits ({step.reason})")
    since = "" if step.waiting_since is None else f" for {duration(between(step.waiting_since, now))}"
    return f"step {step.position} ({preview(step.worker, 64)}) {what}{since}"
