"""A run's budget while it goes on: looking at it, raising it, lowering it, giving a first one.

The order goes on record, then the workflows that wait for it are woken.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from engine.operations.cancelling import Given
from engine.operations.waking import Connect, wake_when_connected
from engine.service import refuse_unpriced
from engine.store.budgets import READ_BUDGET, BudgetSnapshot, budget_snapshot
from engine.store.database import Database
from engine.store.inputs import read_pool_document
from engine.store.orders import Order
from engine.store.raising import LimitChange
from engine.store.raising import change_budget as write_change
from worker_pools.pool import pool_from_document


@dataclass(frozen=True, slots=True)
class BudgetGiven:
    """The order as it stands, and the budget as it is now (None: the run has none)."""

    given: Given
    budget: BudgetSnapshot | None


async def read_budget(database: Database, run_id: UUID) -> BudgetSnapshot | None:
    """The budget that a run spends from: its own, else the nearest of its ancestors'; None if there is none."""
    (rows,) = await database.fetch((READ_BUDGET, (run_id,)))
    return budget_snapshot(rows[0]) if rows else None


async def change_budget(
    database: Database, connect: Connect, order: Order, change: LimitChange, *, pool_digest: str
) -> BudgetGiven:
    """Changes a run's limits. ``pool_digest`` names the pool that the run is pinned to.

    Raises what `engine.store.raising.change_budget` does, and InputError ``budget-price-unknown`` for a limit in
    dollars where a model of the pool has no price.
    """
    if change.limits.usd is not None:
        refuse_unpriced(pool_from_document(await read_pool_document(database, pool_digest)), change.limits)
    changed = await write_change(database, order, change)
    if not changed.ordered.changed:
        return BudgetGiven(Given(changed.ordered, delivered=True), changed.budget)
    delivered = await wake_when_connected(database, connect, order.run_id)
    return BudgetGiven(Given(changed.ordered, delivered), changed.budget)
