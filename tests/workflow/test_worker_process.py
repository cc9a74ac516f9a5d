"""Worker processes that end: in order, in the middle of a call, and by kill -9 (G5-01, G3-05)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from activities.executions import execution_request, first_request, reconcile, start_execution
from engine.service import Submission, prepare, submit
from engine.settings import TemporalSettings
from engine.store.database import Database
from engine.store.runs import create_run
from engine.temporal_client import connect_temporal
from tests.support.gate import Gate
from tests.support.processes import CHECKOUT, environment
from tests.support.provider import Provider
from tests.support.runs import ended, lists_plan, submit_plan, worker_process
from tests.support.servers import TestServers, database_name
from tests.support.stored import record
from tests.support.workflows import (
    handle_of,
    history_events,
    pool_of,
    provider_reaches,
    run_of,
    scheduled_activities,
    temporal_record,
    until,
)
from tests.workflow.aviary import Aviary
from worker_pools.pool import Pool

ONE = lists_plan(["Go."], [[]], [0])
STARTED = "activity_task_started_event_attributes"


class WorkerChild:
    """A worker in a process of its own."""

    def __init__(self, database_url: str, address: str, folder: Path, grace_s: float = 0.2) -> None:
        self.log = folder / f"worker-{time.monotonic_ns()}.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-W",
                    "always",
                    "-m",
                    "tests.support.worker_main",
                    database_url,
                    address,
                    str(grace_s),
                ],
                stdout=log,
                stderr=log,
                env=environment(),
                cwd=CHECKOUT,
            )

    def says(self, word: str, *, timeout_s: float = 20.0) -> None:
        end = time.monotonic() + timeout_s
        while word not in self.log.read_text():
            assert self._process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.02)

    def end(self, number: int) -> int:
        """Sends the signal and waits."""
        if self._process.poll() is None:
            os.kill(self._process.pid, number)
        return self._process.wait(30)


@dataclass
class Nursery:
    """Starts workers in processes of their own; none outlives its test."""

    database_url: str
    address: str
    folder: Path
    children: list[WorkerChild] = field(default_factory=list)

    def start(self, **options: Any) -> WorkerChild:
        self.children.append(WorkerChild(self.database_url, self.address, self.folder, **options))
        return self.children[-1]


@pytest.fixture
def nursery(servers: TestServers, database_url: str, tmp_path: Path) -> Iterator[Nursery]:
    started = Nursery(database_url, servers.temporal_address, tmp_path)
    yield started
    for child in started.children:
        child.end(signal.SIGKILL)


async def submit_from_outside(database: Database, address: str, pool: Pool, plan: str) -> Any:
    """Submits the way a command does: from a process that is no worker."""
    client = await connect_temporal(TemporalSettings(address))
    submission = Submission(task="What?", pool=pool, actor_id="tester", plan_text=plan)
    return (await submit(database, client, submission)).id


@pytest.mark.slow
async def test_a_call_of_a_killed_worker_is_made_once_more_and_nothing_else_is(
    nursery: Nursery, database: Database, provider: Provider, tmp_path: Path
) -> None:
    first = nursery.start()
    first.says("ready")
    provider.script({"delay_first_s": 60}, model="second")
    pool = pool_of(tmp_path, provider.base_url, "first", "second")
    run_id = await submit_from_outside(database, nursery.address, pool, lists_plan(["Go."] * 2, [[], [0]], [0, 1]))
    await provider_reaches(provider, 2)
    first.end(signal.SIGKILL)
    assert "imported after initial workflow load" not in first.log.read_text()
    nursery.start().says("ready")
    begun = time.monotonic()
    run = await ended(database, run_id)
    # Far below the heartbeat timeout: the successor proved its predecessor dead.
    assert time.monotonic() - begun < 6
    assert run.state == "succeeded"
    assert [request["model"] for request in provider.requests] == ["first", "second", "second"]
    assert [attempt.state for attempt in run.steps[1].attempts] == ["unknown", "succeeded"]
    assert [str(attempt.id) for attempt in run.steps[1].attempts] == [r["attempt_id"] for r in provider.requests[1:]]
    assert not run.cost_complete


@pytest.mark.slow
async def test_a_try_that_a_killed_worker_had_only_taken_is_not_waited_for(
    nursery: Nursery, database: Database, database_url: str, provider: Provider, tmp_path: Path
) -> None:
    """The record knows nothing of it; Temporal would find out by the heartbeat that does not come."""
    async with Gate(database_url) as gate:
        first = WorkerChild(gate.url, nursery.address, tmp_path)
        await asyncio.to_thread(first.says, "ready")
        submission = Submission(
            task="What?", pool=pool_of(tmp_path, provider.base_url, "plain"), actor_id="tester", plan_text=ONE
        )
        new = prepare(submission)
        stop = gate.stop_at(new.id, "open", "before-commit")
        client = await connect_temporal(TemporalSettings(nursery.address))
        run_id = (await submit(database, client, submission, prepared=new)).id
        async with asyncio.timeout(20):
            await stop.reached.wait()
        await asyncio.to_thread(first.end, signal.SIGKILL)
    nursery.start().says("ready")
    assert (await ended(database, run_id)).state == "succeeded"
    assert provider.count == 1
    events = await history_events(client, run_id)
    (started,) = [event.activity_task_started_event_attributes for event in events if event.HasField(STARTED)]
    assert (started.attempt, started.last_failure.application_failure_info.type) == (2, "worker-lost")


@pytest.mark.slow
async def test_a_planning_call_of_a_killed_worker_is_made_once_more(
    nursery: Nursery, database: Database, provider: Provider, tmp_path: Path
) -> None:
    first = nursery.start()
    first.says("ready")
    provider.script({"delay_first_s": 60}, {"text": ONE}, model="planner")
    pool = pool_of(tmp_path, provider.base_url, "plain", conductor={"model": "planner"})
    client = await connect_temporal(TemporalSettings(nursery.address))
    run_id = (await submit(database, client, Submission(task="What?", pool=pool, actor_id="t"))).id
    await provider_reaches(provider, 1)
    first.end(signal.SIGKILL)
    # Two successors at once must not fail the same call twice: the second would hit the call made again.
    for child in [nursery.start(), nursery.start()]:
        child.says("ready")
    begun = time.monotonic()
    run = await ended(database, run_id)
    assert time.monotonic() - begun < 6
    assert run.state == "succeeded"
    assert [request["model"] for request in provider.requests] == ["planner", "planner", "plain"]
    assert [attempt.state for attempt in run.planning] == ["unknown", "succeeded"]


async def test_a_sigterm_with_enough_grace_lets_the_call_finish(
    nursery: Nursery, database: Database, provider: Provider, tmp_path: Path
) -> None:
    first = nursery.start(grace_s=10)
    first.says("ready")
    pool = pool_of(tmp_path, provider.base_url, "sleep-1000ms")
    run_id = await submit_from_outside(database, nursery.address, pool, ONE)
    await provider_reaches(provider, 1)
    assert await asyncio.to_thread(first.end, signal.SIGTERM) == 0
    run = await run_of(database, run_id)
    assert (run.state, provider.count) == ("succeeded", 1)
    assert [attempt.state for attempt in run.steps[0].attempts] == ["succeeded"]


@contextlib.asynccontextmanager
async def stopped_in_a_call(
    servers: TestServers, database_url: str, provider: Provider, folder: Path
) -> AsyncIterator[Aviary]:
    """A worker whose grace period is too short for the call that it is in; it has ended when this is entered."""
    async with contextlib.AsyncExitStack() as stack:
        process = await stack.enter_async_context(worker_process(database_url, servers.temporal_address, grace_s=0.1))
        aviary = Aviary(process, provider, folder)
        provider.script({"text": aviary.word, "delay_first_s": 60}, model="slow")
        await aviary.start(aviary.pool("slow", worker={"attempts_max": 1}), access=[[]])
        await provider_reaches(provider, 1)
        await stack.aclose()
        yield aviary


async def test_a_call_cut_off_by_a_shutdown_is_unknown_and_does_not_count(
    servers: TestServers, database_url: str, provider: Provider, tmp_path: Path
) -> None:
    async with stopped_in_a_call(servers, database_url, provider, tmp_path) as aviary:
        assert provider.requests[0]["disconnected"]
        assert b"worker-shutdown" in await temporal_record(aviary.process.client, aviary.runs[0])
        await aviary.search()
        async with worker_process(database_url, servers.temporal_address) as successor:
            successor.secrets.put("PODIUM_TEST_CANARY", "sk-new")
            run = await ended(successor.database, aviary.runs[0])
        assert run.state == "succeeded"
        attempts = [(attempt.state, attempt.error_code) for attempt in run.steps[0].attempts]
        assert attempts == [("unknown", "worker-shutdown"), ("succeeded", None)]
        assert provider.count == 2
        await aviary.search()


@pytest.mark.slow
async def test_an_answer_waits_for_a_database_that_is_away_for_longer_than_a_heartbeat(
    servers: TestServers, database_url: str, provider: Provider, tmp_path: Path
) -> None:
    """Nothing is bought again: the Close that holds the answer keeps its activity alive until it is written."""
    async with worker_process(database_url, servers.temporal_address) as process:
        run_id = await submit_plan(process, pool_of(tmp_path, provider.base_url, "sleep-700ms"), ONE)
        await provider_reaches(provider, 1)
        with away(servers, database_url):
            await asyncio.sleep(13)
        run = await ended(process.database, run_id)
        await handle_of(process.client, run_id).result()
        events = await history_events(process.client, run_id)
    started = [event.activity_task_started_event_attributes for event in events]
    # Temporal never gave it up: no second try was started that would have raced with the Close.
    assert [one.attempt for one in started if one.attempt] == [1]
    assert (run.state, provider.count) == ("succeeded", 1)
    assert [attempt.state for attempt in run.steps[0].attempts] == ["succeeded"]


@contextlib.contextmanager
def away(servers: TestServers, database_url: str) -> Iterator[None]:
    """A database that nobody can connect to, and to which nobody is connected."""
    name = sql.Identifier(database_name(database_url))
    address = servers.postgres_admin_url.replace("postgresql+psycopg://", "postgresql://")
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute(sql.SQL("ALTER DATABASE {} WITH ALLOW_CONNECTIONS false").format(name))
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'client backend' AND datname = %s",
            (database_name(database_url),),
        )
        try:
            yield
        finally:
            connection.execute(sql.SQL("ALTER DATABASE {} WITH ALLOW_CONNECTIONS true").format(name))


async def test_a_held_run_looks_again_by_itself_and_ever_less_often(
    servers: TestServers, database_url: str, provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Half a minute in production; the workflow reads the number from the module that is passed through to it.
    monkeypatch.setattr("engine.contracts.HELD_RECHECK_FIRST", timedelta(seconds=0.2))
    async with worker_process(database_url, servers.temporal_address) as process:
        asked = Submission(task="Go.", pool=pool_of(tmp_path, provider.base_url, "plain"), actor_id="t", plan_text=ONE)
        run_id = (await create_run(process.database, prepare(asked))).id
        pause(database_url, run_id, "clock_timestamp()")
        await start_execution(process.database, process.client, run_id)
        await asyncio.sleep(2.5)
        looks = scheduled_activities(await history_events(process.client, run_id))
        # At 0, 0.2, 0.6, 1.4 and 3 seconds, and not 12 times.
        assert 2 <= len(looks) <= 5
        pause(database_url, run_id, "NULL")
        run = await ended(process.database, run_id)
    assert (run.state, provider.count) == ("succeeded", 1)


def pause(database_url: str, run_id: Any, value: str) -> None:
    """The order to pause or to go on, as a row, without the signal."""
    with psycopg.connect(database_url.replace("postgresql+psycopg://", "postgresql://"), autocommit=True) as connection:
        connection.execute(f"UPDATE runs SET paused_at = {value} WHERE id = %s".encode(), (run_id,))


async def test_a_queue_that_is_added_later_is_served(
    servers: TestServers, database_url: str, provider: Provider, tmp_path: Path
) -> None:
    async with worker_process(database_url, servers.temporal_address, all_queues=True) as process:
        pool = pool_of(tmp_path, provider.base_url, "plain", worker={"queue": "other"})
        run = await ended(process.database, await submit_plan(process, pool, ONE))
        assert run.state == "succeeded"


async def test_a_pause_before_a_retry_is_not_taken_for_a_queue_that_nobody_polls(
    servers: TestServers, database_url: str, provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.contracts.NO_WORKER_TIMEOUT", timedelta(seconds=1))
    provider.script({"status": 429, "headers": {"Retry-After": "2.5"}}, model="busy")
    async with worker_process(database_url, servers.temporal_address) as process:
        run_id = await submit_plan(process, pool_of(tmp_path, provider.base_url, "busy"), ONE)
        run = await ended(process.database, run_id)
        assert run.state == "succeeded"
        assert scheduled_activities(await history_events(process.client, run_id)) == ["step-0-0-0"]


async def test_a_queue_that_nobody_polls_is_a_step_that_waits(
    servers: TestServers, database_url: str, provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A minute in production; the workflow reads the number from the module that is passed through to it.
    monkeypatch.setattr("engine.contracts.NO_WORKER_TIMEOUT", timedelta(seconds=1))
    async with worker_process(database_url, servers.temporal_address) as process:
        # Two queues: the workflow is on the general one, where this worker carries it out.
        pool = pool_of(tmp_path, provider.base_url, "plain", worker={"queue": "nobody"}, conductor={"queue": "other"})
        run_id = await submit_plan(process, pool, ONE)

        async def waits() -> bool:
            run = await run_of(process.database, run_id)
            return (run.state, run.reason, run.steps[0].reason) == ("waiting", "no-worker", "no-worker")

        await until(waits)
        process.ensure_queues(["nobody"])
        run = await ended(process.database, run_id)
        assert run.state == "succeeded"
        assert await handle_of(process.client, run_id).result()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute in production; the workflow reads the number from the module that is passed through to it."""
    monkeypatch.setattr("engine.contracts.NO_WORKER_TIMEOUT", timedelta(seconds=1))


@pytest.mark.usefixtures("impatient")
async def test_planning_on_a_queue_that_nobody_polls_is_shown_as_waiting(
    servers: TestServers, database_url: str, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"text": ONE}, model="planner", times=1)
    async with worker_process(database_url, servers.temporal_address) as process:
        pool = pool_of(tmp_path, provider.base_url, "plain", conductor={"queue": "nobody", "model": "planner"})
        run_id = await submit_plan(process, pool, None)

        async def waits() -> bool:
            run = await run_of(process.database, run_id)
            return (run.state, run.reason) == ("waiting", "no-worker")

        await until(waits)
        # Looking again finds the same, and writes nothing.
        entries = len((await record(database_url, run_id)).bodies)
        await reconcile(process.database, process.client)
        assert len((await record(database_url, run_id)).bodies) == entries
        process.ensure_queues(["nobody"])
        assert (await ended(process.database, run_id)).state == "succeeded"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("conductor", ["stand-in", "other"])
async def test_a_queue_whose_workers_are_busy_is_told_from_one_without_workers(
    servers: TestServers, database_url: str, provider: Provider, tmp_path: Path, conductor: str
) -> None:
    """One call at a time: the second run lies in the queue for longer than an unpolled one may (G3-12's backlog)."""
    provider.script({"delay_first_s": 4.0}, model="slow", times=1)
    async with worker_process(database_url, servers.temporal_address, calls_max=1) as process:
        # With two queues the workflow lives on the general one.
        pool = pool_of(
            tmp_path, provider.base_url, "slow", "plain", conductor={"queue": conductor}, worker={"queue": "stand-in"}
        )
        first = await submit_plan(process, pool, ONE)
        await provider_reaches(provider, 1)
        second = await submit_plan(process, pool, lists_plan(["Go."], [[]], [1]))

        async def busy() -> bool:
            await reconcile(process.database, process.client)
            run = await run_of(process.database, second)
            assert "no-worker" not in {run.reason, run.steps[0].reason}
            return (run.state, run.reason, run.steps[0].reason) == ("waiting", "workers-busy", "workers-busy")

        await until(busy, timeout_s=5)
        for run_id in (first, second):
            run = await ended(process.database, run_id)
            assert (run.state, run.reason) == ("succeeded", None)


@pytest.mark.usefixtures("impatient")
async def test_what_a_step_waits_for_follows_the_workers_that_come_and_go(
    servers: TestServers, database_url: str, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"delay_first_s": 60.0}, model="slow", times=1)
    pool = pool_of(tmp_path, provider.base_url, "slow", "plain", conductor={"queue": "other"})
    async with worker_process(database_url, servers.temporal_address, queues=()) as process:

        async def waits_for(code: str) -> None:
            async def shown() -> bool:
                await reconcile(process.database, process.client)
                return (await run_of(process.database, second)).reason == code

            await until(shown)

        async with worker_process(database_url, servers.temporal_address, calls_max=1):
            await submit_plan(process, pool, ONE)
            await provider_reaches(provider, 1)
            second = await submit_plan(process, pool, lists_plan(["Go."], [[]], [1]))
            await waits_for("workers-busy")
        await waits_for("no-worker")
        process.ensure_queues(["stand-in"])
        assert (await ended(process.database, second)).state == "succeeded"


async def test_a_run_whose_only_queue_nobody_polls_is_shown_as_waiting(
    servers: TestServers, database_url: str, provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workflow lives on that queue and cannot say so itself; the reconciler of any worker does."""
    monkeypatch.setattr("engine.contracts.NO_WORKER_TIMEOUT", timedelta(seconds=1))
    async with worker_process(database_url, servers.temporal_address) as process:
        pool = pool_of(tmp_path, provider.base_url, "plain", worker={"queue": "nobody"})
        run_id = await submit_plan(process, pool, ONE)

        async def waits() -> bool:
            await reconcile(process.database, process.client)
            run = await run_of(process.database, run_id)
            return (run.state, run.reason) == ("waiting", "no-worker")

        await until(waits)
        process.ensure_queues(["nobody"])
        run = await ended(process.database, run_id)
        assert (run.state, run.reason) == ("succeeded", None)


async def test_a_run_lives_where_its_calls_go_if_they_all_go_to_one_queue(
    servers: TestServers, database_url: str, provider: Provider, tmp_path: Path
) -> None:
    async with worker_process(database_url, servers.temporal_address) as process:
        process.ensure_queues(["one", "two"])
        for conductor, expected in (("one", "pool-one"), ("two", "podium")):
            pool = pool_of(
                tmp_path, provider.base_url, "plain", worker={"queue": "one"}, conductor={"queue": conductor}
            )
            run_id = await submit_plan(process, pool, ONE)
            assert (await ended(process.database, run_id)).state == "succeeded"
            assert (await handle_of(process.client, run_id).describe()).task_queue == expected


@pytest.mark.parametrize("plan", [None, lists_plan(["Go.", "Idle.", "End."], [[], [], [0]], [0, 0, 0])])
async def test_the_submitter_starts_exactly_what_the_record_says(
    database: Database, tmp_path: Path, plan: str | None
) -> None:
    """The submitter does not read back what it has just written, so the two ways must never differ."""
    for number, policy in enumerate(({}, {"unread_steps": "skip"})):
        folder = tmp_path / str(number)
        folder.mkdir()
        pool = pool_of(folder, "http://127.0.0.1:9/v1", "plain", policy=policy)
        new = prepare(Submission(task="Go.", pool=pool, actor_id="tester", plan_text=plan))
        await create_run(database, new)
        assert await execution_request(database, new.id) == first_request(new, pool)
