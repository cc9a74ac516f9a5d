"""Pausing: nothing new starts, calls in flight finish and are kept, and the run goes on where it was held."""

from __future__ import annotations

import asyncio
from pathlib import Path
from uuid import UUID

import pytest

from activities.executions import reconcile
from engine.contracts import child_run_id
from engine.errors import RefusedError
from engine.operations.pausing import pause_run, unpause_run
from engine.operations.waking import wake_when_connected
from engine.service import Submission, prepare
from engine.settings import TemporalSettings
from engine.store.database import Database
from engine.store.runs import create_run
from engine.temporal_client import connect_temporal
from tests.support.nested import CHAIN, PLANNER, recursive_pool
from tests.support.orders import cancel, connecting, nothing_more_is_called, order, pause, temporal_is_away, unpause
from tests.support.provider import Provider
from tests.support.runs import ended, lists_plan, submit_plan, worker_process
from tests.support.servers import TestServers
from tests.support.stored import check_invariants, record
from tests.support.workflows import delete_workflow, pool_of, provider_reaches, run_of, until
from worker_pools.process import WorkerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

ONE = lists_plan(["Go."], [[]], [0])
TWO = lists_plan(["Go."] * 2, [[], [0]], [0, 1])


async def paused_in_first_call(process: WorkerProcess, provider: Provider, folder: Path) -> UUID:
    """A run of two steps that was paused during its first call and is held before its second."""
    run_id = await submit_plan(process, pool_of(folder, provider.base_url, "sleep-400ms", "plain"), TWO)
    await provider_reaches(provider, 1)
    given = await pause(process, run_id)
    # The call in flight goes on, so the run does not wait yet.
    assert (given.ordered.state, given.delivered) == ("running", True)

    async def first_done() -> bool:
        return (await run_of(process.database, run_id)).steps[0].state == "succeeded"

    await until(first_done)
    return run_id


async def shown_as_paused(process: WorkerProcess, run_id: UUID) -> bool:
    run = await run_of(process.database, run_id)
    return (run.state, run.reason) == ("waiting", "paused")


async def test_a_paused_run_finishes_its_call_starts_nothing_and_goes_on_at_once(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    run_id = await paused_in_first_call(process, provider, tmp_path)
    await until(lambda: shown_as_paused(process, run_id))
    assert len(await nothing_more_is_called(provider, for_s=1.0)) == 1
    assert (await run_of(process.database, run_id)).steps[0].output
    given = await unpause(process, run_id)
    assert given.delivered
    run = await ended(process.database, run_id, timeout_s=5)
    assert (run.state, provider.count) == ("succeeded", 2)
    kept = await record(process.database.url, run_id)
    check_invariants(kept)
    assert kept.run["wake_requested_at"] is None
    assert [entry["actor"] for entry in kept.entries() if "order" in entry["data"]] == ["operator"] * 2


@pytest.mark.parametrize("planned", [True, False])
async def test_a_run_that_is_paused_before_it_begins_calls_nothing_until_it_may(
    process: WorkerProcess, provider: Provider, tmp_path: Path, planned: bool
) -> None:
    asked = Submission(
        task="Go.",
        pool=pool_of(tmp_path, provider.base_url, "plain", conductor={"structured_output": "json-schema"}),
        actor_id="t",
        plan_text=ONE if planned else None,
    )
    run_id = (await create_run(process.database, prepare(asked))).id
    await pause(process, run_id)
    assert await reconcile(process.database, process.client) == 1
    await nothing_more_is_called(provider, for_s=1.0)
    run = await run_of(process.database, run_id)
    assert (run.state, run.reason, provider.count) == ("waiting", "paused", 0)
    await unpause(process, run_id)
    assert (await ended(process.database, run_id, timeout_s=5)).state == "succeeded"
    check_invariants(await record(process.database.url, run_id))


async def test_a_pause_keeps_a_retry_from_being_made(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"status": 503, "headers": {"Retry-After": "1"}}, model="busy")
    run_id = await submit_plan(process, pool_of(tmp_path, provider.base_url, "busy"), ONE)
    await provider_reaches(provider, 1)

    async def failed_once() -> bool:
        return [one.state for one in (await run_of(process.database, run_id)).steps[0].attempts] == ["failed"]

    await until(failed_once)
    given = await pause(process, run_id)
    assert (given.ordered.state, given.ordered.reason) == ("waiting", "paused")
    await nothing_more_is_called(provider, for_s=2.0)
    assert provider.count == 1
    await unpause(process, run_id)
    run = await ended(process.database, run_id, timeout_s=10)
    assert (run.state, provider.count) == ("succeeded", 2)


async def test_a_paused_run_can_be_cancelled(process: WorkerProcess, provider: Provider, tmp_path: Path) -> None:
    run_id = await paused_in_first_call(process, provider, tmp_path)
    await cancel(process, run_id)
    assert (await ended(process.database, run_id, timeout_s=5)).state == "cancelled"
    before = await record(process.database.url, run_id)
    for write in (pause, unpause):
        with pytest.raises(RefusedError, match="already been cancelled at"):
            await write(process, run_id)
    assert await record(process.database.url, run_id) == before


async def test_orders_given_while_temporal_is_away_hold_and_are_delivered_later(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    run_id = await submit_plan(process, pool_of(tmp_path, provider.base_url, "sleep-400ms", "plain"), TWO)
    await provider_reaches(provider, 1)
    given = await pause_run(process.database, temporal_is_away, order(run_id))
    assert not given.delivered
    await until(lambda: shown_as_paused(process, run_id))
    assert len(await nothing_more_is_called(provider)) == 1
    assert not (await unpause_run(process.database, temporal_is_away, order(run_id))).delivered
    # Nobody has woken the workflow: it would look again by itself only after half a minute.
    await asyncio.sleep(0.5)
    assert provider.count == 1
    await reconcile(process.database, process.client)
    assert (await ended(process.database, run_id, timeout_s=5)).state == "succeeded"
    assert (await record(process.database.url, run_id)).run["wake_requested_at"] is None


async def test_a_pause_given_while_the_worker_is_down_holds(
    servers: TestServers, template_database: str, provider: Provider, tmp_path: Path
) -> None:
    url = servers.new_database(template_database)
    pool = pool_of(tmp_path, provider.base_url, "sleep-300ms", "plain")
    client = await connect_temporal(TemporalSettings(servers.temporal_address))
    database = Database(url)
    async with worker_process(url, servers.temporal_address, grace_s=5.0) as first:
        run_id = await submit_plan(first, pool, TWO)
        await provider_reaches(provider, 1)
    given = await pause_run(database, connecting(client), order(run_id))
    assert given.ordered.changed
    before = provider.count
    async with worker_process(url, servers.temporal_address) as second:
        assert len(await nothing_more_is_called(provider, for_s=1.5)) == before
        await unpause(second, run_id)
        assert (await ended(database, run_id, timeout_s=20)).state == "succeeded"
    await database.close()
    servers.drop_database(url)


async def test_a_wake_up_reaches_all_live_descendants_and_no_newer_order_is_forgotten(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    """A run and its child are held, each by a pause of its own that was taken back unseen."""
    provider.script({"text": CHAIN}, model=PLANNER)
    pool = recursive_pool(tmp_path, provider, "sleep-400ms")
    run_id = await submit_plan(process, pool, lists_plan(["Split it."], [[]], [1]))
    await provider_reaches(provider, 2)
    runs = (run_id, child_run_id(run_id, round=0, position=0))
    for own in runs:
        await pause(process, own)
    await until(lambda: shown_as_paused(process, runs[1]))
    for own in runs:
        await unpause_run(process.database, temporal_is_away, order(own))
    assert await wake_when_connected(process.database, connecting(process.client), run_id)
    for own in runs:
        assert (await ended(process.database, own, timeout_s=10)).state == "succeeded"
        assert (await record(process.database.url, own)).run["wake_requested_at"] is None


async def test_a_wish_for_a_run_whose_workflow_is_gone_is_forgotten_and_the_run_settled(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    run_id = await paused_in_first_call(process, provider, tmp_path)
    await unpause_run(process.database, temporal_is_away, order(run_id))
    await delete_workflow(process.client, run_id)
    await reconcile(process.database, process.client)
    run = await run_of(process.database, run_id)
    assert (run.state, run.reason) in {("failed", "workflow-lost"), ("succeeded", None)}
    assert (await record(process.database.url, run_id)).run["wake_requested_at"] is None
