"""A step whose secret is not in this process waits for it and says so; it does not fail and calls nothing."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import select
from temporalio.exceptions import ApplicationError

from activities.context import ActivityContext
from engine.store.attempts import Place
from engine.store.settling import note_waiting
from engine.store.tables import Run
from worker_pools.pool import Worker

SECRET_MISSING = "secret-missing"  # noqa: S105  # a code, not a secret
RECHECK = timedelta(seconds=5)


async def require_secret(context: ActivityContext, place: Place, worker: Worker) -> None:
    """Raises what makes Temporal ask again later if the worker's key is not here; the wait is on record.

    A run that was cancelled meanwhile ends instead, with the code ``cancelled``.
    """
    if worker.api_key is None or context.secrets.get(worker.api_key) is not None:
        return
    if await _is_cancelled(context, place):
        # Nothing else would look at the order while the step waits, because no attempt is opened.
        raise ApplicationError("cancelled", type="cancelled", non_retryable=True)
    await note_waiting(context.database, place.run_id, place.round, place.position, SECRET_MISSING)
    raise ApplicationError(SECRET_MISSING, type=SECRET_MISSING, next_retry_delay=RECHECK)


async def _is_cancelled(context: ActivityContext, place: Place) -> bool:
    async with context.database.read() as connection:
        return await connection.scalar(select(Run.cancel_requested_at).where(Run.id == place.run_id)) is not None
