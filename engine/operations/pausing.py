"""Pausing a run and taking the pause back: nothing new starts meanwhile, and calls in flight finish and are kept."""

from __future__ import annotations

from engine.operations.cancelling import Given
from engine.operations.waking import Connect, wake_when_connected
from engine.store.database import Database
from engine.store.orders import Order
from engine.store.orders import pause_run as write_pause
from engine.store.orders import unpause_run as write_unpause


async def pause_run(database: Database, connect: Connect, order: Order) -> Given:
    """Holds a run and everything below it. Raises RefusedError ``run-ended``, ``run-cancelling``, ``run-paused``."""
    ordered = await write_pause(database, order)
    return Given(ordered, await wake_when_connected(database, connect, order.run_id))


async def unpause_run(database: Database, connect: Connect, order: Order) -> Given:
    """Lets a run go on. Raises RefusedError ``run-ended``, ``run-cancelling``, ``run-not-paused``."""
    ordered = await write_unpause(database, order)
    return Given(ordered, await wake_when_connected(database, connect, order.run_id))
