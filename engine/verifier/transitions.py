"""The legal moves between states, as docs/states.md shows them. A test compares this table with the engine's."""

from __future__ import annotations

from typing import Final

_RUN: Final = {
    "created": "planning running waiting failed cancelled",
    "planning": "running waiting succeeded failed cancelled",
    "running": "planning waiting succeeded failed cancelled",
    "waiting": "planning running succeeded failed cancelled",
    "failed": "created",
    "cancelled": "created",
}
_STEP: Final = {
    "pending": "running waiting succeeded failed skipped reused cancelled",
    "running": "pending waiting succeeded failed skipped cancelled",
    "waiting": "pending running succeeded failed skipped cancelled",
    "failed": "pending running skipped",
    "cancelled": "pending running",
}
_ATTEMPT: Final = {
    "sent": "succeeded refused failed cancelled superseded unknown",
    "unknown": "superseded",
}


def _pairs(table: dict[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset((old, new) for old, news in table.items() for new in news.split())


LEGAL: Final = {"run": _pairs(_RUN), "step": _pairs(_STEP), "attempt": _pairs(_ATTEMPT)}


def is_legal(subject: str, old: str, new: str) -> bool:
    """Whether a run, step or attempt may go from one state to another; a new reason in the same state is no move."""
    return old == new or (old, new) in LEGAL[subject]
