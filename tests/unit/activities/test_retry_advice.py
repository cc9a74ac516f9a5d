"""What a provider says about when to come back, in all its spellings, and what we make of it."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

import pytest

from activities.failures import RETRY_AFTER_MAX_S, RETRY_AFTER_TOO_LONG, remedy_for, retry_after_s
from worker_pools.adapters import CallFailed

NOW = datetime(2026, 11, 30, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "date", "seconds"),
    [
        ("7", None, 7.0),
        (" 1.5 ", None, 1.5),
        ("0", None, 0.0),
        ("Mon, 30 Nov 2026 12:00:30 GMT", None, 30.0),
        ("Mon, 30 Nov 2026 12:00:30 GMT", "Mon, 30 Nov 2026 12:00:20 GMT", 10.0),
        ("Mon, 30 Nov 2026 11:00:00 GMT", None, 0.0),
        ("Mon, 30 Nov 2026 12:00:30 -0000", None, 30.0),
        ("Mon, 30 Nov 2026 12:00:30 GMT", "rubbish", 30.0),
        (None, None, None),
        ("", None, None),
        ("-5", None, None),
        ("nan", None, None),
        ("inf", None, None),
        ("1e3", None, None),
        ("soon", None, None),
        ("\u0663", None, None),
        ("9" * 40, None, None),
        ("Mon, 30 Nov 99999 12:00:30 GMT", None, None),
    ],
)
def test_the_header_is_read_or_says_nothing(value: str | None, date: str | None, seconds: float | None) -> None:
    assert retry_after_s(value, date, NOW) == seconds


def test_no_header_however_odd_raises() -> None:
    dice = random.Random(7)  # not a secret
    signs = "0123456789 ,:;+-.GMTMonNovZ\x00\u00e9()"
    for _ in range(3000):
        text = "".join(dice.choices(signs, k=dice.randrange(40)))
        found = retry_after_s(text, text[::-1], NOW)
        assert found is None or found >= 0


def test_milliseconds_are_finer_and_win() -> None:
    failure = CallFailed("rate-limited", sent=True, retry_after="2", retry_headers={"retry-after-ms": "1250"})
    assert remedy_for(failure, NOW).delay == timedelta(milliseconds=1250)


def test_too_long_a_wait_is_a_failure_with_its_own_code() -> None:
    remedy = remedy_for(CallFailed("rate-limited", sent=True, retry_after=str(RETRY_AFTER_MAX_S + 1)), NOW)
    assert (remedy.code, remedy.retry) == (RETRY_AFTER_TOO_LONG, False)


def test_a_terminal_failure_is_terminal_whatever_the_header_says() -> None:
    remedy = remedy_for(CallFailed("auth-failed", sent=True, retry_after="1"), NOW)
    assert (remedy.code, remedy.retry, remedy.delay) == ("auth-failed", False, None)
