"""Open and Close: the two transactions around a model call.

After Open it is durable that a call may happen; after Close it is durable what came of it. Both may be repeated with
the same attempt id and then find their first result. An attempt that lost its fence is recorded and never accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from typing import Any, Literal
from uuid import UUID

from engine.errors import BugError
from engine.store import queries
from engine.store.artifacts import ArtifactDraft
from engine.store.database import Database
from engine.store.exchange import Connection
from engine.store.run_writer import AttemptResult, RunWriter, lock_run, storable, usd
from engine.store.states import RUN_ENDED, STEP_HAS_OUTPUT, STEP_LIVE

# Tries that ended through no fault of the model or the step do not count against attempts_max.
PLAN_INVALID = "plan-invalid"
UNCOUNTED_CODES = frozenset({"worker-shutdown", PLAN_INVALID})

Verdict = Literal["call", "done", "held", "cancelled", "failed", "superseded", "retry"]


@dataclass(frozen=True, slots=True, order=True)
class Fence:
    """Which try holds the right to a step: compared in this order. ``attempt`` is Temporal's number, from 1."""

    execution: int
    dispatch: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Place:
    """A step of a run, or (``position`` None) the planning of a round."""

    run_id: UUID
    round: int
    position: int | None


@dataclass(frozen=True, slots=True)
class Opening:
    """What Open needs. ``manifest`` renders the prompt again; ``prompt_commitment`` is its salted HMAC (32 bytes).

    ``invalid_plans_max`` is for planning only: how many invalid plans of one execution end it.
    """

    place: Place
    fence: Fence
    attempt_id: UUID
    worker: str
    model: str
    manifest: ArtifactDraft
    prompt_commitment: bytes
    attempts_max: int
    process_id: UUID | None = None
    reserve_usd: Decimal | None = None
    invalid_plans_max: int | None = None


@dataclass(frozen=True, slots=True)
class Ruling:
    """What a transaction decided. With ``done``, the accepted attempt and its numbers; with ``failed``, the code."""

    verdict: Verdict
    code: str | None = None
    attempt_id: UUID | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cost_usd: Decimal | None = None
    run_ended: bool = False


async def open_attempt(database: Database, opening: Opening) -> Ruling:
    """Decides whether the model is called, and makes it durable first. Only the verdict ``call`` calls."""

    async def work(connection: Connection) -> Ruling:
        place = opening.place
        writer, (owners, attempts, ancestors) = await lock_run(
            connection,
            place.run_id,
            _read_owner(place),
            (queries.READ_ATTEMPTS, (place.run_id, place.round, place.position)),
            (queries.READ_ANCESTORS, (place.run_id,)),
        )
        owner = _only(owners)
        ruling = _refusal(writer, owner, attempts, ancestors, opening)
        if ruling is None:
            ruling = _open(writer, owner, attempts, opening)
        await writer.commit()
        # With the verdict "call" it is durable from here on that a call may happen.
        return ruling

    return await database.write(work)


def _refusal(
    writer: RunWriter,
    owner: dict[str, Any],
    attempts: Sequence[dict[str, Any]],
    ancestors: Sequence[dict[str, Any]],
    opening: Opening,
) -> Ruling | None:
    """Why nothing may be called, or None. What is already paid is found first."""
    if opening.fence.execution != writer.run["execution"]:
        return Ruling("superseded", "execution-superseded")
    accepted = next((attempt for attempt in attempts if attempt["accepted"]), None)
    if accepted is not None or owner.get("state") in STEP_HAS_OUTPUT or owner.get("accepted_at") is not None:
        return _done(owner, accepted)
    if owner.get("state") == "skipped":
        # Nothing to call and nothing to wait for; no other step is shown an output of it.
        return Ruling("done", "skipped")
    mine = next((attempt for attempt in attempts if attempt["id"] == opening.attempt_id), None)
    if mine is not None:
        # Open was repeated after its COMMIT was lost: the call may go on only if nobody took over since.
        return Ruling("call") if mine["state"] == "sent" else Ruling("superseded", "attempt-superseded")
    if opening.fence <= _fence(owner):
        return Ruling("superseded", "fence-lost")
    return _standing_order(writer, owner, ancestors)


def _standing_order(writer: RunWriter, owner: dict[str, Any], ancestors: Sequence[dict[str, Any]]) -> Ruling | None:
    chain = (writer.run, *ancestors)
    if any(run["state"] in RUN_ENDED for run in chain):
        return Ruling("cancelled", "run-ended")
    if any(run["cancel_requested_at"] is not None for run in chain):
        return Ruling("cancelled", "cancelled")
    if any(_passed(run["deadline_at"], writer.now) for run in chain):
        if owner.get("state") in STEP_LIVE:
            writer.set_step_state(owner, "failed", "deadline-exceeded")
        return Ruling("failed", "deadline-exceeded")
    if any(run["paused_at"] is not None for run in chain):
        return Ruling("held", "paused")
    if owner.get("state") == "failed":
        return Ruling("failed", owner["reason"])
    return None


def _open(writer: RunWriter, owner: dict[str, Any], attempts: Sequence[dict[str, Any]], opening: Opening) -> Ruling:
    place, fence = opening.place, opening.fence
    for attempt in attempts:
        if attempt["state"] == "sent":
            # Its worker died or lost its lease: the call may have happened and may have been billed.
            writer.close_attempt(attempt, AttemptResult("unknown", "outcome-lost"), [])
    if opening.invalid_plans_max is not None and invalid_plans(attempts, fence.execution) >= opening.invalid_plans_max:
        # The worker died after it had written down the last of them and before it could report it.
        return Ruling("failed", PLAN_INVALID)
    if counted_attempts(attempts, fence.execution) >= opening.attempts_max:
        if place.position is not None:
            writer.set_step_state(owner, "failed", "attempts-exhausted")
        return Ruling("failed", "attempts-exhausted")
    number = len(attempts) + 1
    writer.statement(
        queries.INSERT_ATTEMPT,
        {
            "id": opening.attempt_id,
            "tenant_id": writer.tenant_id,
            "run_id": place.run_id,
            "round": place.round,
            "position": place.position,
            "number": number,
            "execution": fence.execution,
            "dispatch": fence.dispatch,
            "temporal_attempt": fence.attempt,
            "worker": opening.worker,
            "model": opening.model,
            "process_id": opening.process_id,
            "prompt_commitment": opening.prompt_commitment,
            "reserved_usd": opening.reserve_usd,
            "now": writer.now,
        },
    )
    writer.add_to_totals(attempts_count=1)
    writer.mark_seen(fence.execution)
    writer.set_run_state("planning" if place.position is None else "running")
    moved = _take_over(writer, owner, place, fence)
    writer.entry(
        "attempt.sent",
        attempt=str(opening.attempt_id),
        round=place.round,
        step=place.position,
        number=number,
        worker=opening.worker,
        model=opening.model,
        fence=[fence.execution, fence.dispatch, fence.attempt],
        prompt=opening.prompt_commitment.hex(),
        artifacts=writer.artifacts([opening.manifest]),
        moved=moved,
    )
    return Ruling("call")


def _take_over(writer: RunWriter, owner: dict[str, Any], place: Place, fence: Fence) -> dict[str, Any] | None:
    """Writes the newest try of a step or of a round's planning; returns how the step moved, for the entry."""
    numbers = (fence.execution, fence.dispatch, fence.attempt)
    if place.position is None:
        writer.statement(queries.SET_PLAN_FENCE, (*numbers, place.run_id, place.round))
        return None
    writer.statement(queries.TAKE_STEP, (*numbers, writer.now, place.run_id, place.round, place.position))
    if owner["state"] == "running" and owner["reason"] is None:
        return None
    return {"state": "running", "reason": None, "old": owner["state"]}


@dataclass(frozen=True, slots=True)
class Closing:
    """What Close needs. ``retry`` says whether a failure is worth another try; ``ends_run`` is the workflow's wish."""

    place: Place
    attempt_id: UUID
    result: AttemptResult
    drafts: Sequence[ArtifactDraft] = ()
    retry: bool = False
    attempts_max: int = 1
    ends_run: bool = False


async def close_step_attempt(database: Database, closing: Closing) -> Ruling:
    """Records how a step's attempt ended and accepts its output if it still holds the fence.

    Verdicts: ``done`` (accepted now or before), ``retry``, ``failed``, ``cancelled``, ``superseded``.
    """

    async def work(connection: Connection) -> Ruling:
        place = closing.place
        writer, (owners, attempts, unfinished) = await lock_run(
            connection,
            place.run_id,
            _read_owner(place),
            (queries.READ_ATTEMPTS, (place.run_id, place.round, place.position)),
            (queries.READ_UNFINISHED, (place.run_id, place.round)),
        )
        step = _only(owners)
        attempt = find_attempt(attempts, closing.attempt_id)
        if already_closed(attempt, closing):
            return _recorded(writer, step, attempt)
        if not holds_fence(step, attempt) or step["state"] not in STEP_LIVE:
            supersede(writer, attempt, closing)
            await writer.commit()
            return Ruling("superseded", "fence-lost")
        others = {row["position"] for row in unfinished} - {place.position}
        ruling = _close_step(writer, step, attempts, attempt, closing, is_sole=not others)
        await writer.commit()
        # Now it is durable what came of the call; whoever repeats this finds it.
        return ruling

    return await database.write(work)


def _close_step(
    writer: RunWriter,
    step: dict[str, Any],
    attempts: Sequence[dict[str, Any]],
    attempt: dict[str, Any],
    closing: Closing,
    *,
    is_sole: bool,
) -> Ruling:
    accepted = closing.result.state == "succeeded"
    result = storable(replace(closing.result, accepted=accepted))
    ruling = Ruling(
        "failed",
        result.error_code,
        attempt_id=closing.attempt_id,
        input_tokens=result.input_tokens,
        output_tokens=result.output_tokens,
        cost_usd=result.cost_usd,
    )
    committed = writer.artifacts(closing.drafts)
    if accepted:
        writer.close_attempt(attempt, result, committed, step=step, step_state="succeeded")
        # The workflow only wishes; that no other step is left is for the record to say.
        ends = closing.ends_run and is_sole and writer.run["state"] not in RUN_ENDED
        if ends:
            writer.set_run_state("succeeded")
        return replace(ruling, verdict="done", run_ended=ends)
    if result.state == "cancelled":
        writer.close_attempt(attempt, result, committed)
        return replace(ruling, verdict="cancelled")
    closed = [
        {**other, "error_code": result.error_code} if other["id"] == closing.attempt_id else other for other in attempts
    ]
    if closing.retry and counted_attempts(closed, attempt["execution"]) < closing.attempts_max:
        writer.close_attempt(attempt, result, committed)
        return replace(ruling, verdict="retry")
    writer.close_attempt(attempt, result, committed, step=step, step_state="failed")
    return ruling


def _recorded(writer: RunWriter, step: dict[str, Any], attempt: dict[str, Any]) -> Ruling:
    """The first result of a Close that was repeated because its COMMIT got no answer."""
    if attempt["accepted"]:
        return replace(_done(step, attempt), run_ended=writer.run["state"] == "succeeded")
    if attempt["state"] == "superseded" or _fence_of(attempt) != _fence(step):
        return Ruling("superseded", "fence-lost")
    ruling = Ruling(
        "retry",
        attempt["error_code"],
        attempt_id=attempt["id"],
        input_tokens=attempt["input_tokens"],
        output_tokens=attempt["output_tokens"],
        cost_usd=usd(attempt["cost_usd"]),
    )
    if attempt["state"] == "cancelled":
        return replace(ruling, verdict="cancelled")
    return replace(ruling, verdict="failed") if step["state"] == "failed" else ruling


def counted_attempts(attempts: Sequence[dict[str, Any]], execution: int) -> int:
    """How many tries of an execution count against ``attempts_max``."""
    return sum(
        attempt["execution"] == execution and attempt["error_code"] not in UNCOUNTED_CODES for attempt in attempts
    )


def invalid_plans(attempts: Sequence[dict[str, Any]], execution: int) -> int:
    """How many texts of an execution were no valid plan."""
    return sum(attempt["execution"] == execution and attempt["error_code"] == PLAN_INVALID for attempt in attempts)


def find_attempt(attempts: Sequence[dict[str, Any]], attempt_id: UUID) -> dict[str, Any]:
    """The attempt's row; raises BugError if Open never wrote it."""
    for attempt in attempts:
        if attempt["id"] == attempt_id:
            return attempt
    raise BugError("attempt-unknown", "an attempt was closed that had not been opened")


def already_closed(attempt: dict[str, Any], closing: Closing) -> bool:
    """Whether this Close has had its say before.

    An attempt that was given up as unknown has not reported yet, unless the report is that nothing is known.
    """
    if attempt["state"] == "unknown":
        return closing.result.state == "unknown"
    return bool(attempt["state"] != "sent")


def holds_fence(owner: dict[str, Any], attempt: dict[str, Any]) -> bool:
    """Whether no newer try of this step or plan has been opened, and this one was not given up."""
    return attempt["state"] == "sent" and _fence_of(attempt) == _fence(owner)


def supersede(writer: RunWriter, attempt: dict[str, Any], closing: Closing) -> None:
    """Records a late zombie: its output is kept, its cost is counted, nothing of it is accepted."""
    result = storable(closing.result)
    late = replace(result, state="superseded", error_code=result.error_code or "fence-lost", accepted=False)
    writer.close_attempt(attempt, late, writer.artifacts(closing.drafts))


def _read_owner(place: Place) -> tuple[Any, tuple[Any, ...]]:
    if place.position is None:
        return queries.READ_PLAN, (place.run_id, place.round)
    return queries.READ_STEP, (place.run_id, place.round, place.position)


def _only(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if len(rows) != 1:
        raise BugError("step-unknown", "there is no such step or round in this run")
    return rows[0]


def _fence(owner: dict[str, Any]) -> Fence:
    return Fence(owner["fence_execution"], owner["fence_dispatch"], owner["fence_attempt"])


def _fence_of(attempt: dict[str, Any]) -> Fence:
    return Fence(attempt["execution"], attempt["dispatch"], attempt["temporal_attempt"])


def _done(owner: dict[str, Any], accepted: dict[str, Any] | None) -> Ruling:
    if accepted is None:
        return Ruling("done", attempt_id=owner["accepted_attempt_id"])
    return Ruling(
        "done",
        attempt_id=accepted["id"],
        input_tokens=accepted["input_tokens"],
        output_tokens=accepted["output_tokens"],
        cost_usd=usd(accepted["cost_usd"]),
    )


def _passed(deadline: datetime | None, now: datetime) -> bool:
    return deadline is not None and deadline <= now
