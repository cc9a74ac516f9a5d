"""Cancelling through Temporal, deadlines, and steps that wait for a secret (G3-07). Orders: test_cancel_moments."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest
from temporalio.client import WorkflowFailureError

from activities.executions import execution_request, start_execution
from engine import contracts
from engine.errors import RefusedError
from engine.service import Submission, prepare, submit
from engine.store.runs import create_run
from engine.store.snapshots import RunSnapshot
from tests.support.provider import Provider
from tests.support.runs import ended, lists_plan, submit_plan
from tests.support.servers import superuser_url
from tests.support.stored import check_invariants, record, rows
from tests.support.workflows import (
    handle_of,
    history_events,
    pool_of,
    provider_reaches,
    run_of,
    scheduled_activities,
    until,
)
from worker_pools.process import WorkerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

ONE = lists_plan(["Go."], [[]], [0])
KEY = "PODIUM_TEST_LATE_KEY"


async def closed(provider: Provider) -> None:
    """Waits until the provider has seen every connection close."""

    async def none_open() -> bool:
        return bool(provider.stats["in_flight"] == 0)

    await until(none_open)


async def test_a_cancel_closes_the_connection_and_ends_in_cancelled(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    pool = pool_of(tmp_path, provider.base_url, "sleep-60000ms", "plain", worker={"timeouts": {"call_s": 80}})
    run_id = await submit_plan(process, pool, lists_plan(["Go."] * 2, [[], [0]], [0, 1]))
    await provider_reaches(provider, 1)
    # Behind the first heartbeat, which the SDK never holds back.
    await asyncio.sleep(contracts.HEARTBEAT_INTERVAL_MIN_S + 0.5)
    begun = time.monotonic()
    handle = handle_of(process.client, run_id)
    await handle.cancel()
    await closed(provider)
    assert time.monotonic() - begun < contracts.HEARTBEAT_INTERVAL_MIN_S + 2
    await handle.cancel()
    run = await ended(process.database, run_id)
    assert (run.state, run.reason) == ("cancelled", "cancelled")
    (attempt,) = run.steps[0].attempts
    assert (attempt.state, attempt.error_code, attempt.cost_usd) == ("cancelled", "cancelled", None)
    assert not run.cost_complete
    assert {step.state for step in run.steps} == {"cancelled"}
    (request,) = provider.requests
    assert request["disconnected"]
    result = await handle.result()
    assert result["state"] == "cancelled"


async def test_a_cancel_in_the_pause_before_a_retry_makes_no_further_call(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"status": 503, "headers": {"Retry-After": "30"}}, model="busy", times=None)
    run_id = await submit_plan(process, pool_of(tmp_path, provider.base_url, "busy"), ONE)
    await provider_reaches(provider, 1)

    async def failed_once() -> bool:
        return [attempt.state for attempt in (await run_of(process.database, run_id)).steps[0].attempts] == ["failed"]

    await until(failed_once)
    await handle_of(process.client, run_id).cancel()
    run = await ended(process.database, run_id, timeout_s=5)
    assert run.state == "cancelled"
    assert provider.count == 1


async def test_a_cancel_before_the_first_step_is_settled_as_cancelled(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    """The cancel and the start reach the worker together."""
    new = prepare(
        Submission(task="Go.", pool=pool_of(tmp_path, provider.base_url, "plain"), actor_id="t", plan_text=ONE)
    )
    run_id = (await create_run(process.database, new)).id
    request = await execution_request(process.database, run_id)
    workflow = contracts.workflow_id(str(run_id), 1)
    handle = await process.client.start_workflow(
        contracts.WORKFLOW_TYPE,
        request,
        id=workflow,
        task_queue=contracts.WORKFLOW_QUEUE,
        start_delay=contracts.STICKY_QUEUE_TIMEOUT,
    )
    await handle.cancel()
    run = await ended(process.database, run_id)
    assert run.state == "cancelled"
    assert provider.count == 0


async def test_a_cancel_that_arrives_during_open_calls_nothing_and_costs_nothing(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    asked = Submission(task="Go.", pool=pool_of(tmp_path, provider.base_url, "plain"), actor_id="t", plan_text=ONE)
    run_id = (await create_run(process.database, prepare(asked))).id
    address = process.database.url.replace("postgresql+psycopg://", "postgresql://")
    with psycopg.connect(address) as holder:
        holder.execute("SELECT 1 FROM runs WHERE id = %s FOR UPDATE", (run_id,))
        await start_execution(process.database, process.client, run_id)
        await asyncio.sleep(0.5)
        await handle_of(process.client, run_id).cancel()
        # Long enough for a heartbeat to bring the cancellation while Open waits for the row.
        await asyncio.sleep(contracts.HEARTBEAT_INTERVAL_MIN_S + 1)
    run = await ended(process.database, run_id)
    assert (run.state, provider.count) == ("cancelled", 0)
    assert [(attempt.state, attempt.cost_usd) for attempt in run.steps[0].attempts] in ([], [("cancelled", Decimal(0))])


async def test_an_answer_that_arrives_with_the_cancel_is_kept(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    """Whatever wins, the run ends once, and the step, its call, Temporal and the run agree; both do win here."""
    seen = set()
    for delay_ms in (0, 30, 60, 120, 60_000):
        provider.reset()
        pool = pool_of(tmp_path, provider.base_url, f"sleep-{delay_ms}ms", worker={"timeouts": {"call_s": 80}})
        run_id = await submit_plan(process, pool, ONE)
        if delay_ms == 0:
            # The answer is on record before the cancel.
            await ended(process.database, run_id)
        else:
            await asyncio.sleep(0.1)
        handle = handle_of(process.client, run_id)
        await handle.cancel()
        run = await ended(process.database, run_id)
        assert (run.state, run.steps[0].state) in {("succeeded", "succeeded"), ("cancelled", "cancelled")}
        assert (await handle.result())["state"] == run.state
        assert len(run.steps[0].attempts) == provider.count <= 1
        attempts = [attempt.state for attempt in run.steps[0].attempts]
        assert attempts in ([["succeeded"]] if run.state == "succeeded" else [[], ["cancelled"]])
        assert (run.answer is not None) == (run.state == "succeeded")
        check_invariants(await record(process.database.url, run_id))
        seen.add(run.state)
    assert seen == {"succeeded", "cancelled"}


@pytest.mark.parametrize("planning", [False, True])
async def test_the_deadline_stops_the_call_and_fails_the_run(
    process: WorkerProcess, provider: Provider, tmp_path: Path, planning: bool
) -> None:
    pool = pool_of(
        tmp_path, provider.base_url, "sleep-60000ms", conductor={"model": "sleep-60000ms"}, policy={"deadline_s": 1.0}
    )
    begun = time.monotonic()
    run_id = await submit_plan(process, pool, None if planning else ONE)
    run = await ended(process.database, run_id)
    assert (run.state, run.reason) == ("failed", "deadline-exceeded")
    assert time.monotonic() - begun < 5
    (attempt,) = run.planning if planning else run.steps[0].attempts
    assert attempt.state == "cancelled"
    assert provider.requests[0]["disconnected"]


async def test_a_step_whose_secret_is_missing_waits_and_goes_on_when_it_is_there(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    pool = pool_of(tmp_path, provider.base_url, "plain", worker={"api_key": {"env": KEY}})
    run_id = await submit_plan(process, pool, ONE)

    async def waits() -> bool:
        run = await run_of(process.database, run_id)
        return (run.state, run.reason) == ("waiting", "secret-missing")

    await until(waits)
    run = await run_of(process.database, run_id)
    assert (run.steps[0].state, run.steps[0].reason) == ("waiting", "secret-missing")
    assert run.steps[0].attempts == ()
    process.secrets.put(KEY, "sk-late")
    run = await ended(process.database, run_id, timeout_s=10)
    assert run.state == "succeeded"
    assert provider.requests[0]["headers"]["authorization"] == "Bearer sk-late"


async def test_a_run_that_waits_for_a_secret_can_be_cancelled(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    pool = pool_of(tmp_path, provider.base_url, "plain", worker={"api_key": {"env": "PODIUM_TEST_NO_KEY"}})
    run_id = await submit_plan(process, pool, ONE)

    async def waits() -> bool:
        return (await run_of(process.database, run_id)).state == "waiting"

    await until(waits)
    await handle_of(process.client, run_id).cancel()
    assert (await ended(process.database, run_id, timeout_s=5)).state == "cancelled"


async def test_a_run_that_waits_for_a_secret_obeys_a_cancel_that_is_only_a_row(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    pool = pool_of(tmp_path, provider.base_url, "plain", worker={"api_key": {"env": "PODIUM_TEST_NO_KEY"}})
    run_id = await submit_plan(process, pool, ONE)

    async def waits() -> bool:
        return (await run_of(process.database, run_id)).state == "waiting"

    await until(waits)
    order_row(process, "UPDATE runs SET cancel_requested_at = clock_timestamp() WHERE id = %s", run_id)
    assert (await ended(process.database, run_id, timeout_s=10)).state == "cancelled"


async def test_a_cancel_while_the_run_is_being_settled_changes_nothing(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"status": 401}, model="odd")
    name = "slow_settling"
    administrator = superuser_url(process.database.url)
    write(
        administrator,
        f"""
        CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(1); RETURN NEW; END $$;
        CREATE TRIGGER {name} BEFORE UPDATE ON runs FOR EACH ROW WHEN (NEW.state = 'failed') EXECUTE FUNCTION {name}();
        """,
    )
    try:
        run_id = await submit_plan(process, pool_of(tmp_path, provider.base_url, "odd"), ONE)

        async def settling() -> bool:
            return "settle-1" in scheduled_activities(await history_events(process.client, run_id))

        await until(settling)
        handle = handle_of(process.client, run_id)
        await handle.cancel()
        run = await ended(process.database, run_id)
    finally:
        write(administrator, f"DROP TRIGGER {name} ON runs")
    assert (run.state, run.reason) == ("failed", "auth-failed")
    with pytest.raises(WorkflowFailureError):
        await handle.result()


def order_row(process: WorkerProcess, statement: str, *parameters: Any) -> None:
    """An order as a row, the way a face would write it."""
    write(process.database.url, statement, *parameters)


def write(url: str, statement: str, *parameters: Any) -> None:
    address = url.replace("postgresql+psycopg://", "postgresql://")
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute(statement.encode(), parameters)


async def test_a_cancel_that_is_only_a_row_stops_the_next_step(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    pool = pool_of(tmp_path, provider.base_url, "sleep-500ms", "plain")
    run_id = await submit_plan(process, pool, lists_plan(["Go."] * 2, [[], [0]], [0, 1]))
    await provider_reaches(provider, 1)
    order_row(process, "UPDATE runs SET cancel_requested_at = clock_timestamp() WHERE id = %s", run_id)
    run: RunSnapshot = await ended(process.database, run_id)
    assert run.state == "cancelled"
    assert provider.count == 1


async def test_the_same_key_twice_is_one_run(process: WorkerProcess, provider: Provider, tmp_path: Path) -> None:
    pool = pool_of(tmp_path, provider.base_url, "plain")
    asked = Submission(task="Go.", pool=pool, actor_id="t", plan_text=ONE, idempotency_key="key-1")
    first, second = await asyncio.gather(*(submit(process.database, process.client, asked) for _ in range(2)))
    assert first.id == second.id
    assert (await ended(process.database, first.id)).state == "succeeded"
    again = await submit(process.database, process.client, asked)
    assert again.id == first.id
    assert provider.count == 1


async def test_without_a_key_two_requests_are_two_runs_and_a_key_belongs_to_one_request(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    """G3-10: an honest repetition is a run of its own; another request under a used key is refused and makes none."""
    pool = pool_of(tmp_path, provider.base_url, "plain")
    asked = Submission(task="Go.", pool=pool, actor_id="t", plan_text=ONE)
    runs = {(await submit(process.database, process.client, asked)).id for _ in range(2)}
    keyed = replace(asked, idempotency_key="key-2")
    runs.add((await submit(process.database, process.client, keyed)).id)
    assert len(runs) == 3
    for run_id in runs:
        assert (await ended(process.database, run_id)).state == "succeeded"
    for other in (replace(keyed, task="Go away."), replace(keyed, plan_text=lists_plan(["Run."], [[]], [0]))):
        with pytest.raises(RefusedError) as refused:
            await submit(process.database, process.client, other)
        assert refused.value.code == "idempotency-conflict"
    assert provider.count == 3
    found = await rows(process.database.url, "SELECT id FROM runs WHERE idempotency_key = 'key-2'")
    assert len(found) == 1
