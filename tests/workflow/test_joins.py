"""Steps that end together: one report names them all, so that their reader does not wait for a turn for each."""

from __future__ import annotations

import asyncio
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from temporalio import activity
from temporalio.worker import Replayer

from activities import steps
from engine import contracts
from engine.contracts import StepReceipt, StepRequest, workflow_id
from engine.converter import DATA_CONVERTER
from engine.settings import TemporalSettings
from engine.store.closing import unblocks_nothing
from engine.temporal_client import connect_temporal
from engine.workflow import RunWorkflow
from tests.replay.changed import Deaf
from tests.support.orders import cancel
from tests.support.provider import Provider
from tests.support.runs import ended, lists_plan, submit_plan
from tests.support.servers import TestServers
from tests.support.stored import check_invariants, record
from tests.support.workflows import handle_of, history_events, interpreted, pool_of, provider_reaches, run_of, until
from worker_pools.process import WorkerProcess, workflow_runner

pytestmark = pytest.mark.asyncio(loop_scope="module")

FAN = lists_plan(["Go."] * 3, [[], [], [0, 1]], [0, 1, 2])


class LateReport:
    """Step 0 has ended, but says so only when its reader is under way, which hears of it from step 1."""

    def __init__(self, after_s: float = 0.5) -> None:
        self.after_s = after_s
        self.reader_began = asyncio.Event()
        self.reports: list[int] = []

    @activity.defn(name="perform_step")
    async def perform_step(self, request: StepRequest) -> StepReceipt:
        receipt = StepReceipt("succeeded", left=[2] if request.position == 1 else [1, 2])
        if request.position == 0:
            await self.reader_began.wait()
            # The run has ended by then; its workflow still waits for what it has asked for.
            await asyncio.sleep(self.after_s)
        elif request.position == 2:
            self.reader_began.set()
            receipt = StepReceipt("succeeded", run_ended=True)
        self.reports.append(request.position)
        return receipt


async def test_a_report_that_names_what_else_has_ended_is_enough_to_go_on(servers: TestServers) -> None:
    client = await connect_temporal(TemporalSettings(servers.temporal_address))
    late = LateReport()
    async with asyncio.timeout(15):
        result = await interpreted(client, [[], [], [0, 1]], late.perform_step)
    assert result.state == "succeeded"
    assert late.reports == [1, 2, 0]


async def test_a_report_that_never_comes_does_not_keep_the_workflow_of_a_run_that_has_ended(
    servers: TestServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker died within the moment by which it was put off, and nobody has its queue any more."""
    monkeypatch.setattr(contracts, "REPORTS_WITHIN_S", 0.5)
    client = await connect_temporal(TemporalSettings(servers.temporal_address))
    late = LateReport(after_s=60)
    async with asyncio.timeout(15):
        result = await interpreted(client, [[], [], [0, 1]], late.perform_step)
    assert result.state == "succeeded"
    assert late.reports == [1, 2]


@activity.defn(name="perform_step")
async def late_first(request: StepRequest) -> StepReceipt:
    """Step 1 tells that step 0 has ended, which says so itself a moment later; between the two, step 3 moves."""
    if request.position == 3 and request.dispatch == 0:
        await asyncio.sleep(0.3)
        return StepReceipt("moved")
    await asyncio.sleep({0: 0.6, 2: 0.9}.get(request.position, 0))
    return StepReceipt("succeeded", left=[2, 3] if request.position < 2 else None, run_ended=request.position == 2)


@pytest.mark.parametrize("version", [Deaf, RunWorkflow])
async def test_a_run_goes_on_when_workers_with_and_without_this_take_turns(servers: TestServers, version: type) -> None:
    client = await connect_temporal(TemporalSettings(servers.temporal_address))
    run_id = uuid4()
    async with asyncio.timeout(15):
        await interpreted(client, [[], [], [0, 1], []], late_first, workflow=version, run_id=str(run_id))
    history = await client.get_workflow_handle(workflow_id(str(run_id), 1)).fetch_history()
    replayer = Replayer(workflows=[RunWorkflow], data_converter=DATA_CONVERTER, workflow_runner=workflow_runner())
    # Any worker of today may have to go on from here.
    await replayer.replay_workflow(history)


def other(position: int, state: str, *reads: int) -> dict[str, object]:
    return {"position": position, "state": state, "reads": list(reads)}


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([other(1, "running"), other(2, "pending", 1)], True),
        ([other(1, "running")], True),
        # Nobody else will report.
        ([], False),
        ([other(2, "pending", 1), other(1, "pending")], False),
        # Something can begin.
        ([other(1, "running"), other(2, "pending", 0)], False),
        ([other(1, "running"), other(2, "pending")], False),
        # It may wait for what this call had reserved.
        ([other(1, "running"), other(2, "waiting", 1)], False),
        ([other(1, "running"), other(2, "failed", 1)], False),
    ],
)
async def test_a_report_is_put_off_only_where_another_one_will_say_the_same(
    others: list[dict[str, object]], *, expected: bool
) -> None:
    assert unblocks_nothing(others) is expected


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports that unblock nothing come much later than anything else here."""
    monkeypatch.setattr(steps, "REPORT_AFTER_S", 5.0)


async def first_done(process: WorkerProcess, run_id: UUID) -> None:
    async def done() -> bool:
        return (await run_of(process.database, run_id)).steps[0].state == "succeeded"

    await until(done)


@pytest.mark.usefixtures("patient")
async def test_the_reader_is_called_before_the_first_report_has_come(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    run_id = await submit_plan(process, pool_of(tmp_path, provider.base_url, "a", "sleep-600ms", "c"), FAN)
    run = await ended(process.database, run_id)
    assert run.state == "succeeded"
    assert provider.count == 3
    # The run has ended; its workflow ends when it has heard of everything that it asked for.
    assert (await handle_of(process.client, run_id).result())["state"] == "succeeded"
    events = await history_events(process.client, run_id)
    scheduled = {
        event.activity_task_scheduled_event_attributes.activity_id: event.event_id
        for event in events
        if event.HasField("activity_task_scheduled_event_attributes")
    }
    reported = {
        event.activity_task_completed_event_attributes.scheduled_event_id: event.event_id
        for event in events
        if event.HasField("activity_task_completed_event_attributes")
    }
    at = {name: reported[event] for name, event in scheduled.items()}
    assert at["step-0-1-0"] < scheduled["step-0-2-0"] < at["step-0-0-0"]
    check_invariants(await record(process.database.url, run_id))


@pytest.mark.usefixtures("patient")
async def test_a_cancellation_does_not_wait_for_a_report_and_takes_nothing_back(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    run_id = await submit_plan(process, pool_of(tmp_path, provider.base_url, "a", "sleep-20000ms", "c"), FAN)
    await first_done(process, run_id)
    await provider_reaches(provider, 2)
    await cancel(process, run_id)
    async with asyncio.timeout(15):
        run = await ended(process.database, run_id)
    assert (run.state, run.steps[0].state) == ("cancelled", "succeeded")
    check_invariants(await record(process.database.url, run_id))
