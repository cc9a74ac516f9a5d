"""Times of entries: text in one form, so that they are compared as they stand, and moved by whole seconds. Pure."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from engine.verifier.faults import InvalidError

_FORM = "%Y-%m-%dT%H:%M:%S.%fZ"


def later(at: str, seconds: int) -> str:
    """The time so many seconds after ``at`` (RFC 3339 in UTC with microseconds). Raises InvalidError for no time."""
    try:
        moved = datetime.strptime(at, _FORM).replace(tzinfo=UTC) + timedelta(seconds=seconds)
    except (ValueError, OverflowError):
        raise InvalidError(f"{at} is no time that can be reckoned with") from None
    # `strftime` writes years before 1000 without zeros.
    return moved.isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"
