"""Fallbacks when workers die: what was given to a substitute stays with it, and lost tries count.

No other worker may be there, so these have a module of their own.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest
from temporalio.client import Client

from engine.service import Submission, prepare, submit
from engine.settings import TemporalSettings
from engine.store.database import Database
from engine.store.ids import new_run_id
from engine.temporal_client import connect_temporal
from tests.support.gate import Gate
from tests.support.provider import Provider
from tests.support.runs import ended, worker_process
from tests.support.servers import TestServers
from tests.support.stored import check_invariants, record
from tests.support.substitutes import BAD_KEY, ONE, pool_with_substitutes, substitutions
from tests.support.workers import Workers
from tests.support.workflows import provider_reaches
from worker_pools.pool import Pool
from worker_pools.process import WorkerProcess

pytestmark = pytest.mark.slow


def other_queue(database: Database, servers: TestServers) -> AbstractAsyncContextManager[WorkerProcess]:
    return worker_process(database.url, servers.temporal_address, queues=("other",))


async def submitted(client: Client, database: Database, pool: Pool) -> UUID:
    submission = Submission(task="Go.", pool=pool, actor_id="tester", plan_text=ONE)
    return (await submit(database, client, submission)).id


@pytest.fixture
async def client(servers: TestServers) -> Client:
    return await connect_temporal(TemporalSettings(servers.temporal_address))


async def test_a_worker_that_dies_between_the_close_and_its_report_repeats_nothing(
    servers: TestServers, database: Database, client: Client, provider: Provider, tmp_path: Path
) -> None:
    """The substitution is on record and its report is not: the activity's next try finds the step elsewhere."""
    provider.script(BAD_KEY, model="one")
    async with Gate(database.url) as gate, other_queue(database, servers):
        with Workers(gate.url, servers.temporal_address, tmp_path) as workers:
            first = workers.start()
            await asyncio.to_thread(first.says, "ready")
            run_id = new_run_id()
            submission = Submission(
                task="Go.", pool=pool_with_substitutes(tmp_path, provider), actor_id="tester", plan_text=ONE
            )
            new = replace(prepare(submission), id=run_id)
            stop = gate.stop_at(run_id, "close", "after-commit")
            await submit(database, client, submission, prepared=new)
            await asyncio.wait_for(stop.reached.wait(), 20)
            await asyncio.to_thread(first.end, signal.SIGKILL)
            kept = await record(database.url, run_id)
            assert substitutions(kept) == [("first", "second", 1)]
            assert (kept.steps[0]["state"], kept.steps[0]["worker"]) == ("pending", "second")
            second = workers.start()
            await asyncio.to_thread(second.says, "ready")
            run = await ended(database, run_id, timeout_s=40)
    assert (run.state, run.steps[0].worker) == ("succeeded", "second")
    assert [request["model"] for request in provider.requests] == ["one", "two"]
    kept = await record(database.url, run_id)
    check_invariants(kept)
    assert len(substitutions(kept)) == 1


async def test_tries_that_died_with_their_workers_count_and_open_then_moves_the_step(
    servers: TestServers, database: Database, client: Client, provider: Provider, tmp_path: Path
) -> None:
    """Both tries of ``first`` end with a killed worker: Open closes the second as unknown and gives the step away."""
    provider.script(*[{"end": "hang"}] * 2, model="one")
    with Workers(database.url, servers.temporal_address, tmp_path) as workers:
        run_id = await submitted(client, database, pool_with_substitutes(tmp_path, provider))
        for number in (1, 2):
            worker = workers.start()
            await provider_reaches(provider, number, timeout_s=40)
            await asyncio.to_thread(worker.end, signal.SIGKILL)
        workers.start()
        async with other_queue(database, servers):
            run = await ended(database, run_id, timeout_s=40)
    assert (run.state, run.steps[0].worker) == ("succeeded", "second")
    assert [(one.worker, one.state) for one in run.steps[0].attempts] == [
        ("first", "unknown"), ("first", "unknown"), ("second", "succeeded"),
    ]  # fmt: skip
    kept = await record(database.url, run_id)
    check_invariants(kept)
    assert substitutions(kept) == [("first", "second", 2)]
    assert provider.count == 3
