"""`podium show`: everything about one run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from engine.cli import terminal
from engine.errors import ExitCode

if TYPE_CHECKING:
    from engine.settings import Settings
    from engine.store.database import Database
    from engine.store.snapshots import RunSnapshot
    from worker_pools.pool import Pool


@click.command()
@click.argument("run_reference", metavar="RUN")
@click.option("--json", "as_json", is_flag=True, help="Print the run as one JSON object.")
def show(run_reference: str, as_json: bool) -> int:
    """Show RUN (an id, the beginning of one, or 'last'): plan, steps, attempts, costs, answer."""
    from engine.cli.contract import run_object
    from engine.cli.session import run_async, settings_for_run
    from engine.cli.tables import print_run

    settings = settings_for_run()
    run, pool, remarks, (waits, hints) = run_async(_fetch(settings, run_reference))
    if as_json:
        terminal.out_json(run_object(run, remarks))
    else:
        print_run(run, pool, remarks, waits, hints)
    return ExitCode.OK


async def _fetch(
    settings: Settings, reference: str
) -> tuple[RunSnapshot, Pool | None, list[dict[str, Any]], tuple[list[str], list[str]]]:
    """The run, its pool, what keeps it from going on though its state does not say so, and what it waits for."""
    from engine.cli.outage import shortage_words
    from engine.cli.reads import note_read
    from engine.cli.session import open_session, pinned_pool
    from engine.keeper.client import Needs
    from engine.service import find_run
    from engine.store.states import RUN_LIVE

    async with open_session(settings, Needs()) as session:
        run = await find_run(session.database, reference)
        short = await session.shortage() if run.state in RUN_LIVE else None
        words = [] if short is None else [(short.code, "; ".join(shortage_words(short, run.id)))]
        remarks = [{"code": code, "field": None, "position": None, "text": text} for code, text in words]
        pool = await pinned_pool(session.database, run.pool_digest)
        await note_read(session, run, pool, "show")
        return run, pool, remarks, await _waits(session.database, run)


async def _waits(database: Database, run: RunSnapshot) -> tuple[list[str], list[str]]:
    """What a run, or else the run below it that everything is left to, waits for, and the commands that answer."""
    from engine.cli.follow import waits_below
    from engine.cli.render import state_words
    from engine.cli.session import pinned_pool
    from engine.cli.tree import place_words
    from engine.cli.waits import hint_lines, key_hints, wait_lines
    from engine.operations.pausing import paused_run
    from engine.service import find_run

    below = None if run.state == "waiting" else waits_below(run)
    where = run if below is None else await find_run(database, str(below.id))
    paused = await paused_run(database, where.id) if where.reason == "paused" else None
    hints = hint_lines(where, paused) + key_hints(where, await pinned_pool(database, where.pool_digest))
    lines = wait_lines(where)
    if below is None:
        return lines, hints
    of = "" if below.parent.run_id == run.id else f" of run {below.parent.run_id}"
    head = f"run {where.id} below it ({place_words(below.parent)}{of}): {state_words(where.state, where.reason)}"
    return [head, *(f"run {where.id}: {line}" for line in lines)], hints
