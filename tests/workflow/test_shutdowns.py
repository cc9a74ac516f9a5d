"""A worker is stopped while five calls are in flight (G3-09): with time enough, with too little, and with none."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest

from engine import contracts
from engine.service import Submission, submit
from engine.settings import TemporalSettings
from engine.store.database import Database
from engine.temporal_client import connect_temporal
from tests.support.provider import Provider
from tests.support.runs import ended, lists_plan
from tests.support.servers import TestServers
from tests.support.stored import check_invariants, record
from tests.support.workers import Workers
from tests.support.workflows import pool_of, provider_reaches, run_of

pytestmark = pytest.mark.slow

CALLS = 5
CALL_S = 4
FIVE = lists_plan(["Go."] * CALLS, [[]] * CALLS, [0] * CALLS)
HEARTBEAT_TIMEOUT_S = contracts.HEARTBEAT_TIMEOUT.total_seconds()


@pytest.fixture
def workers(servers: TestServers, database_url: str, tmp_path: Path) -> Iterator[Workers]:
    with Workers(database_url, servers.temporal_address, tmp_path) as started:
        yield started


async def five_calls(
    workers: Workers, database: Database, provider: Provider, folder: Path, *, seconds: int = 60, attempts_max: int = 1
) -> UUID:
    """A run whose five steps are all being called; the first call of each takes so long, further ones no time."""
    client = await connect_temporal(TemporalSettings(workers.address))
    provider.script(*[{"delay_first_s": seconds}] * CALLS, model="long")
    worker = {"attempts_max": attempts_max, "timeouts": {"call_s": 90, "first_token_s": 80}}
    pool = pool_of(folder, provider.base_url, "long", worker=worker)
    submission = Submission(task="What?", pool=pool, actor_id="tester", plan_text=FIVE)
    run_id = (await submit(database, client, submission)).id
    await provider_reaches(provider, CALLS)
    return run_id


@pytest.mark.slow
async def test_with_time_enough_all_calls_finish_and_none_is_repeated(
    workers: Workers, database: Database, provider: Provider, tmp_path: Path
) -> None:
    child = workers.start(grace_s=30)
    await asyncio.to_thread(child.says, "ready")
    run_id = await five_calls(workers, database, provider, tmp_path, seconds=CALL_S)
    began = time.monotonic()
    assert await asyncio.to_thread(child.end) == 0
    # It waits for its calls and not for the whole of its grace.
    assert time.monotonic() - began < CALL_S + 10
    run = await run_of(database, run_id)
    assert [step.state for step in run.steps] == ["succeeded"] * CALLS
    assert provider.count == CALLS
    await asyncio.to_thread(workers.start().says, "ready")
    assert (await ended(database, run_id)).state == "succeeded"
    assert provider.count == CALLS


@pytest.mark.slow
async def test_with_too_little_time_calls_are_handed_back_at_once_and_do_not_count(
    workers: Workers, database: Database, provider: Provider, tmp_path: Path
) -> None:
    first = workers.start(grace_s=0.5)
    await asyncio.to_thread(first.says, "ready")
    run_id = await five_calls(workers, database, provider, tmp_path)
    second = workers.start(grace_s=30)
    await asyncio.to_thread(second.says, "ready")
    began = time.monotonic()
    assert await asyncio.to_thread(first.end) == 0
    await provider_reaches(provider, 2 * CALLS)
    # Far below the timeout for heartbeats, to say nothing of that for the whole call.
    assert time.monotonic() - began < HEARTBEAT_TIMEOUT_S * 0.8
    run = await ended(database, run_id)
    assert run.state == "succeeded"
    for step in run.steps:
        tries = [(attempt.state, attempt.error_code) for attempt in step.attempts]
        assert tries == [("unknown", "worker-shutdown"), ("succeeded", None)]
    # What was cut off may have been billed, so the sum is not called complete.
    assert not run.cost_complete
    assert provider.count == 2 * CALLS
    check_invariants(await record(database.url, run_id))


@pytest.mark.slow
async def test_after_a_kill_the_worker_beside_it_takes_over_after_one_heartbeat_timeout(
    workers: Workers, database: Database, provider: Provider, tmp_path: Path
) -> None:
    first = workers.start()
    await asyncio.to_thread(first.says, "ready")
    run_id = await five_calls(workers, database, provider, tmp_path, attempts_max=2)
    # It starts before the kill, so it has no reason to look for a dead predecessor.
    second = workers.start(grace_s=30)
    await asyncio.to_thread(second.says, "ready")
    first.end(signal.SIGKILL)
    began = time.monotonic()
    await provider_reaches(provider, 2 * CALLS, timeout_s=30)
    assert time.monotonic() - began < HEARTBEAT_TIMEOUT_S + 8
    run = await ended(database, run_id)
    assert run.state == "succeeded"
    assert [[attempt.state for attempt in step.attempts] for step in run.steps] == [["unknown", "succeeded"]] * CALLS
    assert provider.count == 2 * CALLS
    check_invariants(await record(database.url, run_id))
