"""Behind PgBouncer in transaction mode (G4-08): nothing is prepared by name, and everything works as without it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import pytest
from sqlalchemy import event

from engine.service import Submission, submit
from engine.settings import TemporalSettings
from engine.store.attempts import open_attempt
from engine.store.closing import close_step_attempt
from engine.store.database import Database
from engine.store.exchange import Connection, allow_preparing, exchange
from engine.store.schema import require_current_schema, upgrade_schema
from engine.store.snapshots import read_run
from engine.store.watching import listen
from engine.temporal_client import connect_temporal
from tests.support.command import podium
from tests.support.pooler import Pooler, why_not
from tests.support.provider import Provider
from tests.support.runs import ended, lists_plan, make_pool
from tests.support.servers import TestServers, superuser_url
from tests.support.stored import answered, check_invariants, execute, opening, record, stored_run
from tests.support.workers import Workers

WORKERS = 4
RUNS = 50
WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
# What the driver and the server say when names of sessions get mixed up.
CONFUSED = ("prepared statement", "DuplicatePreparedStatement", "InvalidSqlStatementName")


@pytest.fixture
def pooler(own_database_url: str, tmp_path: Path) -> Iterator[Pooler]:
    with Pooler(own_database_url, tmp_path) as running:
        yield running


async def _perform(database: Database) -> None:
    run_id = await stored_run(database, [[], [0]])
    for position in range(2):
        opened = opening(run_id, position)
        assert (await open_attempt(database, opened)).verdict == "call"
        assert (await close_step_attempt(database, answered(opened, ends_run=position == 1))).verdict == "done"
    run = await read_run(database, run_id)
    assert run is not None
    assert run.state == "succeeded"
    check_invariants(await record(database.url, run_id))


async def _names(database: Database) -> int:
    """How many names of ours the server's sessions know, as far as eight questions at once reach them."""

    async def ask() -> int:
        query = "SELECT count(*) AS count, pg_sleep(0.05) FROM pg_prepared_statements WHERE name LIKE %s"
        ((row,),) = await database.fetch((query, ("podium%",)))
        return int(row["count"])

    return sum(await asyncio.gather(*(ask() for _ in range(8))))


@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_nothing_is_prepared_by_name_behind_a_pooler(pooler: Pooler, kind: Literal["unix", "tcp"]) -> None:
    database = Database(pooler.url(kind), pool_size=8)
    await asyncio.gather(*(_perform(database) for _ in range(16)))
    assert database.is_pooled
    assert await _names(database) == 0
    await database.close()


async def test_the_same_socket_without_a_pooler_prepares(own_database_url: str) -> None:
    database = Database(own_database_url, pool_size=8)
    await _perform(database)
    assert database.is_pooled is False
    assert await _names(database) > 0
    await database.close()


async def test_a_pooler_that_is_not_recognised_costs_repeats_and_no_errors(pooler: Pooler) -> None:
    """The control: with names the pooler does confuse sessions. That is found out, and then nothing is prepared."""
    database = Database(pooler.url("unix"), pool_size=8)
    failures: list[str] = []

    def prepare_all_the_same(connection: Any, _record: object) -> None:
        allow_preparing(connection.driver_connection)

    event.listen(database.engine.sync_engine, "connect", prepare_all_the_same)

    async def work(connection: Connection) -> None:
        try:
            await exchange(connection, [("BEGIN", ()), ("SELECT %s + 1", (1,)), ("SELECT pg_sleep(0.01)", ())])
        except Exception as error:
            failures.append(type(error).__name__)
            raise

    for _ in range(4):
        await asyncio.gather(*(database.write(work) for _ in range(16)))
    assert set(failures) & set(CONFUSED)
    await asyncio.gather(*(_perform(database) for _ in range(4)))
    await database.close()


async def test_a_session_that_somebody_emptied_is_used_without_an_error(own_database_url: str) -> None:
    database = Database(own_database_url, pool_size=1)
    await _perform(database)
    async with database.engine.begin() as connection:
        await connection.exec_driver_sql("DEALLOCATE ALL")
    assert await database.fetch(("SELECT %s::int AS n", (7,))) == [[{"n": 7}]]
    async with database.engine.begin() as connection:
        await connection.exec_driver_sql("DEALLOCATE ALL")
    await _perform(database)
    await database.close()


async def test_times_are_utc_behind_a_pooler_too(pooler: Pooler, own_database_url: str) -> None:
    name = own_database_url.partition("?")[0].rpartition("/")[2]
    await execute(superuser_url(own_database_url), f"ALTER DATABASE \"{name}\" SET timezone = 'America/New_York'")
    await execute(superuser_url(own_database_url), f"ALTER DATABASE \"{name}\" SET datestyle = 'German'")
    database = Database(pooler.url("tcp"), pool_size=8)

    async def look() -> None:
        query = "SELECT clock_timestamp() AS now, current_setting('timezone') AS zone, pg_sleep(0.02)"
        ((row,),) = await database.fetch((query, ()))
        assert (row["zone"], row["now"].utcoffset()) == ("UTC", timedelta(0))

    for _ in range(3):
        await asyncio.gather(*(look() for _ in range(8)))
    await database.close()


async def test_nobody_listens_through_a_pooler(pooler: Pooler) -> None:
    """A LISTEN would stay in a session that the next client gets."""
    database = Database(pooler.url("unix"), pool_size=2)
    heard = asyncio.ensure_future(anext(listen(database, "podium_progress")))
    await asyncio.sleep(0.3)
    await database.fetch(("SELECT pg_notify('podium_progress', 'x')", ()))
    ((row,),) = await database.fetch(("SELECT count(*) AS count FROM pg_listening_channels()", ()))
    assert row["count"] == 0
    assert not heard.done()
    heard.cancel()
    await asyncio.gather(heard, return_exceptions=True)
    await database.close()


def test_the_schema_is_upgraded_through_a_pooler(servers: TestServers, tmp_path: Path) -> None:
    url = servers.new_database()
    try:
        with Pooler(url, tmp_path) as pooler:
            assert upgrade_schema(pooler.url("tcp")).applied
            require_current_schema(pooler.url("tcp"))
    finally:
        servers.drop_database(url)


def test_doctor_says_that_there_is_a_pooler(pooler: Pooler, servers: TestServers, tmp_path: Path) -> None:
    env = {"PODIUM_DATABASE_URL": pooler.url("unix"), "PODIUM_TEMPORAL_ADDRESS": servers.temporal_address}
    env["PODIUM_KEY_STORE"] = "none"
    done = podium("doctor", "--json", home=tmp_path / "home", env=env)
    assert done.code == 0, done.out
    (found,) = [check for check in done.valid_json("doctor")["checks"] if check["name"] == "database"]
    assert found["status"] == "ok"
    assert "behind a pooler" in found["text"]


@pytest.mark.slow
async def test_fifty_runs_by_four_workers_behind_a_pooler(
    pooler: Pooler, servers: TestServers, provider: Provider, tmp_path: Path
) -> None:
    log = servers.postgres.log_path
    said_before = log.stat().st_size
    url = pooler.url("unix")
    with Workers(url, servers.temporal_address, tmp_path) as workers:
        children = [workers.start(grace_s=1) for _ in range(WORKERS)]
        for child in children:
            await asyncio.to_thread(child.says, "ready")
        database = Database(url, pool_size=4)
        client = await connect_temporal(TemporalSettings(servers.temporal_address))
        pool = make_pool(tmp_path, provider.base_url)
        plan = lists_plan(["Go.", "Go on."], [[], [0]])
        submission = Submission(task="What?", pool=pool, actor_id="tester", plan_text=plan)
        created = [await submit(database, client, submission) for _ in range(RUNS)]
        runs = await asyncio.gather(*(ended(database, one.id, timeout_s=90) for one in created))
        await database.close()
        assert [await asyncio.to_thread(child.end) for child in children] == [0] * WORKERS
    assert {run.state for run in runs} == {"succeeded"}
    assert provider.count == 2 * RUNS
    for run in runs:
        check_invariants(await record(url, run.id))
    said = log.read_bytes()[said_before:].decode() + pooler.log + "".join(child.said for child in children)
    assert [word for word in CONFUSED if word in said] == []
