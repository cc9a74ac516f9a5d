"""`podium up` and `podium down`: the keeper of the embedded servers in the foreground, and its end."""

from __future__ import annotations

import asyncio
from typing import Final

import click

from engine.cli import terminal
from engine.errors import ExitCode, InputError, PodiumError, RefusedError
from engine.settings import Settings, load_settings

_HINT: Final = "`podium list` in an environment that has them hands them over"


@click.command()
def up() -> int:
    """Keep the embedded servers, model and worker running until Ctrl-C or SIGTERM.

    Takes over from a keeper in the background; live runs go on, with the keys that are set here.
    """
    from engine.cli.session import run_async
    from engine.keeper.client import BUSY_EXIT

    settings = _embedded()
    run_async(_stop_background(settings))
    code = run_async(_keep(settings))
    if code == BUSY_EXIT:
        raise RefusedError(
            "keeper-running",
            f"{settings.home} has a keeper already: another `podium up`",
            hint="`podium down` stops it",
        )
    return code


async def _keep(settings: Settings) -> int:
    """Runs the keeper to its end. Once it is ready for the first time, it gets the keys of live runs."""
    from engine.keeper.daemon import run_keeper

    handover: asyncio.Task[None] | None = None

    def say(status: str) -> None:
        nonlocal handover
        terminal.err(status)
        if status == "ready" and handover is None:
            handover = asyncio.create_task(_hand_over_keys(settings))

    try:
        # Awaited here, not in a task of its own: between the end of its lock and the cancel below the hand-over must
        # not run, or it would start a keeper in the background.
        return await run_keeper(settings, foreground=True, say=say)
    finally:
        if handover is not None:
            handover.cancel()
            await asyncio.gather(handover, return_exceptions=True)


async def _hand_over_keys(settings: Settings) -> None:
    """Gives the keeper what this environment holds of the keys of live runs, as any command does; says what lacks."""
    from engine.cli.session import open_session
    from engine.keeper.client import Needs
    from worker_pools.secrets import SecretStore

    try:
        async with open_session(settings, Needs(), on_status=lambda _: None) as session:
            missing = SecretStore().missing(session.live_keys)
    except PodiumError as error:
        terminal.err(f"warning: the keys of live runs were not handed over: {terminal.inert(error.message)}")
        terminal.err(f"hint: {_HINT}")
        return
    if missing:
        names = ", ".join(key.env or f"the file {key.file}" for key in missing)
        terminal.err(f"warning: keys of live runs are missing here: {terminal.inert(names)}; their steps wait")
        terminal.err(f"hint: {_HINT}")


async def _stop_background(settings: Settings) -> None:
    """Stops a keeper that a command left in the background. Another `up` keeps the home; a home of nobody is let be."""
    from engine.keeper.client import keeper_status, stop_keeper

    if not (settings.home / "version").exists():
        return
    status = await keeper_status(settings.home)
    if status is not None and status.get("foreground") is False:
        terminal.err("taking over from the keeper in the background: it stops first, live runs go on")
        await stop_keeper(settings.home)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print what was done as one JSON object.")
def down(as_json: bool) -> int:
    """Stop the embedded servers. Live runs stay on record and go on at the next command."""
    from engine.cli.session import run_async
    from engine.keeper.client import stop_keeper

    settings = _embedded()
    # A home that does not exist is not made only to find nothing in it.
    stopped = (settings.home / "version").exists() and run_async(stop_keeper(settings.home))
    if as_json:
        from engine.cli.contract import versioned

        terminal.out_json(versioned({"home": str(settings.home), "stopped": stopped}))
    else:
        terminal.err("stopped" if stopped else f"nothing was running in {terminal.inert(str(settings.home))}")
    return ExitCode.OK


def _embedded() -> Settings:
    settings = load_settings()
    if not settings.embedded:
        raise InputError(
            "servers-not-embedded",
            "PODIUM_DATABASE_URL is set, so there are no embedded servers",
            hint="unset it and PODIUM_TEMPORAL_ADDRESS, or start `podium worker` for your own servers",
        )
    return settings
