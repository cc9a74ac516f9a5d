"""Workflows with a bug each, for tests: what a mistake of ours in the plan loop would do to a run."""

from __future__ import annotations

from typing import Any

from temporalio import workflow
from temporalio.common import RawValue, RetryPolicy

with workflow.unsafe.imports_passed_through():
    from pydantic import TypeAdapter

    from engine import contracts
    from engine.contracts import PlanReceipt, RunRequest, RunResult, StepReceipt, StepSpec
from engine.workflow import RunWorkflow

SECRET = "kanarie-in-workflow-code"  # a word that must not be found anywhere


def _endless(depth: int) -> int:
    return _endless(depth + 1) + 1


def _raise(kind: int) -> None:
    """Raises the exception with this number."""
    if kind == 0:
        raise ValueError(SECRET)
    if kind == 1:
        raise KeyError(SECRET)
    if kind == 2:
        TypeAdapter(int).validate_python(SECRET)
    if kind == 3:
        raise TimeoutError(SECRET)
    if kind == 4:
        _endless(0)
    raise AssertionError(SECRET)


CODES = (
    "bug-value-error",
    "bug-key-error",
    "bug-validation-error",
    "bug-timeout-error",
    "bug-recursion-error",
    "bug-assertion-error",
)


@workflow.defn(name=contracts.WORKFLOW_TYPE)
class BuggyRun(RunWorkflow):
    """Raises in the plan loop when step 1 is to start; the number of steps after it says what."""

    @workflow.run
    async def run(self, raw: RawValue) -> RunResult:
        """See ``RunWorkflow``."""
        return await super().run(raw)

    async def _perform(self, request: RunRequest, step: StepSpec, *, ends_run: bool) -> StepReceipt:
        if step.position == 1:
            _raise(len(request.steps or []) - 2)
        return await super()._perform(request, step, ends_run=ends_run)

    @workflow.signal(name=contracts.WAKE_SIGNAL)
    def wake(self) -> None:
        """A bug outside the run's own coroutine: it fails the workflow task, again and again."""
        raise ValueError(SECRET)


# What is asked with, by the number of the run's steps less one.
UNREADABLE: tuple[list[Any], ...] = ([{"nonsense": 1}], [7], [None], [], [{"run_id": "x"}, 2])


@workflow.defn(name=contracts.WORKFLOW_TYPE)
class UnreadableRun(RunWorkflow):
    """Asks for activities with arguments that are none of ours, as another version's code or a stranger might.

    The number of steps says which arguments; a run that the Conductor plans asks with the first.
    """

    @workflow.run
    async def run(self, raw: RawValue) -> RunResult:
        """See ``RunWorkflow``."""
        return await super().run(raw)

    async def _call(
        self, request: RunRequest, step: StepSpec, dispatch: int, *, ends_run: bool, patient: bool
    ) -> StepReceipt:
        return await _asked("perform_step", UNREADABLE[len(request.steps or []) - 1], step.queue)

    async def _plan(self, request: RunRequest) -> PlanReceipt:
        return await _asked("plan_task", UNREADABLE[0], request.plan_queue.removeprefix("pool-"))


async def _asked(name: str, arguments: list[Any], queue: str) -> Any:
    return await workflow.execute_activity(
        name,
        args=arguments,
        task_queue=contracts.pool_queue(queue),
        start_to_close_timeout=contracts.BOOKKEEPING_TIMEOUT,
        # As the workflow's own: Temporal tries again for as long as it is not told that this is of no use.
        retry_policy=RetryPolicy(maximum_attempts=0),
    )
