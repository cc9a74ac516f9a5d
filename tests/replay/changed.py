"""Copies of the workflow with a change each: what a history of today would meet if somebody made it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from datetime import timedelta

from temporalio import workflow
from temporalio.common import RawValue

with workflow.unsafe.imports_passed_through():
    from engine import contracts
    from engine.contracts import RunRequest, RunResult, StepReceipt, StepSpec, WaitRequest
from engine.workflow import RunWorkflow, _Ended

TIMEOUT = timedelta(seconds=30)


async def _book(request: RunRequest) -> None:
    """An activity that the workflow of today does not ask for."""
    await workflow.execute_activity(
        contracts.note_waiting,
        WaitRequest(request.run_id, request.execution, request.round, None, "added"),
        task_queue=contracts.WORKFLOW_QUEUE,
        start_to_close_timeout=TIMEOUT,
    )


@workflow.defn(name=contracts.WORKFLOW_TYPE)
class Added(RunWorkflow):
    """Asks for one activity more before each step."""

    @workflow.run
    async def run(self, raw: RawValue) -> RunResult:
        """See ``RunWorkflow``."""
        return await super().run(raw)

    async def _perform(self, request: RunRequest, step: StepSpec, *, ends_run: bool) -> StepReceipt:
        await _book(request)
        return await super()._perform(request, step, ends_run=ends_run)


@workflow.defn(name=contracts.WORKFLOW_TYPE)
class AddedWithPatch(RunWorkflow):
    """The same in the right way: what has begun without it goes on without it."""

    @workflow.run
    async def run(self, raw: RawValue) -> RunResult:
        """See ``RunWorkflow``."""
        return await super().run(raw)

    async def _perform(self, request: RunRequest, step: StepSpec, *, ends_run: bool) -> StepReceipt:
        if workflow.patched("one-activity-more"):
            await _book(request)
        return await super()._perform(request, step, ends_run=ends_run)


@workflow.defn(name=contracts.WORKFLOW_TYPE)
class Removed(RunWorkflow):
    """No longer settles a run by an activity of its own."""

    @workflow.run
    async def run(self, raw: RawValue) -> RunResult:
        """See ``RunWorkflow``."""
        return await super().run(raw)

    async def _settle(self, request: RunRequest, ended: _Ended) -> _Ended:
        return ended


@workflow.defn(name=contracts.WORKFLOW_TYPE)
class Reordered(RunWorkflow):
    """Begins the first of several steps after the others."""

    @workflow.run
    async def run(self, raw: RawValue) -> RunResult:
        """See ``RunWorkflow``."""
        return await super().run(raw)

    async def _perform(self, request: RunRequest, step: StepSpec, *, ends_run: bool) -> StepReceipt:
        if step.position == 0:
            # The same workflow task, a little later in it.
            for _ in range(5):
                await asyncio.sleep(0)
        return await super()._perform(request, step, ends_run=ends_run)


@workflow.defn(name=contracts.WORKFLOW_TYPE)
class Renamed(RunWorkflow):
    """Gives the activities of steps other ids."""

    @workflow.run
    async def run(self, raw: RawValue) -> RunResult:
        """See ``RunWorkflow``."""
        return await super().run(raw)

    async def _call(
        self, request: RunRequest, step: StepSpec, dispatch: int, *, ends_run: bool, patient: bool
    ) -> StepReceipt:
        return await super()._call(request, step, dispatch + 1, ends_run=ends_run, patient=patient)


@workflow.defn(name=contracts.WORKFLOW_TYPE)
class Hurried(RunWorkflow):
    """Reads the machine's clock, which a replay would read anew."""

    @workflow.run
    async def run(self, raw: RawValue) -> RunResult:
        """See ``RunWorkflow``."""
        time.time()
        return await super().run(raw)


@workflow.defn(name=contracts.WORKFLOW_TYPE)
class Deaf(RunWorkflow):
    """Hears of each step from its own report only, as before the reports of others told it, too."""

    @workflow.run
    async def run(self, raw: RawValue) -> RunResult:
        """See ``RunWorkflow``."""
        return await super().run(raw)

    async def _perform(self, request: RunRequest, step: StepSpec, *, ends_run: bool) -> StepReceipt:
        return replace(await super()._perform(request, step, ends_run=ends_run), left=None)
