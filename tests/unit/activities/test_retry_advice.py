"""What a provider says about when to come back, in all its spellings, and what we make of it (G2-01)."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta

import pytest

from activities.failures import RETRY_AFTER_MAX_S, RETRY_AFTER_TOO_LONG, remedy_for
from activities.retry_advice import Clock, advice_s, reset_s, retry_after_s
from worker_pools.adapters import CallFailed
from worker_pools.adapters.classify import RETRY_HEADERS, ProviderError, provider_failure

NOW = datetime(2026, 11, 30, 12, 0, 0, tzinfo=UTC)
CLOCK = Clock(NOW)
EPOCH = int(NOW.timestamp())


@pytest.mark.parametrize(
    ("value", "date", "seconds"),
    [
        ("7", None, 7.0),
        (" 1.5 ", None, 1.5),
        ("0", None, 0.0),
        ("2m0s", None, 120.0),
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
    assert retry_after_s(value, Clock(NOW, date)) == seconds


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("1s", 1.0),
        ("6m0s", 360.0),
        ("20ms", 0.02),
        ("2m59.56s", 179.56),
        ("1h0m30s", 3630.0),
        ("1d2h", 93_600.0),
        ("1m1ms", 60.001),
        ("30", 30.0),
        (str(EPOCH + 45), 45.0),
        (f"{EPOCH + 45}.5", 45.5),
        (str((EPOCH + 45) * 1000), 45.0),
        (str(EPOCH - 45), 0.0),
        ("2026-11-30T12:00:45Z", 45.0),
        ("2026-11-30T13:00:45.500+01:00", 45.5),
        ("2026-11-30T12:00:45", None),
        ("2026-11-30", None),
        ("Mon, 30 Nov 2026 12:00:45 GMT", 45.0),
        ("-5", None),
        ("", None),
        ("s", None),
        ("5 minutes", None),
        ("9" * 13 + "9", None),
    ],
)
@pytest.mark.parametrize("name", ["x-ratelimit-reset-requests", "anthropic-ratelimit-output-tokens-reset"])
def test_a_reset_header_is_read_in_every_spelling(name: str, value: str, seconds: float | None) -> None:
    found = reset_s({name: value}, CLOCK)
    assert found == (None if seconds is None else pytest.approx(seconds))


def test_a_reset_date_is_read_by_the_answers_own_clock() -> None:
    clock = Clock(NOW, "Mon, 30 Nov 2026 10:00:00 GMT")
    assert reset_s({"anthropic-ratelimit-requests-reset": "2026-11-30T10:00:20Z"}, clock) == 20.0


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        # The limit that is used up decides.
        (
            {
                "x-ratelimit-reset-requests": "8m0s",
                "x-ratelimit-remaining-requests": "199",
                "x-ratelimit-reset-tokens": "6s",
                "x-ratelimit-remaining-tokens": "0",
            },
            6.0,
        ),
        # Tokens may be left and yet be too few; requests that are left cannot be the reason.
        (
            {
                "x-ratelimit-reset-requests": "8m0s",
                "x-ratelimit-remaining-requests": "199",
                "x-ratelimit-reset-tokens": "6s",
                "x-ratelimit-remaining-tokens": "12",
            },
            6.0,
        ),
        # Of two that are used up the later one.
        (
            {
                "anthropic-ratelimit-requests-reset": "2026-11-30T12:00:10Z",
                "anthropic-ratelimit-requests-remaining": "0",
                "anthropic-ratelimit-input-tokens-reset": "2026-11-30T12:00:40Z",
                "anthropic-ratelimit-input-tokens-remaining": "0",
            },
            40.0,
        ),
        # Nothing is known of what is left.
        ({"x-ratelimit-reset-requests": "2s", "x-ratelimit-reset-tokens": "9s"}, 9.0),
        ({"x-ratelimit-reset-requests": "soon", "x-ratelimit-reset-tokens": "9s"}, 9.0),
        ({"ratelimit-reset": "9"}, 9.0),
        ({"x-ratelimit-reset-requests": "2s", "x-ratelimit-remaining-requests": "5"}, None),
        ({}, None),
    ],
)
def test_the_limit_that_refused_decides_how_long_to_wait(headers: dict[str, str], seconds: float | None) -> None:
    assert reset_s(headers, CLOCK) == seconds


@pytest.mark.parametrize(
    ("headers", "limited", "seconds"),
    [
        ({"retry-after-ms": "1250", "retry-after": "2", "x-ratelimit-reset": "9"}, True, 1.25),
        ({"retry-after": "2", "x-ratelimit-reset": "9"}, True, 2.0),
        ({"retry-after": "soon", "x-ratelimit-reset": "9"}, True, 9.0),
        ({"retry-after-ms": "-1", "x-ratelimit-reset": "9"}, True, 9.0),
        # A server error that happens to carry the headers of a limit has nothing to do with it.
        ({"x-ratelimit-reset": "9"}, False, None),
        ({"retry-after": "2", "x-ratelimit-reset": "9"}, False, 2.0),
    ],
)
def test_the_plainest_advice_wins(headers: dict[str, str], limited: bool, seconds: float | None) -> None:
    assert advice_s(headers, CLOCK, limited=limited) == seconds


def test_no_header_however_odd_raises() -> None:
    dice = random.Random(7)  # not a secret
    signs = "0123456789 ,:;+-.GMTMonNovZdhms\x00\u00e9()"
    for _ in range(3000):
        text = "".join(dice.choices(signs, k=dice.randrange(40)))
        headers = dict.fromkeys(RETRY_HEADERS, text)
        found = advice_s(headers, Clock(NOW, text[::-1]), limited=True)
        assert found is None or found >= 0


def failed(code: int, **headers: str) -> CallFailed:
    told = {name.replace("_", "-"): value for name, value in headers.items()}
    return provider_failure(ProviderError("{}", code, told))


def test_a_limit_that_names_its_reset_is_waited_for() -> None:
    remedy = remedy_for(failed(429, x_ratelimit_reset_tokens="6m0s", x_ratelimit_remaining_tokens="0"), NOW)
    assert (remedy.code, remedy.retry, remedy.delay) == ("rate-limited", True, timedelta(minutes=6))
    assert remedy_for(failed(529, X_RateLimit_Reset=str(EPOCH + 30)), NOW).delay == timedelta(seconds=30)
    assert remedy_for(failed(500, x_ratelimit_reset_tokens="6m0s"), NOW).delay is None


def test_advice_that_is_shorter_than_the_usual_pause_does_not_use_up_the_attempts_in_a_moment() -> None:
    for header in ("0", "0.02", "1"):
        remedy = remedy_for(CallFailed("rate-limited", sent=True, retry_after=header), NOW)
        assert (remedy.retry, remedy.delay) == (True, None)
    assert remedy_for(failed(429, x_ratelimit_reset_requests="20ms"), NOW).delay is None


def test_milliseconds_are_finer_and_win() -> None:
    failure = CallFailed("rate-limited", sent=True, retry_after="2", retry_headers={"retry-after-ms": "1250"})
    assert remedy_for(failure, NOW).delay == timedelta(milliseconds=1250)


def test_too_long_a_wait_is_a_failure_with_its_own_code() -> None:
    for failure in (
        CallFailed("rate-limited", sent=True, retry_after=str(RETRY_AFTER_MAX_S + 1)),
        failed(429, x_ratelimit_reset_requests="24h0m0s"),
        failed(429, Retry_After="999999"),
    ):
        remedy = remedy_for(failure, NOW)
        assert (remedy.code, remedy.retry) == (RETRY_AFTER_TOO_LONG, False)
    waits = remedy_for(failed(429, x_ratelimit_reset_requests="24h0m0s"), NOW, wait_max_s=86_400)
    assert waits.delay == timedelta(hours=24)


def test_a_terminal_failure_is_terminal_whatever_the_header_says() -> None:
    remedy = remedy_for(CallFailed("auth-failed", sent=True, retry_after="1"), NOW)
    assert (remedy.code, remedy.retry, remedy.delay) == ("auth-failed", False, None)
