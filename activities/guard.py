"""The outer edge of every activity: what leaves it is a result or one of our codes, never a foreign exception."""

from __future__ import annotations

import functools
import logging
import typing
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, Final, ParamSpec, TypeVar

from temporalio import activity
from temporalio.common import RawValue
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
# The workflow asked for something that this code cannot read; see `guarded`.
REQUEST_UNREADABLE: Final = "bug-request-unreadable"
_log = logging.getLogger(__name__)


def guarded(function: Callable[Arguments, Awaitable[Result]]) -> Callable[Arguments, Awaitable[Result]]:
    """Maps what an activity raises: a service that is away is tried again, anything unforeseen is fatal and loud.

    Without this Temporal would retry a bug for ever. The trace goes to the local log; its text may be confidential.
    The request is read in here for the same reason: what the SDK cannot read it has tried again without end.
    """
    hints = typing.get_type_hints(function)
    name, requested = next(iter(hints.items()))

    @functools.wraps(function)
    async def wrapper(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            # Without `activity.defn`, as tests may call it, there is nothing raw.
            read: Any = [_read(one, requested) if isinstance(one, RawValue) else one for one in args]
            return await function(*read, **kwargs)
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

    # What the SDK goes by when it hands the request over.
    wrapper.__annotations__ = {name: RawValue, "return": hints["return"]}
    return wrapper


def _read(raw: RawValue, requested: type) -> Any:
    try:
        request: Any = activity.payload_converter().from_payload(raw.payload, requested)
    except Exception:  # noqa: BLE001  # whatever a converter may raise
        request = None
    if isinstance(request, requested):
        return request
    _log.error("%s: %s cannot be read", activity.info().workflow_id, requested.__name__)
    raise ApplicationError(REQUEST_UNREADABLE, type=REQUEST_UNREADABLE, non_retryable=True)
