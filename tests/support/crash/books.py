"""What the crash suite judges: every row of a database that the checks need, read in one snapshot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import dict_row

from tests.support.stored import plain_url


@dataclass(frozen=True, slots=True)
class Fault:
    """A broken promise, and the run whose record shows it, if it is one's."""

    run_id: UUID | None
    text: str


@dataclass(frozen=True, slots=True)
class Books:
    """Every row of a database that the checks need, as they were at one moment."""

    runs: dict[UUID, dict[str, Any]]
    steps: dict[UUID, list[dict[str, Any]]]
    attempts: dict[UUID, list[dict[str, Any]]]
    bodies: dict[UUID, list[bytes]]
    heads: dict[UUID, dict[str, Any]]
    budgets: list[dict[str, Any]]
    reviews: dict[UUID, list[dict[str, Any]]]
    # With the id of the run that they are about.
    decisions: dict[UUID, list[dict[str, Any]]]


async def read_books(url: str) -> Books:
    """Reads all runs of a database in one snapshot."""
    async with await psycopg.AsyncConnection.connect(plain_url(url), row_factory=dict_row) as link:
        await link.set_isolation_level(psycopg.IsolationLevel.REPEATABLE_READ)

        async def rows(query: str) -> list[dict[str, Any]]:
            return await (await link.execute(query.encode())).fetchall()

        runs = await rows("SELECT * FROM runs ORDER BY id")
        steps = await rows("SELECT * FROM steps ORDER BY round, position")
        attempts = await rows("SELECT * FROM attempts ORDER BY round, position NULLS FIRST, number")
        entries = await rows("SELECT run_id, body FROM ledger_entries ORDER BY run_id, seq")
        heads = await rows("SELECT * FROM ledger_heads")
        budgets = await rows("SELECT * FROM budgets")
        reviews = await rows("SELECT * FROM reviews ORDER BY run_id, seq")
        decisions = await rows(
            "SELECT review_decisions.*, run_id FROM review_decisions JOIN reviews ON reviews.id = review_id"
        )
    bodies: dict[UUID, list[bytes]] = defaultdict(list)
    for entry in entries:
        bodies[entry["run_id"]].append(entry["body"])
    return Books(
        runs={run["id"]: run for run in runs},
        steps=_by_run(steps),
        attempts=_by_run(attempts),
        bodies=bodies,
        heads={head["run_id"]: head for head in heads},
        budgets=budgets,
        reviews=_by_run(reviews),
        decisions=_by_run(decisions),
    )


def _by_run(rows: Iterable[dict[str, Any]]) -> dict[UUID, list[dict[str, Any]]]:
    found: dict[UUID, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        found[row["run_id"]].append(row)
    return found
