"""`podium resume`: continues a run that failed or was cancelled, and follows it to its end like `podium run`.

A pool file is checked before any server is started; a run that cannot be resumed is left as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from uuid import UUID

import click

from engine.cli import terminal
from engine.cli.orders import reason_option, run_argument

if TYPE_CHECKING:
    from engine.cli.session import Session
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
    from engine.cli.orders import settings_for_order
    from engine.cli.session import run_async

    settings = settings_for_order(reason)

    # Imported only now: it takes a second, and what is wrong with the run's name was said at once.
    from worker_pools.pool import load_pool

    other = None if pool_name is None else load_pool(pool_name)
    job = _Job(settings, run_reference, reason, other, detach=detach, as_json=as_json)
    try:
        return run_async(_resume_and_follow(job))
    except KeyboardInterrupt:
        return _interrupted(job)


def _interrupted(job: _Job) -> int:
    from engine.cli.escort import interrupted, interrupted_early

    if job.resumed is not None:
        return interrupted(job.resumed, as_json=job.as_json, embedded=job.settings.embedded)
    words, hint = "interrupted before the resume was confirmed", f"podium show {job.reference}"
    return interrupted_early(words, hint, line=f"{words}; `{hint}` shows the run", as_json=job.as_json)


async def _resume_and_follow(job: _Job) -> int:
    from engine.cli.escort import escort, leave, report
    from engine.cli.session import open_session
    from engine.keeper.client import Needs
    from engine.operations.resuming import pool_to_use
    from engine.service import find_run

    async with open_session(job.settings, Needs()) as session:
        run = await find_run(session.database, job.reference)
        session.run_id = run.id
        pool = await pool_to_use(session.database, run, job.other_pool)
        if run.state in {"failed", "cancelled"}:
            # For a run that will be refused nothing is started. A key may be new: the old one may be why it failed.
            await session.need(pool)
        if not await _resume(job, session, run, pool) and not job.as_json:
            terminal.err("note: Temporal does not answer; the run goes on when it and a worker are back")
        if job.detach:
            return await leave(session, run.id, as_json=job.as_json)
        seen = await escort(session, run.id, as_json=job.as_json)
    return report(seen, pool, as_json=job.as_json)


async def _resume(job: _Job, session: Session, run: RunSnapshot, pool: Pool) -> bool:
    """Whether the new execution was started; if not, a reconciler does it."""
    from engine.cli.escort import let_finish
    from engine.cli.orders import order_of
    from engine.operations.resuming import resume_run

    def done(_: bool) -> None:
        job.resumed = run.id

    order = order_of(job.settings, run.id, job.reason)
    repin = job.other_pool is not None
    work = resume_run(session.database, session.client, order, run=run, pool=pool, repin=repin)
    return await let_finish(work, done)
