"""The keys that a process holds: read once a run, remembered for a short time, given up when the record says so.

Must never use a secret of an epoch that the database calls past: every query for texts also reads the run's epoch.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final
from uuid import UUID

from engine.errors import UnavailableError
from engine.keystore.interface import KeyStore
from engine.keystore.keys import RunKeys

CACHED_MAX: Final = 4096
# A destroyed secret leaves the memory of all processes within that time, also of those that never ask again.
CACHED_S: Final = 60.0


class Keyring:
    """A key store with a bounded memory of what was read from it. Safe to share between tasks of one event loop."""

    def __init__(self, store: KeyStore, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.store = store
        self._clock = clock
        self._cached: OrderedDict[UUID, tuple[float, RunKeys]] = OrderedDict()

    async def create(self, run_id: UUID) -> RunKeys:
        """Makes the keys of a run about to be written; durable before it returns."""
        keys = await asyncio.to_thread(self.store.create, run_id)
        self._remember(keys)
        return keys

    async def settle(self, run_id: UUID) -> None:
        """The run is on record. Harmless for a run whose keys were not made here."""
        found = self._cached.get(run_id)
        if found is not None:
            await asyncio.to_thread(self.store.settle, found[1])

    async def for_writing(self, run_id: UUID, epoch: int) -> RunKeys:
        """The keys by which texts of a run are sealed that the database says to be in ``epoch``.

        Raises UnavailableError ``text-key-missing``, or ``erasure-unfinished`` while the store is behind the database.
        """
        keys = await self.for_reading(run_id, epoch)
        if keys.epoch < epoch:
            raise UnavailableError(
                "erasure-unfinished",
                f"texts of run {run_id} are being erased",
                hint="try again in a moment; if it stays so, `podium doctor` looks at the key store",
            )
        return keys

    async def for_reading(self, run_id: UUID, epoch: int) -> RunKeys:
        """The keys of a run; a remembered one only while the database names the same epoch.

        Raises UnavailableError ``text-key-missing`` if the store has none.
        """
        self.forget_expired()
        found = self._cached.get(run_id)
        if found is not None and found[1].epoch == epoch:
            return found[1]
        self.forget(run_id)
        keys = await asyncio.to_thread(self.store.read, run_id)
        if keys is None:
            raise missing(run_id)
        self._remember(keys)
        return keys

    def forget(self, run_id: UUID) -> None:
        """Gives up the keys of a run, if they are here."""
        self._cached.pop(run_id, None)

    def forget_expired(self) -> None:
        """Gives up what was read too long ago."""
        while self._cached:
            read_at, keys = next(iter(self._cached.values()))
            if self._clock() - read_at < CACHED_S:
                return
            self.forget(keys.run_id)

    def _remember(self, keys: RunKeys) -> None:
        self._cached.pop(keys.run_id, None)
        self._cached[keys.run_id] = (self._clock(), keys)
        while len(self._cached) > CACHED_MAX:
            self._cached.popitem(last=False)


def missing(run_id: UUID) -> UnavailableError:
    """The error for a run whose texts are sealed and whose keys are not in the store."""
    return UnavailableError(
        "text-key-missing",
        f"the key store has no key for the texts of run {run_id}",
        hint="nothing is lost yet: restore the key store from its own backup; `podium doctor` looks at it",
    )
