"""Placing and releasing legal holds. For what a hold does see `engine.store.holding`.

Placing takes one person, releasing takes two: one asks, another one, by person and not by account, confirms. Each is an
entry of the tenant's chain; the reason is a text of that chain.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal
from uuid import UUID

from engine.errors import InputError, RefusedError
from engine.keystore import RunKeys
from engine.store.artifacts import INSERT, ArtifactDraft
from engine.store.database import Database
from engine.store.exchange import Connection, Row, exchange
from engine.store.holding import LOCK_HOLDS
from engine.store.ids import new_run_id
from engine.store.orders import Order, moment
from engine.store.system_chain import ChainWriter, lock_system

_MATTER: Final = re.compile(r"[A-Za-z0-9._:+-]{1,64}")
_OPEN = "SELECT * FROM holds WHERE tenant_id = %s AND matter = %s AND released_at IS NULL"
# Whether this very wish is on record: the link can die between COMMIT and its answer.
_DONE = "SELECT 1 FROM artifacts WHERE owner_id = %s"
_NEWEST = "SELECT * FROM holds WHERE tenant_id = %s AND matter = %s ORDER BY placed_at DESC LIMIT 1"
_HELD = "SELECT run_id FROM held_runs WHERE hold_id = %s ORDER BY run_id"
_KNOWN_RUNS = "SELECT id FROM runs WHERE tenant_id = %s AND id = ANY(%s)"
_PERSONS = "SELECT actor_id, person FROM persons WHERE tenant_id = %s AND actor_id = ANY(%s)"
_INSERT_HOLD = (
    "INSERT INTO holds (id, tenant_id, matter, all_runs, actor_id, placed_at) VALUES (%s, %s, %s, %s, %s, %s)"
)
_WIDEN = "UPDATE holds SET all_runs = all_runs OR %s, release_asked_by = NULL, release_asked_at = NULL WHERE id = %s"
_INSERT_HELD = "INSERT INTO held_runs (hold_id, run_id, added_at) VALUES (%s, %s, %s) ON CONFLICT DO NOTHING"
_ASK = "UPDATE holds SET release_asked_by = %s, release_asked_at = %s WHERE id = %s"
_RELEASE = "UPDATE holds SET released_by = %s, released_at = %s WHERE id = %s"
# For whom somebody asked; the newest wish, because more runs take an earlier one back.
_ASKED_FOR = """
    SELECT convert_from(body, 'UTF8')::jsonb->>'on_behalf_of' AS account FROM ledger_entries
    WHERE run_id = %s AND type = 'hold.release_asked'
      AND convert_from(body, 'UTF8')::jsonb->'data'->>'hold' = %s::uuid::text
    ORDER BY seq DESC LIMIT 1
"""
_LIST = """
    SELECT holds.*, array(SELECT run_id FROM held_runs WHERE hold_id = holds.id ORDER BY run_id) AS runs
    FROM holds WHERE tenant_id = %s AND (released_at IS NULL OR %s) ORDER BY placed_at, id
"""


@dataclass(frozen=True, slots=True)
class Matter:
    """Who wants what of a matter's hold, and why. ``id`` owns the text of the reason."""

    tenant_id: UUID
    matter: str
    actor_id: str
    on_behalf_of: str | None
    reason: str
    id: UUID = field(default_factory=new_run_id)

    def __post_init__(self) -> None:
        """Raises InputError for a name or a reason that cannot be kept."""
        if not _MATTER.fullmatch(self.matter):
            raise InputError(
                "matter-invalid",
                "the name of a matter has letters, digits and . _ : + - (at most 64)",
                hint="use the number that the matter has with your counsel, not a person's name",
            )
        # The same rules as for the reason of an order.
        Order(self.id, self.actor_id, self.on_behalf_of, self.reason)

    def draft(self) -> ArtifactDraft:
        """The reason, about to be stored."""
        return ArtifactDraft(self.id, "reason", self.reason.encode())


@dataclass(frozen=True, slots=True)
class HoldView:
    """A hold as it stands. ``runs`` are those that were named; with ``all_runs`` every run is held."""

    id: UUID
    matter: str
    all_runs: bool
    runs: tuple[UUID, ...]
    actor_id: str
    placed_at: datetime
    release_asked_by: str | None
    release_asked_at: datetime | None
    released_by: str | None
    released_at: datetime | None

    @property
    def state(self) -> Literal["held", "asked", "released"]:
        """Whether it holds, and if somebody has asked to release it."""
        if self.released_at is not None:
            return "released"
        return "held" if self.release_asked_at is None else "asked"


async def list_holds(database: Database, tenant_id: UUID, *, released: bool = False) -> list[HoldView]:
    """The holds in the order in which they were placed; those that were released only if asked for."""
    (rows,) = await database.fetch((_LIST, (tenant_id, released)))
    return [_view(row) for row in rows]


async def place_hold(database: Database, matter: Matter, runs: Sequence[UUID], *, all_runs: bool = False) -> HoldView:
    """Holds runs for a matter; a matter that is held already gets more runs, and nobody's wish to release it stands.

    Raises InputError ``run-unknown``.
    """
    keys = await _own_keys(database, matter.tenant_id)

    async def work(connection: Connection) -> None:
        writer = await lock_system(
            connection, matter.tenant_id, actor_id=matter.actor_id, on_behalf_of=matter.on_behalf_of
        )
        _, done, known, found = await exchange(
            connection,
            [
                (LOCK_HOLDS, ()),
                (_DONE, (matter.id,)),
                (_KNOWN_RUNS, (matter.tenant_id, list(runs))),
                (_OPEN, (matter.tenant_id, matter.matter)),
            ],
        )
        if done:
            return
        missing = set(runs) - {row["id"] for row in known}
        if missing:
            raise InputError("run-unknown", f"there is no run {min(missing)}", hint="podium list")
        held: set[UUID] = set()
        if found:
            (rows,) = await exchange(connection, [(_HELD, (found[0]["id"],))])
            held = {row["run_id"] for row in rows}
            if held >= set(runs) and found[0]["all_runs"] >= all_runs:
                return
        hold_id = found[0]["id"] if found else matter.id
        if found:
            writer.statement(_WIDEN, (all_runs, hold_id))
        else:
            writer.statement(
                _INSERT_HOLD, (hold_id, matter.tenant_id, matter.matter, all_runs, matter.actor_id, writer.now)
            )
        fresh = sorted(set(runs) - held)
        for run in fresh:
            writer.statement(_INSERT_HELD, (hold_id, run, writer.now))
        said: dict[str, Any] = {"runs": [str(run) for run in fresh], "all_runs": all_runs}
        _entry(writer, "hold.widened" if found else "hold.placed", hold_id, matter, keys, **said)
        await writer.commit()
        # Now nothing of these runs can be erased: an erasure begins before this, or sees it.

    await database.write(work)
    return await _the(database, matter)


async def release_hold(database: Database, matter: Matter) -> HoldView:
    """Asks that a hold be released, or, as another person, releases it.

    Raises RefusedError ``hold-unknown``, ``second-person-needed``.
    """
    keys = await _own_keys(database, matter.tenant_id)

    async def work(connection: Connection) -> UUID:
        writer = await lock_system(
            connection, matter.tenant_id, actor_id=matter.actor_id, on_behalf_of=matter.on_behalf_of
        )
        place = (matter.tenant_id, matter.matter)
        _, done, found, newest = await exchange(
            connection, [(LOCK_HOLDS, ()), (_DONE, (matter.id,)), (_OPEN, place), (_NEWEST, place)]
        )
        if done:
            return UUID(str(newest[0]["id"]))
        if not found:
            raise RefusedError("hold-unknown", f"nothing is held for {matter.matter}", hint="podium hold list")
        hold = found[0]
        hold_id: UUID = hold["id"]
        asked_by = hold["release_asked_by"]
        if asked_by is None:
            writer.statement(_ASK, (matter.actor_id, writer.now, hold_id))
            _entry(writer, "hold.release_asked", hold_id, matter, keys)
        else:
            await _refuse_same_person(connection, matter, hold)
            writer.statement(_RELEASE, (matter.actor_id, writer.now, hold_id))
            _entry(writer, "hold.released", hold_id, matter, keys, asked_by=asked_by)
        await writer.commit()
        # Now it is asked for, or what was held may be erased again.
        return hold_id

    hold_id = await database.write(work)
    (view,) = [one for one in await list_holds(database, matter.tenant_id, released=True) if one.id == hold_id]
    return view


async def _refuse_same_person(connection: Connection, matter: Matter, hold: Row) -> None:
    (wish,) = await exchange(connection, [(_ASKED_FOR, (matter.tenant_id, hold["id"]))])
    # Whoever lets somebody else act has a part in it, as in a review.
    asked = {hold["release_asked_by"], *(row["account"] for row in wish)} - {None}
    confirms = {matter.actor_id, matter.on_behalf_of} - {None}
    (rows,) = await exchange(connection, [(_PERSONS, (matter.tenant_id, [*asked, *confirms]))])
    persons = {row["actor_id"]: row["person"] for row in rows}
    if {persons.get(account, account) for account in asked} & {persons.get(account, account) for account in confirms}:
        raise RefusedError(
            "second-person-needed",
            f"{hold['release_asked_by']} asked for the release of {matter.matter} at"
            f" {moment(hold['release_asked_at'])}; another person has to confirm it",
            hint=f"as somebody else: podium hold release {matter.matter} --reason ...",
        )


async def _own_keys(database: Database, tenant_id: UUID) -> RunKeys | None:
    """The keys for texts of the tenant's own chain."""
    if database.keys is None:
        return None
    keys = await database.keys.create(tenant_id)
    await database.keys.settle(tenant_id)
    return keys


def _entry(writer: ChainWriter, type_: str, hold_id: UUID, matter: Matter, keys: RunKeys | None, **fields: Any) -> None:
    draft = matter.draft()
    writer.statement(INSERT, draft.row(matter.tenant_id, matter.tenant_id, keys))
    writer.entry(type_, hold=str(hold_id), matter=matter.matter, **fields, artifacts=[draft.committed()])


async def _the(database: Database, matter: Matter) -> HoldView:
    for view in await list_holds(database, matter.tenant_id):
        if view.matter == matter.matter:
            return view
    raise RefusedError("hold-unknown", f"nothing is held for {matter.matter} any more", hint="podium hold list")


def _view(row: Row) -> HoldView:
    names = HoldView.__dataclass_fields__
    return HoldView(**{**{name: row[name] for name in names}, "runs": tuple(row["runs"])})
