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
    """Follow RUN (an id, the beginning of one, or 'last') until it ends.

    Keys that the run waits for are handed over if they are set here. Ctrl-C leaves the run going on. Into a pipe or a
    file only the answer goes; table and summary go to standard error then.
    """
    from engine.cli.session import run_async, settings_for_reading

    settings = settings_for_reading(run_reference)
    assert settings is not None
    try:
        return run_async(_watch(settings, run_reference, as_json=as_json))
    except KeyboardInterrupt:
        terminal.err(f"no longer watching; `podium watch {run_reference}` does so again")
        return ExitCode.INTERRUPTED


async def _watch(settings: Settings, reference: str, *, as_json: bool) -> int:
    from engine.cli.follow import PATIENCE_S, exit_code, follow, say_how_it_ended, stays_on
    from engine.cli.session import open_session, pinned_pool
    from engine.cli.tables import print_result
    from engine.cli.views import open_view
    from engine.keeper.client import Needs
    from engine.operations.pausing import paused_run
    from engine.service import find_run, resolve_run

    async with open_session(settings, Needs()) as session:
        run_id = await resolve_run(session.database, reference)
        session.run_id = run_id
        patience_s = PATIENCE_S if session.handed_over else 0.0
        with open_view(as_json=as_json) as view:
            progress = await follow(
                session.database,
                run_id,
                view,
                shortage=session.shortage,
                patience_s=patience_s,
                stays=stays_on(as_json=as_json),
            )
        run = await find_run(session.database, str(run_id))
        pool = await pinned_pool(session.database, run.pool_digest)
        paused = await paused_run(session.database, run_id) if run.reason == "paused" else None
    print_result(run, as_json=as_json)
    say_how_it_ended(run, pool, paused)
    return exit_code(progress.state)
