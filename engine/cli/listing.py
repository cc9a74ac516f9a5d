"""`podium list`: the newest runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from engine.cli import terminal
from engine.errors import ExitCode

if TYPE_CHECKING:
    from engine.settings import Settings
    from engine.store.snapshots import RunLine

STATES = ("created", "planning", "running", "waiting", "succeeded", "failed", "cancelled")
LIMIT_MAX = 1000


@click.command("list")
@click.option(
    "-n", "--limit", type=click.IntRange(1, LIMIT_MAX), default=20, show_default=True, help="At most so many."
)
@click.option("--state", "states", type=click.Choice(STATES), multiple=True, help="Only these states; repeatable.")
@click.option("--all", "with_children", is_flag=True, help="Also the runs that belong to steps of other runs.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def list_runs(limit: int, states: tuple[str, ...], with_children: bool, as_json: bool) -> int:
    """List the newest runs, newest first.

    On a narrow terminal ids are shortened; `podium show` takes the beginning of one.
    """
    from engine.cli.contract import list_array
    from engine.cli.session import run_async, settings_for_reading
    from engine.settings import load_settings

    every = load_settings()
    home = every.home if every.embedded else None
    settings = settings_for_reading()
    lines = () if settings is None else run_async(_fetch(settings, limit, states, children=with_children))
    if as_json:
        terminal.out_json(list_array(lines))
    elif lines:
        from engine.cli.render import columns, show
        from engine.cli.tables import run_lines

        show(*run_lines(lines, columns()))
    else:
        where = "" if home is None else f" in {terminal.inert(str(home))}"
        hint = "" if states else '; podium run "What is gravity? Explain it to a child."'
        terminal.err(f"no {'such runs' if states else 'runs yet'}{where}{hint}")
    return ExitCode.OK


async def _fetch(settings: Settings, limit: int, states: tuple[str, ...], *, children: bool) -> tuple[RunLine, ...]:
    from engine.cli.session import open_session
    from engine.keeper.client import Needs
    from engine.service import TENANT
    from engine.store import snapshots

    async with open_session(settings, Needs()) as session:
        return await snapshots.list_runs(session.database, TENANT, limit=limit, states=states, children=children)
