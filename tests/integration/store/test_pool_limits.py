"""Few connections, impatient servers, crowded servers: no connection is held during a call, and crowds are waited out."""

from __future__ import annotations

import asyncio
import time
from urllib.parse import quote

import psycopg
import pytest

from engine.errors import UnavailableError
from engine.store.attempts import open_attempt
from engine.store.closing import close_step_attempt
from engine.store.database import Database
from engine.store.exchange import Connection, exchange
from engine.store.ids import new_run_id
from engine.store.snapshots import read_run
from tests.support.servers import superuser_url
from tests.support.stored import answered, check_invariants, execute, opening, record, rows, stored_run

CALL_S = 3.0


def _name(url: str) -> str:
    return url.partition("?")[0].rpartition("/")[2]


async def test_ten_calls_share_one_connection_that_none_of_them_holds(own_database_url: str) -> None:
    await execute(
        superuser_url(own_database_url),
        f"ALTER DATABASE \"{_name(own_database_url)}\" SET idle_in_transaction_session_timeout = '2s'",
    )
    database = Database(own_database_url, pool_size=1)
    runs = [await stored_run(database, [[]]) for _ in range(10)]
    seen: list[list[str]] = []

    async def perform(number: int) -> str:
        opened = opening(runs[number], 0)
        assert (await open_attempt(database, opened)).verdict == "call"
        await asyncio.sleep(CALL_S)
        return (await close_step_attempt(database, answered(opened, ends_run=True))).verdict

    async def watch() -> None:
        await asyncio.sleep(CALL_S * 0.7)
        found = await rows(own_database_url, "SELECT state FROM pg_stat_activity WHERE application_name = 'podium'")
        seen.append([row["state"] for row in found])

    results = await asyncio.gather(*(perform(number) for number in range(10)), watch())
    assert results[:10] == ["done"] * 10
    assert seen == [["idle"]]
    await database.close()


async def test_a_transaction_that_stood_still_too_long_is_repeated(own_database_url: str) -> None:
    options = quote("-c idle_in_transaction_session_timeout=200ms", safe="")
    database = Database(f"{own_database_url}&options={options}")
    run_id = await stored_run(database, [[]])
    tries = []

    async def slow_once(connection: Connection) -> None:
        tries.append(1)
        await exchange(connection, [("BEGIN", ()), ("SELECT 1 FROM runs WHERE id = %s FOR UPDATE", (run_id,))])
        if len(tries) == 1:
            await asyncio.sleep(0.6)
        await exchange(connection, [("SELECT 1", ())])

    await database.write(slow_once)
    assert len(tries) == 2
    await database.close()


async def test_a_server_that_is_full_is_waited_for_and_nothing_is_opened_twice(own_database_url: str) -> None:
    database = Database(own_database_url, pool_size=2)
    run_id = await stored_run(database, [[]])
    name = _name(own_database_url)
    other = superuser_url(own_database_url.replace(name, "podium"))
    opened = opening(run_id, 0)
    await open_attempt(database, opened)
    await execute(other, f'ALTER DATABASE "{name}" CONNECTION LIMIT 0')
    await execute(
        other,
        f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'client backend' AND datname = '{name}'",
    )
    closing = asyncio.create_task(close_step_attempt(database, answered(opened)))
    await asyncio.sleep(2)
    assert not closing.done()
    with pytest.raises(UnavailableError):
        await read_run(database, run_id)
    await execute(other, f'ALTER DATABASE "{name}" CONNECTION LIMIT -1')
    assert (await closing).verdict == "done"
    kept = await record(own_database_url, run_id)
    assert len(kept.attempts) == 1
    check_invariants(kept)
    await database.close()


@pytest.mark.parametrize("spoil", ["password", "database"])
async def test_what_no_waiting_mends_is_said_at_once_without_the_drivers_words(database_url: str, spoil: str) -> None:
    if spoil == "password":
        url = database_url.replace("podium:", "podium:canary-", 1)
    else:
        url = database_url.replace(_name(database_url), "canary-database")
    database = Database(url)
    started = time.monotonic()
    for attempt in (read_run(database, new_run_id()), database.write(_nothing)):
        with pytest.raises(UnavailableError) as caught:
            await attempt
        assert caught.value.code == "database-unreachable"
        assert "canary" not in f"{caught.value} {caught.value.hint}"
        assert caught.value.__cause__ is None
    assert time.monotonic() - started < 12
    await database.close()


async def _nothing(connection: Connection) -> None:
    await exchange(connection, [("SELECT 1", ())])


async def test_a_value_that_cannot_be_sent_leaves_the_connection_as_it_was(own_database_url: str) -> None:
    database = Database(own_database_url, pool_size=1)

    async def nul(connection: Connection) -> None:
        await exchange(connection, [("SELECT 1", ()), ("SELECT %s::text", ("a\0b",))])

    with pytest.raises(psycopg.DataError):
        await database.write(nul)
    backends = await rows(own_database_url, "SELECT pid FROM pg_stat_activity WHERE application_name = 'podium'")
    run_id = await stored_run(database, [[]])
    assert (
        await rows(own_database_url, "SELECT pid FROM pg_stat_activity WHERE application_name = 'podium'") == backends
    )
    check_invariants(await record(own_database_url, run_id))
    await database.close()


async def test_packets_larger_than_every_buffer_pass_in_both_directions(database: Database) -> None:
    big = b"x" * (3 * 1024 * 1024)
    found = await database.fetch(*[("SELECT %s::bytea AS big, %s::int AS n", (big, n)) for n in range(4)])
    assert [(len(part[0]["big"]), part[0]["n"]) for part in found] == [(len(big), n) for n in range(4)]
