"""What a legal hold does: while a matter holds a run, nothing of its whole tree is erased, by nobody, for no reason.

A refusal is an entry of the run. For placing and releasing holds see `engine.store.holds`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final, NoReturn
from uuid import UUID

from engine.errors import RefusedError
from engine.store.database import Database
from engine.store.exchange import Connection, exchange
from engine.store.hold_rows import READ_ENTRIES_FOR, standing
from engine.store.run_writer import lock_run

if TYPE_CHECKING:
    from engine.store.erasing import ErasureOrder

_LOCK_KEY: Final = 0x706F64686F6C64
# An erasure begins before a hold or sees it; a hold is placed when no erasure is about to begin.
LOCK_HOLDS_SHARED: Final = f"SELECT pg_advisory_xact_lock_shared({_LOCK_KEY})"
LOCK_HOLDS: Final = f"SELECT pg_advisory_xact_lock({_LOCK_KEY})"

_HOLDS_ON = """
    SELECT DISTINCT holds.matter FROM holds
    WHERE released_at IS NULL AND (
        (all_runs AND tenant_id IN (SELECT tenant_id FROM runs WHERE id = ANY(%(runs)s)))
        OR id IN (SELECT hold_id FROM held_runs WHERE run_id = ANY(%(runs)s)))
    ORDER BY matter
"""

_KNOWN_REFUSAL = """
    SELECT 1 FROM ledger_entries
    WHERE run_id = %s AND type = 'erasure.refused'
      AND convert_from(body, 'UTF8')::jsonb->'data'->>'erasure' = %s::uuid::text
"""


async def holds_on(source: Database | Connection, runs: Collection[UUID]) -> list[str]:
    """The matters that hold one of these runs, by the rows or by the ledger. Give the whole tree: a part holds all."""
    by_rows, by_ledger = (_HOLDS_ON, {"runs": list(runs)}), (READ_ENTRIES_FOR, (list(runs),))
    if isinstance(source, Database):
        rows, entries = await source.fetch(by_rows, by_ledger)
    else:
        rows, entries = await exchange(source, [by_rows, by_ledger])
    said = {hold.matter for hold in standing(entries).values() if hold.holds(runs)}
    return sorted({row["matter"] for row in rows} | said)


async def refuse_for_hold(database: Database, order: ErasureOrder, matters: Sequence[str]) -> NoReturn:
    """Writes down that an erasure was refused, and raises RefusedError ``run-held``."""
    run_id = order.target.run_id

    async def work(connection: Connection) -> None:
        writer, (known,) = await lock_run(
            connection, run_id, (_KNOWN_REFUSAL, (run_id, order.id)), actor_id=order.actor_id
        )
        if known:
            return
        writer.on_behalf_of = order.on_behalf_of
        writer.entry(
            "erasure.refused",
            erasure=str(order.id),
            cause=order.cause,
            scope=order.target.scope,
            reason="hold",
            matters=list(matters),
            artifacts=writer.artifacts(order.drafts()),
        )
        await writer.commit()

    await database.write(work)
    raise held(run_id, matters, note="; the refusal is on record")


def held(run_id: UUID, matters: Sequence[str], note: str = "") -> RefusedError:
    """The error for texts that are under hold."""
    return RefusedError(
        "run-held", f"run {run_id} is under hold for {', '.join(matters)}{note}", hint="podium hold list"
    )
