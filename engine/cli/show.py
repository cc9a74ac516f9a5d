"""`podium show`: everything about one run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from engine.cli import terminal
from engine.errors import ExitCode

if TYPE_CHECKING:
    from engine.settings import Settings
    from engine.store.snapshots import RunSnapshot
    from worker_pools.pool import Pool


@click.command()
@click.argument("run_reference", metavar="RUN")
@click.option("--json", "as_json", is_flag=True, help="Print the run as one JSON object.")
def show(run_reference: str, as_json: bool) -> int:
    """Show RUN (an id, the beginning of one, or 'last'): plan, steps, attempts, costs, answer."""
    from engine.cli.contract import run_object
    from engine.cli.session import run_async, settings_for_reading
    from engine.cli.tables import print_run

    settings = settings_for_reading(run_reference)
    assert settings is not None
    run, pool, remarks = run_async(_fetch(settings, run_reference))
    if as_json:
        terminal.out_json(run_object(run, remarks))
    else:
        print_run(run, pool, remarks)
    return ExitCode.OK


async def fetch_run(settings: Settings, reference: str) -> RunSnapshot:
    """Reads one run by id, prefix or `last`."""
    from engine.cli.session import open_session
    from engine.keeper.client import Needs
    from engine.service import find_run

    async with open_session(settings, Needs()) as session:
        return await find_run(session.database, reference)


async def _fetch(settings: Settings, reference: str) -> tuple[RunSnapshot, Pool | None, list[dict[str, Any]]]:
    """The run, its pool, and what keeps it from going on though its state does not say so."""
    from engine.cli.outage import shortage_words
    from engine.cli.session import open_session, pinned_pool
    from engine.keeper.client import Needs
    from engine.service import find_run
    from engine.store.states import RUN_LIVE

    async with open_session(settings, Needs()) as session:
        run = await find_run(session.database, reference)
        short = await session.shortage() if run.state in RUN_LIVE else None
        words = [] if short is None else [(short.code, "; ".join(shortage_words(short, run.id)))]
        remarks = [{"code": code, "field": None, "position": None, "text": text} for code, text in words]
        return run, await pinned_pool(session.database, run.pool_digest), remarks
