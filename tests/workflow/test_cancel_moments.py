"""Orders to cancel, given at every moment of a run (G5-02), while Temporal or the worker is away, and twice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest

from activities.executions import reconcile
from engine.errors import InputError, RefusedError
from engine.operations.cancelling import cancel_run, wait_for_end
from engine.service import Submission, prepare, resolve_run, submit
from engine.settings import TemporalSettings
from engine.store.database import Database
from engine.store.runs import create_run
from engine.temporal_client import connect_temporal
from tests.support.orders import cancel, connecting, nothing_more_is_called, order, pause, temporal_is_away
from tests.support.provider import Provider
from tests.support.runs import ended, lists_plan, submit_plan, worker_process
from tests.support.servers import TestServers
from tests.support.stored import check_invariants, record
from tests.support.workflows import (
    delete_workflow,
    history_events,
    pool_of,
    provider_reaches,
    run_of,
    scheduled_activities,
    terminate_workflow,
    until,
)
from worker_pools.process import WorkerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

ONE = lists_plan(["Go."], [[]], [0])


async def closed(provider: Provider) -> None:
    """Waits until the provider has seen every connection close."""

    async def none_open() -> bool:
        return bool(provider.stats["in_flight"] == 0)

    await until(none_open)


def order_row(process: WorkerProcess, statement: str, *parameters: Any) -> None:
    """An order as a row, the way a face would write it."""
    address = process.database.url.replace("postgresql+psycopg://", "postgresql://")
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute(statement.encode(), parameters)


async def planning_call(process: WorkerProcess, provider: Provider, folder: Path) -> UUID:
    pool = pool_of(folder, provider.base_url, "plain", conductor={"model": "sleep-60000ms", "timeouts": {"call_s": 80}})
    run_id = await submit_plan(process, pool, None)
    await provider_reaches(provider, 1)
    return run_id


async def first_call(process: WorkerProcess, provider: Provider, folder: Path) -> UUID:
    pool = pool_of(folder, provider.base_url, "sleep-60000ms", "plain", worker={"timeouts": {"call_s": 80}})
    run_id = await submit_plan(process, pool, lists_plan(["Go."] * 2, [[], [0]], [0, 1]))
    await provider_reaches(provider, 1)
    return run_id


async def second_call(process: WorkerProcess, provider: Provider, folder: Path) -> UUID:
    pool = pool_of(folder, provider.base_url, "plain", "sleep-60000ms", worker={"timeouts": {"call_s": 80}})
    run_id = await submit_plan(process, pool, lists_plan(["Go."] * 2, [[], [0]], [0, 1]))
    await provider_reaches(provider, 2)
    return run_id


async def two_parallel_calls(process: WorkerProcess, provider: Provider, folder: Path) -> UUID:
    pool = pool_of(folder, provider.base_url, "sleep-60000ms", "plain", worker={"timeouts": {"call_s": 80}})
    run_id = await submit_plan(process, pool, lists_plan(["Go."] * 3, [[], [], [0, 1]], [0, 0, 1]))
    await provider_reaches(provider, 2)
    return run_id


async def between_steps(process: WorkerProcess, provider: Provider, folder: Path) -> UUID:
    """A pause holds the run there for as long as the test needs."""
    pool = pool_of(folder, provider.base_url, "sleep-300ms", "plain")
    run_id = await submit_plan(process, pool, lists_plan(["Go."] * 2, [[], [0]], [0, 1]))
    await provider_reaches(provider, 1)
    await pause(process, run_id)

    async def held() -> bool:
        events = await history_events(process.client, run_id)
        return "step-0-1-0" in scheduled_activities(events)

    await until(held)
    return run_id


async def retry_pause(process: WorkerProcess, provider: Provider, folder: Path) -> UUID:
    provider.script({"status": 503, "headers": {"Retry-After": "30"}}, model="busy", times=None)
    run_id = await submit_plan(process, pool_of(folder, provider.base_url, "busy"), ONE)

    async def failed_once() -> bool:
        return [attempt.state for attempt in (await run_of(process.database, run_id)).steps[0].attempts] == ["failed"]

    await until(failed_once)
    return run_id


async def queued(process: WorkerProcess, provider: Provider, folder: Path) -> UUID:
    """On record, and its submitter died before the workflow was started."""
    asked = Submission(task="Go.", pool=pool_of(folder, provider.base_url, "plain"), actor_id="t", plan_text=ONE)
    return (await create_run(process.database, prepare(asked))).id


# Of the twelve moments of G5-02 those in which a run can be cancelled: reach it, then calls in flight and before.
MOMENTS: dict[str, tuple[Callable[[WorkerProcess, Provider, Path], Awaitable[UUID]], int, int]] = {
    "queued": (queued, 0, 0),
    "planning": (planning_call, 1, 0),
    "first call": (first_call, 1, 0),
    "second call": (second_call, 1, 1),
    "between steps": (between_steps, 0, 1),
    "two parallel calls": (two_parallel_calls, 2, 0),
    "retry pause": (retry_pause, 0, 1),
}


@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_cancel_ends_the_run_at_once_and_nothing_is_called_afterwards(
    process: WorkerProcess, provider: Provider, tmp_path: Path, moment: str
) -> None:
    reach, in_flight, before = MOMENTS[moment]
    run_id = await reach(process, provider, tmp_path)
    given = await cancel(process, run_id)
    assert given.ordered.changed
    assert given.delivered
    end = await wait_for_end(process.database, run_id, timeout_s=10)
    assert end is not None
    assert (end.state, end.reason) == ("cancelled", "cancelled")
    requests = await nothing_more_is_called(provider)
    assert [request["disconnected"] for request in requests] == [False] * before + [True] * in_flight
    run = await run_of(process.database, run_id)
    attempts = [*run.planning, *(attempt for step in run.steps for attempt in step.attempts)]
    broken_off = [attempt for attempt in attempts if attempt.state == "cancelled"]
    assert len(broken_off) == in_flight
    # It may have been billed, so its cost is not known, which is not 0.
    assert all(attempt.cost_usd is None for attempt in broken_off)
    # What the provider's 503 cost is not known either.
    assert run.cost_complete == (in_flight == 0 and moment != "retry pause")
    # What was finished stays readable.
    assert [step.output is not None for step in run.steps] == [step.state == "succeeded" for step in run.steps]
    if moment in {"second call", "between steps"}:
        assert run.steps[0].output
    kept = await record(process.database.url, run_id)
    check_invariants(kept)
    assert kept.run["wake_requested_at"] is None
    # A second cancel is harmless: it says since when, and not a byte of the record moves.
    again = await cancel(process, run_id)
    assert (again.ordered.state, again.ordered.changed) == ("cancelled", False)
    assert await record(process.database.url, run_id) == kept


async def test_a_second_cancel_while_the_first_takes_effect_is_harmless(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    run_id = await first_call(process, provider, tmp_path)
    results = await asyncio.gather(*(cancel(process, run_id) for _ in range(5)))
    assert sum(given.ordered.changed for given in results) == 1
    assert (await ended(process.database, run_id)).state == "cancelled"
    kept = await record(process.database.url, run_id)
    assert len(kept.entries("run.cancel_requested")) == 1
    check_invariants(kept)


async def test_a_cancel_that_meets_the_final_write_is_told_that_the_run_finished_before(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    """The answer is there and its transaction waits for the run's row; the cancel comes behind it."""
    run_id = await submit_plan(process, pool_of(tmp_path, provider.base_url, "sleep-500ms"), ONE)
    await provider_reaches(provider, 1)
    address = process.database.url.replace("postgresql+psycopg://", "postgresql://")
    with psycopg.connect(address) as holder:
        holder.execute("SELECT 1 FROM runs WHERE id = %s FOR UPDATE", (run_id,))
        await closed(provider)
        await asyncio.sleep(0.3)
        task = asyncio.create_task(cancel(process, run_id))
        await asyncio.sleep(0.3)
    with pytest.raises(RefusedError) as refused:
        await task
    assert refused.value.code == "run-ended"
    assert "already succeeded at" in refused.value.message
    run = await run_of(process.database, run_id)
    assert (run.state, run.steps[0].state) == ("succeeded", "succeeded")
    assert run.answer


async def test_a_cancel_that_is_on_record_before_the_answer_never_ends_as_success_without_output(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    """The order stands and the answer arrives before the call hears of it: kept if it is there, in agreement."""
    seen = set()
    # In the first the second step has been called before the order; in the last the first is never answered.
    for calls, delay_ms in ((2, 50), (1, 150), (1, 300), (1, 600), (1, 60_000)):
        provider.reset()
        # The second step is slow, so that the run cannot have ended before the order on a busy machine.
        pool = pool_of(
            tmp_path, provider.base_url, f"sleep-{delay_ms}ms", "sleep-5000ms", worker={"timeouts": {"call_s": 80}}
        )
        run_id = await submit_plan(process, pool, lists_plan(["Go."] * 2, [[], [0]], [0, 1]))
        await provider_reaches(provider, calls)
        await cancel(process, run_id)
        run = await ended(process.database, run_id)
        assert run.state == "cancelled"
        assert run.steps[1].state == "cancelled"
        seen.add(run.steps[0].state)
        kept = await record(process.database.url, run_id)
        ordered_at = kept.run["cancel_requested_at"]
        assert len(kept.attempts) == provider.count >= calls
        # By the database's clock, which says it more exactly than any pause of ours: nothing began after the order.
        assert all(row["sent_at"] < ordered_at for row in kept.attempts)
        for step in run.steps:
            assert (step.state == "succeeded") == (step.output is not None)
            # Whatever was paid for and arrived is kept: there is no answered call without its output.
            assert (step.state == "succeeded") == ("succeeded" in {attempt.state for attempt in step.attempts})
        check_invariants(kept)
        await nothing_more_is_called(provider, for_s=0.2)
    assert seen == {"succeeded", "cancelled"}


@pytest.mark.parametrize("state", ["succeeded", "failed"])
async def test_a_cancel_of_a_run_that_just_ended_is_refused_and_changes_nothing(
    process: WorkerProcess, provider: Provider, tmp_path: Path, state: str
) -> None:
    if state == "failed":
        provider.script({"status": 401}, model="plain")
    run_id = await submit_plan(process, pool_of(tmp_path, provider.base_url, "plain"), ONE)
    await ended(process.database, run_id)
    before = await record(process.database.url, run_id)
    with pytest.raises(RefusedError) as refused:
        await cancel(process, run_id)
    assert refused.value.code == "run-ended"
    assert f"already {state} at" in refused.value.message
    assert await record(process.database.url, run_id) == before


async def test_a_cancel_while_temporal_is_away_stands_and_is_delivered_later(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    run_id = await first_call(process, provider, tmp_path)
    given = await cancel_run(process.database, temporal_is_away, order(run_id))
    assert (given.ordered.changed, given.delivered) == (True, False)
    kept = await record(process.database.url, run_id)
    assert kept.run["wake_requested_at"] is not None
    await reconcile(process.database, process.client)
    assert (await ended(process.database, run_id, timeout_s=10)).state == "cancelled"
    (request,) = await nothing_more_is_called(provider)
    assert request["disconnected"]
    assert (await record(process.database.url, run_id)).run["wake_requested_at"] is None


@pytest.mark.parametrize("way", ["delete", "terminate"])
async def test_a_cancel_of_a_run_whose_workflow_is_gone_ends_it_at_once(
    process: WorkerProcess, provider: Provider, tmp_path: Path, way: str
) -> None:
    run_id = await first_call(process, provider, tmp_path)
    await (delete_workflow if way == "delete" else terminate_workflow)(process.client, run_id)
    given = await cancel(process, run_id)
    assert given.delivered
    run = await run_of(process.database, run_id)
    assert (run.state, run.reason) == ("cancelled", "cancelled")
    assert [attempt.state for attempt in run.steps[0].attempts] == ["unknown"]
    check_invariants(await record(process.database.url, run_id))


async def test_the_reconciler_ends_a_cancelled_run_that_was_never_started(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    run_id = await queued(process, provider, tmp_path)
    order_row(process, "UPDATE runs SET cancel_requested_at = clock_timestamp() WHERE id = %s", run_id)
    assert await reconcile(process.database, process.client) == 1
    run = await run_of(process.database, run_id)
    assert (run.state, provider.count) == ("cancelled", 0)


async def test_a_cancel_given_while_the_worker_is_down_holds_before_any_call(
    servers: TestServers, template_database: str, provider: Provider, tmp_path: Path
) -> None:
    """Two runs: one had a call in flight when the worker died, one had not begun."""
    url = servers.new_database(template_database)
    pool = pool_of(tmp_path, provider.base_url, "sleep-60000ms", "plain", worker={"timeouts": {"call_s": 80}})
    async with worker_process(url, servers.temporal_address, grace_s=0.0) as first:
        begun = await submit_plan(first, pool, lists_plan(["Go."] * 2, [[], [0]], [0, 1]))
        await provider_reaches(provider, 1)
    client = await connect_temporal(TemporalSettings(servers.temporal_address))
    database = Database(url)
    waiting = (
        await submit(database, client, Submission("Go.", pool, actor_id="t", plan_text=lists_plan(["Go."], [[]], [1])))
    ).id
    for run_id in (begun, waiting):
        given = await cancel_run(database, connecting(client), order(run_id))
        assert given.ordered.changed
        assert await wait_for_end(database, run_id, timeout_s=0.3) is None
    called = provider.count
    async with worker_process(url, servers.temporal_address):
        for run_id in (begun, waiting):
            assert (await ended(database, run_id, timeout_s=20)).state == "cancelled"
    assert len(await nothing_more_is_called(provider)) == called
    await database.close()
    servers.drop_database(url)


async def test_a_cancel_of_an_unknown_run_changes_nothing(process: WorkerProcess) -> None:
    with pytest.raises(InputError, match="there is no run") as unknown:
        await resolve_run(process.database, "0192aaaa-0000-7000-8000-000000000000")
    assert unknown.value.code == "run-unknown"
