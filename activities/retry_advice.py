"""When a provider wants to be asked again, in seconds, from all the headers in which providers say so.

Pure. The values are a stranger's text: whatever cannot be read says nothing, and nothing here raises.
"""

from __future__ import annotations

import email.utils
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

_NUMBER = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,6})?")
# As Go writes durations, which OpenAI and Groq send: 1s, 6m0s, 20ms, 2m59.56s.
_DURATION = re.compile(
    r"(?:(?P<d>[0-9]{1,4})d)?(?:(?P<h>[0-9]{1,5})h)?(?:(?P<m>[0-9]{1,6})m(?!s))?"
    r"(?:(?P<s>[0-9]{1,9}(?:\.[0-9]{1,9})?)s)?(?:(?P<ms>[0-9]{1,9}(?:\.[0-9]{1,9})?)ms)?"
)
_UNIT_S = {"d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_EPOCH = re.compile(r"[0-9]{10}(?:\.[0-9]{1,9})?|[0-9]{13}")
_EPOCH_MILLISECONDS_DIGITS = 13

# The headers of each limit: `{}` is `reset` or `remaining`. OpenAI's, the general ones, Anthropic's.
_LIMITS = (
    "x-ratelimit-{}-requests",
    "x-ratelimit-{}-tokens",
    "x-ratelimit-{}",
    "ratelimit-{}",
    "anthropic-ratelimit-requests-{}",
    "anthropic-ratelimit-tokens-{}",
    "anthropic-ratelimit-input-tokens-{}",
    "anthropic-ratelimit-output-tokens-{}",
)


@dataclass(frozen=True, slots=True)
class Clock:
    """The two clocks by which a date may be read: the answer's own Date header, and ours (aware)."""

    now: datetime
    date: str | None = None

    def seconds_until(self, target: datetime) -> float:
        """By the answer's own clock, so that a clock of ours that is off does not matter; never negative."""
        base = _http_date((self.date or "").strip()) or self.now
        return max((target - base).total_seconds(), 0.0)


def advice_s(headers: Mapping[str, str], clock: Clock, *, limited: bool) -> float | None:
    """Seconds until the provider wants to be asked again; None where it does not say.

    `headers` has lower-case names. OpenAI's `retry-after-ms` is finer than the standard Retry-After and wins; without
    either, the reset times of the exhausted limits count. These come with every answer of some providers, so they are
    read only where the provider refused because of a limit (`limited`).
    """
    milliseconds = headers.get("retry-after-ms", "").strip()
    if _NUMBER.fullmatch(milliseconds):
        return float(milliseconds) / 1000
    told = retry_after_s(headers.get("retry-after"), clock)
    if told is None:
        # Google's way of saying it, which stands in the body (RetryInfo).
        told = retry_after_s(headers.get("retry-info"), clock)
    return reset_s(headers, clock) if told is None and limited else told


def retry_after_s(value: str | None, clock: Clock) -> float | None:
    """Seconds to wait by a Retry-After header (RFC 9110, 10.2.3), or None where it says nothing usable.

    A number may have a fraction, which providers send, and so may a duration such as `2m0s`.
    """
    text = (value or "").strip()
    if _NUMBER.fullmatch(text):
        return float(text)
    duration = _duration_s(text)
    if duration is not None:
        return duration
    target = _http_date(text)
    return None if target is None else clock.seconds_until(target)


def reset_s(headers: Mapping[str, str], clock: Clock) -> float | None:
    """Seconds until the limit that refused the call is lifted, by the reset headers; None where none can be read.

    The longest wait of the limits that are used up counts. Where none says so, the longest of all but the requests
    that are known to be left: tokens may be left and yet be too few.
    """
    used_up, possible = [], []
    for limit in _LIMITS:
        wait = _reset_wait_s(headers.get(limit.format("reset")), clock)
        if wait is None:
            continue
        left = headers.get(limit.format("remaining"), "").strip()
        if _NUMBER.fullmatch(left) and float(left) == 0:
            used_up.append(wait)
        elif not left or "requests" not in limit:
            possible.append(wait)
    return max(used_up or possible, default=None)


def _reset_wait_s(value: str | None, clock: Clock) -> float | None:
    """A reset header: a duration, seconds, a moment since the epoch (seconds or milliseconds), or an RFC 3339 time."""
    text = (value or "").strip()
    if _EPOCH.fullmatch(text):
        scale = 1000 if len(text) == _EPOCH_MILLISECONDS_DIGITS and "." not in text else 1
        return clock.seconds_until(datetime.fromtimestamp(float(text) / scale, UTC))
    target = _iso_time(text)
    if target is not None:
        return clock.seconds_until(target)
    return retry_after_s(text, clock)


def _duration_s(text: str) -> float | None:
    found = _DURATION.fullmatch(text)
    if found is None or not text:
        return None
    return sum(float(found[unit]) * seconds for unit, seconds in _UNIT_S.items() if found[unit] is not None)


def _iso_time(text: str) -> datetime | None:
    """RFC 3339, as Anthropic writes it: with a zone, else it names no moment."""
    if "T" not in text or not text.isascii():
        return None
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        return None
    return parsed if parsed.tzinfo is not None else None


def _http_date(text: str) -> datetime | None:
    if not text:
        return None
    try:
        parsed = email.utils.parsedate_to_datetime(text)
    except (ValueError, TypeError, OverflowError):
        return None
    return parsed.replace(tzinfo=UTC) if parsed.tzinfo is None else parsed
