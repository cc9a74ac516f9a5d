"""A step whose secret is not in this process waits for it and says so; it does not fail and calls nothing.

Open shows the wait, behind all orders: a step that is cancelled, paused or waits for an operator is not held up here.
"""

from __future__ import annotations

from datetime import timedelta

from temporalio.exceptions import ApplicationError

from activities.context import ActivityContext
from engine.store.attempts import SECRET_MISSING, Ruling
from worker_pools.pool import Worker

RECHECK = timedelta(seconds=5)


def secret_missing(context: ActivityContext, worker: Worker) -> bool:
    """Whether the worker names a key that this process does not have."""
    return worker.api_key is not None and context.secrets.get(worker.api_key) is None


def raise_if_waiting(ruling: Ruling) -> None:
    """Raises what makes Temporal ask again: soon for a missing key, at once for a try that was handed out twice."""
    if ruling.verdict == "held" and ruling.code == SECRET_MISSING:
        raise ApplicationError(SECRET_MISSING, type=SECRET_MISSING, next_retry_delay=RECHECK)
    if ruling.verdict == "retry":
        code = ruling.code or "retry"
        raise ApplicationError(code, type=code)
