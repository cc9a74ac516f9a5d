"""Retention: texts of runs that ended long enough ago are erased; entries, numbers and sizes stay for ever.

How long is for the pool to say (`policy.retention_days`, as the run pinned it), else for the installation. Never those
of a tree that has not ended, nor of one under hold, nor an output that a fork reuses whose own time has not come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID, uuid5

from engine.errors import RefusedError
from engine.store.database import Database
from engine.store.erasing import ErasureOrder, erase
from engine.store.erasure_scope import Target
from engine.store.exchange import Connection
from engine.store.hold_rows import READ_ENTRIES, standing
from engine.store.run_writer import ENGINE_ACTOR
from engine.store.system_chain import lock_system

# Runs of one sweep; the rest waits for the next.
RUNS_MAX: Final = 500
ORPHANS_AFTER_S: Final = 86_400.0

_DUE = """
    WITH RECURSIVE due AS (
        SELECT runs.id, runs.tenant_id, runs.ended_at FROM runs
        JOIN pool_snapshots ON pool_snapshots.digest = runs.pool_digest
        WHERE parent_run_id IS NULL AND ended_at IS NOT NULL AND runs.tenant_id = %(tenant_id)s
          AND ended_at < clock_timestamp() - make_interval(secs => 86400.0 * coalesce(
                (convert_from(document, 'UTF8')::jsonb#>>'{pool,policy,retention_days}')::integer, %(default_days)s))
    ), tree AS (
        SELECT id AS root, id, ended_at FROM due
        UNION ALL
        SELECT tree.root, child.id, child.ended_at FROM runs child JOIN tree ON child.parent_run_id = tree.id
    ), left_over AS (
        SELECT tree.root, artifacts.id, artifacts.byte_count, EXISTS (
            SELECT FROM steps JOIN artifacts task ON task.owner_id = steps.run_id AND task.kind = 'task'
            WHERE artifacts.kind = 'output' AND steps.accepted_attempt_id = artifacts.owner_id
              AND steps.state = 'reused' AND task.erasure_id IS NULL
              AND steps.run_id NOT IN (SELECT own.id FROM tree own WHERE own.root = tree.root)) AS is_reused
        FROM tree JOIN artifacts ON artifacts.run_id = tree.id
        WHERE artifacts.erasure_id IS NULL AND artifacts.kind NOT IN ('basis', 'basis_reason')
    )
    SELECT root AS id, (SELECT array_agg(own.id) FROM tree own WHERE own.root = left_over.root) AS tree,
           array_agg(id) FILTER (WHERE is_reused) AS spared,
           count(*) FILTER (WHERE NOT is_reused) AS artifacts,
           coalesce(sum(byte_count) FILTER (WHERE NOT is_reused), 0)::bigint AS bytes,
           (SELECT array_agg(DISTINCT holds.id) FROM holds LEFT JOIN held_runs ON held_runs.hold_id = holds.id
            WHERE released_at IS NULL AND holds.tenant_id = %(tenant_id)s
              AND (all_runs OR run_id IN (SELECT own.id FROM tree own WHERE own.root = left_over.root))) AS held
    FROM left_over
    WHERE NOT EXISTS (SELECT FROM tree live WHERE live.root = left_over.root AND live.ended_at IS NULL)
    GROUP BY root HAVING count(*) FILTER (WHERE NOT is_reused) > 0
    ORDER BY root LIMIT %(limit)s
"""
_ON_RECORD = """
    SELECT id FROM runs WHERE id = ANY(%s) AND key_epoch > 0
    UNION SELECT run_id FROM artifacts WHERE run_id = ANY(%s) AND key_epoch > 0
"""


@dataclass(frozen=True, slots=True)
class DueRun:
    """A run whose time has come, with what is left of its texts, and the holds that keep them."""

    id: UUID
    artifacts: int
    bytes: int
    spared: tuple[UUID, ...] = ()
    held: tuple[UUID, ...] = ()


@dataclass(slots=True)
class Swept:
    """What a sweep did. ``held`` are runs under hold, ``refused`` those that somebody else was working on."""

    erased: list[UUID] = field(default_factory=list)
    held: list[UUID] = field(default_factory=list)
    refused: list[UUID] = field(default_factory=list)
    artifacts: int = 0
    bytes: int = 0


async def due_runs(
    database: Database, tenant_id: UUID, default_days: int | None, *, limit: int = RUNS_MAX
) -> list[DueRun]:
    """The runs whose texts are to go, oldest first; ``default_days`` None keeps those of pools that say nothing."""
    where = {"tenant_id": tenant_id, "default_days": default_days, "limit": limit}
    rows, entries = await database.fetch((_DUE, where), (READ_ENTRIES, (tenant_id,)))
    holds = standing(entries)
    due = []
    for row in rows:
        # By the rows or by the ledger.
        held = {*(row["held"] or ()), *(own for own, hold in holds.items() if hold.holds(row["tree"]))}
        due.append(DueRun(row["id"], row["artifacts"], row["bytes"], tuple(row["spared"] or ()), tuple(sorted(held))))
    return due


async def sweep(
    database: Database, tenant_id: UUID, default_days: int | None, *, actor_id: str = ENGINE_ACTOR
) -> Swept:
    """Erases what is due. An entry of the tenant's chain says how much; each run's own chain says what.

    A run under hold gets one entry ``erasure.refused`` for each set of holds, however often it is swept.
    """
    done = Swept()
    for run in await due_runs(database, tenant_id, default_days):
        await _sweep_run(database, run, done, actor_id)
    if done.erased:
        await _write_down(database, tenant_id, default_days, done, actor_id)
    return done


async def _sweep_run(database: Database, run: DueRun, done: Swept, actor_id: str) -> None:
    order = ErasureOrder(Target(run.id), actor_id, None, "", copies="keep", cause="retention")
    if run.held:
        # Always the same id for the same holds, by which the refusal is found again.
        name = "retention/" + ",".join(sorted(str(hold) for hold in run.held))
        order = ErasureOrder(order.target, actor_id, None, "", cause="retention", id=uuid5(run.id, name))
    try:
        await erase(database, order, spare=run.spared)
    except RefusedError as refusal:
        (done.held if refusal.code == "run-held" else done.refused).append(run.id)
    else:
        done.erased.append(run.id)
        done.artifacts += run.artifacts
        done.bytes += run.bytes


async def _write_down(
    database: Database, tenant_id: UUID, default_days: int | None, done: Swept, actor_id: str
) -> None:
    async def work(connection: Connection) -> None:
        writer = await lock_system(connection, tenant_id, actor_id=actor_id)
        writer.entry(
            "retention.swept",
            runs=len(done.erased),
            artifacts=done.artifacts,
            bytes=done.bytes,
            held=len(done.held),
            default_days=default_days,
        )
        await writer.commit()

    await database.write(work)


async def forget_orphans(database: Database, *, older_than_s: float = ORPHANS_AFTER_S) -> int:
    """Forgets keys of runs that a submitter made and never wrote; returns how many. One key store, one database."""
    if database.keys is None:
        return 0
    store = database.keys.store
    orphans = await asyncio.to_thread(lambda: list(store.orphans(older_than_s)))
    if not orphans:
        return 0
    (rows,) = await database.fetch((_ON_RECORD, (orphans, orphans)))
    on_record = {row["id"] for row in rows}
    return await asyncio.to_thread(_forget, database, orphans, on_record)


def _forget(database: Database, orphans: Sequence[UUID], on_record: set[UUID]) -> int:
    assert database.keys is not None
    store, count = database.keys.store, 0
    for orphan in orphans:
        keys = store.read(orphan) if orphan in on_record else None
        if keys is not None:
            # Its submitter died between the record and the key store.
            store.settle(keys)
        elif orphan not in on_record:
            store.drop_orphan(orphan)
            count += 1
    return count
