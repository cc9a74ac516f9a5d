"""Following a run until it ends or waits for somebody: looks a few times a second, listens for arriving tokens.

Only looks. Whoever stops following changes nothing about the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol
from uuid import UUID

from activities.progress import CHANNEL
from engine.cli import terminal
from engine.cli.diagnosis import blame, why_stopped
from engine.cli.outage import shortage_words
from engine.cli.render import duration
from engine.cli.waits import hint_lines, key_hints, wait_lines
from engine.errors import ExitCode, UnavailableError
from engine.store.database import Database
from engine.store.gates import REVIEW
from engine.store.snapshots import RunSnapshot
from engine.store.states import RUN_ENDED, RUN_LIVE
from engine.store.trees import Descendant, who_waits
from engine.store.waiting import BUDGET_REASONS, OPERATOR, PAUSED
from engine.store.watching import RunProgress, listen, read_progress
from worker_pools.pool import Pool

POLL_S: Final = 0.2
# A step that waits for a key asks for it every 5 s; a key that was just handed over needs that long to be found.
PATIENCE_S: Final = 12.0
# A database that restarts or fails over is back within seconds; who follows a run need not notice.
OUTAGE_S: Final = 15.0
RETRY_PAUSE_S: Final = 0.5
SPACE_POLL_S: Final = 1.0
# Reasons to wait that end only when somebody does something.
SOMEBODY: Final = frozenset({"secret-missing", PAUSED, OPERATOR, REVIEW, *BUDGET_REASONS})
# These are answered by commands, from wherever; a missing key has to be handed over from here.
ANSWERED_ELSEWHERE: Final = frozenset({OPERATOR, REVIEW, *BUDGET_REASONS})
# A budget that looks used up for a moment may have room again with the end of the call that is just being written.
BUDGET_PATIENCE_S: Final = 2.0
EXIT_CODES: Final[dict[str, ExitCode]] = {
    "succeeded": ExitCode.OK,
    "failed": ExitCode.FAILED,
    "cancelled": ExitCode.CANCELLED,
    "waiting": ExitCode.WAITING,
}


Shortage = Callable[[], Awaitable[UnavailableError | None]]


class View(Protocol):
    """Whoever shows progress."""

    def update(self, progress: RunProgress) -> None:
        """The run's present state."""

    def pieces(self, round_number: int, place: str, count: int) -> None:
        """So many pieces (about one a token) of an answer have arrived; `place` is `plan` or a position."""


async def follow(
    database: Database,
    run_id: UUID,
    view: View,
    *,
    shortage: Shortage,
    patience_s: float = 0.0,
    stays: bool = False,
) -> RunProgress:
    """Returns the run's state when it has ended, or waits for somebody for longer than `patience_s`.

    With `stays` it goes on looking at a run that waits for an answer or a budget: somebody at a terminal sees from the
    view what is missing, and that the run goes on once it came.

    Says when the servers lack space (`shortage` looks for that), which no state of the run shows: nothing can be
    written then.
    """
    waiting_since: float | None = None
    space = _Space(run_id, shortage)
    async with _beside(_hear(database, run_id, view)), _beside(space.mind()):
        while True:
            progress = await _look(database, run_id)
            view.update(progress)
            if progress.state in RUN_ENDED:
                space.ended()
                return progress
            reason = _waits_for(progress)
            if reason is None or (stays and reason in ANSWERED_ELSEWHERE):
                waiting_since = None
            else:
                waiting_since = waiting_since or time.monotonic()
                if time.monotonic() - waiting_since >= _patience_s(reason, patience_s):
                    return progress
            await asyncio.sleep(POLL_S)


def _waits_for(progress: RunProgress) -> str | None:
    """What the run, or else the runs below it to which all of its present work was handed, waits for."""
    if progress.state == "waiting" and progress.reason in SOMEBODY:
        return progress.reason
    waiting = who_waits(progress.id, _running(progress), progress.below, SOMEBODY)
    return None if waiting is None else waiting.reason


def _running(run: RunProgress | RunSnapshot) -> int:
    return sum(step.state == "running" for step in run.steps)


def waits_below(run: RunSnapshot) -> Descendant | None:
    """The run below a run that goes on, if all that is left of it waits there for somebody."""
    return who_waits(run.id, _running(run), run.below, SOMEBODY) if run.state in RUN_LIVE else None


def _patience_s(reason: str, patience_s: float) -> float:
    if reason in BUDGET_REASONS:
        return BUDGET_PATIENCE_S
    return patience_s if reason == "secret-missing" else 0.0


def stays_on(*, as_json: bool) -> bool:
    """Whether whoever called has a terminal to look at a run that waits, and nobody waits for the command's end."""
    return not as_json and terminal.err_is_terminal() and terminal.out_is_terminal()


async def _look(database: Database, run_id: UUID) -> RunProgress:
    give_up_at = time.monotonic() + OUTAGE_S
    while True:
        try:
            progress = await read_progress(database, run_id)
        except UnavailableError:
            if time.monotonic() > give_up_at:
                raise
            await asyncio.sleep(RETRY_PAUSE_S)
            continue
        if progress is None:
            from engine.service import unknown_run

            raise unknown_run(run_id)
        return progress


async def _hear(database: Database, run_id: UUID, view: View) -> None:
    while True:
        # Progress of tokens is a courtesy: whatever keeps it from coming must not disturb the rest.
        with contextlib.suppress(OSError):
            async with contextlib.aclosing(listen(database, CHANNEL)) as payloads:
                async for payload in payloads:
                    for line in payload.splitlines():
                        own, round_number, place, count = line.split(" ")
                        if own == str(run_id):
                            view.pieces(int(round_number), place, int(count))
        await asyncio.sleep(RETRY_PAUSE_S)


@dataclass(slots=True)
class _Space:
    """Whether the servers lack space, told when it begins and when it is over, each once."""

    run_id: UUID
    shortage: Shortage
    is_short: bool = False

    async def mind(self) -> None:
        """Looks again and again."""
        while True:
            self._tell(await self.shortage())
            await asyncio.sleep(SPACE_POLL_S)

    def ended(self) -> None:
        """The run has ended, so there was space to write that down; it does not go on any more."""
        self._tell(None, over="there is space again")

    def _tell(self, found: UnavailableError | None, over: str = "there is space again; the run goes on") -> None:
        if found is not None and not self.is_short:
            message, hint = shortage_words(found, self.run_id)
            terminal.err(f"warning: {found.code}: {terminal.inert(message)}")
            terminal.err(f"hint: {terminal.inert(hint)}")
        elif found is None and self.is_short:
            terminal.err(over)
        self.is_short = found is not None


@asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Does work that never ends for as long as the context is open."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def exit_code(state: str) -> ExitCode:
    """What a command that followed a run to this state ends with; a live run waits, or it would be followed on."""
    return EXIT_CODES.get(state, ExitCode.WAITING)


def say_how_it_ended(run: RunSnapshot, pool: Pool | None, paused: UUID | None = None) -> None:
    """One line on standard error for a run that did not succeed, with what to do about it.

    ``paused`` is the run whose pause holds this one, if it is not its own.
    """
    words = f"run {run.id} {run.state}" + (f": {run.reason}" if run.reason else "")
    if run.state == "failed":
        terminal.err(f"error: {words}{blame(run, pool)}")
        terminal.err(f"hint: podium show {run.id}; podium resume {run.id} goes on with what is not done")
    elif run.state == "cancelled":
        terminal.err(words)
    elif run.state == "waiting":
        terminal.err(words)
        for line in wait_lines(run, why_stopped(run, pool)):
            terminal.err(line)
        for hint in _what_it_waits_for(run, pool, paused):
            terminal.err(f"hint: {hint}")
    elif (below := waits_below(run)) is not None:
        terminal.err(f"{words}; run {below.id} below it waits ({below.reason})")
        terminal.err(f"hint: podium show {below.id}")


def _what_it_waits_for(run: RunSnapshot, pool: Pool | None, paused: UUID | None) -> list[str]:
    if run.reason == "secret-missing":
        return key_hints(run, pool)
    return hint_lines(run, paused) or [f"podium show {run.id}"]


def detached_words(run_id: UUID, *, embedded: bool) -> str:
    """What is said to somebody who leaves a run that goes on."""
    where = "in the keeper" if embedded else "in your workers"
    return f"detached: run {run_id} goes on {where}; `podium watch {run_id}` follows it again"


def elapsed(progress: RunProgress) -> str:
    """Time since the run was created, by the database's clock."""
    return duration(((progress.ended_at or progress.read_at) - progress.created_at).total_seconds())
