"""Staying with a run: what `run`, `fork`, `resume` and `watch` have in common once there is a run to look at.

Must never decide anything about the run; whoever leaves, leaves it going on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from engine.cli import terminal
from engine.errors import ExitCode

if TYPE_CHECKING:
    from uuid import UUID

    from engine.cli.session import Session
    from engine.store.snapshots import RunSnapshot
    from worker_pools.pool import Pool

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Seen:
    """The state that a run was seen in last, its record, and the run whose pause holds it, if it is held."""

    state: str
    run: RunSnapshot
    paused: UUID | None


async def let_finish(work: Coroutine[Any, Any, Result], done: Callable[[Result], None]) -> Result:
    """A write of milliseconds, finished even if Ctrl-C meets it, so that the user is told what became of it.

    `done` is told the result in both cases.
    """
    task = asyncio.ensure_future(work)
    try:
        result = await asyncio.shield(task)
    except asyncio.CancelledError:
        done(await task)
        raise
    done(result)
    return result


async def escort(session: Session, run_id: UUID, *, as_json: bool, first_call: bool = False) -> Seen:
    """Shows progress until the run has ended or waits for somebody.

    A missing key is waited for a little if the session handed keys over. `first_call` is as in
    `engine.cli.views.open_view`.
    """
    from engine.cli.follow import PATIENCE_S, follow, stays_on
    from engine.cli.reads import note_read
    from engine.cli.session import pinned_pool
    from engine.cli.views import open_view
    from engine.operations.pausing import paused_run
    from engine.service import find_run

    with open_view(as_json=as_json, first_call=first_call) as view:
        progress = await follow(
            session.database,
            run_id,
            view,
            shortage=session.shortage,
            patience_s=PATIENCE_S if session.keys_given else 0.0,
            stays=stays_on(as_json=as_json),
        )
    run = await find_run(session.database, str(run_id))
    paused = await paused_run(session.database, run_id) if run.reason == "paused" else None
    if run.answer is not None:
        await note_read(session, run, await pinned_pool(session.database, run.pool_digest), "watch")
    return Seen(progress.state, run, paused)


def report(seen: Seen, pool: Pool | None, *, as_json: bool) -> int:
    """Prints the answer, or why there is none; returns the exit code that belongs to the state seen last."""
    from engine.cli.follow import exit_code, say_how_it_ended
    from engine.cli.tables import print_result

    print_result(seen.run, as_json=as_json)
    say_how_it_ended(seen.run, pool, seen.paused)
    return exit_code(seen.state)


async def leave(session: Session, run_id: UUID, *, as_json: bool) -> int:
    """`--detach`: says which run goes on, and how to follow it."""
    from engine.cli.contract import run_object
    from engine.cli.follow import detached_words
    from engine.service import find_run

    if as_json:
        terminal.out_json(run_object(await find_run(session.database, str(run_id))))
    else:
        terminal.out(str(run_id))
        terminal.err(detached_words(run_id, embedded=session.services.embedded))
    return ExitCode.OK


def interrupted(run_id: UUID, *, as_json: bool, embedded: bool) -> int:
    """Ctrl-C while a run goes on."""
    from engine.cli.follow import detached_words

    words = detached_words(run_id, embedded=embedded)
    return _report_interrupt(words, words, None, as_json=as_json)


def interrupted_early(words: str, hint: str, *, line: str, as_json: bool) -> int:
    """Ctrl-C before it was known whether there is a run; `line` is how a person is told of both."""
    return _report_interrupt(line, words, hint, as_json=as_json)


def _report_interrupt(line: str, words: str, hint: str | None, *, as_json: bool) -> int:
    from engine.cli.ending import error_object

    terminal.err(line)
    if as_json:
        terminal.out_json(error_object("interrupted", words, hint))
    return ExitCode.INTERRUPTED
