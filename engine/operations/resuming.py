"""Resuming a run that failed or was cancelled: with the pool that it is pinned to, or with another one.

What has an accepted output is not called again. Must never change a run that it refuses to resume.
"""

from __future__ import annotations

from engine.errors import UnavailableError
from engine.operations.waking import TEMPORAL_AWAY, Connect
from engine.service import check_policy, refuse_unpriced
from engine.store.budgets import Limits
from engine.store.database import Database
from engine.store.drafts import StepRoute
from engine.store.inputs import read_pool_document
from engine.store.orders import Order
from engine.store.resuming import PoolSnapshotDraft, Resumption
from engine.store.resuming import resume_run as write_resumption
from engine.store.snapshots import RunSnapshot
from worker_pools.pool import Pool, pool_digest, pool_document, pool_from_document


async def pool_to_use(database: Database, run: RunSnapshot, other: Pool | None) -> Pool:
    """The pool that a resumed run uses: the other one if there is one, else the one that it is pinned to."""
    if other is not None:
        return other
    return pool_from_document(await read_pool_document(database, run.pool_digest))


async def resume_run(
    database: Database, connect: Connect, order: Order, *, run: RunSnapshot, pool: Pool, repin: bool
) -> bool:
    """Gives the run a new execution and starts it; whether that was possible: if not, a reconciler does it.

    ``pool`` is what `pool_to_use` said, ``repin`` that it is another.
    Raises what `engine.store.resuming.resume_run` does, and InputError for a pool that this version cannot carry out.
    """
    resumption = _resumption(run, pool, repin=repin)
    await write_resumption(database, order, resumption)
    return await _start(database, connect, order)


def _resumption(run: RunSnapshot, pool: Pool, *, repin: bool) -> Resumption:
    snapshot = None
    if repin:
        check_policy(pool)
        if run.budget is not None:
            refuse_unpriced(pool, Limits(usd=run.budget.usd.limit))
        document = pool_document(pool)
        digest = pool_digest(document)
        if digest != run.pool_digest:
            snapshot = PoolSnapshotDraft(pool.name, digest, document)
    return Resumption(
        pool_seen=run.pool_digest,
        routes={worker.name: StepRoute(worker.model, worker.queue) for worker in pool.workers},
        deadline_s=pool.policy.deadline_s,
        # A substitute took over because the planned worker failed; who resumes has seen to that. Where an operator
        # chose the worker, the choice stays.
        planned_workers=pool.policy.on_failed_step == "fallback",
        repin=snapshot,
    )


async def _start(database: Database, connect: Connect, order: Order) -> bool:
    # Imported here: Temporal's SDK takes half a second that a refused resume need not wait for.
    from activities.executions import start_execution  # noqa: PLC0415  # see above

    try:
        await start_execution(database, await connect(), order.run_id)
    except UnavailableError as error:
        if error.code != TEMPORAL_AWAY:
            raise
        return False
    return True
