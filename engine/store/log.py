"""Reading the log and letting it grow: sizes, proofs, checkpoints, and the sequencer's one statement.

Readers take a raw connection inside `Database.write`, or one that `raw_connection` gives; each is one or two round
trips. Proofs are computed from stored subtrees, so they cost the logarithm of the log's size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncConnection

from engine.errors import UnavailableError
from engine.ledger.tree import Node, Range, consistency_ranges, cover, inclusion_ranges, root_of_range
from engine.store.database import Database
from engine.store.exchange import Connection, Params, Row, exchange

# The system chain's entries that say which key signs: {key}, and {old, new, size, overlap_s, note}.
KEY_CREATED = "key.created"
KEY_ROTATED = "key.rotated"
# How many entries get their leaf in one transaction.
BATCH_MAX = 2000
# An entry that waits for its leaf is gone, or a node is.
_GONE = "PD011"
_DAMAGED = "log-damaged"

_SIZE = "SELECT coalesce(max(index) + 1, 0) AS size FROM log_leaves WHERE tenant_id = %s"
_NODES = """
    SELECT 0 AS level, index, leaf_hash AS hash FROM log_leaves WHERE tenant_id = %s AND index = ANY(%s)
    UNION ALL
    SELECT n.level, n.index, n.hash FROM unnest(%s::integer[], %s::bigint[]) AS wanted (level, index)
    JOIN log_nodes n ON n.tenant_id = %s AND n.level = wanted.level AND n.index = wanted.index
"""
_CHECKPOINTS = "SELECT size, root, note, key_id, signed_at FROM log_checkpoints WHERE tenant_id = %s"
_LEAVES = "SELECT seq, index FROM log_leaves WHERE run_id = %s"
_KEYS = """
    SELECT e.body, l.index FROM ledger_entries e LEFT JOIN log_leaves l USING (run_id, seq)
    WHERE e.run_id = %s AND e.type IN ('key.created', 'key.rotated') ORDER BY e.seq
"""
# Each tenant that has waiting entries, by jumping through the index: a million waiting entries cost no more than one.
_WAITING = """
    WITH RECURSIVE waiting AS (
        (SELECT tenant_id FROM ledger_pending ORDER BY tenant_id LIMIT 1)
        UNION ALL
        SELECT (SELECT tenant_id FROM ledger_pending WHERE tenant_id > waiting.tenant_id ORDER BY tenant_id LIMIT 1)
        FROM waiting WHERE waiting.tenant_id IS NOT NULL
    )
    SELECT tenant_id FROM waiting WHERE tenant_id IS NOT NULL
"""
_EXTEND = "SELECT log_extend(%s, %s) AS added"
TENANTS = """
    WITH RECURSIVE known AS (
        (SELECT tenant_id FROM log_leaves ORDER BY tenant_id LIMIT 1)
        UNION ALL
        SELECT (SELECT tenant_id FROM log_leaves WHERE tenant_id > known.tenant_id ORDER BY tenant_id LIMIT 1)
        FROM known WHERE known.tenant_id IS NOT NULL
    )
    SELECT tenant_id FROM known WHERE tenant_id IS NOT NULL
"""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as it is stored. ``note`` is the signed note, byte for byte; ``root`` has 32 bytes."""

    size: int
    root: bytes
    note: bytes
    key_id: str
    signed_at: datetime


@dataclass(frozen=True, slots=True)
class SignerKey:
    """A key of the signer as the system chain says it: texts of public keys (``name+id+base64``).

    ``replaces`` is the key before it, which also signs for ``overlap_s`` seconds from ``at`` on, and ``statement`` the
    note in which both say so (`engine.verifier.rotation`); None for a first key. ``index`` is the leaf of the entry,
    None as long as it waits for one.
    """

    key: str
    replaces: str | None
    overlap_s: int
    statement: bytes | None
    at: datetime
    index: int | None


async def raw_connection(pooled: AsyncConnection) -> Connection:
    """The connection that this module's functions take, out of one from `Database.read`."""
    return cast("Connection", (await pooled.get_raw_connection()).driver_connection)


async def log_size(connection: Connection, tenant_id: UUID) -> int:
    """How many leaves the tenant's log has."""
    return int((await _one(connection, _SIZE, (tenant_id,)))["size"])


async def log_root(connection: Connection, tenant_id: UUID, size: int) -> bytes:
    """The root over the first ``size`` leaves, 32 bytes. Raises UnavailableError ``log-damaged`` as the proofs do."""
    return (await _roots(connection, tenant_id, [(0, size)]))[0]


async def latest_checkpoint(connection: Connection, tenant_id: UUID) -> Checkpoint | None:
    """The newest checkpoint, None before the first."""
    rows = await _rows(connection, f"{_CHECKPOINTS} ORDER BY size DESC LIMIT 1", (tenant_id,))
    return _checkpoint(rows[0]) if rows else None


async def checkpoints(connection: Connection, tenant_id: UUID, *, from_size: int = 0) -> list[Checkpoint]:
    """All checkpoints of at least ``from_size`` leaves, the smallest first."""
    rows = await _rows(connection, f"{_CHECKPOINTS} AND size >= %s ORDER BY size", (tenant_id, from_size))
    return [_checkpoint(row) for row in rows]


async def first_checkpoint_after(connection: Connection, tenant_id: UUID, size: int) -> Checkpoint | None:
    """The smallest checkpoint of at least ``size`` leaves: it covers all leaves below that number."""
    rows = await _rows(connection, f"{_CHECKPOINTS} AND size >= %s ORDER BY size LIMIT 1", (tenant_id, size))
    return _checkpoint(rows[0]) if rows else None


async def inclusion(connection: Connection, tenant_id: UUID, index: int, size: int) -> list[bytes]:
    """The inclusion path (RFC 6962) of the leaf ``index`` in the tree of the first ``size`` leaves.

    Raises ValueError for an index beyond the size, UnavailableError ``log-damaged`` if a stored subtree is missing.
    """
    return await _roots(connection, tenant_id, inclusion_ranges(index, size))


async def inclusions(
    connection: Connection, tenant_id: UUID, indexes: Sequence[int], size: int
) -> dict[int, list[bytes]]:
    """The inclusion paths of many leaves, read at once."""
    wanted = {index: inclusion_ranges(index, size) for index in indexes}
    ranges = sorted({one for path in wanted.values() for one in path})
    roots = dict(zip(ranges, await _roots(connection, tenant_id, ranges), strict=True))
    return {index: [roots[one] for one in path] for index, path in wanted.items()}


async def consistency(connection: Connection, tenant_id: UUID, old: int, new: int) -> list[bytes]:
    """The proof (RFC 6962) that the tree of ``new`` leaves extends that of ``old``. Raises as ``inclusion`` does."""
    return await _roots(connection, tenant_id, consistency_ranges(old, new))


async def subtree_roots(connection: Connection, tenant_id: UUID, ranges: Sequence[Range]) -> dict[Range, bytes]:
    """The roots of subtrees (start, end) of the log. Raises UnavailableError ``log-damaged`` as ``inclusion`` does."""
    return dict(zip(ranges, await _roots(connection, tenant_id, ranges), strict=True))


async def leaf_indexes(connection: Connection, run_id: UUID) -> dict[int, int]:
    """The leaf of each entry of a chain, by the entry's number; entries that wait for theirs are left out."""
    return {row["seq"]: row["index"] for row in await _rows(connection, _LEAVES, (run_id,))}


async def signer_keys(connection: Connection, tenant_id: UUID) -> list[SignerKey]:
    """The history of the signer's keys, the first one first; the last one is in use."""
    found = []
    for row in await _rows(connection, _KEYS, (tenant_id,)):
        entry = json.loads(bytes(row["body"]))
        data = entry["data"]
        at = datetime.fromisoformat(entry["at"])
        if entry["type"] == KEY_CREATED:
            found.append(SignerKey(data["key"], None, 0, None, at, row["index"]))
        else:
            statement = data["note"].encode()
            found.append(SignerKey(data["new"], data["old"], data["overlap_s"], statement, at, row["index"]))
    return found


async def tenants(database: Database) -> list[UUID]:
    """All tenants that have a log."""
    (rows,) = await database.fetch((TENANTS, ()))
    return [row["tenant_id"] for row in rows]


async def extend_log(database: Database, *, batch_max: int = BATCH_MAX) -> dict[UUID, int]:
    """Gives every waiting entry its leaf, in transactions of at most ``batch_max``; returns how many by tenant.

    Safe when several do it at once, and when it ends at any moment: what was not committed waits on. Raises
    UnavailableError ``log-damaged`` when an entry that waits, or a stored subtree, is gone; the logs of other tenants
    are extended before that.
    """
    added: dict[UUID, int] = {}
    broken: UnavailableError | None = None
    (waiting,) = await database.fetch((_WAITING, ()))
    for row in waiting:
        tenant_id = row["tenant_id"]
        try:
            while (count := await _extend_once(database, tenant_id, batch_max)) > 0:
                added[tenant_id] = added.get(tenant_id, 0) + count
                if count < batch_max:
                    break
        except UnavailableError as error:
            if error.code != _DAMAGED:
                raise
            broken = error
    if broken is not None:
        raise broken
    return added


async def _extend_once(database: Database, tenant_id: UUID, batch_max: int) -> int:
    async def work(connection: Connection) -> int:
        return int((await _one(connection, _EXTEND, (tenant_id, batch_max)))["added"])

    try:
        return await database.write(work)
        # Now these entries have their leaves, for good; a crash before this line left all of them waiting.
    except Exception as error:
        if getattr(error, "sqlstate", None) == _GONE:
            raise damaged("entries that wait for their place in the log, or parts of it, are gone") from None
        raise


def damaged(what: str) -> UnavailableError:
    """The error for a log that lacks what it once had."""
    return UnavailableError(
        _DAMAGED, what, hint="the database was changed by hand: `podium audit verify --database` says where"
    )


async def _roots(connection: Connection, tenant_id: UUID, ranges: Sequence[Range]) -> list[bytes]:
    wanted = {node for start, end in ranges for node in cover(start, end)}
    leaves = [index for level, index in wanted if level == 0]
    above = [node for node in wanted if node[0] > 0]
    levels, indexes = [level for level, _ in above], [index for _, index in above]
    found: dict[Node, bytes] = {}
    if wanted:
        rows = await _rows(connection, _NODES, (tenant_id, leaves, levels, indexes, tenant_id))
        found = {(row["level"], row["index"]): bytes(row["hash"]) for row in rows}
    if len(found) != len(wanted):
        raise damaged("the log lacks some of its leaves or nodes")
    return [root_of_range(start, end, found.__getitem__) for start, end in ranges]


def _checkpoint(row: Row) -> Checkpoint:
    return Checkpoint(row["size"], bytes(row["root"]), bytes(row["note"]), row["key_id"], row["signed_at"])


async def _rows(connection: Connection, sql: str, params: Params) -> list[Row]:
    (rows,) = await exchange(connection, [(sql, params)])
    return rows


async def _one(connection: Connection, sql: str, params: Params) -> dict[str, Any]:
    return (await _rows(connection, sql, params))[0]
