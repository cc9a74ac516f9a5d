"""RunWorkflow: interprets a plan's graph. The plan is data; there is one workflow for all plans.

Deterministic: no I/O, no clock, no environment, no random numbers, and no import beyond contracts, graph and errors.
The database decides what may be called; this workflow asks, in the right order, and ends every run that it began.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

from temporalio import workflow
from temporalio.common import RawValue, RetryPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    ChildWorkflowError,
    FailureError,
    TimeoutError,  # noqa: A004  # Temporal's
    TimeoutType,
    WorkflowAlreadyStartedError,
    is_cancelled_exception,
)

with workflow.unsafe.imports_passed_through():
    from engine import contracts
    from engine.contracts import (
        ChildEndRequest,
        ChildReceipt,
        ChildRequest,
        EndState,
        Outcome,
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


_BOOKKEEPING: dict[str, Any] = {
    "task_queue": contracts.WORKFLOW_QUEUE,
    "start_to_close_timeout": contracts.BOOKKEEPING_TIMEOUT,
    "retry_policy": _RETRY,
}
# A child is asked to end, not cut off, so that it can settle its calls; ids are used once, whatever asks for them.
_CHILD_OPTIONS: dict[str, Any] = {
    "parent_close_policy": workflow.ParentClosePolicy.REQUEST_CANCEL,
    "cancellation_type": workflow.ChildWorkflowCancellationType.WAIT_CANCELLATION_COMPLETED,
    "id_reuse_policy": WorkflowIDReusePolicy.REJECT_DUPLICATE,
    "task_timeout": contracts.WORKFLOW_TASK_TIMEOUT,
}
KEPT = "kept"
WORKFLOW_LOST = "workflow-lost"
# A child ended because a step here fails, of which the word may come later.
PARENT_FAILED = "parent-failed"
# What follows from another failure; the failure itself says why the run fails.
_CONSEQUENCES = frozenset({PARENT_FAILED, "run-failing"})


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
        # Counted, so that a wake-up between a look and the wait is not lost.
        self._wakes = 0
        # Steps that ended: what they had reserved and did not use may be enough for one that waits for the budget.
        self._freed = 0
        # A step has failed for good, so nothing that is held will be wanted any more.
        self._giving_up = False
        # Steps that lie in a queue which nobody has polled for a while.
        self._unpolled: set[int] = set()
        # Rounds and children under way.
        self._below: dict[str, workflow.ChildWorkflowHandle[Any, RunResult]] = {}

    # Abandoned when the workflow ends: whom it would have woken is then ended, too.
    @workflow.signal(name=contracts.WAKE_SIGNAL, unfinished_policy=workflow.HandlerUnfinishedPolicy.ABANDON)
    async def wake(self) -> None:
        """Something in the database changed: look again at what is held. Carries nothing and decides nothing."""
        self._wakes += 1
        await self._wake_below()

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
        if request.is_round:
            # The run goes on, or is ended, by the workflow that asked for this round.
            return RunResult(ended.state, ended.code)
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
            steps, skipped = request.steps, request.skipped
            if steps is None:
                receipt = await self._plan(request)
                steps, skipped = receipt.steps, receipt.skipped
            if not steps and request.round > 0:
                return _Ended("succeeded", KEPT)
            ended = await self._perform_all(request, steps, skipped)
        except _Ended as early:
            return early
        if request.is_round:
            return ended
        return await self._revise(request, ended)

    async def _revise(self, request: RunRequest, ended: _Ended) -> _Ended:
        """Lets the Conductor look at the answer and plan again, until it keeps it or the rounds are used up."""
        number = request.round
        while ended.state == "succeeded" and ended.code is None and number + 1 < request.rounds_max:
            number += 1
            own_id = contracts.round_workflow_id(request.run_id, request.execution, number)
            result = await self._run_below(_round_request(request, number), own_id)
            ended = _Ended(result.state, result.code)
            if _is_cancelling():
                # The wait for the round went on until it had ended; a further one must not begin.
                raise asyncio.CancelledError
        return _Ended("succeeded") if ended.code == KEPT else ended

    async def _plan(self, request: RunRequest) -> PlanReceipt:
        dispatch, looks, patient = 0, 0, False
        while True:
            # Read before the look: an order may come between what the database says and when it is heard here.
            woken = self._wakes
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
                    looks = await self._held(looks, woken)
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
                        sole = len(done) == graph.size - 1 and request.round + 1 >= request.rounds_max
                        tasks[position] = asyncio.create_task(self._perform(request, steps[position], ends_run=sole))
                if not tasks:
                    return failure or _all_done(graph, done)
                await workflow.wait(list(tasks.values()), return_when=asyncio.FIRST_COMPLETED)
                for position in [position for position, task in tasks.items() if task.done()]:
                    receipt = _receipt_of(tasks.pop(position))
                    self._freed += 1
                    if receipt.run_ended:
                        # Reports that come a moment later say nothing new; a dead worker's is not waited for.
                        late = [workflow.wait(tasks.values(), timeout=contracts.REPORTS_WITHIN_S)] if tasks else []
                        await _finish([asyncio.create_task(wait) for wait in late])
                        return _Ended("succeeded", settled=True)
                    if receipt.outcome == "succeeded":
                        done.add(position)
                        told = set() if receipt.left is None else set(range(graph.size)).difference(receipt.left, done)
                        # Others have ended as well, whose reports are still to come; older workers waited for them.
                        if told and workflow.patched("told-by-others"):
                            done |= told
                    elif failure is None or (failure.code in _CONSEQUENCES and receipt.outcome != "held"):
                        # Nothing new starts; calls in flight are paid for, so they may finish and be kept.
                        self._giving_up = True
                        failure = _Ended("cancelled" if receipt.outcome == "cancelled" else "failed", receipt.code)
                        # The same for the children: Open refuses them from now on, so what they hold back may end.
                        await self._wake_below()
                        # What lies in a queue that nobody polls has not begun, and nobody could take it out again.
                        for unpolled in self._unpolled & tasks.keys():
                            tasks[unpolled].cancel()
        except (asyncio.CancelledError, Exception):
            # Not `finally`: a workflow that a worker drops from its memory is closed where nothing may be awaited.
            await _stop(list(tasks.values()))
            raise

    async def _perform(self, request: RunRequest, step: StepSpec, *, ends_run: bool) -> StepReceipt:
        dispatch, looks, patient = 0, 0, False
        while True:
            # Read before the look: an order may come between what the database says and when it is heard here.
            woken, freed = self._wakes, self._freed
            try:
                if step.kind == "conductor":
                    receipt = await self._delegate(request, step, dispatch, ends_run=ends_run)
                else:
                    receipt = await self._call(request, step, dispatch, ends_run=ends_run, patient=patient)
            except ActivityError as error:
                if not _nobody_polled(error):
                    raise
                await self._note_no_worker(request, step.position)
                patient = True
                self._unpolled.add(step.position)
                if self._giving_up:
                    return StepReceipt("held", "no-worker")
            else:
                patient = False
                self._unpolled.discard(step.position)
                if receipt.outcome == "moved" or receipt.code == "operator":
                    # A call has ended, though the step has not.
                    self._freed += 1
                if receipt.outcome == "moved":
                    step = receipt.step or step
                elif receipt.outcome == "held":
                    short = (receipt.code or "").startswith("budget")
                    looks = await self._held(looks, woken, freed=freed if short else None)
                if receipt.outcome not in {"moved", "held"} or self._giving_up:
                    return receipt
            dispatch += 1

    async def _call(
        self, request: RunRequest, step: StepSpec, dispatch: int, *, ends_run: bool, patient: bool
    ) -> StepReceipt:
        return await workflow.execute_activity(
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

    async def _delegate(self, request: RunRequest, step: StepSpec, dispatch: int, *, ends_run: bool) -> StepReceipt:
        """Recursion: the step is a planning problem of its own, with its own run in a child workflow."""
        place = (request.run_id, request.execution, request.round, step.position)
        begun: ChildReceipt = await workflow.execute_activity(
            contracts.begin_child,
            ChildRequest(*place, dispatch),
            activity_id=contracts.child_activity_id("begin", request.round, step.position, dispatch),
            **_BOOKKEEPING,
        )
        if begun.outcome != "begun" or begun.request is None:
            return StepReceipt(_as_outcome(begun), begun.code, step=begun.step)
        if self._giving_up:
            # Another step failed meanwhile. The child has not begun; settling this run settles it as well.
            return StepReceipt("cancelled", "run-failing")
        closed = True
        try:
            await self._run_below(begun.request, contracts.workflow_id(begun.request.run_id, begun.request.execution))
        except ChildWorkflowError:
            # The child has ended without an answer and says so on record; what follows is for the record to say, too.
            pass
        except WorkflowAlreadyStartedError:
            # An earlier look at this step had started it; its end is on record.
            closed = False
        if _is_cancelling():
            # It is this run that is cancelled, and the child with it.
            raise asyncio.CancelledError
        return await workflow.execute_activity(
            contracts.finish_child,
            ChildEndRequest(*place, begun.request.execution, ends_run, child_closed=closed),
            activity_id=contracts.child_activity_id("finish", request.round, step.position, dispatch),
            **_BOOKKEEPING,
        )

    async def _run_below(self, request: RunRequest, own_id: str) -> RunResult:
        """Runs a round or a child in a workflow of its own; a cancellation is passed on and its end is waited for."""
        handle = await workflow.start_child_workflow(
            contracts.WORKFLOW_TYPE,
            request,
            result_type=RunResult,
            id=own_id,
            task_queue=request.queue,
            **_CHILD_OPTIONS,
        )
        self._below[own_id] = handle
        try:
            result: RunResult = await handle
        finally:
            del self._below[own_id]
        return result

    async def _wake_below(self) -> None:
        for handle in list(self._below.values()):
            # One that has just ended cannot be woken any more.
            with suppress(FailureError):
                await handle.signal(contracts.WAKE_SIGNAL)

    async def _held(self, looks: int, woken: int, *, freed: int | None = None) -> int:
        """Waits for a wake-up; looks again after a while in any case, because a signal can be lost.

        Takes and returns how often it was looked at in vain: each wait is twice as long as the one before. ``woken`` is
        the count of wake-ups before the look. With ``freed`` the end of any other step since then wakes it, too. A run
        that is about to fail waits for nothing.
        """
        wait = min(contracts.HELD_RECHECK_FIRST * 2 ** min(looks, 20), contracts.HELD_RECHECK_MAX)
        try:
            await workflow.wait_condition(
                lambda: self._giving_up or self._wakes != woken or (freed is not None and self._freed != freed),
                timeout=wait,
            )
        except builtins.TimeoutError:
            return looks + 1
        return 0

    async def _note_no_worker(self, request: RunRequest, position: int | None) -> None:
        await workflow.execute_activity(
            contracts.note_waiting,
            WaitRequest(request.run_id, request.execution, request.round, position, "no-worker"),
            **_BOOKKEEPING,
        )

    async def _settle(self, request: RunRequest, ended: _Ended) -> _Ended:
        task = asyncio.create_task(
            workflow.execute_activity(
                contracts.settle_run,
                SettleRequest(request.run_id, request.execution, ended.state, ended.code),
                activity_id=f"settle-{request.execution}",
                **_BOOKKEEPING,
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


def _receipt_of(task: asyncio.Task[StepReceipt]) -> StepReceipt:
    """What became of a step; one that was taken out of its queue because the run fails was only held."""
    if task.cancelled():
        return StepReceipt("held", "no-worker")
    error = task.exception()
    if error is not None and is_cancelled_exception(error) and not _is_cancelling():
        return StepReceipt("held", "no-worker")
    return task.result()


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


def _round_request(request: RunRequest, number: int) -> RunRequest:
    return replace(request, round=number, steps=None, skipped=[], done=[], deadline_s=None, is_round=True)


def _is_cancelling() -> bool:
    """Whether the task was told to stop, though what it waited for took the cancellation upon itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _as_outcome(begun: ChildReceipt) -> Outcome:
    return "failed" if begun.outcome == "begun" else begun.outcome


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
    if isinstance(error, ChildWorkflowError):
        # A round whose workflow was ended by hand; what it had done is on record.
        return _Ended("failed", WORKFLOW_LOST)
    return _Ended("failed", bug_code(error))
