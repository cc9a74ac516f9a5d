"""`podium unpause`: lets a paused run go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from engine.cli import terminal
from engine.cli.orders import reason_option, run_argument
from engine.errors import ExitCode

if TYPE_CHECKING:
    from engine.settings import Settings


@click.command()
@run_argument
@reason_option
@click.option("--json", "as_json", is_flag=True, help="Print what came of it as one JSON object.")
def unpause(run_reference: str, reason: str | None, as_json: bool) -> int:
    """Let RUN (an id, the beginning of one, or 'last') go on after a pause."""
    from engine.cli.orders import settings_for_order
    from engine.cli.session import run_async

    settings = settings_for_order(reason)
    return run_async(_unpause(settings, run_reference, reason, as_json=as_json))


async def _unpause(settings: Settings, reference: str, reason: str | None, *, as_json: bool) -> int:
    from engine.cli.orders import order_object, order_of, say_if_not_delivered
    from engine.cli.session import open_session
    from engine.keeper.client import Needs
    from engine.operations.pausing import paused_run, unpause_run
    from engine.service import resolve_run

    async with open_session(settings, Needs()) as session:
        run_id = await resolve_run(session.database, reference)
        order = order_of(settings, run_id, reason)
        given = await unpause_run(session.database, session.client, order)
        above = await paused_run(session.database, run_id)
    if as_json:
        terminal.out_json(order_object("unpause", order, given, given.ordered.state, given.ordered.reason))
        return ExitCode.OK
    say_if_not_delivered(given)
    if above is not None:
        terminal.out(f"run {run_id} is not paused itself any more, but run {above} above it still is")
        terminal.err(f"hint: podium unpause {above}")
        return ExitCode.OK
    terminal.out(f"run {run_id} goes on")
    terminal.err(f"hint: podium watch {run_id}")
    return ExitCode.OK
