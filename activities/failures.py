"""What becomes of a call that gave no answer: the one place where failures are mapped.

*Retryable*: Temporal calls again, after the provider's advice where there is one. *Terminal*: the step fails now.
*Fatal* is a bug of ours: it is not mapped here, it fails the run loudly.
"""

from __future__ import annotations

import email.utils
import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from worker_pools.adapters import CALL_CODES, CallFailed

# Advice above this is not slept on: the step fails with a code that says so, and can be resumed later.
RETRY_AFTER_MAX_S = 900.0
RETRY_AFTER_TOO_LONG = "retry-after-too-long"
_NUMBER = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,6})?")


@dataclass(frozen=True, slots=True)
class Remedy:
    """What to do: whether to call again, when at the earliest (None: Temporal's own pause), under which code."""

    code: str
    retry: bool
    delay: timedelta | None = None


def remedy_for(failure: CallFailed, now: datetime) -> Remedy:
    """The remedy for a failed call. ``now`` is aware; it is used where a date came without the reply's own clock."""
    if failure.entry.kind != "retryable":
        return Remedy(failure.code, retry=False)
    advice = _advice_s(failure, now)
    if advice is None:
        return Remedy(failure.code, retry=True)
    if advice > RETRY_AFTER_MAX_S:
        return Remedy(RETRY_AFTER_TOO_LONG, retry=False)
    return Remedy(failure.code, retry=True, delay=timedelta(seconds=advice))


def _advice_s(failure: CallFailed, now: datetime) -> float | None:
    """Seconds to wait: by OpenAI's ``retry-after-ms``, which is finer, else by the standard header."""
    milliseconds = failure.retry_headers.get("retry-after-ms", "").strip()
    if _NUMBER.fullmatch(milliseconds):
        return float(milliseconds) / 1000
    return retry_after_s(failure.retry_after, failure.date, now)


def retry_after_s(value: str | None, date: str | None, now: datetime) -> float | None:
    """Seconds to wait by a Retry-After header (RFC 9110, 10.2.3), or None where it says nothing usable.

    A number may have a fraction, which providers send. A date is read against the reply's own Date header, so that
    a clock that is off does not matter; without one, against ``now``.
    """
    text = (value or "").strip()
    if _NUMBER.fullmatch(text):
        return float(text)
    target = _http_date(text)
    if target is None:
        return None
    base = _http_date((date or "").strip()) or now
    return max((target - base).total_seconds(), 0.0)


def verdict_retries(code: str) -> bool:
    """Whether a complete reply that is no answer is worth another call."""
    return CALL_CODES[code].kind == "retryable"


def _http_date(text: str) -> datetime | None:
    if not text:
        return None
    try:
        parsed = email.utils.parsedate_to_datetime(text)
    except (ValueError, TypeError, OverflowError):
        return None
    return parsed.replace(tzinfo=UTC) if parsed.tzinfo is None else parsed
