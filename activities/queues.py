"""Whether anybody works on a queue: what a step that lies in it for long is said to wait for.

Only asks Temporal. Times are compared with times of the same clock, which is Temporal's.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final
from uuid import UUID

from temporalio.api.enums.v1 import PendingActivityState, TaskQueueType
from temporalio.api.taskqueue.v1 import TaskQueue
from temporalio.api.workflowservice.v1 import DescribeTaskQueueRequest
from temporalio.client import Client
from temporalio.service import RPCError, RPCStatusCode

from activities.waking import temporal_unreachable
from engine import contracts
from engine.errors import BugError
from engine.store.database import Database
from engine.store.inputs import read_pinned, read_pool_document, read_steps
from worker_pools.pool import pool_from_document

# Nobody polls the queue.
NO_WORKER: Final = "no-worker"
# Somebody does, and has no place free for one more call.
WORKERS_BUSY: Final = "workers-busy"

# A few are enough: any of them that is in somebody's hands proves that there is somebody.
_CALLS_MAX: Final = 10
# Calls in flight by the record, newest first; a step's queue says where it was called.
_READ_CALLS: Final = """
    SELECT attempts.run_id, attempts.round, attempts.position, attempts.execution, attempts.dispatch
    FROM attempts JOIN steps
        ON (steps.run_id, steps.round, steps.position) = (attempts.run_id, attempts.round, attempts.position)
    WHERE attempts.state = 'sent' AND steps.queue = %s
    ORDER BY attempts.sent_at DESC LIMIT %s
"""


async def why_unpolled(database: Database, client: Client, queue: str) -> str:
    """``workers-busy`` if somebody works on a pool's queue (its name in the pool), else ``no-worker``.

    Somebody does who has polled it lately, or who has one of its calls in hands: a full worker polls no more until one
    of its calls has ended. Only what is shown depends on it, so this host's clock will do. Raises UnavailableError
    ``temporal-unreachable``.
    """
    try:
        if await _polled(client, queue) or await _in_hands(database, client, queue):
            return WORKERS_BUSY
    except RPCError as error:
        raise temporal_unreachable(error) from None
    return NO_WORKER


async def queue_of(database: Database, run_id: UUID, round_number: int, position: int | None) -> str:
    """The pool's queue on which a step, or (None) the planning, is called."""
    if position is not None:
        for step in await read_steps(database, run_id, round_number):
            if step.position == position:
                return step.queue
        raise BugError("step-unknown", "there is no such step in this run")
    _, digest = await read_pinned(database, run_id)
    return pool_from_document(await read_pool_document(database, digest)).conductor.queue


async def _polled(client: Client, queue: str) -> bool:
    request = DescribeTaskQueueRequest(
        namespace=client.namespace,
        task_queue=TaskQueue(name=contracts.pool_queue(queue)),
        task_queue_type=TaskQueueType.TASK_QUEUE_TYPE_ACTIVITY,
    )
    pollers = (await client.workflow_service.describe_task_queue(request)).pollers
    oldest = datetime.now(UTC) - contracts.NO_WORKER_TIMEOUT
    return any(poller.last_access_time.ToDatetime(UTC) >= oldest for poller in pollers)


async def _in_hands(database: Database, client: Client, queue: str) -> bool:
    """Whether Temporal has heard of a call on the queue within its heartbeat timeout: else it is not "started"."""
    (rows,) = await database.fetch((_READ_CALLS, (queue, _CALLS_MAX)))
    for row in rows:
        own = contracts.step_activity_id(row["round"], row["position"], row["dispatch"])
        for workflow in contracts.round_workflow_ids(str(row["run_id"]), row["execution"], row["round"]):
            try:
                description = await client.get_workflow_handle(workflow).describe()
            except RPCError as error:
                if error.status == RPCStatusCode.NOT_FOUND:
                    continue
                raise
            for pending in description.raw_description.pending_activities:
                if (pending.activity_id, pending.state) == (own, PendingActivityState.PENDING_ACTIVITY_STATE_STARTED):
                    return True
    return False
