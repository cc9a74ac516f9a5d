"""Statements are prepared once a session, and nothing that happens to a session makes that show."""

from __future__ import annotations

import pytest
from psycopg.errors import DivisionByZero
from sqlalchemy import text

from engine.store.database import Database
from engine.store.exchange import Connection, exchange
from tests.support.servers import superuser_url
from tests.support.stored import execute


async def test_a_statement_is_prepared_once_and_used_again(database: Database) -> None:
    async def work(connection: Connection) -> int:
        for number in range(5):
            ((row,),) = await exchange(connection, [("SELECT %s + 1 AS sum", (number,))])
            assert row["sum"] == number + 1
        (rows,) = await exchange(
            connection, [("SELECT count(*) AS count FROM pg_prepared_statements WHERE statement LIKE %s", ("%AS sum",))]
        )
        return int(rows[0]["count"])

    assert await database.write(work) == 1


async def test_a_failed_packet_leaves_no_false_memory(database: Database) -> None:
    async def fails(connection: Connection) -> None:
        await exchange(connection, [("SELECT 1 / %s", (0,)), ("SELECT %s AS never_prepared", (1,))])

    async def works(connection: Connection) -> int:
        (rows,) = await exchange(connection, [("SELECT %s AS never_prepared", (7,))])
        return int(rows[0]["never_prepared"])

    one = Database(database.url, pool_size=1)
    with pytest.raises(DivisionByZero):
        await one.write(fails)
    assert await one.write(works) == 7
    await one.close()


async def test_a_value_that_cannot_be_sent_leaves_no_false_memory(database: Database) -> None:
    async def fails(connection: Connection) -> None:
        await exchange(connection, [("SELECT %s AS first", (1,)), ("SELECT %s AS second", (object(),))])

    async def works(connection: Connection) -> int:
        (rows,) = await exchange(connection, [("SELECT %s AS first", (3,))])
        return int(rows[0]["first"])

    one = Database(database.url, pool_size=1)
    with pytest.raises(Exception, match="object"):
        await one.write(fails)
    assert await one.write(works) == 3
    await one.close()


async def test_a_table_that_changes_under_a_prepared_statement_is_read_anew(database: Database) -> None:
    one = Database(database.url, pool_size=1)

    async def read(connection: Connection) -> list[str]:
        (rows,) = await exchange(connection, [("SELECT * FROM temporal_cluster", ())])
        return list(rows[0])

    async with database.engine.begin() as other:
        await other.execute(text("INSERT INTO temporal_cluster (cluster_id, namespace) VALUES ('c', 'n')"))
    before = await one.write(read)
    await execute(superuser_url(database.url), "ALTER TABLE temporal_cluster ADD COLUMN more integer")
    assert await one.write(read) == [*before, "more"]
    await one.close()
