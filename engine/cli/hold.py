"""`podium hold`: keeping texts from being erased, for a matter. Releasing takes two people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from engine.cli import terminal
from engine.errors import ExitCode, InputError

if TYPE_CHECKING:
    from engine.settings import Settings
    from engine.store.holds import HoldView, Matter


@click.group()
def hold() -> None:
    """Keep texts from being erased while a matter is open."""


@hold.command(short_help="Hold runs for a matter.")
@click.argument("matter")
@click.argument("run_references", metavar="[RUN]...", nargs=-1)
@click.option("--all", "all_runs", is_flag=True, help="Every run, those to come included.")
@click.option("--reason", required=True, metavar="TEXT", help="Why; kept on record.")
@click.option("--json", "as_json", is_flag=True, help="Print the hold as one JSON object.")
def add(matter: str, run_references: tuple[str, ...], all_runs: bool, reason: str, as_json: bool) -> int:
    """Hold each RUN, with its whole tree, for MATTER (a name of your own, such as a file number).

    Nothing of what is held can be erased, by an order or by retention; each refusal is on record. The same matter takes
    more runs.
    """
    from engine.cli.session import run_async, settings_for_run

    if bool(run_references) == all_runs:
        raise InputError("usage", "name the runs, or give --all", hint=f"podium hold add {matter} RUN --reason ...")
    settings = settings_for_run()
    _matter(settings, matter, reason)
    view = run_async(_add(settings, matter, run_references, all_runs=all_runs, reason=reason))
    _say(view, as_json=as_json)
    return ExitCode.OK


@hold.command(short_help="Ask to release a matter's hold, or confirm it as a second person.")
@click.argument("matter")
@click.option("--reason", required=True, metavar="TEXT", help="Why; kept on record.")
@click.option("--json", "as_json", is_flag=True, help="Print the hold as one JSON object.")
def release(matter: str, reason: str, as_json: bool) -> int:
    """Ask that MATTER's hold be released; when another person gives the same command, it is.

    Until then everything stays held. Ends with 3 while the second person is awaited.
    """
    from engine.cli.session import run_async, settings_for_run

    settings = settings_for_run()
    view = run_async(_release(settings, _matter(settings, matter, reason)))
    _say(view, as_json=as_json)
    return ExitCode.OK if view.state == "released" else ExitCode.WAITING


@hold.command("list", short_help="List the holds.")
@click.option("--all", "with_released", is_flag=True, help="Those that were released too.")
@click.option("--json", "as_json", is_flag=True, help="Print them as one JSON array.")
def list_(with_released: bool, as_json: bool) -> int:
    """List the holds with their runs, and whose release is asked for."""
    from engine.cli.contract import versioned
    from engine.cli.session import run_async, settings_for_reading

    settings = settings_for_reading()
    views = [] if settings is None else run_async(_list(settings, with_released=with_released))
    if as_json:
        terminal.out_json([versioned(_object(view)) for view in views])
    elif not views:
        terminal.err("nothing is held")
    else:
        for view in views:
            terminal.out(_line(view))
    return ExitCode.OK


def _matter(settings: Settings, matter: str, reason: str) -> Matter:
    from engine.service import TENANT
    from engine.store.holds import Matter

    if not reason.strip():
        raise InputError("reason-missing", "a hold needs a reason", hint="say why with --reason TEXT")
    return Matter(TENANT, matter, settings.actor_id, settings.on_behalf_of, reason)


async def _add(
    settings: Settings, matter: str, references: tuple[str, ...], *, all_runs: bool, reason: str
) -> HoldView:
    from engine.cli.session import open_session
    from engine.keeper.client import Needs
    from engine.service import resolve_run
    from engine.store.holds import place_hold

    async with open_session(settings, Needs()) as session:
        runs = [await resolve_run(session.database, reference) for reference in references]
        return await place_hold(session.database, _matter(settings, matter, reason), runs, all_runs=all_runs)


async def _release(settings: Settings, matter: Matter) -> HoldView:
    from engine.cli.session import open_session
    from engine.keeper.client import Needs
    from engine.store.holds import release_hold

    async with open_session(settings, Needs()) as session:
        return await release_hold(session.database, matter)


async def _list(settings: Settings, *, with_released: bool) -> list[HoldView]:
    from engine.cli.session import open_session
    from engine.keeper.client import Needs
    from engine.service import TENANT
    from engine.store.holds import list_holds

    async with open_session(settings, Needs()) as session:
        return await list_holds(session.database, TENANT, released=with_released)


def _say(view: HoldView, *, as_json: bool) -> None:
    if as_json:
        from engine.cli.contract import versioned

        terminal.out_json(versioned(_object(view)))
        return
    terminal.out(_line(view))
    if view.state == "asked":
        terminal.err(f"hint: another person confirms it: podium hold release {view.matter} --reason ...")


def _line(view: HoldView) -> str:
    from engine.cli.render import local_time

    what = "all runs" if view.all_runs else ", ".join(str(run) for run in view.runs)
    since = f"held since {local_time(view.placed_at)} by {view.actor_id}"
    if view.state == "asked":
        since += f"; {view.release_asked_by} asks for its release"
    elif view.released_at is not None:
        since = f"released {local_time(view.released_at)} by {view.release_asked_by} and {view.released_by}"
    return f"{view.matter}  {since}: {what}"


def _object(view: HoldView) -> dict[str, Any]:
    from engine.cli.contract import time_text

    return {
        "hold": str(view.id),
        "matter": view.matter,
        "state": view.state,
        "all_runs": view.all_runs,
        "runs": [str(run) for run in view.runs],
        "placed_by": view.actor_id,
        "placed_at": time_text(view.placed_at),
        "release_asked_by": view.release_asked_by,
        "release_asked_at": time_text(view.release_asked_at),
        "released_by": view.released_by,
        "released_at": time_text(view.released_at),
    }
