"""Texts that are sealed, erased or held cannot be expressed by the schema before; going back to it is refused then."""

from __future__ import annotations

import asyncio
from pathlib import Path
from uuid import UUID

import pytest

from engine.errors import RefusedError
from engine.store.database import Database
from engine.store.erasing import erase
from engine.store.holds import Matter, place_hold
from engine.store.schema import downgrade_schema, upgrade_schema
from engine.store.snapshots import read_run
from engine.store.tables import DEFAULT_TENANT
from tests.support.sealed import finished_run, order_for, sealed_database


async def _fill(url: str, keys: Path | None, what: str) -> UUID:
    database = Database(url) if keys is None else sealed_database(url, keys)
    run_id = await finished_run(database, ["an answer"])
    if what == "erased texts":
        await erase(database, order_for(run_id))
    if what == "holds":
        await place_hold(database, Matter(UUID(DEFAULT_TENANT), "m-1", "counsel", None, "because"), [run_id])
    await database.close()
    return run_id


@pytest.mark.parametrize("what", ["sealed texts", "erased texts", "holds"])
def test_what_only_this_schema_can_express_keeps_it(database_url: str, tmp_path: Path, what: str) -> None:
    asyncio.run(_fill(database_url, tmp_path / "keys" if what == "sealed texts" else None, what))
    with pytest.raises(RefusedError, match=what) as refused:
        downgrade_schema(database_url, "0004")
    assert refused.value.code == "downgrade-refused"


def test_texts_in_the_clear_go_back_and_forth(database_url: str) -> None:
    run_id = asyncio.run(_fill(database_url, None, "nothing"))
    downgrade_schema(database_url, "0004")
    upgrade_schema(database_url)

    async def read() -> str | None:
        database = Database(database_url)
        run = await read_run(database, run_id)
        await database.close()
        return None if run is None else run.answer

    assert asyncio.run(read()) == "an answer"
