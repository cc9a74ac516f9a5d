"""What becomes of a call that gave no answer: the one place where failures are mapped.

*Retryable*: Temporal calls again, after the provider's advice where there is one. *Terminal*: the step fails now.
*Fatal* is a bug of ours: it is not mapped here, it fails the run loudly.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from activities.retry_advice import Clock, advice_s
from engine.contracts import RETRY_INITIAL
from worker_pools.adapters import CALL_CODES, CallFailed

# Advice above this is not slept on, unless the worker says otherwise (`retry_after_max_s`): the step fails with a code
# that says so, and can be resumed later.
RETRY_AFTER_MAX_S = 900.0
RETRY_AFTER_TOO_LONG = "retry-after-too-long"
# A limit is what these speak of; other answers carry reset headers too, which say nothing about them.
_LIMITED = frozenset({"rate-limited", "overloaded"})
_DECLINED = frozenset({"refused", "content-filtered"})


@dataclass(frozen=True, slots=True)
class Remedy:
    """What to do: whether to call again, when at the earliest (None: Temporal's own pause), under which code."""

    code: str
    retry: bool
    delay: timedelta | None = None


def remedy_for(failure: CallFailed, now: datetime, *, wait_max_s: float = RETRY_AFTER_MAX_S) -> Remedy:
    """The remedy for a failed call. ``now`` is aware; it is used where a date came without the reply's own clock."""
    if failure.entry.kind != "retryable":
        return Remedy(failure.code, retry=False)
    headers = failure.retry_headers
    if failure.retry_after is not None:
        headers = {**headers, "retry-after": failure.retry_after}
    advice = advice_s(headers, Clock(now, failure.date), limited=failure.code in _LIMITED)
    if advice is None or advice <= RETRY_INITIAL.total_seconds():
        # Temporal's own pause is at least as long, and grows: advice of 20 ms would use up all attempts in a moment.
        return Remedy(failure.code, retry=True)
    if advice > wait_max_s:
        return Remedy(RETRY_AFTER_TOO_LONG, retry=False)
    return Remedy(failure.code, retry=True, delay=timedelta(seconds=advice))


def verdict_retries(code: str) -> bool:
    """Whether a complete reply that is no answer is worth another call."""
    return CALL_CODES[code].kind == "retryable"


def ended_state(code: str) -> Literal["refused", "failed"]:
    """The state of an attempt that ended with this code: a model or a filter declined, or something failed."""
    return "refused" if code in _DECLINED else "failed"
