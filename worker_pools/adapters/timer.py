"""The clock of one call: its three limits as one deadline that moves.

`async with CallTimer(...)` raises TimeoutError at the deadline, and `code` then says which limit it was. All limits of
all adapters are set here and nowhere else. Times are in seconds on the monotonic clock.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Self

from worker_pools.pool import Timeouts


class CallTimer:
    """Starts with the wait for the first token; `arrived` at each piece moves the deadline."""

    def __init__(self, limits: Timeouts) -> None:
        self._limits = limits
        self._started = time.monotonic()
        self._timeout = asyncio.timeout(None)
        self.first_token_s: float | None = None
        self.code = "first-token-timeout"

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self.within(self._limits.first_token_s, "first-token-timeout")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._timeout.__aexit__(kind, error, trace)

    @property
    def expired(self) -> bool:
        """Whether the deadline has passed, as opposed to a TimeoutError of somebody else."""
        return self._timeout.expired()

    def arrived(self) -> None:
        """A piece of the answer or of the reasoning is here; the next one must follow within `idle_s`."""
        if self.first_token_s is None:
            self.first_token_s = self.elapsed_s()
        self.within(self._limits.idle_s, "idle-timeout")

    def within(self, wait_s: float, code: str) -> None:
        """Whatever comes next must come within `wait_s` and before the call's own end."""
        left_s = self._limits.call_s - self.elapsed_s()
        self.code = code if wait_s < left_s else "call-timeout"
        self._timeout.reschedule(asyncio.get_running_loop().time() + min(wait_s, left_s))

    def elapsed_s(self) -> float:
        """Seconds since the call began."""
        return time.monotonic() - self._started
