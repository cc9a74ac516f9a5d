"""RunWorkflow: interprets a plan's graph. The plan is data; there is one workflow for all plans.

Deterministic: no I/O, no clock, no environment, no random numbers, and no import beyond contracts, graph and errors.
The database decides what may be called; this workflow asks, in the right order, and ends every run that it began.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.common import RawValue, RetryPolicy
from temporalio.exceptions import ActivityError, ApplicationError, TimeoutError, TimeoutType, is_cancelled_exception  # noqa: A004  # Temporal's

with workflow.unsafe.imports_passed_through():
    from engine import contracts
    from engine.contracts import (
        EndState,
        PlanReceipt,
        PlanRequest,
        RunRequest,
        RunResult,
        SettleRequest,
        StepReceipt,
        StepRequest,
        StepSpec,
        WaitRequest,
    )
    from engine.converter import bug_code
    from engine.graph import PlanGraph

# Temporal's own limit on tries is off: it would also count deploys. Open counts the tries and ends the step.
_RETRY = RetryPolicy(
    initial_interval=contracts.RETRY_INITIAL,
    maximum_interval=contracts.RETRY_MAXIMUM,
    backoff_coefficient=2.0,
    maximum_attempts=0,
)


class _Ended(Exception):  # noqa: N818  # not an error: it is how the interpretation of a plan is left
    """The run is decided. ``settled`` says that the last step's transaction has already ended it."""

    def __init__(self, state: EndState, code: str | None = None, *, settled: bool = False) -> None:
        super().__init__(state)
        self.state: EndState = state
        self.code = code
        self.settled = settled


# Without a versioning behaviour: a server refuses one from a worker that is not versioned.
@workflow.defn(name=contracts.WORKFLOW_TYPE)
class RunWorkflow:
    """One execution of one run."""

    def __init__(self) -> None:
        self._wakes = 0

    @workflow.signal(name=contracts.WAKE_SIGNAL)
    def wake(self) -> None:
        """Something in the database changed: look again at what is held. Carries nothing and decides nothing."""
        self._wakes += 1

    @workflow.run
    async def run(self, raw: RawValue) -> RunResult:
        """Plans if there is no plan, runs the steps, settles. Every end of a run passes through here.

        ``raw`` is a RunRequest. It is read in here: what the SDK cannot read it refuses without end.
        """
        request = RunRequest(*_own_run())
        try:
            request = _read(raw)
            ended = await self._interpret(request)
        except asyncio.CancelledError:
            ended = _Ended("cancelled", "cancelled")
        except Exception as error:  # noqa: BLE001  # any other way out would leave the run without an end
            ended = _outcome(error)
        if not ended.settled:
            ended = await self._settle(request, ended)
        if ended.state == "failed":
            raise ApplicationError("failed", type=ended.code or "failed", non_retryable=True)
        return RunResult(ended.state, ended.code)

    async def _interpret(self, request: RunRequest) -> _Ended:
        work = asyncio.create_task(self._plan_and_perform(request))
        tasks = [work]
        if request.deadline_s is not None:
            tasks.append(asyncio.create_task(_deadline(request.deadline_s)))
        try:
            await workflow.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            in_time = work.done()
        except asyncio.CancelledError:
            await _stop(tasks)
            raise
        await _stop(tasks)
        if in_time or _succeeded(work):
            return work.result()
        # A call that the deadline stopped ends in ways of its own (a cancelled activity); they decide nothing here.
        return tasks[-1].result()

    async def _plan_and_perform(self, request: RunRequest) -> _Ended:
        try:
            if request.steps is None:
                receipt = await self._plan(request)
                return await self._perform_all(request, receipt.steps, receipt.skipped)
            return await self._perform_all(request, request.steps, request.skipped)
        except _Ended as ended:
            return ended

    async def _plan(self, request: RunRequest) -> PlanReceipt:
        dispatch, looks, patient = 0, 0, False
        while True:
            try:
                receipt = await workflow.execute_activity(
                    contracts.plan_task,
                    PlanRequest(request.run_id, request.execution, request.round, dispatch),
                    activity_id=contracts.plan_activity_id(request.round, dispatch),
                    task_queue=request.plan_queue,
                    schedule_to_start_timeout=None if patient else contracts.NO_WORKER_TIMEOUT,
                    start_to_close_timeout=timedelta(seconds=request.plan_call_s + contracts.CALL_MARGIN_S),
                    heartbeat_timeout=contracts.HEARTBEAT_TIMEOUT,
                    retry_policy=_RETRY,
                    cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
                )
            except ActivityError as error:
                if not _nobody_polled(error):
                    raise
                await self._note_no_worker(request, None)
                patient = True
            else:
                patient = False
                if receipt.outcome == "planned":
                    return receipt
                if receipt.outcome == "held":
                    looks = await self._held(looks)
                elif receipt.outcome != "repair":
                    raise _Ended(receipt.outcome, receipt.code)
            dispatch += 1

    async def _perform_all(self, request: RunRequest, steps: list[StepSpec], skipped: list[int]) -> _Ended:
        graph = PlanGraph.of([step.reads for step in steps])
        done = {*skipped, *request.done}
        begun = set(done)
        tasks: dict[int, asyncio.Task[StepReceipt]] = {}
        failure: _Ended | None = None
        try:
            while True:
                if failure is None:
                    for position in graph.ready(done=done, begun=begun):
                        begun.add(position)
                        sole = len(done) == graph.size - 1
                        tasks[position] = asyncio.create_task(self._perform(request, steps[position], ends_run=sole))
                if not tasks:
                    return failure or _all_done(graph, done)
                await workflow.wait(list(tasks.values()), return_when=asyncio.FIRST_COMPLETED)
                for position in [position for position, task in tasks.items() if task.done()]:
                    receipt = tasks.pop(position).result()
                    if receipt.run_ended:
                        return _Ended("succeeded", settled=True)
                    if receipt.outcome == "succeeded":
                        done.add(position)
                    elif failure is None and receipt.outcome != "held":
                        # Nothing new starts; calls in flight are paid for, so they may finish and be kept.
                        failure = _Ended(receipt.outcome, receipt.code)
        except (asyncio.CancelledError, Exception):
            # Not `finally`: a workflow that a worker drops from its memory is closed where nothing may be awaited.
            await _stop(list(tasks.values()))
            raise

    async def _perform(self, request: RunRequest, step: StepSpec, *, ends_run: bool) -> StepReceipt:
        dispatch, looks, patient = 0, 0, False
        while True:
            try:
                receipt = await workflow.execute_activity(
                    contracts.perform_step,
                    StepRequest(request.run_id, request.execution, request.round, step.position, dispatch, ends_run),
                    activity_id=contracts.step_activity_id(request.round, step.position, dispatch),
                    task_queue=contracts.pool_queue(step.queue),
                    schedule_to_start_timeout=None if patient else contracts.NO_WORKER_TIMEOUT,
                    start_to_close_timeout=timedelta(seconds=step.call_s + contracts.CALL_MARGIN_S),
                    heartbeat_timeout=contracts.HEARTBEAT_TIMEOUT,
                    retry_policy=_RETRY,
                    cancellation_type=workflow.ActivityCancellationType.WAIT_CANCELLATION_COMPLETED,
                )
            except ActivityError as error:
                if not _nobody_polled(error):
                    raise
                await self._note_no_worker(request, step.position)
                patient = True
            else:
                patient = False
                if receipt.outcome != "held":
                    return receipt
                looks = await self._held(looks)
            dispatch += 1

    async def _held(self, looks: int) -> int:
        """Waits for a wake-up; looks again after a while in any case, because a signal can be lost.

        Takes and returns how often it was looked at in vain: each wait is twice as long as the one before.
        """
        seen = self._wakes
        wait = min(contracts.HELD_RECHECK_FIRST * 2 ** min(looks, 20), contracts.HELD_RECHECK_MAX)
        try:
            await workflow.wait_condition(lambda: self._wakes != seen, timeout=wait)
        except builtins.TimeoutError:
            return looks + 1
        return 0

    async def _note_no_worker(self, request: RunRequest, position: int | None) -> None:
        await workflow.execute_activity(
            contracts.note_waiting,
            WaitRequest(request.run_id, request.execution, request.round, position, "no-worker"),
            task_queue=contracts.WORKFLOW_QUEUE,
            start_to_close_timeout=contracts.BOOKKEEPING_TIMEOUT,
            retry_policy=_RETRY,
        )

    async def _settle(self, request: RunRequest, ended: _Ended) -> _Ended:
        task = asyncio.create_task(
            workflow.execute_activity(
                contracts.settle_run,
                SettleRequest(request.run_id, request.execution, ended.state, ended.code),
                activity_id=f"settle-{request.execution}",
                task_queue=contracts.WORKFLOW_QUEUE,
                start_to_close_timeout=contracts.BOOKKEEPING_TIMEOUT,
                retry_policy=_RETRY,
            )
        )
        # A cancel that arrives now must not keep the run from being settled.
        await _finish([task])
        receipt = task.result()
        return _Ended(_end_state(receipt.state, ended.state), receipt.code, settled=True)


async def _stop(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancels the tasks and waits: only after the calls in flight have been settled is the run settled."""
    for task in tasks:
        task.cancel()
    await _finish(tasks)


async def _finish(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Waits until the tasks are done, whatever becomes of them, also when the workflow is cancelled meanwhile."""
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.shield(asyncio.ensure_future(workflow.wait(pending)))
        except asyncio.CancelledError:
            continue
    for task in tasks:
        if not task.cancelled():
            # Looked at, so that asyncio does not complain of an exception that nobody asked for.
            task.exception()


def _read(raw: RawValue) -> RunRequest:
    request = workflow.payload_converter().from_payload(raw.payload, RunRequest)
    if not isinstance(request, RunRequest):
        raise TypeError
    return request


def _own_run() -> tuple[str, int]:
    """The run that this workflow stands for by its id, for the case that its input cannot be read."""
    own = contracts.run_of_workflow(workflow.info().workflow_id)
    if own is None:
        raise ApplicationError("bug-workflow-id", type="bug-workflow-id", non_retryable=True)
    return own


def _succeeded(work: asyncio.Task[_Ended]) -> bool:
    return not work.cancelled() and work.exception() is None and work.result().state == "succeeded"


def _all_done(graph: PlanGraph, done: Collection[int]) -> _Ended:
    """Nothing runs and nothing is ready: the run has succeeded, if every step is accounted for."""
    if graph.size == 0 or len(done) < graph.size:
        return _Ended("failed", "bug-steps-left")
    return _Ended("succeeded")


async def _deadline(seconds: float) -> _Ended:
    await asyncio.sleep(max(seconds, 0.0))
    return _Ended("failed", "deadline-exceeded")


def _end_state(state: str, asked: EndState) -> EndState:
    """The state that the database settled on; it may have ended the run before, in another way."""
    known: dict[str, EndState] = {"succeeded": "succeeded", "failed": "failed", "cancelled": "cancelled"}
    return known.get(state, asked)


def _nobody_polled(error: ActivityError) -> bool:
    cause = error.cause
    return isinstance(cause, TimeoutError) and cause.type == TimeoutType.SCHEDULE_TO_START


def _outcome(error: Exception) -> _Ended:
    if is_cancelled_exception(error):
        return _Ended("cancelled", "cancelled")
    if isinstance(error, ActivityError):
        cause = error.cause
        if isinstance(cause, ApplicationError):
            if cause.type == "cancelled":
                return _Ended("cancelled", "cancelled")
            return _Ended("failed", cause.type or "bug")
        return _Ended("failed", "activity-timeout" if isinstance(cause, TimeoutError) else "activity-failed")
    return _Ended("failed", bug_code(error))
