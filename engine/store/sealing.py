"""Which keys a connection's texts are sealed with, and opening what was read. See `engine.store.artifacts`.

A database opened without a key store reads and writes texts in the clear; what is sealed it cannot read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, cast
from uuid import UUID
from weakref import WeakKeyDictionary

from sqlalchemy.ext.asyncio import AsyncConnection

from engine.errors import RefusedError, UnavailableError
from engine.keystore import Keyring, RunKeys
from engine.keystore.keyring import missing
from engine.keystore.keys import SealedPlace, unseal
from engine.store.exchange import Connection, Row

# Larger texts are opened in a thread, so that the calls of other runs are not held up.
LARGE_BYTES: Final = 1 << 20
_keyrings: WeakKeyDictionary[Connection, Keyring] = WeakKeyDictionary()


def seal_with(connection: Connection, keyring: Keyring | None) -> None:
    """Texts that go over this connection are sealed with these keys."""
    if keyring is not None:
        _keyrings[connection] = keyring


def keyring_of(connection: Connection) -> Keyring | None:
    """The keys of a connection of a `Database`; None if that keeps texts in the clear."""
    return _keyrings.get(connection)


async def keyring_of_pooled(connection: AsyncConnection) -> Keyring | None:
    """The same for SQLAlchemy's connection."""
    return keyring_of(cast("Connection", (await connection.get_raw_connection()).driver_connection))


async def writing_keys(connection: Connection, run_id: UUID, epoch: int) -> RunKeys | None:
    """The keys that texts of a run are sealed with; None for a run whose texts are in the clear (epoch 0).

    Raises UnavailableError ``key-store-needed``, ``text-key-missing``, ``erasure-unfinished``.
    """
    if epoch == 0:
        return None
    keyring = keyring_of(connection)
    if keyring is None:
        raise needed()
    return await keyring.for_writing(run_id, epoch)


async def opened(keyring: Keyring | None, rows: Sequence[Row]) -> list[Row]:
    """The rows with their texts opened: content and salt as they were given to be stored, both None where erased.

    Rows need id, run_id, owner_id, kind, ordinal, content, salt, key_epoch and run_epoch (the run's own). Raises
    UnavailableError ``key-store-needed`` and ``text-key-missing``, RefusedError ``text-damaged``.
    """
    sealed = [row for row in rows if row["key_epoch"] and row["content"] is not None]
    if not sealed:
        return list(rows)
    if keyring is None:
        raise needed()
    keys = {}
    for row in sealed:
        if row["run_id"] not in keys:
            keys[row["run_id"]] = await keyring.for_reading(row["run_id"], row["run_epoch"])
    if sum(len(row["content"]) for row in sealed) > LARGE_BYTES:
        return await asyncio.to_thread(_all_open, keys, rows)
    return _all_open(keys, rows)


def _all_open(keys: dict[UUID, RunKeys], rows: Sequence[Row]) -> list[Row]:
    return [_open(keys[row["run_id"]], row) if row["key_epoch"] and row["content"] is not None else row for row in rows]


def _open(keys: RunKeys, row: Row) -> Row:
    key = keys.key_of(row["id"], row["key_epoch"])
    if key is None:
        if row["key_epoch"] > keys.epoch:
            # The store is older than the database: a copy of it was restored.
            raise missing(row["run_id"])
        # Its key is destroyed already, and the row follows in a moment.
        return {**row, "content": None, "salt": None}
    places = ("run_id", "id", "owner_id", "kind", "ordinal", "key_epoch")
    salt, content = unseal(key, SealedPlace(*(row[name] for name in places)), row["content"])
    return {**row, "content": content, "salt": salt}


def text_erased(kind: str, run_id: UUID) -> RefusedError:
    """The error for a text that somebody had erased, or that is being erased."""
    return RefusedError(
        "text-erased",
        f"the {kind.replace('_', ' ')} of run {run_id} was erased",
        hint=f"who had it erased, when and why is on record: podium audit log {run_id}",
    )


def needed() -> UnavailableError:
    """The error for sealed texts and no key store."""
    return UnavailableError(
        "key-store-needed",
        "texts of this database are sealed, and no key store was given",
        hint="set PODIUM_KEY_STORE to the one that they were written with",
    )
