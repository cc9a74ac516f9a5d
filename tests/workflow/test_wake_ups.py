"""A wake-up counts from before the look at the database, so that an order between the two is not overlooked."""

from __future__ import annotations

import asyncio
from uuid import uuid4

from temporalio import activity
from temporalio.client import Client
from temporalio.worker import Worker

from engine import contracts
from engine.contracts import RunRequest, StepReceipt, StepRequest, StepSpec
from engine.settings import TemporalSettings
from engine.temporal_client import connect_temporal
from engine.workflow import RunWorkflow
from tests.support.servers import TestServers
from worker_pools.process import workflow_runner


class HeldOnce:
    """A step that is held at the first look; the order that frees it is given before the workflow hears of that."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.dispatches: list[int] = []

    @activity.defn(name="perform_step")
    async def perform_step(self, request: StepRequest) -> StepReceipt:
        self.dispatches.append(request.dispatch)
        if request.dispatch > 0:
            return StepReceipt("succeeded", run_ended=True)
        handle = self._client.get_workflow_handle(contracts.workflow_id(request.run_id, request.execution))
        await handle.signal(contracts.WAKE_SIGNAL)
        return StepReceipt("held", "operator")


async def test_an_order_between_the_look_and_the_wait_is_heard(servers: TestServers) -> None:
    client = await connect_temporal(TemporalSettings(servers.temporal_address))
    held = HeldOnce(client)
    run_id, queue = str(uuid4()), f"wakes-{uuid4().hex[:8]}"
    request = RunRequest(run_id, 1, steps=[StepSpec(0, [], queue, 10.0)], queue=contracts.pool_queue(queue))
    async with Worker(
        client,
        task_queue=request.queue,
        workflows=[RunWorkflow],
        activities=[held.perform_step],
        workflow_runner=workflow_runner(),
    ):
        # Far less than the half minute after which it would look again anyway.
        async with asyncio.timeout(15):
            result = await client.execute_workflow(
                contracts.WORKFLOW_TYPE,
                request,
                id=contracts.workflow_id(run_id, 1),
                task_queue=request.queue,
                result_type=contracts.RunResult,
            )
    assert result.state == "succeeded"
    assert held.dispatches == [0, 1]
