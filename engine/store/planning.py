"""Close of a planning call: the plan with its steps, or the text that was not one, in one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.plan import PlanError, PlanNote
from engine.store import queries
from engine.store.attempts import (
    UNCOUNTED_CODES,
    Closing,
    Ruling,
    already_closed,
    find_attempt,
    holds_fence,
    supersede,
)
from engine.store.database import Connection, Database
from engine.store.plans import PlanDraft, raw_plan_drafts, write_plan
from engine.store.run_writer import RunWriter, lock_run

PLAN_INVALID = "plan-invalid"


@dataclass(frozen=True, slots=True)
class RejectedPlan:
    """Text of a Conductor that is not a valid plan, with every fault found in it."""

    raw: bytes
    notes: Sequence[PlanNote]
    errors: Sequence[PlanError]


async def close_planning_attempt(
    database: Database,
    closing: Closing,
    planned: PlanDraft | RejectedPlan | None,
    *,
    fallback: PlanDraft | None,
    repairs_max: int,
) -> Ruling:
    """Records how a planning call ended.

    Verdicts: ``done`` (a plan is stored), ``retry`` (call again; with code ``plan-invalid`` show the errors),
    ``failed``, ``cancelled``, ``superseded``. ``fallback`` is the pool's template for plans that stay invalid.
    """

    async def work(connection: Connection) -> Ruling:
        place = closing.place
        writer, (plans, attempts) = await lock_run(
            connection,
            place.run_id,
            (queries.READ_PLAN, (place.run_id, place.round)),
            (queries.READ_ATTEMPTS, (place.run_id, place.round, None)),
        )
        attempt = find_attempt(attempts, closing.attempt_id)
        if already_closed(attempt):
            return _recorded(plans[0]["accepted_at"] is not None, attempt["state"], attempt["error_code"])
        if not holds_fence(plans[0], attempt):
            late = closing
            if isinstance(planned, RejectedPlan | PlanDraft):
                late = replace(closing, drafts=[*closing.drafts, *raw_plan_drafts(closing.attempt_id, planned.raw, ())])
            supersede(writer, attempt, late)
            await writer.flush()
            return Ruling("superseded", "fence-lost")
        ruling = _close(writer, attempts, attempt, closing, planned, fallback=fallback, repairs_max=repairs_max)
        await writer.flush()
        return ruling

    return await database.write(work)


def _close(
    writer: RunWriter,
    attempts: Sequence[dict[str, Any]],
    attempt: dict[str, Any],
    closing: Closing,
    planned: PlanDraft | RejectedPlan | None,
    *,
    fallback: PlanDraft | None,
    repairs_max: int,
) -> Ruling:
    place = closing.place
    result = replace(closing.result, accepted=isinstance(planned, PlanDraft))
    drafts = list(closing.drafts)
    if isinstance(planned, RejectedPlan):
        result = replace(result, state="failed", error_code=PLAN_INVALID)
        drafts += raw_plan_drafts(closing.attempt_id, planned.raw, planned.notes, planned.errors)
    writer.close_attempt(attempt, result, writer.artifacts(drafts))
    before = [other for other in attempts if other["id"] != closing.attempt_id]
    if isinstance(planned, PlanDraft):
        write_plan(writer, place.round, replace(planned, attempt_id=closing.attempt_id))
        return Ruling("done", attempt_id=closing.attempt_id)
    if isinstance(planned, RejectedPlan):
        invalid = 1 + sum(other["error_code"] == PLAN_INVALID for other in before)
        writer.entry("plan.rejected", round=place.round, attempt=str(closing.attempt_id), number=invalid)
        if invalid <= repairs_max:
            return Ruling("retry", PLAN_INVALID)
        if fallback is not None:
            write_plan(writer, place.round, fallback)
            return Ruling("done", PLAN_INVALID)
        return Ruling("failed", PLAN_INVALID)
    if result.state == "cancelled":
        return Ruling("cancelled", result.error_code)
    counted = 1 + sum(
        other["execution"] == attempt["execution"] and other["error_code"] not in UNCOUNTED_CODES for other in before
    )
    again = closing.retry and counted < closing.attempts_max
    return Ruling("retry" if again else "failed", result.error_code)


def _recorded(planned: bool, state: str, code: str | None) -> Ruling:
    if planned:
        return Ruling("done")
    if state in {"superseded", "cancelled"}:
        return Ruling("superseded" if state == "superseded" else "cancelled", code)
    return Ruling("retry", code)
