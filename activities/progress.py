"""Live progress of calls: numbers only, sent to whoever listens, never stored.

A notification is lost when nobody listens, and that is right: the record of a call is its attempt, not its progress.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from uuid import UUID

from engine.errors import PodiumError
from engine.store.database import Database

CHANNEL = "podium_progress"
FLUSH_INTERVAL_S = 0.25
# PostgreSQL takes at most 8000 bytes a notification; a line is at most 80.
LINES_MAX = 80

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class ProgressBoard:
    """Collects the newest numbers of each call and sends them together, a few times a second."""

    database: Database
    _fresh: dict[tuple[UUID, int, int | None], int] = field(default_factory=dict)

    def report(self, run_id: UUID, round_number: int, position: int | None, pieces: int) -> None:
        """Remembers how many pieces of an answer (about one a token) have arrived."""
        self._fresh[run_id, round_number, position] = pieces

    async def run(self) -> None:
        """Sends until cancelled. A database that is away costs progress, nothing else."""
        while True:
            await asyncio.sleep(FLUSH_INTERVAL_S)
            try:
                await self._flush()
            except PodiumError:
                continue
            except Exception:  # noqa: BLE001  # logged with its trace
                _log.exception("the progress of calls could not be sent")

    async def _flush(self) -> None:
        if not self._fresh:
            return
        lines = [
            f"{run_id} {round_number} {'plan' if position is None else position} {pieces}"
            for (run_id, round_number, position), pieces in self._fresh.items()
        ]
        self._fresh = {}
        for first in range(0, len(lines), LINES_MAX):
            payload = "\n".join(lines[first : first + LINES_MAX])
            await self.database.fetch(("SELECT pg_notify(%s, %s)", (CHANNEL, payload)))
