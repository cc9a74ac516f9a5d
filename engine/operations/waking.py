"""Waking a run's workflow after an order was written down. Must never be what makes an order count: the row is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING
from uuid import UUID

from engine.errors import UnavailableError
from engine.store.database import Database

if TYPE_CHECKING:
    from temporalio.client import Client

# Temporal, connected when it is needed: an order is on record before anybody looks whether Temporal is there.
Connect = Callable[[], Awaitable["Client"]]
TEMPORAL_AWAY = "temporal-unreachable"


async def wake_when_connected(database: Database, connect: Connect, run_id: UUID) -> bool:
    """Wakes the workflows of a run and its live descendants (or cancels them, if that was ordered).

    Then clears ``runs.wake_requested_at``, unless a newer order set it again. False if Temporal is away: the order
    stands all the same, and the reconciler of any worker repeats the wake-up.
    """
    # Imported here: Temporal's SDK takes half a second that commands which only read need not wait for.
    from activities.waking import deliver_orders  # noqa: PLC0415  # see above

    try:
        await deliver_orders(database, await connect(), run_id)
    except UnavailableError as error:
        if error.code != TEMPORAL_AWAY:
            raise
        return False
    return True
