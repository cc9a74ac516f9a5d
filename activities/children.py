"""``begin_child`` and ``finish_child``: a step whose worker is the Conductor itself becomes a run of its own."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from uuid import UUID

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.context import ActivityContext
from activities.executions import WORKFLOW_LOST, execution_request
from activities.guard import guarded
from activities.prompts import new_nonce, render_step
from activities.review_gates import ask_about_output, gates_of, reviewed
from activities.steps import failure_policy, rendered, step_receipt, step_spec
from engine.contracts import ChildEndRequest, ChildOutcome, ChildReceipt, ChildRequest, StepReceipt, child_run_id
from engine.settings import TASK_BYTES_MAX
from engine.store.attempts import Place, ReviewSight
from engine.store.children import ChildClosing, ChildOpening, begin_child, finish_child
from engine.store.drafts import StepRoute
from engine.store.gates import REVIEW
from engine.store.inputs import read_assignment, read_step_inputs
from engine.store.settling import Settlement, settle_run

_OUTCOMES: dict[str, ChildOutcome] = {"done": "succeeded", "held": "held", "cancelled": "cancelled"}
_CHILD_PAUSE = timedelta(seconds=1)


class ChildActivities:
    """The activities around a child workflow."""

    def __init__(self, context: ActivityContext) -> None:
        self._context = context

    @activity.defn(name="begin_child")
    @guarded
    async def begin_child(self, request: ChildRequest) -> ChildReceipt:
        """Creates, or opens again, the run that a step is delegated to; its task is the step's rendered prompt."""
        database = self._context.database
        place = Place(UUID(request.run_id), request.round, request.position)
        inputs = await read_step_inputs(database, place.run_id, request.round, request.position)
        pool = await self._context.pool(inputs.pool_digest)
        worker = pool.worker(inputs.worker)
        if worker.kind != "conductor":
            return ChildReceipt("moved", step=await step_spec(self._context, place, pool))
        prompt = await rendered(inputs, lambda: render_step(pool, inputs, new_nonce()))
        task = "\n\n".join(message.content for message in prompt.messages)
        opening = ChildOpening(
            place=place,
            execution=request.execution,
            worker=worker.name,
            task=task if len(task.encode()) <= TASK_BYTES_MAX else None,
            depth_max=pool.policy.depth_max,
            on_failure=failure_policy(pool, worker, inputs.planned_worker),
            dispatch=request.dispatch,
            routes={other.name: StepRoute(other.model, other.queue) for other in pool.workers},
            planned_workers=pool.policy.on_failed_step == "fallback",
            manifest=prompt.manifest,
            shown=prompt.shown,
        )
        ruling = await reviewed(
            database,
            place.run_id,
            await gates_of(self._context, pool, inputs.tenant_id),
            lambda sight: begin_child(database, replace(opening, review=sight)),
            sent_back=inputs.sent_back_count,
        )
        if ruling.verdict == "superseded":
            raise ApplicationError("superseded", type="superseded", non_retryable=True)
        if ruling.verdict == "begun" and ruling.child_id is not None:
            return ChildReceipt("begun", request=await execution_request(database, ruling.child_id))
        if ruling.verdict == "moved":
            return ChildReceipt("moved", ruling.code, step=await step_spec(self._context, place, pool))
        return ChildReceipt(_OUTCOMES.get(ruling.verdict, "failed"), ruling.code)

    @activity.defn(name="finish_child")
    @guarded
    async def finish_child(self, request: ChildEndRequest) -> StepReceipt:
        """Takes the child's answer over as the step's output."""
        database = self._context.database
        place = Place(UUID(request.run_id), request.round, request.position)
        assigned = await read_assignment(database, place.run_id, request.round, request.position)
        pool = await self._context.pool(assigned.pool_digest)
        worker = pool.worker(assigned.worker)
        gates = await gates_of(self._context, pool, assigned.tenant_id)
        closing = ChildClosing(
            place=place,
            execution=request.execution,
            ends_run=request.ends_run,
            on_failure=failure_policy(pool, worker, assigned.planned_worker),
            review=ReviewSight(gates) if gates else None,
        )
        ruling = await finish_child(database, closing)
        if ruling.verdict == "retry" and request.child_closed:
            # Its workflow was ended by hand, so it could not say so on record itself.
            child_id = child_run_id(place.run_id, round=request.round, position=request.position)
            await settle_run(database, Settlement(child_id, request.child_execution, "failed", WORKFLOW_LOST))
            ruling = await finish_child(database, closing)
        if ruling.verdict == "retry":
            # Its workflow runs, or has ended in a way that its record does not know yet; the reconciler settles that.
            raise ApplicationError("child-not-ended", type="child-not-ended", next_retry_delay=_CHILD_PAUSE)
        if ruling.verdict == "moved":
            return StepReceipt("moved", ruling.code, step=await step_spec(self._context, place, pool))
        if ruling.code == REVIEW:
            await ask_about_output(database, place, gates)
        return step_receipt(ruling)
