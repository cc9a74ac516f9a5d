"""Open and Close seen from an activity: they run to their end also while the activity is being cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from engine.errors import UnavailableError
from engine.store.attempts import Ruling

Result = TypeVar("Result")
PAUSE_S = 2.0


async def to_its_end(work: Coroutine[Any, Any, Result]) -> tuple[Result, bool]:
    """The result of ``work``, which no cancellation stops, and whether one arrived meanwhile."""
    task = asyncio.create_task(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            cancelled = True
    return task.result(), cancelled


async def record(close: Callable[[], Coroutine[Any, Any, Ruling]]) -> Ruling:
    """Runs a Close until it has been recorded: what it holds was paid for, so it waits for a database that is away.

    Gives up with UnavailableError only when the activity is cancelled while the database is away; the attempt then
    counts as unknown.
    """
    while True:
        try:
            ruling, _ = await to_its_end(close())
        except UnavailableError:
            if _cancelling():
                raise
            await _pause()
        else:
            return ruling


def _cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _pause() -> Awaitable[None]:
    return asyncio.sleep(PAUSE_S)
