"""Following a run until it ends or waits for somebody: looks a few times a second, listens for arriving tokens.

Only looks. Whoever stops following changes nothing about the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Protocol
from uuid import UUID

from activities.progress import CHANNEL
from engine.cli import terminal
from engine.cli.diagnosis import blame, model_of
from engine.cli.render import duration
from engine.errors import ExitCode, InputError, UnavailableError
from engine.store.database import Database
from engine.store.snapshots import RunSnapshot
from engine.store.states import RUN_ENDED
from engine.store.watching import RunProgress, listen, read_progress
from worker_pools.pool import Pool

POLL_S: Final = 0.2
# A step that waits for a key asks for it every 5 s; a key that was just handed over needs that long to be found.
PATIENCE_S: Final = 12.0
# A database that restarts or fails over is back within seconds; who follows a run need not notice.
OUTAGE_S: Final = 15.0
RETRY_PAUSE_S: Final = 0.5
# Reasons to wait that end only when somebody does something.
SOMEBODY: Final = frozenset({"secret-missing", "review", "operator", "budget"})
EXIT_CODES: Final[dict[str, ExitCode]] = {
    "succeeded": ExitCode.OK,
    "failed": ExitCode.FAILED,
    "cancelled": ExitCode.CANCELLED,
    "waiting": ExitCode.WAITING,
}


class View(Protocol):
    """Whoever shows progress."""

    def update(self, progress: RunProgress) -> None:
        """The run's present state."""

    def pieces(self, round_number: int, place: str, count: int) -> None:
        """So many pieces (about one a token) of an answer have arrived; `place` is `plan` or a position."""


async def follow(database: Database, run_id: UUID, view: View, *, patience_s: float = 0.0) -> RunProgress:
    """Returns the run's state when it has ended, or waits for somebody for longer than `patience_s`."""
    waiting_since: float | None = None
    async with _listening(database, run_id, view):
        while True:
            progress = await _look(database, run_id)
            view.update(progress)
            if progress.state in RUN_ENDED:
                return progress
            if progress.state == "waiting" and progress.reason in SOMEBODY:
                waiting_since = waiting_since or time.monotonic()
                if time.monotonic() - waiting_since >= patience_s:
                    return progress
            else:
                waiting_since = None
            await asyncio.sleep(POLL_S)


async def _look(database: Database, run_id: UUID) -> RunProgress:
    give_up_at = time.monotonic() + OUTAGE_S
    while True:
        try:
            progress = await read_progress(database, run_id)
        except UnavailableError as error:
            if time.monotonic() < give_up_at:
                await asyncio.sleep(RETRY_PAUSE_S)
                continue
            raise UnavailableError(
                error.code,
                f"{error.message}; run {run_id} is on record and goes on when it is back",
                hint=f"podium watch {run_id}",
            ) from None
        if progress is None:
            raise InputError("run-unknown", f"there is no run {run_id}")
        return progress


@asynccontextmanager
async def _listening(database: Database, run_id: UUID, view: View) -> AsyncIterator[None]:
    async def hear() -> None:
        while True:
            # Progress of tokens is a courtesy: whatever keeps it from coming must not disturb the rest.
            with contextlib.suppress(OSError):
                async with contextlib.aclosing(listen(database, CHANNEL)) as payloads:
                    async for payload in payloads:
                        tell(payload)
            await asyncio.sleep(RETRY_PAUSE_S)

    def tell(payload: str) -> None:
        for line in payload.splitlines():
            own, round_number, place, count = line.split(" ")
            if own == str(run_id):
                view.pieces(int(round_number), place, int(count))

    task = asyncio.create_task(hear())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def exit_code(state: str) -> ExitCode:
    """What a command that followed a run to this state ends with."""
    return EXIT_CODES.get(state, ExitCode.OK)


def say_how_it_ended(run: RunSnapshot, pool: Pool | None) -> None:
    """One line on standard error for a run that did not succeed, with what to do about it."""
    words = f"run {run.id} {run.state}" + (f": {run.reason}" if run.reason else "")
    if run.state == "failed":
        terminal.err(f"error: {words}{blame(run, pool)}")
        terminal.err(f"hint: podium show {run.id}")
    elif run.state == "cancelled":
        terminal.err(words)
    elif run.state == "waiting":
        terminal.err(words)
        terminal.err(f"hint: {_what_it_waits_for(run, pool)}")


def _what_it_waits_for(run: RunSnapshot, pool: Pool | None) -> str:
    if run.reason != "secret-missing":
        return f"podium show {run.id}"
    names: list[str | None] = [step.worker for step in run.steps if step.reason == "secret-missing"] or [None]
    keys = [model.api_key for model in (model_of(pool, name) for name in names) if model is not None and model.api_key]
    whose = ", ".join(dict.fromkeys("the Conductor" if name is None else name for name in names))
    places = ", ".join(dict.fromkeys(key.env or f"the file {key.file}" for key in keys))
    what = f"set {places}" if places else "set its variable (`podium pool check` names it)"
    return f"the key of {whose} is missing: {what} and run `podium watch {run.id}`"


def detached_words(run_id: UUID, *, embedded: bool) -> str:
    """What is said to somebody who leaves a run that goes on."""
    where = "in the keeper" if embedded else "in your workers"
    return f"detached: run {run_id} goes on {where}; `podium watch {run_id}` follows it again"


def elapsed(progress: RunProgress) -> str:
    """Time since the run was created, by the database's clock."""
    return duration(((progress.ended_at or progress.read_at) - progress.created_at).total_seconds())
