"""Starting executions, and the reconciler that keeps the two stores in agreement.

The database says which execution of a run should exist. Whoever notices that it is missing starts it; ids derive from
the run, so it cannot be started twice. A live run whose workflow is closed or gone is settled as lost, resumable.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy import func, select
from temporalio.client import Client, WorkflowExecutionDescription, WorkflowExecutionStatus
from temporalio.common import WorkflowIDConflictPolicy, WorkflowIDReusePolicy
from temporalio.exceptions import WorkflowAlreadyStartedError
from temporalio.service import RPCError, RPCStatusCode

from activities.specs import planned_specs, step_specs
from engine import contracts
from engine.contracts import RunRequest
from engine.errors import BugError, UnavailableError
from engine.store.database import Database
from engine.store.drafts import left_out
from engine.store.inputs import read_pool_document, read_steps
from engine.store.runs import NewRun
from engine.store.settling import Settlement, note_waiting, settle_run
from engine.store.states import RUN_LIVE, STEP_HAS_OUTPUT, STEP_LIVE
from engine.store.tables import Plan, Run
from worker_pools.pool import Pool, pool_from_document

WORKFLOW_LOST = "workflow-lost"
NO_WORKER = "no-worker"
WORKFLOW_STUCK = "workflow-stuck"
# A workflow task that fails this often in a row is not a worker that was restarted.
STUCK_ATTEMPTS = 3
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A run that should have a workflow."""

    id: UUID
    execution: int
    execution_seen: int
    round: int
    age_s: float


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
        queue=contracts.home_queue(pool.queues),
    )


async def execution_request(database: Database, run_id: UUID) -> RunRequest:
    """The workflow's input for the present execution: identifiers, positions and numbers."""
    async with database.read() as connection:
        row = (
            await connection.execute(
                select(
                    Run.execution,
                    Run.round,
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
        done=[step.position for step in steps if step.state in STEP_HAS_OUTPUT],
        deadline_s=deadline_s,
        queue=contracts.home_queue(pool.queues),
    )


async def reconcile(database: Database, client: Client) -> int:
    """Starts what is missing and settles what is lost; returns how many runs it changed."""
    changed = 0
    for run in await _live_runs(database):
        try:
            changed += await _reconcile_run(database, client, run)
        except UnavailableError:
            raise
        except Exception:  # noqa: BLE001  # logged with its trace
            # One run that cannot be looked at must not keep the others waiting.
            _log.exception("run %s could not be reconciled", run.id)
    return changed


async def _reconcile_run(database: Database, client: Client, run: LiveRun) -> bool:
    description = await _describe(client, contracts.workflow_id(str(run.id), run.execution))
    status = None if description is None else description.status
    if description is not None and status == WorkflowExecutionStatus.RUNNING:
        if description.raw_description.pending_workflow_task.attempt >= STUCK_ATTEMPTS:
            # No worker's code can go on with it (a bug, or a version that does not fit).
            await _note_waiting(database, run, WORKFLOW_STUCK)
        elif run.execution_seen < run.execution and run.age_s > contracts.NO_WORKER_TIMEOUT.total_seconds():
            # The workflow's own queue is the pool's, and nobody polls it.
            await _note_waiting(database, run, NO_WORKER)
        return False
    if status is None and run.execution_seen < run.execution:
        # Never seen alive: its submitter died between writing the run and starting the workflow.
        return await start_execution(database, client, run.id)
    ending = Settlement(run.id, run.execution, "failed", WORKFLOW_LOST)
    if status == WorkflowExecutionStatus.CANCELED:
        # Its own settling was lost; what was asked for is known all the same.
        ending = Settlement(run.id, run.execution, "cancelled", "cancelled")
    settled = await settle_run(database, ending)
    return (settled.state, settled.code) == (ending.state, ending.code)


async def _note_waiting(database: Database, run: LiveRun, code: str) -> None:
    """Shows on the record what keeps the run's workflow from going on."""
    steps = await read_steps(database, run.id, run.round)
    live = [step for step in steps if step.state in STEP_LIVE]
    # A step that has not begun waits more visibly than one whose call may still be in flight.
    waits = min(live, key=lambda step: (step.state == "running", step.position), default=None)
    await note_waiting(database, run.id, run.round, None if waits is None else waits.position, code)


async def _live_runs(database: Database) -> list[LiveRun]:
    async with database.read() as connection:
        rows = await connection.execute(
            select(
                Run.id,
                Run.execution,
                Run.execution_seen,
                Run.round,
                func.extract("epoch", func.clock_timestamp() - Run.created_at).label("age_s"),
            )
            .where(Run.state.in_(RUN_LIVE), Run.parent_run_id.is_(None))
            .order_by(Run.id)
        )
        return [LiveRun(row.id, row.execution, row.execution_seen, row.round, float(row.age_s)) for row in rows]


async def _describe(client: Client, workflow: str) -> WorkflowExecutionDescription | None:
    try:
        return await client.get_workflow_handle(workflow).describe()
    except RPCError as error:
        if error.status == RPCStatusCode.NOT_FOUND:
            return None
        raise temporal_unreachable(error) from None


def temporal_unreachable(error: RPCError) -> UnavailableError:
    """The error for a Temporal service that does not answer; its own text is not passed on."""
    return UnavailableError(
        "temporal-unreachable",
        f"Temporal does not answer ({error.status.name.lower().replace('_', '-')})",
        hint="check PODIUM_TEMPORAL_ADDRESS and that the server is up; `podium doctor` looks closer",
    )


def _seconds_left(deadline: datetime | None, now: datetime) -> float | None:
    return None if deadline is None else max((deadline - now).total_seconds(), 0.0)
