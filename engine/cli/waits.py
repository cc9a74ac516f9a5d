"""What people are told about a run that waits for somebody: what for, since when, and which commands answer.

Pure words. Must never read anything or decide whether a run waits: the record says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from engine.cli.diagnosis import model_of
from engine.cli.render import between, duration, preview
from engine.cli.review_render import need_words, what_words

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from engine.store.review_views import ReviewLine
    from engine.store.snapshots import RunSnapshot, StepSnapshot
    from engine.store.watching import RunProgress, StepProgress
    from worker_pools.pool import Pool

OPERATOR: Final = "operator"
PAUSED: Final = "paused"
UNITS: Final = {"budget-usd": "usd", "budget-tokens": "tokens", "budget-calls": "calls"}
_WHAT: Final = {
    "operator": "waits for an operator",
    "review": "waits for a review",
    "review-contradicted": "waits: the tables and the ledger say different things of its review",
    "budget-usd": "waits for the budget (dollars)",
    "budget-tokens": "waits for the budget (tokens)",
    "budget-calls": "waits for the budget (calls)",
    "secret-missing": "waits for its key",
    "no-worker": "waits for a worker process",
    "workers-busy": "waits for its turn: every worker process of its queue is busy",
}
# With more steps than that the commands of each are not spelled out.
STEPS_MAX: Final = 8


def wait_lines(run: RunSnapshot | RunProgress, whys: Mapping[int, str] | None = None) -> list[str]:
    """A line for each step of the present round that waits, and for each open review: what for, and for how long.

    ``whys`` are the ends of the lines of steps, by position.
    """
    ends = whys or {}
    lines = [_line(step, run.read_at) + ends.get(step.position, "") for step in _waiting(run)[:STEPS_MAX]]
    return lines + [_review_line(review) for review in _open(run)[:STEPS_MAX]]


def hint_lines(run: RunSnapshot | RunProgress, paused: UUID | None = None) -> list[str]:
    """The commands that let a waiting run go on; none where it goes on by itself, or where more must be said.

    ``paused`` is the run whose pause holds this one, if that is known; without it, this one.
    """
    lines: list[str] = []
    if run.state == "waiting" and run.reason == PAUSED:
        lines.append(f"podium unpause {paused or run.id}")
    waiting = _waiting(run)
    last = max((step.position for step in run.steps if step.round == run.round), default=-1)
    answerable = [step.position for step in waiting if step.reason == OPERATOR][:STEPS_MAX]
    lines += [_answers(run.id, position, is_last=position == last) for position in answerable]
    lines += [_reviews(review.id) for review in _open(run)[:STEPS_MAX]]
    if any(step.reason == "review-contradicted" for step in waiting) or run.reason == "review-contradicted":
        lines.append(f"`podium audit verify --database` says what differs; `podium cancel {run.id}` ends the run")
    reasons = {str(step.reason) for step in waiting} | ({str(run.reason)} if run.state == "waiting" else set())
    lines += [
        f"`podium budget {run.id}` shows what is used, `podium budget {run.id} --{unit} N` sets a new limit"
        for reason, unit in UNITS.items()
        if reason in reasons
    ]
    return lines


def key_hints(run: RunSnapshot, pool: Pool | None) -> list[str]:
    """Which variable is missing, and how to hand its key over, for a run of which something waits for a key."""
    names: list[str | None] = [step.worker for step in _waiting(run) if step.reason == "secret-missing"]
    if not names and (run.state, run.reason) != ("waiting", "secret-missing"):
        return []
    names = names or [None]
    keys = [model.api_key for model in (model_of(pool, name) for name in names) if model is not None and model.api_key]
    whose = ", ".join(dict.fromkeys("the Conductor" if name is None else name for name in names))
    places = ", ".join(dict.fromkeys(key.env or f"the file {key.file}" for key in keys))
    what = f"set {places}" if places else "set its variable (`podium pool check` names it)"
    return [f"the key of {whose} is missing: {what} and run `podium watch {run.id}`"]


def _answers(run_id: UUID, position: int, *, is_last: bool) -> str:
    step = f"{run_id} --step {position}"
    skip = "" if is_last else f", `podium skip {step}`"
    return f"`podium retry {step} [--worker NAME]`{skip} or `podium abort {step}`"


def _reviews(review_id: UUID) -> str:
    return (
        f"`podium review show {review_id}`, then `podium review approve {review_id}` or "
        f"`podium review reject {review_id} --reason TEXT`"
    )


def _open(run: RunSnapshot | RunProgress) -> Sequence[ReviewLine]:
    """The reviews that the run waits for."""
    return [review for review in run.reviews if review.state == "open" and review.holds]


def _review_line(review: ReviewLine) -> str:
    since = duration(between(review.requested_at, review.read_at))
    return f"review of {what_words(review)} has {need_words(review)}; open for {since}"


def _waiting(run: RunSnapshot | RunProgress) -> Sequence[StepSnapshot | StepProgress]:
    return [step for step in run.steps if step.state == "waiting" and step.round == run.round]


def _line(step: StepSnapshot | StepProgress, now: datetime) -> str:
    what = _WHAT.get(str(step.reason), f"waits ({step.reason})")
    since = "" if step.waiting_since is None else f" for {duration(between(step.waiting_since, now))}"
    return f"step {step.position} ({preview(step.worker, 64)}) {what}{since}"
