"""A database without space says so: in the error, and while it is tried again."""

from __future__ import annotations

import pytest
from sqlalchemy import text

from engine.errors import UnavailableError
from engine.store.database import Database
from engine.store.exchange import Connection

# The server's own error, of the very class that a full disk gives; a full disk itself is in tests/integration/cli.
FULL = "DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '53100', MESSAGE = 'could not extend file'; END $$"


async def test_a_write_that_finds_no_space_is_known_of_until_one_succeeds(database: Database):
    seen = []

    async def work(connection: Connection) -> None:
        seen.append(database.is_full)
        await connection.execute(FULL if len(seen) == 1 else "SELECT 1")

    assert not database.is_full
    await database.write(work)
    assert seen == [False, True]
    assert not database.is_full


async def test_an_error_for_want_of_space_is_no_unreachable_database(database: Database):
    with pytest.raises(UnavailableError) as caught:
        async with database.read() as connection:
            await connection.execute(text(FULL))
    assert caught.value.code == "disk-full"
    assert caught.value.hint
