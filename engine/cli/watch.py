"""`podium watch`: follows a run that goes on, and prints what `run` would have printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from engine.cli import terminal
from engine.errors import ExitCode

if TYPE_CHECKING:
    from engine.settings import Settings


@click.command()
@click.argument("run_reference", metavar="RUN")
@click.option("--json", "as_json", is_flag=True, help="Print the run as one JSON object when it has ended.")
def watch(run_reference: str, as_json: bool) -> int:
    """Follow RUN (an id, the beginning of one, or 'last') until it ends or waits for somebody (3; a terminal stays).

    Keys that the run waits for are handed over if they are set here. Ctrl-C leaves the run going on. Into a pipe or a
    file only the answer goes; table and summary go to standard error then.
    """
    from engine.cli.session import run_async, settings_for_run

    settings = settings_for_run()
    try:
        return run_async(_watch(settings, run_reference, as_json=as_json))
    except KeyboardInterrupt:
        terminal.err(f"no longer watching; `podium watch {run_reference}` does so again")
        return ExitCode.INTERRUPTED


async def _watch(settings: Settings, reference: str, *, as_json: bool) -> int:
    from engine.cli.escort import escort, report
    from engine.cli.session import open_session, pinned_pool
    from engine.keeper.client import Needs
    from engine.service import resolve_run

    async with open_session(settings, Needs()) as session:
        run_id = session.run_id = await resolve_run(session.database, reference)
        seen = await escort(session, run_id, as_json=as_json)
        pool = await pinned_pool(session.database, seen.run.pool_digest)
    return report(seen, pool, as_json=as_json)
