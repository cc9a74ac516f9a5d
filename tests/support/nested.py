"""Runs below runs: pools whose workers include the Conductor itself, plans that use it, and their runs on record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

from engine.contracts import child_run_id
from engine.store.database import Database
from engine.store.snapshots import RunSnapshot
from engine.store.trees import Totals, read_costs
from tests.support.provider import Provider
from tests.support.runs import lists_plan
from tests.support.stored import check_invariants, record, rows
from tests.support.workflows import pool_of, run_of
from worker_pools.pool import Pool

PLANNER = "planner"
SELF = {"name": "self", "description": "plans a part of its own", "kind": "conductor"}
KEEP = "The answer is right.\nmodel_id = []\nsubtasks = []\naccess_list = []\n"
# A child's plan: two calls of worker 0, one after the other.
CHAIN = lists_plan(["Look at one side.", "Look at the other side and conclude."], [[], [0]], [0, 0])


def recursive_pool(folder: Path, provider: Provider, *models: str, **changes: Any) -> Pool:
    """A pool with a worker for each model (one of the model `plain` by default), and the Conductor behind them."""
    conductor = {"model": PLANNER, **changes.pop("conductor", {})}
    more = [*changes.pop("more", []), {**SELF, **changes.pop("own", {})}]
    return pool_of(folder, provider.base_url, *(models or ("plain",)), conductor=conductor, more=more, **changes)


def pair_plan(own: int, conclude: int = 0) -> str:
    """Two parts that the Conductor (worker number `own`) plans, side by side, and a conclusion from both."""
    return lists_plan(["Split A.", "Split B.", "Conclude."], [[], [], [0, 1]], [own, own, conclude])


async def child_of(database: Database, run_id: UUID, position: int, round_number: int = 0) -> RunSnapshot:
    """The run that a step was delegated to, as it stands."""
    return await run_of(database, child_run_id(run_id, round=round_number, position=position))


async def children_of(database: Database, run_id: UUID, positions: Iterable[int] = (0, 1)) -> list[RunSnapshot]:
    """The runs that steps of the first round were delegated to."""
    return [await child_of(database, run_id, position) for position in positions]


async def family_of(database: Database, run_id: UUID) -> list[dict[str, Any]]:
    """The rows of a run and everything below it, from the top."""
    return await rows(
        database.url,
        """
        WITH RECURSIVE family AS (
            SELECT * FROM runs WHERE id = %s
            UNION ALL
            SELECT child.* FROM runs child JOIN family ON child.parent_run_id = family.id
        )
        SELECT * FROM family ORDER BY depth, id
        """,
        run_id,
    )


async def check_family(database: Database, run_id: UUID) -> list[dict[str, Any]]:
    """What must hold for each run of a tree that has ended: consistent, ended, nothing open. Returns the rows.

    The totals that people are shown of a run are those of the calls of everything below it, too.
    """
    family = await family_of(database, run_id)
    listed = await database.query(lambda connection: read_costs(connection, [run["id"] for run in family]))
    records = {run["id"]: await record(database.url, run["id"]) for run in family}
    for run in family:
        kept = records[run["id"]]
        check_invariants(kept)
        assert run["ended_at"] is not None, run
        assert run["state"] == "succeeded" or run["reason"] is not None
        assert all(row["state"] != "sent" for row in kept.attempts)
        assert all(step["state"] not in {"pending", "running", "waiting"} for step in kept.steps)
        calls = [row for below in _at_or_below(family, run["id"]) for row in records[below].attempts]
        totals = _totals_of(calls)
        assert (await run_of(database, run["id"])).totals == totals
        assert listed[run["id"]] == (totals.cost_usd if totals.cost_complete else None)
    return family


def _at_or_below(family: Sequence[dict[str, Any]], top: UUID) -> set[UUID]:
    found = {top}
    # From the top down, so a parent is met before its children.
    for run in family:
        if run["parent_run_id"] in found:
            found.add(run["id"])
    return found


def _totals_of(calls: Sequence[dict[str, Any]]) -> Totals:
    return Totals(
        cost_usd=sum((row["cost_usd"] or Decimal(0) for row in calls), Decimal(0)),
        cost_complete=all(row["cost_usd"] is not None for row in calls),
        input_tokens=sum(row["input_tokens"] or 0 for row in calls),
        output_tokens=sum(row["output_tokens"] or 0 for row in calls),
        calls=len(calls),
    )
