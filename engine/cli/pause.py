"""`podium pause`: nothing new starts in a run until `podium unpause`."""

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
def pause(run_reference: str, reason: str | None, as_json: bool) -> int:
    """Pause RUN (an id, the beginning of one, or 'last'): nothing new starts.

    Calls in flight finish, and their answers are kept. The run's deadline goes on.
    """
    from engine.cli.orders import settings_for_order
    from engine.cli.session import run_async

    settings = settings_for_order(reason)
    return run_async(_pause(settings, run_reference, reason, as_json=as_json))


async def _pause(settings: Settings, reference: str, reason: str | None, *, as_json: bool) -> int:
    from engine.cli.orders import order_object, order_of, say_if_not_delivered
    from engine.cli.session import open_session
    from engine.keeper.client import Needs
    from engine.operations.pausing import pause_run
    from engine.service import find_run, resolve_run

    async with open_session(settings, Needs()) as session:
        run_id = await resolve_run(session.database, reference)
        order = order_of(settings, run_id, reason)
        given = await pause_run(session.database, session.client, order)
        run = await find_run(session.database, str(run_id))
    if as_json:
        terminal.out_json(order_object("pause", order, given, run.state, run.reason))
        return ExitCode.OK
    say_if_not_delivered(given)
    in_flight = sum(attempt.state == "sent" for step in run.steps for attempt in step.attempts)
    in_flight += sum(attempt.state == "sent" for attempt in run.planning)
    finishing = f"; {in_flight} call{'' if in_flight == 1 else 's'} in flight will finish" if in_flight else ""
    terminal.out(f"run {run_id} is paused{finishing}")
    terminal.err(f"hint: podium unpause {run_id}")
    return ExitCode.OK
