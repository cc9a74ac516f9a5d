"""`podium resume`: continues a run that failed or was cancelled, and follows it to its end like `podium run`.

A pool file is checked before any server is started; a run that cannot be resumed is left as it is.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from uuid import UUID

import click

from engine.cli import terminal
from engine.cli.orders import reason_option, run_argument
from engine.errors import ExitCode

if TYPE_CHECKING:
    from engine.cli.session import Session
    from engine.operations.resuming import Started
    from engine.settings import Settings
    from engine.store.snapshots import RunSnapshot
    from worker_pools.pool import Pool


@dataclass(slots=True)
class _Job:
    """What was asked for. ``resumed`` is the run's id as soon as the new execution is on record."""

    settings: Settings
    reference: str
    reason: str | None
    other_pool: Pool | None
    detach: bool
    as_json: bool
    resumed: UUID | None = field(default=None)


@click.command()
@run_argument
@reason_option
@click.option(
    "--pool", "pool_name", metavar="NAME|FILE", help="Go on with this pool instead of the one that the run has."
)
@click.option("--detach", is_flag=True, help="Do not wait: print the run's id and leave.")
@click.option("--json", "as_json", is_flag=True, help="Print the run as one JSON object.")
def resume(run_reference: str, reason: str | None, pool_name: str | None, detach: bool, as_json: bool) -> int:
    """Continue RUN (an id, the beginning of one, or 'last') after it failed or was cancelled.

    Steps that have an answer are not called again; everything else is tried anew. The run keeps the pool file as it
    was when the run began; --pool takes another one. Ctrl-C leaves the run going on.
    """
    from engine.cli.orders import checked_reason
    from engine.cli.session import run_async, settings_for_reading

    settings = settings_for_reading(run_reference)
    assert settings is not None
    checked_reason(settings, reason)

    # Imported only now: it takes a second, and what is wrong with the run's name was said at once.
    from worker_pools.pool import load_pool

    other = None if pool_name is None else load_pool(pool_name)
    job = _Job(settings, run_reference, reason, other, detach=detach, as_json=as_json)
    try:
        return run_async(_resume_and_follow(job))
    except KeyboardInterrupt:
        return _interrupted(job)


def _interrupted(job: _Job) -> int:
    from engine.cli.ending import error_object
    from engine.cli.follow import detached_words

    if job.resumed is not None:
        words, hint = detached_words(job.resumed, embedded=job.settings.embedded), None
    else:
        words, hint = "interrupted before the resume was confirmed", f"podium show {job.reference}"
    terminal.err(words if hint is None else f"{words}; `{hint}` shows the run")
    if job.as_json:
        terminal.out_json(error_object("interrupted", words, hint))
    return ExitCode.INTERRUPTED


async def _resume_and_follow(job: _Job) -> int:
    from engine.cli.contract import run_object
    from engine.cli.follow import PATIENCE_S, detached_words, exit_code, follow, say_how_it_ended, stays_on
    from engine.cli.session import open_session
    from engine.cli.tables import print_result
    from engine.cli.views import open_view
    from engine.keeper.client import Needs
    from engine.operations.resuming import pool_to_use
    from engine.service import find_run

    async with open_session(job.settings, Needs()) as session, AsyncExitStack() as stack:
        run = await find_run(session.database, job.reference)
        session.run_id = run.id
        pool = await pool_to_use(session.database, run, job.other_pool)
        # For a run that will be refused nothing is started.
        handed_over = run.state in {"failed", "cancelled"} and await _serve(job, session, stack, pool)
        started = await _resume(job, session, run, pool)
        if not started.started and not job.as_json:
            terminal.err("note: Temporal does not answer; the run goes on when it and a worker are back")
        if job.detach:
            if job.as_json:
                terminal.out_json(run_object(await find_run(session.database, str(run.id))))
            else:
                terminal.out(str(run.id))
                terminal.err(detached_words(run.id, embedded=job.settings.embedded))
            return ExitCode.OK
        with open_view(as_json=job.as_json) as view:
            progress = await follow(
                session.database,
                run.id,
                view,
                shortage=session.shortage,
                patience_s=PATIENCE_S if handed_over else 0.0,
                stays=stays_on(as_json=job.as_json),
            )
        run = await find_run(session.database, str(run.id))
    print_result(run, as_json=job.as_json)
    say_how_it_ended(run, pool)
    return exit_code(progress.state)


async def _resume(job: _Job, session: Session, run: RunSnapshot, pool: Pool) -> Started:
    import asyncio

    from engine.cli.orders import order_of
    from engine.operations.resuming import resume_run

    order = order_of(job.settings, run.id, job.reason)
    repin = job.other_pool is not None
    task = asyncio.ensure_future(
        resume_run(session.database, session.client, order, run=run, pool=pool, repin=repin)
    )  # fmt: skip
    try:
        started = await asyncio.shield(task)
    except asyncio.CancelledError:
        # Ctrl-C meets a write of milliseconds: it is let finish, so that the user is told what became of the run.
        await task
        job.resumed = run.id
        raise
    job.resumed = run.id
    return started


async def _serve(job: _Job, session: Session, stack: AsyncExitStack, pool: Pool) -> bool:
    """Makes the embedded servers ready for the run's models, with the keys that are set here; whether there were any.

    Keys that were handed over before are replaced: one of them may be why the run failed.
    """
    from engine.cli.session import quiet_status, secrets_here
    from engine.keeper.client import Needs, open_services

    if not session.services.embedded:
        return False
    found = secrets_here(pool)
    needs = Needs(queues=pool.queues, secrets=found, local_model=pool.needs_local_model)
    await stack.enter_async_context(open_services(job.settings, needs, on_status=quiet_status()))
    return bool(found)
