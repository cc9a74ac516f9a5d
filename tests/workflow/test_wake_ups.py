"""A wake-up counts from before the look at the database, so that an order between the two is not overlooked."""

from __future__ import annotations

import asyncio

from temporalio import activity
from temporalio.client import Client

from engine import contracts
from engine.contracts import StepReceipt, StepRequest
from engine.settings import TemporalSettings
from engine.temporal_client import connect_temporal
from tests.support.servers import TestServers
from tests.support.workflows import interpreted


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
    # Far less than the half minute after which it would look again anyway.
    async with asyncio.timeout(15):
        result = await interpreted(client, [[]], held.perform_step)
    assert result.state == "succeeded"
    assert held.dispatches == [0, 1]
