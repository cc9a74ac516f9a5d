"""What the commands that give orders to a run share: the options, the order itself, what is said of it.

Must never say that a run has ended before the record says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from engine.cli import terminal
from engine.cli.contract import Json, time_text, versioned

if TYPE_CHECKING:
    from uuid import UUID

    from engine.operations.cancelling import Given
    from engine.settings import Settings
    from engine.store.orders import Order

Command = TypeVar("Command", bound=Callable[..., Any])
NOT_DELIVERED: Final = (
    "note: Temporal does not answer; the order is on record, is obeyed before anything new is called, and is "
    "delivered when Temporal and a worker are back"
)


def run_argument(command: Command) -> Command:
    """The run: its id, the beginning of one, or 'last'."""
    return click.argument("run_reference", metavar="RUN")(command)


def reason_option(command: Command) -> Command:
    """Why: kept with the order, where it can be erased like every text."""
    return click.option("--reason", metavar="TEXT", help="Why; it is kept on record with who gave the order.")(command)


def order_of(settings: Settings, run_id: UUID, reason: str | None) -> Order:
    """The order of whoever gives this command."""
    from engine.store.orders import Order

    return Order(run_id, settings.actor_id, settings.on_behalf_of, reason)


def settings_for_order(reason: str | None) -> Settings:
    """The settings, for an order to a run that exists; raises InputError for a reason that cannot be kept.

    So that neither starts a server.
    """
    from uuid import UUID

    from engine.cli.session import settings_for_run

    settings = settings_for_run()
    order_of(settings, UUID(int=0), reason)
    return settings


def order_object(name: str, order: Order, given: Given, state: str, reason: str | None) -> Json:
    """An order as `--json` prints it, with the run's state after it."""
    return versioned(
        {
            "order": name,
            "order_id": str(order.id),
            "run": str(order.run_id),
            "changed": given.ordered.changed,
            "delivered": given.delivered,
            "at": time_text(given.ordered.at),
            "state": state,
            "reason": reason,
        }
    )


def say_if_not_delivered(given: Given) -> None:
    """A line on standard error for an order that Temporal does not know of yet."""
    if not given.delivered:
        terminal.err(NOT_DELIVERED)
