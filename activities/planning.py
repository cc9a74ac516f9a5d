"""``plan_task``: one planning call. The workflow asks again when the Conductor's text was not a valid plan."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any
from uuid import UUID

from temporalio import activity

from activities.calling import CallEnd, CallPlan, make_call, not_called
from activities.context import ActivityContext
from activities.guard import guarded
from activities.plan_text import read_plan, template_draft
from activities.prompts import new_nonce, render_plan_request, usable_workers
from activities.review_gates import gates_of, hold_answer
from activities.secrets_gate import raise_if_waiting
from activities.specs import step_specs
from activities.steps import make_opening, raise_if_unfinished, rendered
from activities.transactions import record, to_its_end
from engine.contracts import PlanReceipt, PlanRequest
from engine.errors import InputError
from engine.store.attempts import Fence, Place, Ruling, open_attempt
from engine.store.closing import Closing
from engine.store.drafts import PlanDraft, RejectedPlan
from engine.store.gates import REVIEW
from engine.store.inputs import PlanInputs, read_plan_inputs, read_steps
from engine.store.planning import close_planning_attempt
from engine.store.reviews import GateVerdict
from worker_pools.conductor_schema import plan_schema
from worker_pools.pool import Pool


class PlanActivities:
    """The activity that asks the Conductor for a plan."""

    def __init__(self, context: ActivityContext) -> None:
        self._context = context

    @activity.defn(name="plan_task")
    @guarded
    async def plan_task(self, request: PlanRequest) -> PlanReceipt:
        """Opens a planning attempt, calls the Conductor, stores the plan or everything that was wrong with it."""
        async with self._context.pace.beating():
            return await self._plan(request)

    async def _plan(self, request: PlanRequest) -> PlanReceipt:
        context = self._context
        place = Place(UUID(request.run_id), request.round, None)
        fence = Fence(request.execution, request.dispatch, activity.info().attempt)
        inputs = await read_plan_inputs(context.database, place.run_id, request.round)
        pool = await context.pool(inputs.pool_digest)
        conductor = pool.conductor
        prompt = await rendered(inputs, lambda: render_plan_request(pool, inputs, new_nonce()))
        opening = replace(
            make_opening(context, place, fence, conductor, prompt), invalid_plans_max=pool.policy.plan_repairs_max + 1
        )
        ruling, cancelled = await to_its_end(open_attempt(context.database, opening))
        raise_if_waiting(ruling)
        if ruling.verdict == "call":
            schema = _schema(pool, place.round, inputs.depth) if conductor.structured_output == "json-schema" else None
            plan = CallPlan(place, opening.attempt_id, conductor, prompt.messages, schema)
            end = not_called() if cancelled else await make_call(context, plan)
            ruling = await record(lambda: self._close(place, opening.attempt_id, pool, inputs, end))
            if ruling.code != "plan-invalid" or ruling.verdict != "retry":
                raise_if_unfinished(ruling, end)
        receipt = await self._receipt(place, pool, ruling)
        if receipt.outcome == "planned" and not receipt.steps and place.round > 0:
            # The answer of the round before is kept, so it is the run's, if people let it be.
            return await self._kept(place, pool, inputs, receipt)
        return receipt

    async def _kept(self, place: Place, pool: Pool, inputs: PlanInputs, receipt: PlanReceipt) -> PlanReceipt:
        context = self._context
        gates = await gates_of(context, pool, inputs.tenant_id)
        verdict = GateVerdict("passed") if not gates else await hold_answer(context.database, place.run_id, gates)
        if verdict.kind == "failed":
            return PlanReceipt("failed", verdict.code)
        if verdict.kind == "held":
            return PlanReceipt("held", verdict.code or REVIEW)
        return receipt

    async def _close(self, place: Place, attempt: UUID, pool: Pool, inputs: PlanInputs, end: CallEnd) -> Ruling:
        planned, fallback = None, None
        if end.text is not None:
            planned, fallback = await asyncio.to_thread(_read, pool, end, inputs, place.round)
        closing = Closing(
            place=place,
            attempt_id=attempt,
            result=end.result,
            # The text of a plan is stored as plan_text, byte for byte, not as an output.
            drafts=[draft for draft in end.drafts if draft.kind != "output"],
            retry=end.retry,
            attempts_max=pool.conductor.attempts_max,
        )
        return await close_planning_attempt(
            self._context.database,
            closing,
            planned,
            fallback=fallback,
            repairs_max=pool.policy.plan_repairs_max,
        )

    async def _receipt(self, place: Place, pool: Pool, ruling: Ruling) -> PlanReceipt:
        if ruling.verdict == "done":
            steps = await read_steps(self._context.database, place.run_id, place.round)
            return PlanReceipt(
                "planned",
                steps=step_specs(pool, steps),
                skipped=[step.position for step in steps if step.state == "skipped"],
            )
        if ruling.verdict == "retry":
            return PlanReceipt("repair", ruling.code)
        if ruling.verdict in {"held", "cancelled"}:
            return PlanReceipt("held" if ruling.verdict == "held" else "cancelled", ruling.code)
        return PlanReceipt("failed", ruling.code)


def _read(
    pool: Pool, end: CallEnd, inputs: PlanInputs, round_number: int
) -> tuple[PlanDraft | RejectedPlan, PlanDraft | None]:
    """What the Conductor's text is, and the pool's template for the case that it is no plan."""
    planned = read_plan(
        pool,
        end.raw_text or "",
        finish_reason=end.result.finish_reason,
        output_tokens=end.result.output_tokens,
        round_number=round_number,
        depth=inputs.depth,
    )
    # A template is a way to begin. In a later round there is an answer already, and a template would not mend it.
    fits = isinstance(planned, RejectedPlan) and round_number == 0
    return planned, _fallback(pool, inputs.task.text) if fits else None


def _schema(pool: Pool, round_number: int, depth: int) -> dict[str, Any]:
    conductor = pool.conductor
    return plan_schema(
        workers=usable_workers(pool, depth),
        steps_max=pool.policy.steps_max,
        subtask_chars_max=conductor.subtask_chars_max,
        last_step_reads=conductor.last_step_reads,
        may_keep=round_number > 0,
    )


def _fallback(pool: Pool, task: str) -> PlanDraft | None:
    name = pool.policy.on_invalid_plan
    if name == "fail":
        return None
    try:
        return template_draft(pool, name, task)
    except InputError:
        # A template that does not fit the pool (too many steps) is no way out; the run fails with the plan's errors.
        return None
