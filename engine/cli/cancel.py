"""`podium cancel`: ends a run, and waits until it has ended.

Must never say that a run was cancelled that ended in another way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import click

from engine.cli import terminal
from engine.cli.orders import reason_option, run_argument
from engine.errors import ExitCode

if TYPE_CHECKING:
    from engine.cli.session import Session
    from engine.operations.cancelling import Given
    from engine.settings import Settings
    from engine.store.orders import Order
    from engine.store.watching import RunProgress

# A call in flight hears of it with its next heartbeat (at most 6 s), and then what it cost is written down.
WAIT_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class _Job:
    """What was asked for. ``wait_s`` is None with `--no-wait`."""

    settings: Settings
    reference: str
    reason: str | None
    wait_s: float | None
    as_json: bool


@click.command()
@run_argument
@reason_option
@click.option("--no-wait", is_flag=True, help="Do not wait until the run has ended.")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(0, 86_400), default=WAIT_S, show_default=True, metavar="SECONDS",
    help="How long to wait for the end.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print what came of it as one JSON object.")
def cancel(run_reference: str, reason: str | None, no_wait: bool, timeout_s: float, as_json: bool) -> int:
    """Cancel RUN (an id, the beginning of one, or 'last') and wait until it has ended.

    Calls in flight are broken off, and may be billed all the same. What was finished stays readable, and `podium
    resume` goes on from there. A second cancel does no harm. Exit code 1: the run ended in another way before.
    """
    from engine.cli.orders import settings_for_order
    from engine.cli.session import run_async

    settings = settings_for_order(reason)
    job = _Job(settings, run_reference, reason, None if no_wait else timeout_s, as_json)
    try:
        return run_async(_cancel(job))
    except KeyboardInterrupt:
        terminal.err(f"interrupted; an order that was given stands: `podium show {run_reference}` shows the run")
        return ExitCode.INTERRUPTED


async def _cancel(job: _Job) -> int:
    from engine.cli.orders import order_of
    from engine.cli.session import open_session
    from engine.keeper.client import Needs
    from engine.operations.cancelling import cancel_run
    from engine.service import resolve_run

    ended: RunProgress | None = None
    async with open_session(job.settings, Needs()) as session:
        run_id = await resolve_run(session.database, job.reference)
        session.run_id = run_id
        order = order_of(job.settings, run_id, job.reason)
        given = await cancel_run(session.database, session.client, order)
        if given.ordered.changed or given.ordered.state != "cancelled":
            ended = await _wait(job, session, order, given)
    return _report(job, order, given, ended)


async def _wait(job: _Job, session: Session, order: Order, given: Given) -> RunProgress | None:
    """The run as it ended; None if it goes on."""
    from engine.cli.orders import say_if_not_delivered
    from engine.cli.views import open_view
    from engine.operations.cancelling import wait_for_end

    if not job.as_json:
        say_if_not_delivered(given)
    with open_view(as_json=job.as_json or job.wait_s is None) as view:
        return await wait_for_end(session.database, order.run_id, timeout_s=job.wait_s or 0.0, show=view.update)


def _report(job: _Job, order: Order, given: Given, ended: RunProgress | None) -> int:
    from engine.cli.contract import time_text
    from engine.cli.orders import order_object
    from engine.errors import UnavailableError

    run_id = order.run_id
    if ended is None and given.ordered.state != "cancelled" and job.wait_s is not None:
        raise UnavailableError(
            "cancel-pending",
            f"the cancel of run {run_id} is on record, but the run has not ended after {job.wait_s:g} s",
            hint=f"it ends when a worker and Temporal are there: `podium doctor`, then `podium watch {run_id}`",
        )
    state, reason = given.ordered.state, given.ordered.reason
    if ended is not None:
        state, reason = ended.state, ended.reason
    if job.as_json:
        terminal.out_json(order_object("cancel", order, given, state, reason))
    if state in {"succeeded", "failed"}:
        why = f" ({reason})" if state == "failed" and reason else ""
        terminal.err(f"error: run {run_id} {state}{why} before the cancel took effect")
        terminal.err(f"hint: podium show {run_id}")
        return ExitCode.FAILED
    if job.as_json:
        return ExitCode.OK
    if given.ordered.parent is not None and given.ordered.changed:
        terminal.err(
            f"note: it belongs to a step of run {given.ordered.parent}, which fails unless its pool knows better"
        )
    if ended is None and state != "cancelled":
        terminal.out(f"run {run_id} is being cancelled")
    elif given.ordered.changed or ended is not None:
        terminal.out(f"run {run_id} cancelled")
    else:
        terminal.out(f"run {run_id} was cancelled already, at {time_text(given.ordered.at)}; nothing was changed")
    return ExitCode.OK
