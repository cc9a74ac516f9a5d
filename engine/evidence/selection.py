"""Which runs an export holds: those asked for, everything below them, and the runs that they took outputs over from.

The latter are there so that such an output can be checked where it was made; of their texts only those are disclosed
that the runs asked for were shown. Must only read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

# Every run below these, and they themselves.
_FAMILIES = text("""
    WITH RECURSIVE family AS (
        SELECT id FROM runs WHERE id = ANY(:ids)
        UNION
        SELECT child.id FROM runs child JOIN family ON child.parent_run_id = family.id
    )
    SELECT id FROM family ORDER BY id
""")
# The runs whose attempts gave an output to a step of one of these, and those that forks were made from.
_SOURCES = text("""
    SELECT attempts.run_id FROM steps JOIN attempts ON attempts.id = steps.accepted_attempt_id
    WHERE steps.run_id = ANY(:ids) AND attempts.run_id <> steps.run_id
    UNION
    SELECT source_run_id FROM runs WHERE id = ANY(:ids) AND source_run_id IS NOT NULL
    ORDER BY 1
""")


@dataclass(frozen=True, slots=True)
class Selection:
    """The runs of an export, sorted. ``taken_from`` are those that are there for their outputs only."""

    asked: tuple[UUID, ...]
    family: tuple[UUID, ...]
    taken_from: tuple[UUID, ...]

    @property
    def runs(self) -> tuple[UUID, ...]:
        """All of them."""
        return tuple(sorted((*self.family, *self.taken_from)))


async def select_runs(connection: AsyncConnection, asked: Sequence[UUID], *, with_sources: bool) -> Selection:
    """Finds them. With ``with_sources`` the runs that outputs come from count as asked for."""
    family = await _ids(connection, "families", asked)
    known = set(family)
    fresh = list(family)
    taken: set[UUID] = set()
    while fresh:
        found = [run for run in await _ids(connection, "sources", fresh) if run not in known]
        if with_sources and found:
            found = [run for run in await _ids(connection, "families", found) if run not in known]
        known.update(found)
        taken.update(found)
        fresh = found
    if with_sources:
        return Selection(tuple(asked), tuple(sorted(known)), ())
    return Selection(tuple(asked), tuple(sorted(family)), tuple(sorted(taken)))


async def _ids(connection: AsyncConnection, what: str, ids: Sequence[UUID]) -> list[UUID]:
    query = _FAMILIES if what == "families" else _SOURCES
    return [row[0] for row in await connection.execute(query, {"ids": list(ids)})]
