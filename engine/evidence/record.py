"""Reading the record for an export: chains, pools, texts in small batches; and the entry that says it was exported.

Everything is read in one snapshot of the database, so that its parts agree. Texts go through `engine.store.artifacts`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from engine.errors import RefusedError, UnavailableError
from engine.evidence.review_words import ReviewFacts
from engine.evidence.selection import select_runs
from engine.evidence.timeline import TimelineLine, timeline_line
from engine.store.artifacts import StoredArtifact, list_run_artifacts, read_run_artifacts
from engine.store.database import Database
from engine.store.exchange import Connection, exchange
from engine.store.run_writer import lock_run
from engine.store.tables import LedgerEntry, PoolSnapshot
from engine.verifier.entry_types import committed

# Texts are read so many bytes at a time; a larger one is read alone.
_BATCH_BYTES: Final = 8 * 2**20
_BATCH_COUNT: Final = 256
_SYSTEM_HEAD: Final = "SELECT seq, hash FROM ledger_heads WHERE run_id = %s AND seq > 0"
# What people write to say why they do something.
SAID_KINDS: Final = frozenset({"basis", "basis_reason", "reason", "comment", "meaning"})


async def append_exported(
    database: Database,
    run_id: UUID,
    *,
    tenant: UUID,
    actor_id: str,
    on_behalf_of: str | None,
    export: UUID,
    asked: Sequence[UUID],
    redacted: Sequence[str],
) -> int:
    """Records in a run's chain that it is exported; returns the number of the entry.

    If the link dies in between, it may stand there twice.
    """

    async def work(connection: Connection) -> int:
        writer, _ = await lock_run(connection, run_id, actor_id=actor_id)
        writer.on_behalf_of = on_behalf_of
        heads = (await exchange(connection, [(_SYSTEM_HEAD, (tenant,))]))[-1]
        # So that nobody can cut off the end of that chain, where accounts are linked to persons, without being noticed.
        system = {"entries": heads[0]["seq"], "head": bytes(heads[0]["hash"]).hex()} if heads else None
        writer.entry(
            "run.exported",
            export=str(export),
            runs=[str(run) for run in asked],
            redacted=list(redacted),
            system=system,
        )
        await writer.commit()
        # Now it is on record; a bundle may or may not come of it.
        return writer.seq + 1

    return await database.write(work)


async def read_bodies(connection: AsyncConnection, chain: UUID, limit: int | None) -> list[bytes]:
    """The canonical bytes of a chain's entries in order; the first ``limit`` of them."""
    query = select(LedgerEntry.body).where(LedgerEntry.run_id == chain).order_by(LedgerEntry.seq)
    if limit is not None:
        query = query.where(LedgerEntry.seq <= limit)
    return [bytes(row[0]) for row in await connection.execute(query)]


async def read_pools(connection: AsyncConnection, digests: Sequence[str]) -> dict[str, bytes]:
    """Pool documents by their digests."""
    query = select(PoolSnapshot.digest, PoolSnapshot.document).where(PoolSnapshot.digest.in_(list(digests)))
    return {row.digest: bytes(row.document) for row in await connection.execute(query)}


async def outline(connection: AsyncConnection, run_id: UUID) -> dict[str, StoredArtifact]:
    """A run's texts by id, without content."""
    return {str(artifact.id): artifact for artifact in await list_run_artifacts(connection, run_id)}


async def read_texts(
    connection: AsyncConnection, run_id: UUID, wanted: Sequence[StoredArtifact]
) -> AsyncIterator[StoredArtifact]:
    """These texts with content and salts, a few at a time."""
    batch: list[UUID] = []
    size = 0
    for artifact in wanted:
        if batch and (size + artifact.byte_count > _BATCH_BYTES or len(batch) == _BATCH_COUNT):
            for read in await read_run_artifacts(connection, run_id, batch):
                yield read
            batch, size = [], 0
        batch.append(artifact.id)
        size += artifact.byte_count
    if batch:
        for read in await read_run_artifacts(connection, run_id, batch):
            yield read


@dataclass(frozen=True, slots=True)
class SaidText:
    """What a person wrote with an entry: a reason, a comment, a legal basis. ``text`` is None where it is not there.

    ``erased`` says that it was erased; otherwise it cannot be read.
    """

    artifact: str
    kind: str
    text: str | None
    erased: bool


@dataclass(frozen=True, slots=True)
class Told:
    """An entry in words, the texts that it commits to, and those of them that say why somebody did it."""

    line: TimelineLine
    artifacts: list[str]
    said: list[SaidText]


async def read_timeline(database: Database, run_id: UUID, *, below: bool) -> list[Told]:
    """A run's entries in words, each with the texts that it commits to; with ``below`` those of its child runs too.

    Entries of several runs stand in the order of their times.
    """

    async def work(connection: AsyncConnection) -> list[Told]:
        chains = (await select_runs(connection, [run_id], with_sources=False)).family if below else (run_id,)
        told = []
        for chain in chains:
            bodies = await read_bodies(connection, chain, None)
            facts = ReviewFacts.of(bodies)
            rows = [committed(json.loads(body)["data"]) for body in bodies]
            said = await _said(connection, chain, [row for each in rows for row in each if row["kind"] in SAID_KINDS])
            for body, each in zip(bodies, rows, strict=True):
                ids = [row["artifact"] for row in each]
                told.append(Told(timeline_line(body, facts), ids, [said[one] for one in ids if one in said]))
        return sorted(told, key=lambda one: (one.line.at, one.line.run, one.line.seq)) if below else told

    return await database.query(work)


async def _said(connection: AsyncConnection, chain: UUID, rows: Sequence[dict[str, Any]]) -> dict[str, SaidText]:
    """The texts of these rows by their artifacts. A key that is missing keeps nobody from reading the entries."""
    kinds = {row["artifact"]: row["kind"] for row in rows}
    found: dict[str, SaidText] = {one: SaidText(one, kind, None, erased=False) for one, kind in kinds.items()}
    wanted = [UUID(one) for one in kinds]
    try:
        stored = await read_run_artifacts(connection, chain, wanted) if wanted else []
    except (RefusedError, UnavailableError):
        stored = []
        for one in wanted:
            with suppress(RefusedError, UnavailableError):
                stored += await read_run_artifacts(connection, chain, [one])
    for row in stored:
        words = None if row.content is None else row.content.decode("utf-8", "replace")
        found[str(row.id)] = SaidText(str(row.id), row.kind, words, erased=words is None)
    return found
