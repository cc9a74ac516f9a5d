"""Starting executions, and the reconciler that keeps the two stores in agreement.

The database says which execution of a run should exist. Whoever notices that it is missing starts it; ids derive from
the run, so it cannot be started twice. A live run whose workflow is closed or gone is settled as lost, resumable. An
order whose wake-up did not get through is delivered again.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar
from uuid import UUID

from sqlalchemy import func, select, text
from temporalio.client import Client, WorkflowExecutionDescription, WorkflowExecutionStatus
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from activities.queues import NO_WORKER, WORKERS_BUSY, queue_of, why_unpolled
from activities.review_gates import may_review_output
from activities.specs import planned_specs, step_specs
from activities.waking import CANCELLED, deliver_orders, stop_rounds, stop_workflow, temporal_unreachable
from engine import contracts
from engine.contracts import RunRequest
from engine.errors import BugError, UnavailableError
from engine.store.children import PARENT_ENDED
from engine.store.database import Database
from engine.store.drafts import left_out
from engine.store.inputs import StoredStep, read_pool_document, read_steps
from engine.store.review_expiry import expire_reviews
from engine.store.runs import NewRun
from engine.store.settling import Settlement, note_waiting, settle_run
from engine.store.states import RUN_LIVE, STEP_HAS_OUTPUT, STEP_LIVE
from engine.store.tables import Plan, Run
from worker_pools.pool import Pool, pool_from_document

WORKFLOW_LOST = "workflow-lost"
WORKFLOW_STUCK = "workflow-stuck"
# A workflow task that fails this often in a row is not a worker that was restarted.
STUCK_ATTEMPTS = 3
# With each live run, what is true of the runs above it. For a resumed run that has not begun, its time counts from the
# resumption.
_LIVE_RUNS = text("""
    WITH RECURSIVE chain AS (
        SELECT id AS live_id, parent_run_id, paused_at, false AS has_ended FROM runs WHERE state = ANY(:live)
        UNION ALL
        SELECT chain.live_id, up.parent_run_id, up.paused_at, NOT up.state = ANY(:live)
        FROM chain JOIN runs up ON up.id = chain.parent_run_id
    ), above AS (
        SELECT live_id, bool_or(paused_at IS NOT NULL) AS is_paused, bool_or(has_ended) AS is_orphan
        FROM chain GROUP BY live_id
    )
    SELECT id, execution, execution_seen, round, reason, cancel_requested_at IS NOT NULL AS is_cancelled,
           parent_run_id IS NOT NULL AS is_child, is_paused, is_orphan,
           extract(epoch FROM clock_timestamp() - coalesce(
               CASE WHEN execution > 1 AND execution_seen < execution THEN
                   (SELECT max(at) FROM ledger_entries WHERE run_id = runs.id AND type = 'run.resumed')
               END, created_at)) AS age_s
    FROM runs JOIN above ON above.live_id = runs.id
    -- Parents before their children.
    ORDER BY depth, id
""")
Result = TypeVar("Result")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A run that should have a workflow."""

    id: UUID
    execution: int
    execution_seen: int
    round: int
    reason: str | None
    is_cancelled: bool
    is_paused: bool
    age_s: float
    # A child: its parent's workflow starts it. An orphan is one below a run that has ended.
    is_child: bool
    is_orphan: bool


async def start_execution(database: Database, client: Client, run_id: UUID) -> bool:
    """Starts the run's present execution; False if it was there already. What it needs is read from the database."""
    return await start_workflow(client, await execution_request(database, run_id))


async def start_workflow(client: Client, request: RunRequest) -> bool:
    """Starts the workflow of an execution; False if it was there already."""
    try:
        await client.start_workflow(
            contracts.WORKFLOW_TYPE,
            request,
            id=contracts.workflow_id(request.run_id, request.execution),
            task_queue=request.queue,
            id_reuse_policy=WorkflowIDReusePolicy.REJECT_DUPLICATE,
            id_conflict_policy=WorkflowIDConflictPolicy.FAIL,
            task_timeout=contracts.WORKFLOW_TASK_TIMEOUT,
            # Where this process works on the queue itself, the first task comes with the answer.
            request_eager_start=True,
        )
    except WorkflowAlreadyStartedError:
        return False
    except RPCError as error:
        raise temporal_unreachable(error) from None
    return True


def first_request(new: NewRun, pool: Pool) -> RunRequest:
    """The first execution's input as ``execution_request`` would read it back, for the submitter that just wrote it."""
    if new.plan is None:
        return RunRequest(
            run_id=str(new.id),
            execution=1,
            deadline_s=new.deadline_s,
            rounds_max=new.rounds_max,
            queue=contracts.home_queue(pool.queues),
            plan_queue=contracts.pool_queue(pool.conductor.queue),
            plan_call_s=pool.conductor.timeouts.call_s,
        )
    return RunRequest(
        run_id=str(new.id),
        execution=1,
        steps=planned_specs(pool, new.plan),
        skipped=list(left_out(new.plan)),
        deadline_s=new.deadline_s,
        rounds_max=new.rounds_max,
        queue=contracts.home_queue(pool.queues),
        # For later rounds.
        plan_queue=contracts.pool_queue(pool.conductor.queue),
        plan_call_s=pool.conductor.timeouts.call_s,
    )


async def execution_request(database: Database, run_id: UUID) -> RunRequest:
    """The workflow's input for the present execution: identifiers, positions and numbers."""
    async with database.read() as connection:
        row = (
            await connection.execute(
                select(
                    Run.execution,
                    Run.round,
                    Run.rounds_max,
                    Run.pool_digest,
                    Run.deadline_at,
                    Plan.accepted_at,
                    func.clock_timestamp().label("now"),
                )
                .join(Plan, (Plan.run_id == Run.id) & (Plan.round == Run.round))
                .where(Run.id == run_id)
            )
        ).one_or_none()
    if row is None:
        raise BugError("run-unknown", "there is no such run")
    pool = pool_from_document(await read_pool_document(database, row.pool_digest))
    deadline_s = _seconds_left(row.deadline_at, row.now)
    if row.accepted_at is None:
        return RunRequest(
            run_id=str(run_id),
            execution=row.execution,
            round=row.round,
            deadline_s=deadline_s,
            rounds_max=row.rounds_max,
            queue=contracts.home_queue(pool.queues),
            plan_queue=contracts.pool_queue(pool.conductor.queue),
            plan_call_s=pool.conductor.timeouts.call_s,
        )
    steps = await read_steps(database, run_id, row.round)
    return RunRequest(
        run_id=str(run_id),
        execution=row.execution,
        round=row.round,
        steps=step_specs(pool, steps),
        skipped=[step.position for step in steps if step.state == "skipped"],
        # One whose output people may have to review is looked at once more; its approvals may not count any more.
        done=[step.position for step in steps if step.state in STEP_HAS_OUTPUT and not _reviewed(pool, steps, step)],
        deadline_s=deadline_s,
        rounds_max=row.rounds_max,
        queue=contracts.home_queue(pool.queues),
        plan_queue=contracts.pool_queue(pool.conductor.queue),
        plan_call_s=pool.conductor.timeouts.call_s,
    )


def _reviewed(pool: Pool, steps: Sequence[StoredStep], step: StoredStep) -> bool:
    return may_review_output(pool, step.worker, is_last=step is steps[-1])


async def end_overdue_reviews(database: Database, client: Client) -> None:
    """Ends the reviews whose time is over and wakes their runs at once.

    One indexed query if none is overdue. What is not woken because Temporal is away, the reconciler wakes later.
    """
    for run_id in dict.fromkeys(await expire_reviews(database)):
        await _one_by_one(run_id, deliver_orders(database, client, run_id))


async def reconcile(database: Database, client: Client) -> int:
    """Ends reviews that are overdue, delivers orders, starts what is missing, settles what is lost.

    Returns how many runs were started or settled.
    """
    # What follows from an overdue review is woken below, like every order.
    await expire_reviews(database)
    for run_id in await _ordered_runs(database):
        await _one_by_one(run_id, deliver_orders(database, client, run_id))
    changed = 0
    for run in await _live_runs(database):
        changed += bool(await _one_by_one(run.id, _reconcile_run(database, client, run)))
    return changed


async def _one_by_one(run_id: UUID, work: Awaitable[Result]) -> Result | None:
    try:
        return await work
    except UnavailableError:
        raise
    except Exception:  # noqa: BLE001  # logged with its trace
        # One run that cannot be looked at must not keep the others waiting.
        _log.exception("run %s could not be reconciled", run_id)
    return None


async def _reconcile_run(database: Database, client: Client, run: LiveRun) -> bool:
    description = await _describe(client, contracts.workflow_id(str(run.id), run.execution))
    status = None if description is None else description.status
    if description is not None and status == WorkflowExecutionStatus.RUNNING:
        if run.is_cancelled:
            # Asked for once more: Temporal keeps one such request a workflow, so it costs nothing.
            await deliver_orders(database, client, run.id)
        elif run.is_orphan:
            # It is past calling anything; the end of its parent's workflow should have ended it.
            await stop_workflow(client, contracts.workflow_id(str(run.id), run.execution))
        if _is_stuck(description) or await _round_is_stuck(client, run):
            # No worker's code can go on with it (a bug, or a version that does not fit).
            await _note_waiting(database, run, WORKFLOW_STUCK)
        elif not run.is_paused and _is_unpolled(run):
            await _note_unpolled(database, client, run)
        return False
    never_began = status is None and run.execution_seen < run.execution
    if never_began and run.is_child and not (run.is_orphan or run.is_cancelled):
        # Its parent's workflow is about to start it. Should that be gone, the parent is settled first, and it then.
        return False
    if never_began and not (run.is_orphan or run.is_cancelled):
        # Never seen alive: its submitter died between writing the run and starting the workflow.
        return await start_execution(database, client, run.id)
    ending = Settlement(run.id, run.execution, "failed", WORKFLOW_LOST)
    if run.is_cancelled or status == WorkflowExecutionStatus.CANCELED:
        # Its own settling was lost, or it never began; what was asked for is known all the same.
        ending = Settlement(run.id, run.execution, "cancelled", CANCELLED)
    elif run.is_orphan:
        ending = Settlement(run.id, run.execution, "cancelled", PARENT_ENDED)
    settled = await settle_run(database, ending)
    await stop_rounds(client, run.id, run.execution, run.round)
    return (settled.state, settled.code) == (ending.state, ending.code)


def _is_stuck(description: WorkflowExecutionDescription | None) -> bool:
    return description is not None and description.raw_description.pending_workflow_task.attempt >= STUCK_ATTEMPTS


async def _round_is_stuck(client: Client, run: LiveRun) -> bool:
    if not run.round:
        return False
    return _is_stuck(await _describe(client, contracts.round_workflow_id(str(run.id), run.execution, run.round)))


def _is_unpolled(run: LiveRun) -> bool:
    """Whether nobody has taken anything of the run for a while, or had not when that was last looked at."""
    if run.reason in {NO_WORKER, WORKERS_BUSY}:
        return True
    # Where the workflow's own queue is the pool's, it cannot say so itself.
    return run.execution_seen < run.execution and run.age_s > contracts.NO_WORKER_TIMEOUT.total_seconds()


async def _note_unpolled(database: Database, client: Client, run: LiveRun) -> None:
    """Shows whether anybody works on the queue: workers come and go while a step lies in it."""
    position = await _waiting_position(database, run)
    queue = await queue_of(database, run.id, run.round, position)
    code = await why_unpolled(database, client, queue)
    if code != run.reason:
        await note_waiting(database, run.id, run.round, position, code, execution=run.execution)


async def _note_waiting(database: Database, run: LiveRun, code: str) -> None:
    """Shows on the record what keeps the run's workflow from going on."""
    position = await _waiting_position(database, run)
    await note_waiting(database, run.id, run.round, position, code, execution=run.execution)


async def _waiting_position(database: Database, run: LiveRun) -> int | None:
    steps = await read_steps(database, run.id, run.round)
    live = [step for step in steps if step.state in STEP_LIVE]
    # A step that has not begun waits more visibly than one whose call may still be in flight.
    waits = min(live, key=lambda step: (step.state == "running", step.position), default=None)
    return None if waits is None else waits.position


async def _ordered_runs(database: Database) -> Sequence[UUID]:
    """Runs, of any depth, with an order whose wake-up did not get through."""
    async with database.read() as connection:
        query = select(Run.id).where(Run.wake_requested_at.is_not(None)).order_by(Run.wake_requested_at)
        return (await connection.scalars(query)).all()


async def _live_runs(database: Database) -> list[LiveRun]:
    async with database.read() as connection:
        rows = await connection.execute(_LIVE_RUNS, {"live": list(RUN_LIVE)})
        return [LiveRun(**{**row._asdict(), "age_s": float(row.age_s)}) for row in rows]


async def _describe(client: Client, workflow: str) -> WorkflowExecutionDescription | None:
    try:
        return await client.get_workflow_handle(workflow).describe()
    except RPCError as error:
        if error.status == RPCStatusCode.NOT_FOUND:
            return None
        raise temporal_unreachable(error) from None


def _seconds_left(deadline: datetime | None, now: datetime) -> float | None:
    return None if deadline is None else max((deadline - now).total_seconds(), 0.0)
