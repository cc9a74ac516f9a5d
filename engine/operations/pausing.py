"""Pausing a run and taking the pause back: nothing new starts meanwhile, and calls in flight finish and are kept."""

from __future__ import annotations

from typing import Final
from uuid import UUID

from engine.errors import RefusedError
from engine.operations.cancelling import Given
from engine.operations.waking import Connect, wake_when_connected
from engine.store.database import Database
from engine.store.lineage import LINE_ABOVE
from engine.store.orders import Order
from engine.store.orders import pause_run as write_pause
from engine.store.orders import unpause_run as write_unpause

_READ_PAUSED: Final = f"""{LINE_ABOVE}
    SELECT runs.id FROM runs JOIN line ON line.id = runs.id
    WHERE runs.paused_at IS NOT NULL ORDER BY line.height LIMIT 1
"""  # noqa: S608  # a constant


async def pause_run(database: Database, connect: Connect, order: Order) -> Given:
    """Holds a run and everything below it. Raises RefusedError ``run-ended``, ``run-cancelling``, ``run-paused``."""
    ordered = await write_pause(database, order)
    return Given(ordered, await wake_when_connected(database, connect, order.run_id))


async def unpause_run(database: Database, connect: Connect, order: Order) -> Given:
    """Lets a run go on, unless a run above it is paused, too (see `paused_run`).

    Raises RefusedError ``run-ended``, ``run-cancelling``, ``run-not-paused``.
    """
    try:
        ordered = await write_unpause(database, order)
    except RefusedError as error:
        above = await paused_run(database, order.run_id) if error.code == "run-not-paused" else None
        if above is None:
            raise
        raise RefusedError(
            error.code,
            f"run {order.run_id} is not paused itself: run {above} above it is",
            hint=f"podium unpause {above}",
        ) from None
    return Given(ordered, await wake_when_connected(database, connect, order.run_id))


async def paused_run(database: Database, run_id: UUID) -> UUID | None:
    """The run whose pause holds this one: itself, else the nearest paused run above it; None if there is none."""
    (rows,) = await database.fetch((_READ_PAUSED, (run_id,)))
    return rows[0]["id"] if rows else None
