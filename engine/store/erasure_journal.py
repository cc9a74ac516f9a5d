"""The database and its key store: whether they belong together, and erasures that a restored backup forgot.

The key store's journal names every erasure. A database that was restored from an older backup knows fewer of them: they
are carried out again before anybody is served. Run `ready` when a process opens the database.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final
from uuid import UUID

from engine.errors import UnavailableError
from engine.keystore import ErasureRecord, KeyStore
from engine.store import queries
from engine.store.database import Database
from engine.store.erasing import carry_out, destroy_again, finish_erasures
from engine.store.exchange import Connection, exchange
from engine.store.run_writer import ENGINE_ACTOR
from engine.store.system_chain import lock_system
from engine.store.tables import DEFAULT_TENANT

_READ = """
    SELECT (SELECT store_id FROM key_store) AS store_id, (SELECT journal_end FROM key_store) AS journal_end,
           EXISTS (SELECT FROM erasures WHERE finished_at IS NULL) AS unfinished
"""
_REMEMBER = "INSERT INTO key_store (store_id) VALUES (%s) ON CONFLICT (singleton) DO NOTHING"
_ADOPT = """
    INSERT INTO key_store (store_id, journal_end) VALUES (%s, 0)
    ON CONFLICT (singleton) DO UPDATE SET store_id = excluded.store_id, journal_end = 0,
                                     remembered_at = clock_timestamp()
"""
_NEWEST_SEALED = "SELECT id FROM runs WHERE key_epoch > 0 ORDER BY created_at DESC LIMIT %s"
_KNOWN = "SELECT id, run_id FROM erasures WHERE id = ANY(%s)"
_RUNS = "SELECT id FROM runs WHERE id = ANY(%s)"
_CARRIED_OUT = "UPDATE key_store SET journal_end = greatest(journal_end, %s)"
_INSERT_ERASURE = """
    INSERT INTO erasures (id, run_id, tenant_id, actor_id, on_behalf_of, cause, scope, key_epoch)
    SELECT %(id)s, id, tenant_id, %(actor_id)s, %(on_behalf_of)s, %(cause)s, %(scope)s, %(key_epoch)s
    FROM runs WHERE id = %(run_id)s
    ON CONFLICT (id, run_id) DO NOTHING
"""
_INSERT_BASIS = """
    INSERT INTO artifacts
        (id, tenant_id, run_id, owner_id, kind, ordinal, role, media_type, content, salt, byte_count, key_epoch)
    VALUES (%(id)s, %(tenant_id)s, %(run_id)s, %(owner_id)s, %(kind)s, %(ordinal)s, %(role)s, %(media_type)s,
            %(content)s, %(salt)s, %(byte_count)s, %(key_epoch)s)
    ON CONFLICT (id) DO NOTHING
"""
_LOCK_RUN: Final = "SELECT id FROM runs WHERE id = %s FOR NO KEY UPDATE"
_MARK = "UPDATE artifacts SET erasure_id = %s WHERE run_id = %s AND id = ANY(%s) AND erasure_id IS NULL"
_NEXT_EPOCH = "UPDATE runs SET key_epoch = greatest(key_epoch, %s) WHERE id = %s AND key_epoch > 0"


async def ready(database: Database, *, adopt: bool = False, actor_id: str = ENGINE_ACTOR) -> None:
    """Checks that the key store is this database's, and carries out what is left of erasures.

    One query where there is nothing to do. Raises UnavailableError ``key-store-other``, ``key-store-older`` (a copy of
    the store was restored, and with it destroyed keys), and what the store itself raises. ``adopt`` takes the store
    that is there for this database's from now on, and destroys in it what the database knows to be erased.
    """
    ((found,),) = await database.fetch((_READ, ()))
    if database.keys is None:
        if found["unfinished"]:
            await finish_erasures(database)
        return
    store = database.keys.store
    own = await asyncio.to_thread(store.identity)
    if found["store_id"] is None or adopt:
        await _remember(database, own, found["store_id"], adopt=adopt, actor_id=actor_id)
        if adopt:
            # A copy that was restored has keys again that were destroyed.
            await destroy_again(database)
        ((found,),) = await database.fetch((_READ, ()))
    if found["store_id"] != own:
        raise UnavailableError(
            "key-store-other",
            f"this database belongs to another key store than {store.place}",
            hint="give the right one in PODIUM_KEY_STORE; if it is gone for good: `podium doctor --adopt-keys`",
        )
    if found["unfinished"]:
        await finish_erasures(database)
    await _carry_out_journal(database, store, found["journal_end"])


async def keyless_runs(database: Database, limit: int) -> list[UUID]:
    """Those of the newest runs with sealed texts whose keys this database's key store does not have."""
    (rows,) = await database.fetch((_NEWEST_SEALED, (limit,)))
    runs = [row["id"] for row in rows]
    if database.keys is None:
        return runs
    store = database.keys.store
    return await asyncio.to_thread(lambda: [run for run in runs if store.read(run) is None])


async def _remember(database: Database, own: UUID, old: UUID | None, *, adopt: bool, actor_id: str) -> None:
    async def work(connection: Connection) -> None:
        if not adopt or old in {None, own}:
            await exchange(connection, [(_ADOPT if adopt else _REMEMBER, (own,))])
            return
        writer = await lock_system(connection, UUID(DEFAULT_TENANT), actor_id=actor_id)
        writer.statement(_ADOPT, (own,))
        writer.entry("keys.adopted", store=str(own), old=str(old))
        await writer.commit()

    await database.write(work)


async def _carry_out_journal(database: Database, store: KeyStore, known_end: int) -> None:
    end = await asyncio.to_thread(store.journal_end)
    if end < known_end:
        raise UnavailableError(
            "key-store-older",
            f"the key store {store.place} is older than the database: destroyed keys may be back",
            hint="restore its newest copy; if this is the newest: `podium doctor --adopt-keys` destroys them again",
        )
    if end == known_end:
        return
    journal = await asyncio.to_thread(store.read_journal, known_end)
    records = {(record.erasure_id, record.run_id): record for record in journal.records}
    known, runs = await database.fetch(
        (_KNOWN, ([erasure for erasure, _ in records],)), (_RUNS, ([run for _, run in records],))
    )
    carried_out = {(row["id"], row["run_id"]) for row in known}
    here = {row["id"] for row in runs}
    for place, record in records.items():
        # Another database may have the same key store; what is not here cannot be erased here.
        if place not in carried_out and record.run_id in here:
            await _again(database, record)

    async def work(connection: Connection) -> None:
        await exchange(connection, [(_CARRIED_OUT, (journal.end,))])

    await database.write(work)


async def _again(database: Database, record: ErasureRecord) -> None:
    """Carries out an erasure of the journal once more. The keys are gone already, whatever state the run is in."""
    fields: dict[str, Any] = {
        **record.fields,
        "id": record.erasure_id,
        "run_id": record.run_id,
        "key_epoch": record.epoch,
    }

    async def work(connection: Connection) -> None:
        place = (record.erasure_id, record.run_id)
        await exchange(
            connection,
            [
                (queries.BEGIN, ()),
                (_LOCK_RUN, (record.run_id,)),
                (_INSERT_ERASURE, fields),
                *((_INSERT_BASIS, _row(row)) for row in record.basis),
                (_MARK, (*place, list(record.artifacts))),
                (_NEXT_EPOCH, (record.epoch, record.run_id)),
                (queries.COMMIT, ()),
            ],
        )

    await database.write(work)
    await carry_out(database, record.erasure_id, record.run_id, restored=True)


def _row(said: Any) -> dict[str, Any]:
    """A row of the journal as the database wants it."""
    row = dict(said)
    for name in ("id", "tenant_id", "run_id", "owner_id"):
        row[name] = UUID(row[name])
    for name in ("content", "salt"):
        row[name] = None if row[name] is None else bytes.fromhex(row[name])
    return row
