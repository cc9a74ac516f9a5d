"""Errors and notes of one reading, with their places. Must never quote more than 80 characters of the text."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.plan.clean import quote_text
from engine.plan.limits import ERRORS_MAX, QUOTE_CHARS_MAX
from engine.plan.plan import PlanError, PlanNote


@dataclass(frozen=True, slots=True)
class Fault:
    """An error with its offset in the text; line and column are counted only if it is reported."""

    code: str
    at: int | None
    field: str | None
    text: str
    hint: str | None


@dataclass(slots=True)
class Findings:
    """What one block of a text gave to report."""

    faults: list[Fault] = field(default_factory=list)
    notes: list[PlanNote] = field(default_factory=list)

    @property
    def full(self) -> bool:
        """Whether so much is wrong that reading on is pointless."""
        return len(self.faults) >= ERRORS_MAX

    def error(self, code: str, text: str, *, at: int | None, field: str | None = None, hint: str | None = None) -> None:
        """Record an error at an offset of the text."""
        if not self.full:
            self.faults.append(Fault(code, at, field, text, hint))

    def note(self, code: str, text: str, *, field: str | None = None, position: int | None = None) -> None:
        """Record something that was accepted; no more notes than errors are kept."""
        if len(self.notes) < ERRORS_MAX:
            self.notes.append(PlanNote(code, field, position, text))

    def merge(self, other: Findings) -> None:
        """Take over everything that another reading found."""
        self.faults.extend(other.faults)
        self.notes.extend(other.notes)


def quoted(text: str) -> str:
    """A piece of the text for a message: one line, at most 80 characters, in quotes of our own."""
    return f"«{quote_text(text, QUOTE_CHARS_MAX)}»"


def place(text: str, at: int) -> tuple[int, int]:
    r"""Line and column of an offset, both from 1 in code points; \n, \r\n and \r end a line."""
    at = min(at, len(text))
    line = 1 + text.count("\n", 0, at) + text.count("\r", 0, at) - text.count("\r\n", 0, at)
    return line, at - (max(text.rfind("\n", 0, at), text.rfind("\r", 0, at)) + 1) + 1


def report(text: str, faults: list[Fault]) -> tuple[PlanError, ...]:
    """Errors in the order of their places; those without one come first, repetitions are left out."""
    ordered = sorted(dict.fromkeys(faults), key=lambda fault: -1 if fault.at is None else fault.at)
    errors = []
    for fault in ordered[:ERRORS_MAX]:
        line, column = (None, None) if fault.at is None else place(text, fault.at)
        errors.append(PlanError(fault.code, fault.field, line, column, fault.text, fault.hint))
    if len(ordered) >= ERRORS_MAX:
        errors.append(PlanError("too-many-errors", None, None, None, f"more than {ERRORS_MAX} errors", None))
    return tuple(errors)
