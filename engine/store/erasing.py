"""Erasing texts: keys, salts and contents go, the rows and every entry of the ledger stay.

In three steps, each of which may be repeated by anybody who finds it undone:

1. *Begin*, one transaction: what is to go, who wants it and why is written down, and the runs' next epoch of keys.
   From here on nothing new is sealed with the keys that are about to go.
2. *Destroy*, in the key store: a record in its journal, then the keys. From here on no copy of the database, however
   old, gives the texts back.
3. *Finish*, one transaction a run: contents and salts are emptied, and ``artifact.erased`` is appended.

Must never touch an entry. See `engine.store.erasure_scope` for what has to go along.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal
from uuid import UUID

from psycopg.errors import UniqueViolation

from engine.errors import RefusedError, UnavailableError
from engine.keystore import ErasureRecord
from engine.store import queries
from engine.store.artifacts import INSERT, ArtifactDraft, read_drafts_within
from engine.store.database import Database
from engine.store.erasure_scope import BASIS_KINDS, Reach, Target, read_reach
from engine.store.exchange import Connection, Row, exchange
from engine.store.holding import LOCK_HOLDS_SHARED, held, holds_on, refuse_for_hold
from engine.store.ids import new_run_id
from engine.store.run_writer import lock_run
from engine.store.sealing import writing_keys
from engine.store.states import RUN_LIVE

Copies = Literal["refuse", "erase", "keep"]
Cause = Literal["order", "retention"]
# How often an erasure is worked out anew because the record moved under it.
TRIES_MAX: Final = 5

_LOCK_RUNS = "SELECT id, state, tenant_id, key_epoch FROM runs WHERE id = ANY(%s) ORDER BY id FOR NO KEY UPDATE"
_SHAPE = """
    SELECT (SELECT count(*) FROM artifacts WHERE id = ANY(%(artifacts)s) AND erasure_id IS NULL) AS artifacts,
           (SELECT count(*) FROM artifacts WHERE run_id = ANY(%(runs)s) AND created_at > %(now)s) AS newer,
           EXISTS (SELECT FROM runs WHERE id = ANY(%(trees)s) AND state = ANY(%(live)s)) AS is_live,
           EXISTS (SELECT FROM erasures WHERE run_id = ANY(%(runs)s) AND finished_at IS NULL) AS is_busy,
           EXISTS (SELECT FROM runs WHERE created_at > %(now)s
                   AND (source_run_id = ANY(%(trees)s) OR parent_run_id = ANY(%(trees)s))) AS has_grown
"""
_NOW = "SELECT clock_timestamp() AS now"
_INSERT_ERASURE = """
    INSERT INTO erasures (id, run_id, tenant_id, actor_id, on_behalf_of, cause, scope, key_epoch)
    VALUES (%(id)s, %(run_id)s, %(tenant_id)s, %(actor_id)s, %(on_behalf_of)s, %(cause)s, %(scope)s, %(key_epoch)s)
"""
_MARK = "UPDATE artifacts SET erasure_id = %s WHERE id = ANY(%s) AND erasure_id IS NULL"
_NEXT_EPOCH = "UPDATE runs SET key_epoch = greatest(key_epoch, %s) WHERE id = %s"
_UNFINISHED = """
    SELECT id, run_id, tenant_id, actor_id, on_behalf_of, cause, scope, key_epoch FROM erasures
    WHERE finished_at IS NULL ORDER BY begun_at, id, run_id
"""
_FINISHED = """
    SELECT id, run_id, tenant_id, actor_id, on_behalf_of, cause, scope, key_epoch FROM erasures
    WHERE finished_at IS NOT NULL AND key_epoch > 0 ORDER BY begun_at, id, run_id
"""
_KEPT = "SELECT id, key_epoch FROM artifacts WHERE run_id = %s AND key_epoch > 0 AND erasure_id IS NULL"
_MARKED = "SELECT id FROM artifacts WHERE erasure_id = %s AND run_id = %s ORDER BY id"
_BASIS_ROWS = """
    SELECT id, tenant_id, run_id, owner_id, kind, ordinal, role, media_type, content, salt, byte_count, key_epoch
    FROM artifacts WHERE owner_id = %s AND run_id = %s ORDER BY kind, ordinal
"""
_READ_ERASURE = "SELECT * FROM erasures WHERE id = %s AND run_id = %s"
_EMPTY = """
    UPDATE artifacts SET content = NULL, salt = NULL, erased_at = %s
    WHERE erasure_id = %s AND run_id = %s AND erased_at IS NULL
"""
_FINISH = "UPDATE erasures SET finished_at = %s WHERE id = %s AND run_id = %s"


@dataclass(frozen=True, slots=True)
class ErasureOrder:
    """What somebody wants erased, and on which legal basis. ``id`` makes repeating it one erasure."""

    target: Target
    actor_id: str
    on_behalf_of: str | None
    basis: str
    reason: str | None = None
    copies: Copies = "refuse"
    cause: Cause = "order"
    id: UUID = field(default_factory=new_run_id)

    def drafts(self) -> list[ArtifactDraft]:
        """The texts that say why; the entry commits to them."""
        texts = [("basis", self.basis)] if self.basis else []
        texts += [] if self.reason is None else [("basis_reason", self.reason)]
        return [ArtifactDraft(self.id, kind, words.encode(), role="basis") for kind, words in texts]


@dataclass(frozen=True, slots=True)
class Erased:
    """What came of it: how far it reached, and the copies that were left by order."""

    id: UUID
    reach: Reach


async def erase(database: Database, order: ErasureOrder, *, spare: Sequence[UUID] = ()) -> Erased:
    """Erases texts with everything that was made of them. Afterwards keys, salts and contents are gone.

    Raises RefusedError ``run-live``, ``run-held`` (which is also on record), ``copies-exist``, ``nothing-to-erase``,
    ``erasure-under-way``; InputError for what does not exist; UnavailableError if the key store cannot be reached.
    Nothing was changed then, but for the last: the erasure is begun and is finished as soon as the key store is there.
    """
    await finish_erasures(database)
    for _ in range(TRIES_MAX):
        ((before,),) = await database.fetch((_NOW, ()))
        reach = await look(database, order, spare=spare)
        await _refuse(database, order, reach)
        if await _begin(database, order, reach, before):
            break
    else:
        raise RefusedError(
            "record-moving", "the run is changing all the time", hint="try again when nobody works on it"
        )
    await finish_erasures(database)
    return Erased(order.id, reach)


async def look(database: Database, order: ErasureOrder, *, spare: Sequence[UUID] = ()) -> Reach:
    """What the order would erase; changes nothing."""
    return await database.query(
        lambda connection: read_reach(connection, order.target, with_copies=order.copies == "erase", spare=spare)
    )


async def preview(database: Database, order: ErasureOrder) -> Reach:
    """What the order would erase; changes nothing. Raises RefusedError ``run-held``, of which nothing goes on record.

    What else would keep it from being done (runs that live, copies) is in the reach.
    """
    reach = await look(database, order)
    matters = await holds_on(database, reach.trees)
    if matters:
        raise held(order.target.run_id, matters)
    return reach


async def _refuse(database: Database, order: ErasureOrder, reach: Reach) -> None:
    run = order.target.run_id
    if reach.live:
        first = reach.live[0]
        raise RefusedError(
            "run-live",
            f"run {first} has not ended, and it uses these texts",
            hint=f"wait for its end, or `podium cancel {first}`; then erase",
        )
    matters = await holds_on(database, reach.trees)
    if matters:
        await refuse_for_hold(database, order, matters)
    if not reach.count:
        raise RefusedError("nothing-to-erase", f"run {run} has none of these texts any more", hint=f"podium show {run}")
    if reach.copies and order.copies == "refuse":
        others = ", ".join(str(other) for other in reach.copies)
        raise RefusedError(
            "copies-exist",
            f"other texts quote what is to be erased, in {others}",
            hint="--copies erase takes them along, --copies keep leaves them",
        )


async def _begin(database: Database, order: ErasureOrder, reach: Reach, before: Row) -> bool:
    """The first step; False if the record has changed since it was looked at, so that it must be looked at anew."""

    async def work(connection: Connection) -> bool:
        _, _, runs = await exchange(
            connection, [(queries.BEGIN, ()), (LOCK_HOLDS_SHARED, ()), (_LOCK_RUNS, (list(reach.trees),))]
        )
        artifacts = [artifact for ids in reach.artifacts.values() for artifact in ids]
        where = {"artifacts": artifacts, "runs": list(reach.runs), "trees": list(reach.trees)}
        (known,), (shape,) = await exchange(
            connection,
            [
                ("SELECT count(*) AS count FROM erasures WHERE id = %s", (order.id,)),
                (_SHAPE, {**where, "now": before["now"], "live": list(RUN_LIVE)}),
            ],
        )
        if known["count"]:
            return True
        if shape["artifacts"] != len(artifacts) or any(
            shape[one] for one in ("newer", "is_live", "is_busy", "has_grown")
        ):
            return False
        if await holds_on(connection, reach.trees):
            return False
        statements = await _begin_statements(connection, order, reach, {run["id"]: run for run in runs})
        await exchange(connection, [*statements, (queries.COMMIT, ())])
        # Now the erasure is on its way: whoever finds it unfinished carries it out.
        return True

    try:
        return await database.write(work)
    except UniqueViolation:
        # Another erasure of one of these runs has just begun.
        await finish_erasures(database)
        return False


async def _begin_statements(
    connection: Connection, order: ErasureOrder, reach: Reach, runs: dict[UUID, Row]
) -> list[tuple[str, Any]]:
    statements: list[tuple[str, Any]] = []
    # The run that was named gets its entry also where all its texts belong to others.
    for run_id in sorted({order.target.run_id, *reach.runs}):
        run = runs[run_id]
        after = run["key_epoch"] + 1 if run["key_epoch"] else 0
        named = run_id == order.target.run_id
        row = {
            "id": order.id,
            "run_id": run_id,
            "tenant_id": run["tenant_id"],
            "actor_id": order.actor_id,
            "on_behalf_of": order.on_behalf_of,
            "cause": order.cause,
            "scope": order.target.scope if run_id in reach.own_tree else "copy",
            "key_epoch": after,
        }
        statements += [
            (_INSERT_ERASURE, row),
            (_MARK, (order.id, list(reach.artifacts.get(run_id, ())))),
            (_NEXT_EPOCH, (after, run_id)),
        ]
        if named:
            keys = await writing_keys(connection, run_id, run["key_epoch"])
            statements += [(INSERT, draft.row(run["tenant_id"], run_id, keys)) for draft in order.drafts()]
    return statements


async def finish_erasures(database: Database) -> int:
    """Carries out what was begun, by whomever; returns how many parts of erasures that were.

    Raises UnavailableError while the key store is not there; what is left is found again.
    """
    (unfinished,) = await database.fetch((_UNFINISHED, ()))
    for erasure in unfinished:
        await _destroy(database, erasure)
        await _finish(database, erasure)
    return len(unfinished)


async def carry_out(database: Database, erasure_id: UUID, run_id: UUID, *, restored: bool) -> None:
    """Carries out one part of an erasure that was begun; ``restored`` says that it was done once before."""
    ((erasure,),) = await database.fetch((_READ_ERASURE, (erasure_id, run_id)))
    await _destroy(database, erasure, restored=restored)
    await _finish(database, erasure, restored=restored)


async def destroy_again(database: Database) -> None:
    """Destroys the keys of all that is erased once more, in a key store that was restored from an older copy."""
    (finished,) = await database.fetch((_FINISHED, ()))
    for erasure in finished:
        await _destroy(database, erasure, restored=True)


async def _destroy(database: Database, erasure: Row, *, restored: bool = False) -> None:
    """The second step: the journal first, so that a crash in between is found by whoever reads it."""
    run_id, epoch = erasure["run_id"], erasure["key_epoch"]
    if database.keys is None:
        if epoch:
            raise UnavailableError(
                "key-store-needed",
                f"texts of run {run_id} are to be erased, and no key store was given",
                hint="set PODIUM_KEY_STORE to the one that they were sealed with",
            )
        # Texts in the clear and no key store: there is no journal either, so a restored backup brings them back.
        return
    kept, marked, basis = await database.fetch(
        (_KEPT, (run_id,)), (_MARKED, (erasure["id"], run_id)), (_BASIS_ROWS, (erasure["id"], run_id))
    )
    record = ErasureRecord(
        erasure_id=erasure["id"],
        run_id=run_id,
        epoch=epoch,
        artifacts=[row["id"] for row in marked],
        fields={name: erasure[name] for name in ("actor_id", "on_behalf_of", "cause", "scope")},
        basis=[_said(row) for row in basis],
    )
    keep = {row["id"]: row["key_epoch"] for row in kept}
    store = database.keys.store

    def destroy() -> None:
        if not epoch:
            store.append_journal(record)
            return
        present = store.read(run_id)
        if present is None and restored:
            # Gone with the store that it was destroyed in.
            return
        if present is None or present.epoch < epoch:
            store.append_journal(record)
            store.rotate(run_id, epoch - 1, keep)

    await asyncio.to_thread(destroy)
    # Now the keys are gone, on disk and for good; only this process may still remember them.
    database.keys.forget(run_id)


async def _finish(database: Database, erasure: Row, *, restored: bool = False) -> None:
    """The third step."""

    async def work(connection: Connection) -> None:
        place = (erasure["id"], erasure["run_id"])
        writer, (found, marked) = await lock_run(
            connection, erasure["run_id"], (_READ_ERASURE, place), (_MARKED, place), actor_id=erasure["actor_id"]
        )
        if not found or found[0]["finished_at"] is not None:
            return
        writer.on_behalf_of = erasure["on_behalf_of"]
        drafts = [draft for draft in await read_drafts_within(connection, erasure["id"]) if draft.kind in BASIS_KINDS]
        writer.statement(_EMPTY, (writer.now, *place))
        writer.statement(_FINISH, (writer.now, *place))
        named = await _is_named(connection, erasure)
        writer.entry(
            "artifact.erased",
            erasure=str(erasure["id"]),
            cause=erasure["cause"],
            scope=erasure["scope"],
            erased=[str(row["id"]) for row in marked],
            key_epoch=erasure["key_epoch"] or None,
            restored=restored,
            artifacts=[draft.committed() for draft in drafts] if named else [],
        )
        await writer.commit()
        # Now nothing of the texts is left but their sizes, and the record says who wanted it, when and why.

    await database.write(work)


async def _is_named(connection: Connection, erasure: Row) -> bool:
    """Whether this is the run whose order it was: its chain holds the basis."""
    (rows,) = await exchange(connection, [(_BASIS_ROWS, (erasure["id"], erasure["run_id"]))])
    return bool(rows)


def _said(row: Row) -> dict[str, Any]:
    """A row as the journal keeps it."""
    return {
        name: value.hex() if isinstance(value, bytes) else str(value) if isinstance(value, UUID) else value
        for name, value in row.items()
    }
