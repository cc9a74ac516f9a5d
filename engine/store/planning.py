"""Close of a planning call: the plan with its steps, or the text that was not one, in one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from engine.errors import BugError
from engine.store import queries
from engine.store.attempts import PLAN_INVALID, Ruling, counted_attempts, invalid_plans
from engine.store.closing import Closing, already_closed, find_attempt, holds_fence, supersede
from engine.store.database import Database
from engine.store.drafts import PlanDraft, RejectedPlan
from engine.store.exchange import Connection
from engine.store.plans import raw_plan_drafts, write_plan
from engine.store.run_writer import RunWriter, lock_run, storable


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
        if not plans:
            raise BugError("step-unknown", "there is no such round in this run")
        planned_before = plans[0]["accepted_at"] is not None
        attempt = find_attempt(attempts, closing.attempt_id)
        if already_closed(attempt, closing):
            if planned_before:
                return Ruling("done")
            return _verdict(attempts, attempt, closing, repairs_max=repairs_max)
        if planned_before or not holds_fence(plans[0], attempt):
            supersede(writer, attempt, _with_text(closing, planned))
            await writer.commit()
            return Ruling("superseded", "fence-lost")
        ruling = _close(writer, attempts, attempt, closing, planned, fallback=fallback, repairs_max=repairs_max)
        await writer.commit()
        # Now the plan, or what was wrong with it, is durable; whoever repeats this finds it.
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
    result = storable(replace(closing.result, accepted=isinstance(planned, PlanDraft)))
    if isinstance(planned, RejectedPlan):
        result = replace(result, state="failed", error_code=PLAN_INVALID)
        closing = _with_text(closing, planned)
    writer.close_attempt(attempt, result, writer.artifacts(closing.drafts))
    if isinstance(planned, PlanDraft):
        write_plan(writer, place.round, replace(planned, attempt_id=closing.attempt_id))
        return Ruling("done", attempt_id=closing.attempt_id)
    closed = {**attempt, "state": result.state, "error_code": result.error_code}
    attempts = [closed if other["id"] == closing.attempt_id else other for other in attempts]
    ruling = _verdict(attempts, closed, closing, repairs_max=repairs_max)
    if isinstance(planned, RejectedPlan):
        number = invalid_plans(attempts, attempt["execution"])
        writer.entry(
            "plan.rejected",
            round=place.round,
            attempt=str(closing.attempt_id),
            number=number,
            form=planned.form,
            codes=sorted({error.code for error in planned.errors}),
        )
        if ruling.verdict == "failed" and fallback is not None:
            write_plan(writer, place.round, fallback)
            return Ruling("done", PLAN_INVALID)
    return ruling


def _verdict(
    attempts: Sequence[dict[str, Any]], attempt: dict[str, Any], closing: Closing, *, repairs_max: int
) -> Ruling:
    """What follows from a closed planning attempt that gave no plan: the same the first time and when repeated."""
    code = attempt["error_code"]
    if attempt["state"] == "superseded":
        return Ruling("superseded", "fence-lost")
    if attempt["state"] == "cancelled":
        return Ruling("cancelled", code)
    if code == PLAN_INVALID:
        return Ruling("retry" if invalid_plans(attempts, attempt["execution"]) <= repairs_max else "failed", code)
    again = closing.retry and counted_attempts(attempts, attempt["execution"], {}) < closing.attempts_max
    return Ruling("retry" if again else "failed", code)


def _with_text(closing: Closing, planned: PlanDraft | RejectedPlan | None) -> Closing:
    """The closing with the text that the Conductor gave and what was wrong with it, kept under the attempt."""
    if planned is None:
        return closing
    errors = planned.errors if isinstance(planned, RejectedPlan) else ()
    notes = planned.notes if isinstance(planned, RejectedPlan) else planned.plan.notes
    texts = raw_plan_drafts(closing.attempt_id, planned.raw, notes, errors)
    return replace(closing, drafts=[*closing.drafts, *texts])
