"""`podium db upgrade` and `podium db downgrade`: the database's schema, up to what this program knows, or back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from engine.cli import terminal
from engine.errors import ExitCode, InputError

if TYPE_CHECKING:
    from engine.settings import Settings
    from engine.store.schema import UpgradeReport


@click.group()
def db() -> None:
    """Look after the database."""


@db.command(short_help="Apply the migrations that the database lacks.")
@click.option("--json", "as_json", is_flag=True, help="Print what was done as one JSON object.")
def upgrade(as_json: bool) -> int:
    """Apply the migrations that the database lacks; safe to run from several places at once.

    The embedded servers upgrade themselves when they start; for them this says what the schema is.
    """
    from engine.cli.contract import versioned
    from engine.cli.session import run_async
    from engine.settings import load_settings
    from engine.store.schema import scripts, upgrade_schema

    settings = load_settings()
    report = (
        run_async(_upgrade_embedded(settings))
        if settings.database_url is None
        else upgrade_schema(settings.migration_url or settings.database_url)
    )
    revision = scripts().get_current_head()
    if as_json:
        terminal.out_json(versioned({"applied": report.applied, "revision": revision}))
    elif settings.embedded and not report.applied:
        terminal.out(f"the embedded servers upgrade themselves; the schema is {revision}")
    elif report.applied:
        terminal.out(f"applied {', '.join(report.applied)}; the schema is now {revision}")
    else:
        terminal.out(f"nothing to do; the schema is {revision}")
    return ExitCode.OK


@db.command(short_help="Take migrations back, for an older version of podium.")
@click.argument("revision")
@click.option("--json", "as_json", is_flag=True, help="Print what was done as one JSON object.")
def downgrade(revision: str, as_json: bool) -> int:
    """Take back the migrations after REVISION, so that the version of podium that knows it can work again.

    Stop all workers before. Refused, with the reason, when the database holds what the older schema cannot express.
    """
    from engine.cli.contract import versioned
    from engine.settings import load_settings
    from engine.store.schema import downgrade_schema

    settings = load_settings()
    if settings.database_url is None:
        raise InputError(
            "servers-not-yours",
            "the embedded servers are upgraded by the keeper and do not go back",
            hint="to try a version, use a copy of the home (PODIUM_HOME) while nothing runs",
        )
    report = downgrade_schema(settings.migration_url or settings.database_url, revision)
    if as_json:
        terminal.out_json(versioned({"reverted": report.reverted, "revision": revision}))
    elif report.reverted:
        terminal.out(f"took back {', '.join(report.reverted)}; the schema is now {revision}")
    else:
        terminal.out(f"nothing to do; the schema is {revision}")
    return ExitCode.OK


@db.command(short_help="Print the SQL that makes append-only real on a server of your own.")
@click.option(
    "--application", metavar="ROLE", help="The role that workers connect as (the one in PODIUM_DATABASE_URL)."
)
def roles(application: str | None) -> int:
    """Print the SQL that an administrator runs once, so that the application's role can only add to the ledger.

    The embedded servers have these roles already. With one role for everything Podium works too, but then that role
    owns the ledger and could change it.
    """
    from urllib.parse import unquote, urlsplit

    from engine.settings import load_settings
    from engine.store.roles import administrator_script

    url = load_settings().database_url
    name = application or (unquote(urlsplit(url).username or "") if url else "")
    if not name:
        raise InputError("role-missing", "which role do workers connect as?", hint="podium db roles --application ROLE")
    try:
        terminal.out(administrator_script(name).rstrip("\n"))
    except ValueError:
        raise InputError(
            "role-invalid",
            f"{name!r} cannot be the application's role",
            hint="a plain name of its own, and none of the roles of Podium",
        ) from None
    return ExitCode.OK


async def _upgrade_embedded(settings: Settings) -> UpgradeReport:
    import asyncio

    from engine.cli.session import open_session
    from engine.keeper.client import Needs
    from engine.store.schema import upgrade_schema

    # The keeper upgrades its own database when it starts; this finds nothing left, or says what is in the way.
    async with open_session(settings, Needs()) as session:
        return await asyncio.to_thread(upgrade_schema, session.services.database_url)
