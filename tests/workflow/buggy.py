"""Workflows with a bug each, for tests: what a mistake of ours in the plan loop would do to a run."""

from __future__ import annotations

from temporalio import workflow
from temporalio.common import RawValue

with workflow.unsafe.imports_passed_through():
    from pydantic import TypeAdapter

    from engine import contracts
    from engine.contracts import RunRequest, RunResult, StepReceipt, StepSpec
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
