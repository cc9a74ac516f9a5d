"""The outer edge of every activity: what leaves it is a result or one of our codes, never a foreign exception."""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import ParamSpec, TypeVar

from temporalio.exceptions import ApplicationError

from engine.converter import bug_code
from engine.errors import UnavailableError

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

UNAVAILABLE_PAUSE = timedelta(seconds=2)
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
        except Exception as error:  # noqa: BLE001  # the edge is here for exactly this
            _log.exception("an activity failed with a bug")
            code = bug_code(error)
            raise ApplicationError(code, type=code, non_retryable=True) from None

    return wrapper
