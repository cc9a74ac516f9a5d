"""`podium person`: which accounts are one person. Must never change or undo a link: nobody becomes somebody else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from engine.cli import terminal
from engine.errors import ExitCode

if TYPE_CHECKING:
    from engine.settings import Settings
    from engine.store.persons import Link


@click.group()
def person() -> None:
    """Say which accounts are one person."""


@person.command(short_help="Say that an account is a person's.")
@click.argument("account")
@click.argument("name", metavar="PERSON")
@click.option("--json", "as_json", is_flag=True, help="Print the link as one JSON object.")
def link(account: str, name: str, as_json: bool) -> int:
    """Say that ACCOUNT (what PODIUM_ACTOR holds) is PERSON's, who reviews nothing of their own by any account.

    An account without a link is its own person. A link is never changed.
    """
    from engine.cli.session import run_async
    from engine.settings import load_settings

    made = run_async(_link(load_settings(), account, name))
    if as_json:
        from engine.cli.contract import versioned

        terminal.out_json(versioned(_object(made)))
    else:
        terminal.out(f"{made.actor_id} is {made.person}'s account")
    return ExitCode.OK


@person.command("list", short_help="List the accounts that are linked to a person.")
@click.option("--json", "as_json", is_flag=True, help="Print them as one JSON array.")
def list_(as_json: bool) -> int:
    """List the accounts that are linked to a person; every other account is its own person."""
    from engine.cli.render import aligned, columns, local_time, show
    from engine.cli.session import run_async, settings_for_reading

    settings = settings_for_reading()
    links = [] if settings is None else run_async(_links(settings))
    if as_json:
        from engine.cli.contract import versioned

        terminal.out_json([versioned(_object(one)) for one in links])
    elif links:
        rows = [[one.person, one.actor_id, local_time(one.linked_at), one.linked_by] for one in links]
        show(*aligned(("person", "account", "since", "by"), rows, columns()))
    else:
        terminal.out("no accounts are linked; each is its own person")
    return ExitCode.OK


async def _link(settings: Settings, account: str, name: str) -> Link:
    from engine.cli.session import open_session
    from engine.keeper.client import Needs
    from engine.service import TENANT
    from engine.store.persons import link_account

    async with open_session(settings, Needs()) as session:
        return await link_account(
            session.database, TENANT, account, name, actor_id=settings.actor_id, on_behalf_of=settings.on_behalf_of
        )


async def _links(settings: Settings) -> list[Link]:
    from engine.cli.session import open_session
    from engine.keeper.client import Needs
    from engine.service import TENANT
    from engine.store.persons import list_links

    async with open_session(settings, Needs()) as session:
        return list(await list_links(session.database, TENANT))


def _object(one: Link) -> dict[str, Any]:
    from engine.cli.contract import time_text

    return {
        "account": one.actor_id,
        "person": one.person,
        "linked_by": one.linked_by,
        "linked_at": time_text(one.linked_at),
    }
