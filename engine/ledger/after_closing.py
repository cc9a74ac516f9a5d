"""Which entries may follow a run's closing entry. Pure.

The closing entry commits to the number of entries and to the head so far, so whatever follows it is visible as late:
a call that reports after all, what people did with the finished record, and a resume, which reopens the run.
"""

from __future__ import annotations

from typing import Final

CLOSING: Final = "run.closed"
REOPENING: Final = "run.resumed"
# Whole types, and (ending in a dot) families of types. docs/ledger.md says the same.
AFTER_CLOSING: Final = (
    "attempt.closed",
    "run.exported",
    REOPENING,
    "artifact.",
    "erasure.",
    "hold.",
    "review.",
)


def may_follow_closing(type_: str) -> bool:
    """Whether an entry of this type may stand behind ``run.closed``."""
    return any(type_ == allowed or (allowed.endswith(".") and type_.startswith(allowed)) for allowed in AFTER_CLOSING)
