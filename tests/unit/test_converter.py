"""The failure converter writes codes and numbers, whatever an exception carries."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from temporalio.api.failure.v1 import Failure
from temporalio.converter import DefaultFailureConverter, PayloadConverter
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    CancelledError,
    FailureError,
    RetryState,
    TerminatedError,
    TimeoutError,  # noqa: A004  # Temporal's
    TimeoutType,
)

from engine.converter import CODE, DATA_CONVERTER, CodeOnlyFailureConverter, bug_code
from engine.errors import BugError, UnavailableError

WORD = "kanarie"


def convert(error: BaseException, converter: DefaultFailureConverter | None = None) -> Failure:
    failure = Failure()
    payloads = PayloadConverter.default
    (converter or CodeOnlyFailureConverter()).to_failure(error, payloads, failure)
    return failure


def raised(error: BaseException) -> BaseException:
    """The exception with a trace, a cause and a context that quote the word."""
    try:
        try:
            int(WORD)
        except ValueError as inner:
            raise error from inner
    except BaseException as outer:  # noqa: BLE001  # any kind
        return outer
    raise AssertionError


def timeout() -> TimeoutError:
    return TimeoutError(WORD, type=TimeoutType.HEARTBEAT, last_heartbeat_details=[WORD])


def activity_error() -> ActivityError:
    return ActivityError(
        WORD,
        scheduled_event_id=1,
        started_event_id=2,
        identity=WORD,
        activity_type="perform_step",
        activity_id="step-0-0-0",
        retry_state=RetryState.TIMEOUT,
    )


ERRORS: tuple[BaseException, ...] = (
    ValueError(WORD),
    UnicodeDecodeError("utf-8", WORD.encode(), 0, 1, WORD),
    ApplicationError(WORD, WORD, type="rate-limited"),
    ApplicationError(WORD, type=f"{WORD} {WORD}"),
    CancelledError(WORD, WORD),
    TerminatedError(WORD, WORD),
    timeout(),
    activity_error(),
    FailureError(WORD),
    BugError("step-unknown", WORD, hint=WORD),
    ExceptionGroup(WORD, [ValueError(WORD)]),
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_nothing_that_an_exception_says_is_written(error: BaseException) -> None:
    failure = convert(raised(error))
    assert WORD.encode() not in failure.SerializeToString()
    assert failure.stack_trace == ""
    assert failure.message


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_the_sdks_own_converter_would_have_told(error: BaseException) -> None:
    """The control: without it the test above could be blind."""
    if not isinstance(error, ExceptionGroup):
        assert WORD.encode() in convert(raised(error), DefaultFailureConverter()).SerializeToString()


def test_a_failure_that_came_from_the_service_is_cleaned_with_all_its_causes() -> None:
    told = convert(raised(ApplicationError(WORD, WORD, type="x")), DefaultFailureConverter())
    outer = activity_error()
    outer._failure = Failure(message=WORD, stack_trace=WORD, cause=told)  # as the SDK fills it
    outer._failure.activity_failure_info.identity = WORD
    outer._failure.cause.cause.CopyFrom(Failure(message=WORD, stack_trace=WORD))
    failure = convert(outer)
    assert WORD.encode() not in failure.SerializeToString()
    assert failure.cause.application_failure_info.type == "x"


def test_what_decides_on_a_retry_is_kept() -> None:
    error = ApplicationError("x", type="rate-limited", non_retryable=True, next_retry_delay=timedelta(seconds=7))
    info = convert(error).application_failure_info
    assert (info.type, info.non_retryable, info.next_retry_delay.ToTimedelta()) == (
        "rate-limited", True, timedelta(seconds=7),
    )  # fmt: skip


def test_a_code_survives_the_way_there_and_back() -> None:
    failure = convert(raised(ApplicationError(WORD, type="rate-limited")))
    back = CodeOnlyFailureConverter().from_failure(failure, PayloadConverter.default)
    assert isinstance(back, ApplicationError)
    assert (back.type, str(back.message)) == ("rate-limited", "rate-limited")


def test_clients_and_workers_have_it() -> None:
    assert DATA_CONVERTER.failure_converter_class is CodeOnlyFailureConverter


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError(WORD), "bug-value-error"),
        (OSError(WORD), "bug-oserror"),
        (UnavailableError("temporal-unreachable", WORD), "bug-temporal-unreachable"),
        (BugError("Not A Code!", WORD), "bug"),
        (type("Ünicode", (Exception,), {})(), "bug"),
        (type("_Private", (Exception,), {})(), "bug-private"),
        (type("A" * 99, (Exception,), {})(), "bug"),
    ],
)
def test_the_code_of_a_bug_is_a_word_that_may_be_stored(error: Exception, code: str) -> None:
    found: Any = bug_code(error)
    assert found == code
    assert CODE.fullmatch(found)
