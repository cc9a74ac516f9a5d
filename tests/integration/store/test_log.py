"""The log in the database: every entry is a leaf, once, and proofs out of stored subtrees are those of RFC 6962."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any
from uuid import UUID

import psycopg
import pytest

from engine.errors import UnavailableError
from engine.ledger.entry import EntryPlace, Event, chain_faults, entry_bytes
from engine.store import log
from engine.store.attempts import open_attempt
from engine.store.closing import close_step_attempt
from engine.store.database import Database
from engine.store.exchange import Connection
from engine.store.system_chain import lock_system
from engine.store.tables import DEFAULT_TENANT
from engine.verifier import merkle
from tests.support.attacker import as_superuser
from tests.support.stored import answered, execute, opening, rows, stored_run

TENANT = UUID(DEFAULT_TENANT)


@pytest.fixture
def database_url(own_database_url: str) -> str:
    """Each test looks at the whole log."""
    return own_database_url


async def runs_on_record(database: Database, count: int = 1) -> list[UUID]:
    """Runs that have ended, each of some eight entries."""
    found = []
    for _ in range(count):
        run_id = await stored_run(database, [[]])
        opened = opening(run_id, 0)
        await open_attempt(database, opened)
        await close_step_attempt(database, answered(opened, ends_run=True))
        found.append(run_id)
    return found


async def system_entry(database: Database, type_: str = "test.noted", **fields: Any) -> None:
    async def work(connection: Connection) -> None:
        writer = await lock_system(connection, TENANT, actor_id="tester")
        writer.entry(type_, **fields)
        await writer.commit()

    await database.write(work)


async def leaves_of(url: str) -> list[dict[str, Any]]:
    return await rows(
        url, "SELECT l.*, e.body FROM log_leaves l JOIN ledger_entries e USING (run_id, seq) ORDER BY index"
    )


async def check_log(url: str) -> int:
    """Every entry has exactly one leaf, in the order of its chain; nodes are those of the leaves. Returns the size."""
    leaves = await leaves_of(url)
    assert [leaf["index"] for leaf in leaves] == list(range(len(leaves)))
    assert all(leaf["leaf_hash"] == merkle.leaf_hash(leaf["body"]) for leaf in leaves)
    entries = await rows(url, "SELECT run_id, seq FROM ledger_entries ORDER BY run_id, seq")
    assert sorted((leaf["run_id"], leaf["seq"]) for leaf in leaves) == [(e["run_id"], e["seq"]) for e in entries]
    last: dict[UUID, int] = {}
    for leaf in leaves:
        assert leaf["seq"] == last.get(leaf["run_id"], 0) + 1
        last[leaf["run_id"]] = leaf["seq"]
    hashes = [leaf["leaf_hash"] for leaf in leaves]
    nodes = {(n["level"], n["index"]): n["hash"] for n in await rows(url, "SELECT * FROM log_nodes")}
    expected = {
        (level, index): merkle.root_of(hashes[index << level : (index + 1) << level])
        for level in range(1, len(leaves).bit_length())
        for index in range(len(leaves) >> level)
    }
    assert nodes == expected
    assert await rows(url, "SELECT * FROM ledger_pending") == []
    return len(leaves)


@pytest.mark.parametrize("batch_max", [1, 3, 1000])
async def test_every_entry_becomes_a_leaf_once_whatever_the_batches(database: Database, batch_max: int) -> None:
    await runs_on_record(database, 3)
    await system_entry(database)
    waiting = await rows(database.url, "SELECT * FROM ledger_pending")
    added = await log.extend_log(database, batch_max=batch_max)
    assert added == {TENANT: len(waiting)}
    assert await log.extend_log(database, batch_max=batch_max) == {}
    await runs_on_record(database, 2)
    await log.extend_log(database, batch_max=batch_max)
    assert await check_log(database.url) > len(waiting)


async def test_proofs_of_every_size_hold(database: Database) -> None:
    run_id, *_ = await runs_on_record(database, 3)
    await log.extend_log(database)
    hashes = [leaf["leaf_hash"] for leaf in await leaves_of(database.url)]
    roots = [merkle.root_of(hashes[:size]) for size in range(len(hashes) + 1)]

    async def work(connection: Connection) -> None:
        assert await log.log_size(connection, TENANT) == len(hashes)
        for size in range(1, len(hashes) + 1):
            assert await log.log_root(connection, TENANT, size) == roots[size]
            paths = await log.inclusions(connection, TENANT, range(size), size)
            for index, path in paths.items():
                assert merkle.verify_inclusion(hashes[index], index, size, path, roots[size])
            proof = await log.consistency(connection, TENANT, size, len(hashes))
            assert merkle.verify_consistency(size, roots[size], len(hashes), roots[-1], proof)
        assert await log.inclusion(connection, TENANT, 5, len(hashes)) == merkle.inclusion_path(hashes, 5)
        indexes = await log.leaf_indexes(connection, run_id)
        assert list(indexes) == list(range(1, len(indexes) + 1))
        with pytest.raises(ValueError, match="no such leaf"):
            await log.inclusion(connection, TENANT, len(hashes), len(hashes))
        with pytest.raises(UnavailableError) as caught:
            await log.log_root(connection, TENANT, len(hashes) + 8)
        assert caught.value.code == "log-damaged"

    await database.write(work)
    assert await log.tenants(database) == [TENANT]


async def test_the_log_of_nobody_is_empty(database: Database) -> None:
    async def work(connection: Connection) -> None:
        assert await log.log_size(connection, TENANT) == 0
        assert await log.log_root(connection, TENANT, 0) == merkle.EMPTY_ROOT
        assert await log.latest_checkpoint(connection, TENANT) is None
        assert await log.checkpoints(connection, TENANT) == []
        assert await log.signer_keys(connection, TENANT) == []

    await database.write(work)
    assert await log.tenants(database) == []
    assert await log.extend_log(database) == {}


async def test_an_entry_that_vanished_before_its_leaf_stops_the_log_loudly(database: Database) -> None:
    (run_id,) = await runs_on_record(database)
    await as_superuser(database.url, f"DELETE FROM ledger_entries WHERE run_id = '{run_id}' AND seq = 2")
    with pytest.raises(UnavailableError) as caught:
        await log.extend_log(database)
    assert caught.value.code == "log-damaged"
    assert "podium audit verify --database" in str(caught.value.hint)
    assert await rows(database.url, "SELECT * FROM log_leaves") == []
    # The log of another tenant is not held up by it, whichever comes first.
    other = UUID(int=2**100)

    async def work(connection: Connection) -> None:
        writer = await lock_system(connection, other, actor_id="tester")
        writer.entry("test.noted")
        await writer.commit()

    await database.write(work)
    with pytest.raises(UnavailableError):
        await log.extend_log(database)
    assert [row["tenant_id"] for row in await rows(database.url, "SELECT tenant_id FROM log_leaves")] == [other]


async def test_the_system_chain_is_one_chain_whoever_writes_at_once(database: Database) -> None:
    await asyncio.gather(*(system_entry(database, "test.noted", number=number) for number in range(40)))
    entries = await rows(database.url, "SELECT body, hash FROM ledger_entries WHERE run_id = %s ORDER BY seq", TENANT)
    assert len(entries) == 40
    assert chain_faults(entry["body"] for entry in entries) == []
    (head,) = await rows(database.url, "SELECT * FROM ledger_heads WHERE run_id = %s", TENANT)
    assert (head["seq"], head["hash"]) == (40, entries[-1]["hash"])


async def test_an_entry_says_its_tenant_and_time_or_is_refused(database: Database) -> None:
    run_id = await stored_run(database, [[]])
    (head,) = await rows(database.url, "SELECT *, clock_timestamp() AS now FROM ledger_heads WHERE run_id = %s", run_id)
    place = EntryPlace(TENANT, run_id, head["seq"] + 1, bytes(head["hash"]))
    event = Event("run.changed", "tester", None, {})
    stranger = EntryPlace(UUID(int=7), run_id, place.seq, place.prev)
    for body in (
        entry_bytes(stranger, event, head["now"]),
        entry_bytes(place, event, head["now"] - timedelta(minutes=2)),
        entry_bytes(place, event, head["now"] + timedelta(minutes=2)),
    ):
        with pytest.raises(psycopg.Error) as caught:
            await execute(database.url, "SELECT ledger_append(%s, %s, %s, %s)", run_id, head["seq"], place.prev, [body])
        assert caught.value.sqlstate == "PD002"
    good = [entry_bytes(place, event, head["now"])]
    await execute(database.url, "SELECT ledger_append(%s, %s, %s, %s)", run_id, head["seq"], place.prev, good)
