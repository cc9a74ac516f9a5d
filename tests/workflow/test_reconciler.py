"""No live run is ever left without a workflow, whatever happened to the submitter or to Temporal (G3-10)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from uuid import UUID

import pytest
import temporalio.api.common.v1 as common
import temporalio.api.workflowservice.v1 as workflowservice
from temporalio.client import Client

from activities.executions import reconcile
from engine.errors import UnavailableError
from engine.service import Submission, prepare
from engine.store.database import Database
from engine.store.runs import create_run
from tests.support.provider import Provider
from tests.support.runs import ended, lists_plan, submit_plan, worker_process
from tests.support.servers import TestServers
from tests.support.workflows import handle_of, pool_of, provider_reaches, run_of
from worker_pools.process import WorkerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

ONE = lists_plan(["Go."], [[]], [0])


async def written_only(database: Database, provider: Provider, folder: Path) -> UUID:
    """A run whose submitter died between its write and the workflow's start."""
    pool = pool_of(folder, provider.base_url, "plain")
    return (await create_run(database, prepare(Submission(task="Go.", pool=pool, actor_id="t", plan_text=ONE)))).id


async def test_a_run_that_was_only_written_is_started(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    run_id = await written_only(process.database, provider, tmp_path)
    assert await reconcile(process.database, process.client) == 1
    assert (await ended(process.database, run_id)).state == "succeeded"
    assert await reconcile(process.database, process.client) == 0


async def test_the_reconciler_of_a_worker_looks_again_by_itself_also_after_a_pass_that_failed(
    database_url: str, servers: TestServers, provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    troubles: list[Exception] = [UnavailableError("database-unreachable", "away"), ValueError("a bug")]
    passes = 0

    async def counted(database: Database, client: Client) -> int:
        nonlocal passes
        passes += 1
        if passes > 1 and troubles:
            raise troubles.pop()
        return await reconcile(database, client)

    monkeypatch.setattr("worker_pools.process.reconcile", counted)
    monkeypatch.setattr("worker_pools.process.RECONCILE_INTERVAL_S", 0.3)
    async with worker_process(database_url, servers.temporal_address) as own:
        for _ in range(2):
            # Written after the worker's first pass, so only a later one can find it.
            run_id = await written_only(own.database, provider, tmp_path)
            assert (await ended(own.database, run_id)).state == "succeeded"
    assert troubles == []
    assert passes > 3  # the first, the two that failed, and one that found something


async def test_reconcilers_that_meet_do_no_harm(process: WorkerProcess, provider: Provider, tmp_path: Path) -> None:
    run_ids = [await written_only(process.database, provider, tmp_path) for _ in range(5)]
    await asyncio.gather(*(reconcile(process.database, process.client) for _ in range(4)))
    for run_id in run_ids:
        assert (await ended(process.database, run_id)).state == "succeeded"
    assert provider.count == 5


@pytest.mark.parametrize("way", ["terminate", "delete"])
async def test_a_workflow_that_was_ended_by_hand_ends_its_run(
    process: WorkerProcess, provider: Provider, tmp_path: Path, way: str
) -> None:
    provider.script({"delay_first_s": 60}, model="slow")
    run_id = await submit_plan(process, pool_of(tmp_path, provider.base_url, "slow"), ONE)
    await provider_reaches(provider, 1)
    handle = handle_of(process.client, run_id)
    if way == "terminate":
        await handle.terminate("by hand")
    else:
        execution = common.WorkflowExecution(workflow_id=handle.id)
        request = workflowservice.DeleteWorkflowExecutionRequest(
            namespace=process.client.namespace, workflow_execution=execution
        )
        await process.client.workflow_service.delete_workflow_execution(request)
    for _ in range(100):
        if await reconcile(process.database, process.client):
            break
        await asyncio.sleep(0.05)
    run = await run_of(process.database, run_id)
    assert (run.state, run.reason) == ("failed", "workflow-lost")
    assert [(attempt.state, attempt.error_code) for attempt in run.steps[0].attempts] == [("unknown", "outcome-lost")]
    assert run.steps[0].state == "cancelled"


async def test_a_workflow_that_runs_is_left_alone(process: WorkerProcess, provider: Provider, tmp_path: Path) -> None:
    run_id = await submit_plan(process, pool_of(tmp_path, provider.base_url, "sleep-700ms"), ONE)
    await provider_reaches(provider, 1)
    assert await reconcile(process.database, process.client) == 0
    assert (await ended(process.database, run_id)).state == "succeeded"
    result = await handle_of(process.client, run_id).result()
    assert result["state"] == "succeeded"
