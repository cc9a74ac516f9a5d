"""The options that limit what a run may use, and their values. Must never round an amount of money."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from engine.errors import InputError

if TYPE_CHECKING:
    from engine.store.budgets import Limits
    from worker_pools.pool import Pool

Command = TypeVar("Command", bound=Callable[..., Any])
TOKENS_MAX: Final = 10**15
CALLS_MAX: Final = 10**9
USD_MAX: Final = Decimal(1_000_000)
# As in a pool file: what the columns hold exactly.
_USD: Final = re.compile(r"[0-9]{1,7}(?:\.[0-9]{1,9})?")


def budget_options(command: Command) -> Command:
    """The three limits of a new run; each takes the place of the pool's own."""
    options = [
        click.option("--budget-usd", metavar="USD", help="Most US dollars, child runs included, for example 0.50."),
        click.option(
            "--budget-tokens",
            type=click.IntRange(1, TOKENS_MAX),
            metavar="N",
            help="Most tokens, input and output together.",
        ),
        click.option(
            "--budget-calls", type=click.IntRange(1, CALLS_MAX), metavar="N", help="Most calls of models, retries too."
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def usd(text: str | None, option: str) -> Decimal | None:
    """An amount of US dollars as it was typed, exact; raises InputError ``budget-invalid``."""
    if text is None:
        return None
    if not _USD.fullmatch(text) or Decimal(text) > USD_MAX:
        raise InputError(
            "budget-invalid",
            f"{option} {text[:40]!r} is not an amount of US dollars",
            hint=f"write it like 2.50, without a sign or a unit, at most {USD_MAX:,}",
        )
    return Decimal(text)


def run_limits(pool: Pool, dollars: Decimal | None, tokens: int | None, calls: int | None) -> Limits | None:
    """The budget of a new run: the pool's, with what was given in its place; None if nothing was given."""
    from engine.service import pool_limits
    from engine.store.budgets import Limits

    if (dollars, tokens, calls) == (None, None, None):
        return None
    own = pool_limits(pool)
    return Limits(
        own.usd if dollars is None else dollars,
        own.tokens if tokens is None else tokens,
        own.calls if calls is None else calls,
    )
