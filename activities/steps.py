"""``perform_step``: Open (`engine.store.attempts`), Call, Close (`engine.store.closing`). The heart of the engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from uuid import UUID

from temporalio import activity
from temporalio.exceptions import ApplicationError

from activities.calling import LARGE_CHARS, CallEnd, CallPlan, make_call, not_called
from activities.context import ActivityContext
from activities.guard import guarded
from activities.prompts import Prompt, input_chars, new_nonce, render_step
from activities.review_gates import ask_about_output, gates_of, reviewed
from activities.secrets_gate import raise_if_waiting, secret_missing
from activities.specs import step_specs
from activities.transactions import record, to_its_end
from engine.contracts import StepReceipt, StepRequest, StepSpec, attempt_id, pool_queue
from engine.ledger.commitment import PROMPT_DOMAIN, commitment
from engine.store.artifacts import JSON, ArtifactDraft
from engine.store.attempts import (
    FailurePolicy,
    Fence,
    Opening,
    Place,
    ReviewSight,
    Ruling,
    Substitute,
    open_attempt,
)
from engine.store.closing import Closing, close_step_attempt
from engine.store.gates import REVIEW
from engine.store.ids import artifact_id
from engine.store.inputs import PlanInputs, StepInputs, read_step_inputs, read_steps
from worker_pools.pool import Pool, Worker
from worker_pools.prices import worst_case_tokens, worst_case_usd

# Longer than calls that end together are apart, and shorter than anybody waits for.
REPORT_AFTER_S = 0.1


class StepActivities:
    """The activity that performs a step, bound to what its process shares."""

    def __init__(self, context: ActivityContext) -> None:
        self._context = context

    @activity.defn(name="perform_step")
    @guarded
    async def perform_step(self, request: StepRequest) -> StepReceipt:
        """Opens an attempt, calls the model with no transaction open, closes the attempt."""
        async with self._context.pace.beating():
            return await self._perform(request)

    async def _perform(self, request: StepRequest) -> StepReceipt:
        context = self._context
        place = Place(UUID(request.run_id), request.round, request.position)
        fence = Fence(request.execution, request.dispatch, activity.info().attempt)
        inputs = await read_step_inputs(context.database, place.run_id, request.round, request.position)
        pool = await context.pool(inputs.pool_digest)
        worker = pool.worker(inputs.worker)
        if not _fits(worker):
            # Another worker has the step since it was asked for, and its calls are made elsewhere or take longer.
            return StepReceipt("moved", step=await step_spec(context, place, pool))
        policy = failure_policy(pool, worker, inputs.planned_worker)
        prompt = await rendered(inputs, lambda: render_step(pool, inputs, new_nonce()))
        opening = replace(make_opening(context, place, fence, worker, prompt), on_failure=policy)
        gates = await gates_of(context, pool, inputs.tenant_id)
        ruling, cancelled = await to_its_end(
            reviewed(
                context.database,
                place.run_id,
                gates,
                lambda sight: open_attempt(context.database, replace(opening, review=sight)),
                sent_back=inputs.sent_back_count,
                ends_run=request.ends_run,
            )
        )
        raise_if_waiting(ruling)
        # Now it is durable that a call may happen; a crash from here on leaves an attempt that counts as unknown.
        if ruling.verdict == "call":
            plan = CallPlan(place, opening.attempt_id, worker, prompt.messages)
            end = not_called() if cancelled else await make_call(context, plan)
            closing = Closing(
                place=place,
                attempt_id=opening.attempt_id,
                result=end.result,
                drafts=end.drafts,
                retry=end.retry,
                attempts_max=worker.attempts_max,
                ends_run=request.ends_run,
                on_failure=policy,
                review=ReviewSight(gates) if gates else None,
            )
            # What a call cost is recorded also while the activity is being cancelled.
            ruling = await record(lambda: close_step_attempt(context.database, closing))
            # Now it is durable that this step has this output; a crash from here on repeats nothing.
            raise_if_unfinished(ruling, end)
            if ruling.code == REVIEW:
                await ask_about_output(context.database, place, gates)
        if ruling.verdict == "moved":
            return StepReceipt("moved", ruling.code, step=await step_spec(context, place, pool))
        if ruling.told_again:
            await let_others_report()
        return step_receipt(ruling)


async def let_others_report() -> None:
    """Waits a moment before reporting an output that unblocks nothing; it is on record, and a sibling will name it.

    Each report costs Temporal a turn of the workflow, one after the other; at a join the one that counts would wait for
    the turns of all others.
    """
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.sleep(REPORT_AFTER_S)


async def step_spec(context: ActivityContext, place: Place, pool: Pool) -> StepSpec:
    """The step as it stands on record now: where it goes on."""
    steps = await read_steps(context.database, place.run_id, place.round)
    return next(spec for spec in step_specs(pool, steps) if spec.position == place.position)


def _fits(worker: Worker) -> bool:
    """Whether this activity was asked for with the queue and the time that the worker's calls need."""
    info = activity.info()
    granted = info.start_to_close_timeout
    in_time = granted is None or granted.total_seconds() >= worker.timeouts.call_s
    return worker.kind == "model" and info.task_queue == pool_queue(worker.queue) and in_time


def failure_policy(pool: Pool, worker: Worker, planned: str | None) -> FailurePolicy:
    """What the pool wants of a step that failed for good. ``planned`` is the plan's worker if it is another by now."""
    policy = pool.policy.on_failed_step
    if policy != "fallback":
        return FailurePolicy(wait=policy == "wait")
    chain = pool.worker(planned or worker.name).fallbacks
    # The substitutes are tried in turn: behind the present one, or from the first.
    following = chain[chain.index(worker.name) + 1 :] if worker.name in chain else chain
    if not following:
        return FailurePolicy()
    following_worker = pool.worker(following[0])
    return FailurePolicy(Substitute(following_worker.name, following_worker.model, following_worker.queue))


async def rendered(inputs: StepInputs | PlanInputs, render: Callable[[], Prompt]) -> Prompt:
    """The prompt; a large one is rendered in a thread, so that the calls of other runs are not held up."""
    return await asyncio.to_thread(render) if input_chars(inputs) > LARGE_CHARS else render()


def make_opening(context: ActivityContext, place: Place, fence: Fence, worker: Worker, prompt: Prompt) -> Opening:
    """What Open writes about the call: ids from the place, the manifest, the commitment to the rendered prompt."""
    attempt = attempt_id(
        place.run_id,
        round=place.round,
        position=place.position,
        execution=fence.execution,
        dispatch=fence.dispatch,
        attempt=fence.attempt,
    )
    manifest = ArtifactDraft(attempt, "prompt_manifest", prompt.manifest, role="manifest", media_type=JSON)
    return Opening(
        place=place,
        fence=fence,
        attempt_id=attempt,
        worker=worker.name,
        model=worker.model,
        manifest=manifest,
        prompt_commitment=commitment(manifest.salt, PROMPT_DOMAIN, str(attempt), prompt.rendered),
        attempts_max=worker.attempts_max,
        process_id=context.process_id,
        secret_missing=secret_missing(context, worker),
        reserve_usd=worst_case_usd(worker.price, len(prompt.rendered), worker.output_tokens_max),
        reserve_tokens=worst_case_tokens(len(prompt.rendered), worker.output_tokens_max),
        shown=prompt.shown,
    )


def raise_if_unfinished(ruling: Ruling, end: CallEnd) -> None:
    """Raises what makes Temporal try again, or what tells it that the activity's cancellation was obeyed."""
    if ruling.verdict == "retry":
        code = ruling.code or "retry"
        raise ApplicationError(code, type=code, next_retry_delay=end.delay)
    if ruling.verdict == "superseded":
        raise ApplicationError("superseded", type="superseded", non_retryable=True)
    if end.interrupted and ruling.verdict != "done":
        raise asyncio.CancelledError


def step_receipt(ruling: Ruling) -> StepReceipt:
    """What the workflow is told of a verdict."""
    if ruling.verdict == "superseded":
        raise ApplicationError("superseded", type="superseded", non_retryable=True)
    outcome = {"done": "succeeded", "held": "held", "cancelled": "cancelled"}.get(ruling.verdict, "failed")
    return StepReceipt(
        outcome=outcome,  # type: ignore[arg-type]  # the four words above
        code=ruling.code,
        attempt_id=None if ruling.attempt_id is None else str(ruling.attempt_id),
        artifact_id=None if ruling.attempt_id is None else str(artifact_id(ruling.attempt_id, "output")),
        input_tokens=ruling.input_tokens,
        output_tokens=ruling.output_tokens,
        cost_usd=None if ruling.cost_usd is None else format(ruling.cost_usd, "f"),
        run_ended=ruling.run_ended,
        left=None if ruling.left is None else list(ruling.left),
    )
