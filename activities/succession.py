"""Taking over from worker processes that died: what they had begun fails in Temporal now, not when a beat is missed.

Must run before this process opens calls of its own for the same steps, and must never touch what a living process does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterable
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

from sqlalchemy import select
from temporalio.api.common.v1 import WorkflowExecution
from temporalio.api.enums.v1 import PendingActivityState
from temporalio.api.workflow.v1 import PendingActivityInfo
from temporalio.api.workflowservice.v1 import ResetStickyTaskQueueRequest
from temporalio.client import Client
from temporalio.exceptions import ApplicationError
from temporalio.service import RPCError

from engine import contracts
from engine.store.database import Database
from engine.store.processes import OrphanedAttempt
from engine.store.states import RUN_LIVE
from engine.store.tables import Run

RETRY_AFTER: Final = timedelta(milliseconds=50)
# Temporal is about to give the try up by itself, and another process may have it by the time that it hears of us.
MARGIN: Final = timedelta(seconds=1)
AT_ONCE: Final = 16
_IN_HANDS: Final = frozenset(
    {
        PendingActivityState.PENDING_ACTIVITY_STATE_STARTED,
        PendingActivityState.PENDING_ACTIVITY_STATE_CANCEL_REQUESTED,
    }
)


async def fail_orphans(client: Client, orphans: Iterable[OrphanedAttempt]) -> None:
    """Fails the calls that dead processes had on record as sent."""
    await asyncio.gather(*(_fail_orphan(client, orphan) for orphan in orphans))


async def release_begun(database: Database, client: Client, dead: Collection[UUID]) -> None:
    """Fails what dead processes had taken from Temporal and not yet written down: the record knows nothing of it.

    Looks at the workflow of every live run; one that cannot be looked at is left to Temporal's own timeouts.
    """
    if not dead:
        return
    identities = {contracts.worker_identity(process) for process in dead}
    async with database.read() as connection:
        runs = (await connection.execute(select(Run.id, Run.execution, Run.round).where(Run.state.in_(RUN_LIVE)))).all()
    turn = asyncio.Semaphore(AT_ONCE)

    async def look(workflow: str) -> None:
        async with turn:
            with contextlib.suppress(RPCError):
                await _release(client, workflow, identities)

    ids = (
        workflow
        for run in runs
        for workflow in {
            contracts.workflow_id(str(run.id), run.execution),
            *contracts.round_workflow_ids(str(run.id), run.execution, run.round),
        }
    )
    await asyncio.gather(*(look(workflow) for workflow in ids))


async def _release(client: Client, workflow: str, identities: Collection[str]) -> None:
    # Its next task would first lie in the dead process's own queue until that is given up.
    own = ResetStickyTaskQueueRequest(namespace=client.namespace, execution=WorkflowExecution(workflow_id=workflow))
    await client.workflow_service.reset_sticky_task_queue(own)
    description = await client.get_workflow_handle(workflow).describe()
    for pending in description.raw_description.pending_activities:
        if pending.state in _IN_HANDS and pending.last_worker_identity in identities and _has_time(pending):
            await _fail(client, workflow, pending.activity_id)


def _has_time(pending: PendingActivityInfo) -> bool:
    limit = (
        contracts.HEARTBEAT_TIMEOUT if pending.activity_type.name in contracts.CALLS else contracts.BOOKKEEPING_TIMEOUT
    )
    signs = [pending.last_started_time.ToDatetime(UTC), pending.last_heartbeat_time.ToDatetime(UTC)]
    return datetime.now(UTC) - max(signs) < limit - MARGIN


async def _fail_orphan(client: Client, orphan: OrphanedAttempt) -> None:
    activity_id = (
        contracts.plan_activity_id(orphan.round, orphan.dispatch)
        if orphan.position is None
        else contracts.step_activity_id(orphan.round, orphan.position, orphan.dispatch)
    )
    for workflow in contracts.round_workflow_ids(str(orphan.run_id), orphan.execution, orphan.round):
        with contextlib.suppress(RPCError):
            await _fail(client, workflow, activity_id)
            return


async def _fail(client: Client, workflow: str, activity_id: str) -> None:
    error = ApplicationError("worker-lost", type="worker-lost", next_retry_delay=RETRY_AFTER)
    await client.get_async_activity_handle(workflow_id=workflow, run_id="", activity_id=activity_id).fail(error)
