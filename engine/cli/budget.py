"""`podium budget`: shows what a run may still use, and changes it while the run goes on.

Must never set a limit below what is used already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import click

from engine.cli import terminal
from engine.cli.limits import CALLS_MAX, TOKENS_MAX
from engine.cli.orders import reason_option, run_argument
from engine.errors import ExitCode, InputError

if TYPE_CHECKING:
    from engine.settings import Settings
    from engine.store.raising import LimitChange
    from engine.store.snapshots import RunSnapshot

UNITS: Final = ("usd", "tokens", "calls")


@dataclass(frozen=True, slots=True)
class _Job:
    """What was asked for. ``change`` is None for a look."""

    settings: Settings
    reference: str
    change: LimitChange | None
    reason: str | None
    as_json: bool


@click.command()
@run_argument
@click.option("--usd", metavar="USD", help="Let the run use so many US dollars in all, for example 2.50.")
@click.option("--tokens", type=click.IntRange(1, TOKENS_MAX), metavar="N", help="Let it use so many tokens in all.")
@click.option("--calls", type=click.IntRange(1, CALLS_MAX), metavar="N", help="Let it make so many calls in all.")
@click.option("--none", "lifted", type=click.Choice(UNITS), multiple=True, help="Limit this no more; repeatable.")
@reason_option
@click.option("--json", "as_json", is_flag=True, help="Print the budget as one JSON object.")
def budget(  # noqa: PLR0917  # click passes them by name
    run_reference: str,
    usd: str | None,
    tokens: int | None,
    calls: int | None,
    lifted: tuple[str, ...],
    reason: str | None,
    as_json: bool,
) -> int:
    """Show the budget of RUN (an id, the beginning of one, or 'last'), or change it.

    The limits are for the whole run with all runs below it, from its beginning. A run that waits for its budget goes
    on as soon as there is enough. A run that had no budget can get one while it goes on.
    """
    from engine.cli.orders import settings_for_order
    from engine.cli.session import run_async

    change = _change(usd, tokens, calls, lifted)
    if change is None and reason is not None:
        raise InputError(
            "budget-missing", "a reason without a new limit", hint="give --usd, --tokens, --calls or --none with it"
        )
    settings = settings_for_order(reason)
    return run_async(_budget(_Job(settings, run_reference, change, reason, as_json)))


def _change(usd: str | None, tokens: int | None, calls: int | None, lifted: tuple[str, ...]) -> LimitChange | None:
    from engine.cli.limits import usd as dollars
    from engine.store.budgets import Limits
    from engine.store.raising import LimitChange

    for unit, value in zip(UNITS, (usd, tokens, calls), strict=True):
        if unit in lifted and value is not None:
            raise InputError("budget-twice", f"--{unit} and --none {unit} exclude each other", hint="give one of them")
    if not lifted and (usd, tokens, calls) == (None, None, None):
        return None
    return LimitChange(Limits(dollars(usd, "--usd"), tokens, calls), frozenset(lifted))


async def _budget(job: _Job) -> int:
    from engine.cli.orders import order_object, order_of, say_if_not_delivered
    from engine.cli.session import open_session
    from engine.keeper.client import Needs
    from engine.operations.budgets import change_budget
    from engine.service import find_run

    async with open_session(job.settings, Needs()) as session:
        run = await find_run(session.database, job.reference)
        session.run_id = run.id
        if job.change is None:
            _show(job, run, None)
            return ExitCode.OK
        order = order_of(job.settings, run.id, job.reason)
        result = await change_budget(
            session.database, session.client, order, job.change, pool_digest=run.pool_digest
        )  # fmt: skip
        run = await find_run(session.database, str(run.id))
    if not job.as_json:
        say_if_not_delivered(result.given)
        if not result.given.ordered.changed:
            terminal.err(f"run {run.id} has these limits already; nothing was changed")
    _show(job, run, order_object("budget", order, result.given, run.state, run.reason))
    return ExitCode.OK


def _show(job: _Job, run: RunSnapshot, order: dict[str, Any] | None) -> None:
    from engine.cli.contract import budget_object, versioned
    from engine.cli.tables import budget_lines
    from engine.cli.waits import hint_lines

    if job.as_json:
        nothing = {"order": "budget", "order_id": None, "run": str(run.id), "changed": False, "delivered": None}
        look = versioned({**nothing, "at": None, "state": run.state, "reason": run.reason})
        terminal.out_json((order or look) | {"budget": budget_object(run.budget)})
        return
    lines = budget_lines(run)
    for line in lines or [f"run {run.id} has no limits"]:
        terminal.out(line)
    if order is None and run.state == "waiting":
        for hint in hint_lines(run):
            terminal.err(f"hint: {hint}")
