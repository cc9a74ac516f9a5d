"""`podium retention`: erasing texts that have been kept long enough, by hand. Workers do it every hour."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from engine.cli import terminal
from engine.errors import ExitCode

if TYPE_CHECKING:
    from engine.settings import Settings
    from engine.store.retention import DueRun, Swept


@click.group()
def retention() -> None:
    """Erase texts that have been kept long enough."""


@retention.command(short_help="Erase what is due now.")
@click.option("--dry-run", is_flag=True, help="Say what is due, and change nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print what came of it as one JSON object.")
def sweep(dry_run: bool, as_json: bool) -> int:
    """Erase the texts of runs that ended longer ago than `retention_days` of their pool's policy.

    Pools that say nothing follow PODIUM_RETENTION_DAYS; without that their texts stay. What is under hold stays, and
    so do entries and numbers. Workers do this every hour.
    """
    from engine.cli.session import run_async, settings_for_reading

    settings = settings_for_reading()
    if settings is None:
        found: tuple[list[DueRun], Swept | None] = ([], None)
    else:
        found = run_async(_sweep(settings, dry_run=dry_run))
    due, done = found
    if as_json:
        terminal.out_json(_object(due, done, dry_run=dry_run))
    else:
        _print(due, done)
    return ExitCode.OK


async def _sweep(settings: Settings, *, dry_run: bool) -> tuple[list[DueRun], Swept | None]:
    from engine.cli.session import open_session
    from engine.keeper.client import Needs
    from engine.service import TENANT
    from engine.store import retention as store

    async with open_session(settings, Needs()) as session:
        due = await store.due_runs(session.database, TENANT, settings.retention_days)
        if dry_run:
            return due, None
        return due, await store.sweep(session.database, TENANT, settings.retention_days, actor_id=settings.actor_id)


def _object(due: list[DueRun], done: Swept | None, *, dry_run: bool) -> dict[str, Any]:
    from engine.cli.contract import versioned

    erased = [] if done is None else done.erased
    held = [run.id for run in due if run.held] if done is None else done.held
    return versioned(
        {
            "dry_run": dry_run,
            "due": [{"run": str(run.id), "artifacts": run.artifacts, "bytes": run.bytes} for run in due],
            "erased": [str(run) for run in erased],
            "held": [str(run) for run in held],
            "refused": [] if done is None else [str(run) for run in done.refused],
        }
    )


def _print(due: list[DueRun], done: Swept | None) -> None:
    if not due:
        terminal.out("nothing is due")
    elif done is None:
        for run in due:
            kept = "; it is under hold" if run.held else ""
            terminal.out(f"run {run.id}: {run.artifacts} texts, {run.bytes:,} bytes{kept}")
    else:
        terminal.out(f"{done.artifacts} texts ({done.bytes:,} bytes) of {len(done.erased)} runs were erased")
        for run_id in done.held:
            terminal.out(f"run {run_id} is under hold and stays")
        for run_id in done.refused:
            terminal.out(f"run {run_id} was in use; the next sweep looks again")
