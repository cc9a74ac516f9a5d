"""Signs of life of an activity, from its Open to its Close, at a pace that the process as a whole can afford.

Temporal gives an activity up when it misses heartbeats, and then the model is called again; so a Close that waits for
the database must beat as well. A cancellation arrives with the answer to a heartbeat.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from temporalio import activity

from engine import contracts


@dataclass(slots=True)
class HeartbeatPace:
    """How many activities of this process are alive, and how often each of them should beat."""

    in_flight: int = 0

    @property
    def interval_s(self) -> float:
        """Seconds between two heartbeats of one activity."""
        fair = self.in_flight / contracts.HEARTBEATS_A_SECOND_MAX
        return min(max(fair, contracts.HEARTBEAT_INTERVAL_MIN_S), contracts.HEARTBEAT_INTERVAL_MAX_S)

    @contextlib.asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Sends heartbeats of the current activity for as long as the context lasts."""
        self.in_flight += 1
        task = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            self.in_flight -= 1
            task.cancel()

    async def _beat(self) -> None:
        while True:
            # The start itself counts as a sign of life, so a short call costs no heartbeat at all.
            await asyncio.sleep(self.interval_s)
            activity.heartbeat()
