"""The outer edge of every activity: what leaves it is a result or one of our codes, never a foreign exception."""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import ParamSpec, TypeVar

from temporalio import activity
from temporalio.exceptions import ApplicationError

from engine.converter import bug_code
from engine.errors import BugError, RefusedError, UnavailableError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

UNAVAILABLE_PAUSE = timedelta(seconds=2)
# What a worker says of a run of another database, where two databases were set up with one Temporal namespace.
_ELSEWHERE = frozenset({"run-unknown", "step-unknown"})
_ELSEWHERE_PAUSE = timedelta(seconds=0.5)
_ELSEWHERE_TRIES_MAX = 60
_log = logging.getLogger(__name__)


def guarded(function: Callable[Arguments, Awaitable[Result]]) -> Callable[Arguments, Awaitable[Result]]:
    """Maps what an activity raises: a service that is away is tried again, anything unforeseen is fatal and loud.

    Without this Temporal would retry a bug for ever. The trace goes to the local log; its text may be confidential.
    """

    @functools.wraps(function)
    async def wrapper(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return await function(*args, **kwargs)
        except ApplicationError:
            raise
        except UnavailableError as error:
            raise ApplicationError(error.code, type=error.code, next_retry_delay=UNAVAILABLE_PAUSE) from None
        except RefusedError as error:
            # Texts that were erased or changed: another try would find them the same.
            _log.warning("%s: %s", error.code, error.message)
            raise ApplicationError(error.code, type=error.code, non_retryable=True) from None
        except BugError as error:
            # Its own worker may pick it up; a run that nobody knows fails after a while.
            lost = error.code not in _ELSEWHERE or activity.info().attempt >= _ELSEWHERE_TRIES_MAX
            if lost:
                _log.exception("an activity failed with a bug")
            else:
                _log.warning("%s is not in this worker's database", activity.info().workflow_id)
            code = bug_code(error)
            raise ApplicationError(code, type=code, non_retryable=lost, next_retry_delay=_ELSEWHERE_PAUSE) from None
        except Exception as error:  # noqa: BLE001  # the edge is here for exactly this
            _log.exception("an activity failed with a bug")
            code = bug_code(error)
            raise ApplicationError(code, type=code, non_retryable=True) from None

    return wrapper
