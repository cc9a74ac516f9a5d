"""The sequencer: a loop of the worker process that keeps the log. Several may run; the database makes that safe."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from engine.errors import PodiumError
from engine.signing import LogKeeper

# Waiting entries get their leaves about this often; with nothing to do the looks become rarer.
PAUSE_S: Final = 1.0
PAUSE_MAX_S: Final = 4.0
FAILED_PAUSE_S: Final = 5.0
_log = logging.getLogger(__name__)


async def keep_log(keeper: LogKeeper) -> None:
    """Takes turns until it is cancelled. What goes wrong is logged and tried again: entries wait, nothing is lost."""
    pause_s = PAUSE_S
    while True:
        try:
            pause_s = PAUSE_S if await keeper.turn() else min(pause_s * 2, PAUSE_MAX_S)
        except PodiumError as error:
            _log.warning("%s: the log could not be brought up to date; it is tried again", error.code)
            pause_s = FAILED_PAUSE_S
        except Exception:  # noqa: BLE001  # logged with its trace
            # The model calls of this process are worth more than one turn of the sequencer.
            _log.exception("the sequencer failed; it tries again")
            pause_s = FAILED_PAUSE_S
        await asyncio.sleep(pause_s)
