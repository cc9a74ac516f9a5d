"""A step whose secret is not in this process waits for it and says so; it does not fail and calls nothing."""

from __future__ import annotations

from datetime import timedelta

from temporalio.exceptions import ApplicationError

from activities.context import ActivityContext
from engine.store.attempts import Place
from engine.store.settling import note_waiting
from worker_pools.pool import Worker

SECRET_MISSING = "secret-missing"  # noqa: S105  # a code, not a secret
RECHECK = timedelta(seconds=5)


async def require_secret(context: ActivityContext, place: Place, worker: Worker) -> None:
    """Raises what makes Temporal ask again later if the worker's key is not here; the wait is on record."""
    if worker.api_key is None or context.secrets.get(worker.api_key) is not None:
        return
    await note_waiting(context.database, place.run_id, place.round, place.position, SECRET_MISSING)
    raise ApplicationError(SECRET_MISSING, type=SECRET_MISSING, next_retry_delay=RECHECK)
