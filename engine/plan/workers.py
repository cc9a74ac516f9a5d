"""Which worker a value names. Must never guess: a value that is no worker is an error, and nothing moves up."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from engine.plan.findings import Findings, quoted
from engine.plan.limits import INTEGER_DIGITS_MAX
from engine.plan.nodes import Node, Text, Word

_DIGITS: Final = re.compile(r"0|[1-9][0-9]*")


@dataclass(frozen=True, slots=True)
class StepPlace:
    """Where a value stands: the step's position (from 0), what its author calls it, and the list or key."""

    position: int
    name: str
    field: str


class WorkerNames:
    """The names of a pool's workers, in the file's order; numbers count them from 0."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self._by_folded: dict[str, list[str]] = {}
        for name in names:
            self._by_folded.setdefault(name.strip().casefold(), []).append(name)

    def allowed(self) -> str:
        """The allowed numbers and names in words, for a message; long pools are cut short."""
        listed = ", ".join(f"{number} ({name})" for number, name in enumerate(self.names[:12]))
        return f"allowed: {listed}{', …' if len(self.names) > 12 else ''}"  # noqa: PLR2004 - two lines of a terminal

    def resolve(self, node: Node, place: StepPlace, findings: Findings, hint: str | None) -> str | None:
        """The name of the worker that a value names, or None after recording why it names none.

        A whole number, a registered name (blanks around it aside) and, with a note, a quoted number or a name that
        fits when case is ignored. `hint` goes with numbers that are out of range.
        """
        if isinstance(node, Text):
            return self._named(node, place, findings, hint)
        if isinstance(node, Word) and node.kind == "void":
            return None
        if isinstance(node, Word) and node.kind == "integer":
            return self._numbered(node, int(node.text), place, findings, hint)
        if isinstance(node, Word) and node.surplus_digits:
            said = f"{place.name}: a number of {node.surplus_digits} digits"
            findings.error("number-too-long", said, at=node.start, field=place.field)
        elif isinstance(node, Word) and node.kind == "ambiguous":
            findings.error(
                "yaml-ambiguous",
                f"{place.name}: {quoted(node.text)} is not text to every YAML reader; {self.allowed()}",
                at=node.start,
                field=place.field,
                hint="write a plain number, or put the name in quotes",
            )
        else:
            shown = quoted(node.text) if isinstance(node, Word) else "a bracketed value"
            hinted = "put names in quotes" if isinstance(node, Word) and node.text.strip() in self.names else None
            findings.error(
                "worker-not-a-number",
                f"{place.name}: {shown} is no worker; {self.allowed()}",
                at=node.start,
                field=place.field,
                hint=hinted,
            )
        return None

    def _numbered(self, node: Node, number: int, place: StepPlace, findings: Findings, hint: str | None) -> str | None:
        if 0 <= number < len(self.names):
            return self.names[number]
        findings.error(
            "worker-unknown",
            f"{place.name}: worker {number} does not exist; {self.allowed()}",
            at=node.start,
            field=place.field,
            hint=hint or "workers are counted from 0",
        )
        return None

    def _named(self, node: Text, place: StepPlace, findings: Findings, hint: str | None) -> str | None:
        name = node.value.strip()
        if name in self.names:
            return name
        if _DIGITS.fullmatch(name) and len(name) <= INTEGER_DIGITS_MAX:
            worker = self._numbered(node, int(name), place, findings, hint)
            if worker is not None:
                findings.note(
                    "worker-number-quoted",
                    f"{quoted(name)} was read as worker {name}",
                    field=place.field,
                    position=place.position,
                )
            return worker
        matches = self._by_folded.get(name.casefold(), [])
        if len(matches) == 1:
            findings.note(
                "worker-name-case",
                f"{quoted(node.value)} was read as {matches[0]}",
                field=place.field,
                position=place.position,
            )
            return matches[0]
        if matches:
            findings.error(
                "worker-ambiguous",
                f"{place.name}: {quoted(name)} fits several workers; {self.allowed()}",
                at=node.start,
                field=place.field,
            )
        else:
            findings.error(
                "worker-unknown",
                f"{place.name}: {quoted(name)} is no worker of this pool; {self.allowed()}",
                at=node.start,
                field=place.field,
            )
        return None
