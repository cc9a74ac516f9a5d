"""Cancelling a run: the order goes on record, then its workflow is told; waiting for the end is another call.

Must never report a run as cancelled that ended in another way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID

from engine.operations.waking import Connect, wake_when_connected
from engine.store.database import Database
from engine.store.orders import Order, Ordered, request_cancel
from engine.store.states import RUN_ENDED
from engine.store.watching import RunProgress, read_progress

POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Given:
    """An order as it stands, and whether the workflow was told; if not, the reconciler of any worker tells it."""

    ordered: Ordered
    delivered: bool


async def cancel_run(database: Database, connect: Connect, order: Order) -> Given:
    """Orders that a run and everything below it end; nothing new is called from now on.

    Harmless if that was ordered before. Raises RefusedError ``run-ended`` for a run that succeeded or failed.
    """
    ordered = await request_cancel(database, order)
    if ordered.state in RUN_ENDED:
        return Given(ordered, delivered=True)
    return Given(ordered, await wake_when_connected(database, connect, order.run_id))


async def wait_for_end(
    database: Database, run_id: UUID, *, timeout_s: float, show: Callable[[RunProgress], None] = lambda _: None
) -> RunProgress | None:
    """The run as it ended, or None if it goes on after ``timeout_s``; ``show`` is told what is seen on the way."""
    give_up_at = time.monotonic() + timeout_s
    while True:
        progress = await read_progress(database, run_id)
        if progress is None:
            # Runs are not deleted under a caller that holds the id; if one was, there is nothing to wait for.
            return None
        show(progress)
        if progress.state in RUN_ENDED:
            return progress
        if time.monotonic() >= give_up_at:
            return None
        await asyncio.sleep(POLL_S)
