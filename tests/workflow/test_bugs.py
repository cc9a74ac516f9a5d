"""A bug in workflow code ends the run at once, loudly, with a code; what was paid for is kept (G3-06)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from activities.executions import reconcile
from engine import contracts
from engine.service import Submission, prepare
from engine.settings import TemporalSettings
from engine.store.runs import create_run
from tests.support.provider import Provider
from tests.support.runs import ended, lists_plan, submit_plan
from tests.support.servers import TestServers
from tests.support.workflows import hand_worker, handle_of, pool_of, run_of, temporal_record, until
from tests.workflow.aviary import fail_a_workflow_task
from tests.workflow.buggy import CODES, SECRET, UNREADABLE, BuggyRun, UnreadableRun
from worker_pools.process import WorkerOptions, WorkerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def buggy(servers: TestServers, template_database: str) -> AsyncIterator[WorkerProcess]:
    url = servers.new_database(template_database)
    options = WorkerOptions(url, TemporalSettings(servers.temporal_address))
    async with hand_worker(url, options, BuggyRun) as process:
        yield process
    servers.drop_database(url)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def unreadable(servers: TestServers, template_database: str) -> AsyncIterator[WorkerProcess]:
    url = servers.new_database(template_database)
    options = WorkerOptions(url, TemporalSettings(servers.temporal_address))
    async with hand_worker(url, options, UnreadableRun) as process:
        yield process
    servers.drop_database(url)


@pytest.mark.parametrize("size", [*range(1, len(UNREADABLE) + 1), None])
async def test_an_activity_whose_arguments_cannot_be_read_fails_the_run_at_once(
    unreadable: WorkerProcess, provider: Provider, tmp_path: Path, size: int | None
) -> None:
    """The SDK alone would have it tried again for ever. Without a plan (None) it is the planning that is asked for."""
    pool = pool_of(tmp_path, provider.base_url, "plain")
    plan = None if size is None else lists_plan(["Go."] * size, [[]] * size, [0] * size)
    run_id = await submit_plan(unreadable, pool, plan)
    run = await ended(unreadable.database, run_id, timeout_s=10)
    assert run.state == "failed"
    # A wrong number of arguments is met by Python itself.
    assert run.reason == ("bug-type-error" if size in {4, 5} else "bug-request-unreadable")
    assert provider.count == 0
    assert all(not step.attempts for step in run.steps)


@pytest.mark.parametrize("kind", range(len(CODES)))
async def test_a_bug_in_the_plan_loop_fails_the_run_with_its_code(
    buggy: WorkerProcess, provider: Provider, tmp_path: Path, kind: int
) -> None:
    pool = pool_of(tmp_path, provider.base_url, "plain", policy={"steps_max": 16})
    size = kind + 2
    plan = lists_plan(["Go."] * size, [[], *[["all"]] * (size - 1)], [0] * size)
    run_id = await submit_plan(buggy, pool, plan)
    run = await ended(buggy.database, run_id, timeout_s=10)
    assert (run.state, run.reason) == ("failed", CODES[kind])
    assert run.steps[0].state == "succeeded"
    assert run.steps[0].output
    assert run.cost_usd > 0
    assert {step.state for step in run.steps[1:]} == {"cancelled"}
    assert provider.count == 1
    assert SECRET.encode() not in await temporal_record(buggy.client, run_id)


@pytest.mark.parametrize(
    "request_body",
    [pytest.param({"nonsense": 1}, marks=pytest.mark.slow), 7, None, {"run_id": "x", "execution": "three"}],
)
async def test_an_input_that_cannot_be_read_fails_the_run_it_belongs_to(
    buggy: WorkerProcess, provider: Provider, tmp_path: Path, request_body: object
) -> None:
    pool = pool_of(tmp_path, provider.base_url, "plain")
    new = prepare(Submission(task="Go.", pool=pool, actor_id="t", plan_text=lists_plan(["Go."], [[]])))
    run_id = (await create_run(buggy.database, new)).id
    await buggy.client.start_workflow(
        contracts.WORKFLOW_TYPE,
        request_body,
        id=contracts.workflow_id(str(run_id), 1),
        task_queue=contracts.WORKFLOW_QUEUE,
    )
    run = await ended(buggy.database, run_id, timeout_s=10)
    assert run.state == "failed"
    assert (run.reason or "").startswith("bug-")
    assert provider.count == 0


async def test_a_failed_workflow_task_leaves_a_code_and_nothing_else(
    buggy: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    record = await fail_a_workflow_task(buggy, provider, tmp_path)
    assert b"bug-value-error" in record
    assert SECRET.encode() not in record
    assert b'File "' not in record


async def test_a_workflow_that_cannot_go_on_is_reported_as_stuck(
    buggy: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    """Failures of the workflow task itself (nondeterminism is one) do not end the run: newer code may go on with it."""
    pool = pool_of(tmp_path, provider.base_url, "sleep-300ms", "plain")
    run_id = await submit_plan(buggy, pool, lists_plan(["Go."] * 2, [[], [0]], [0, 1]))
    handle = handle_of(buggy.client, run_id)
    await handle.signal(contracts.WAKE_SIGNAL)

    async def stuck() -> bool:
        await reconcile(buggy.database, buggy.client)
        run = await run_of(buggy.database, run_id)
        return (run.state, run.reason) == ("waiting", "workflow-stuck")

    await until(stuck)
    await handle.terminate("test")
    assert await reconcile(buggy.database, buggy.client) >= 1
    assert (await run_of(buggy.database, run_id)).reason == "workflow-lost"
