"""Which earlier steps a step may read. Must never take a value it does not know for "nothing" or for "everything"."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from engine.plan.findings import Findings, quoted
from engine.plan.limits import INTEGER_DIGITS_MAX
from engine.plan.nodes import Node, Sequence, Text, Word
from engine.plan.plan import Access

_DIGITS: Final = re.compile(r"0|[1-9][0-9]*")
_MEANING: Final = 'write [], ["all"] or a list of earlier steps such as [0, 1]'


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """The numbers by which a form refers to its steps, in order: 0, 1, 2 ... in the lists, 1, 2, 3 ... in objects."""

    numbers: tuple[int, ...]
    hint: str | None = None  # said with references that fail, if the plan looks counted from another number

    def name(self, position: int) -> str:
        """How the plan's author would call the step at this position."""
        return f"step {self.numbers[position]}"


class AccessReader:
    """Reads the access entries of one plan."""

    def __init__(self, numbers: StepNumbers, field: str, findings: Findings) -> None:
        self._numbers = numbers
        self._positions = {number: position for position, number in enumerate(numbers.numbers)}
        self._field = field
        self._findings = findings

    def resolve(self, node: Node, position: int) -> Access | None:
        """Earlier positions or "all"; None after recording why the value is neither.

        `[]`, a list of step numbers and "all" (also inside a list) are plain. A bare or quoted number, a repeated one
        and a spelled-out none are accepted with a note.
        """
        if isinstance(node, Sequence):
            return self._listed(node, position)
        word = self._shorthand(node)
        if word == "all":
            return "all"
        if word == "none":
            self._findings.note(
                "access-none",
                f"{quoted(node.value if isinstance(node, Text) else 'null')} was read as: sees nothing",
                field=self._field,
                position=position,
            )
            return ()
        found = self._reference(node, position)
        if found is None:
            return None
        if isinstance(node, Word):
            self._findings.note(
                "access-number-alone", f"{node.text} was read as [{node.text}]", field=self._field, position=position
            )
        return (found,)

    def _listed(self, node: Sequence, position: int) -> Access | None:
        found: list[int] = []
        opens_all = failed = False
        for item in node.items:
            if isinstance(item, Text) and self._shorthand(item) == "all":
                opens_all = True
                continue
            reference = self._reference(item, position)
            if reference is None:
                failed = True
            elif reference in found:
                self._findings.note(
                    "access-repeated",
                    f"{self._numbers.name(reference)} was listed more than once",
                    field=self._field,
                    position=position,
                )
            else:
                found.append(reference)
        if failed:
            return None
        return "all" if opens_all else tuple(sorted(found))

    @staticmethod
    def _shorthand(node: Node) -> str | None:
        if isinstance(node, Text) and (word := node.value.strip().casefold()) in ("all", "none"):
            return word
        return "none" if isinstance(node, Word) and node.kind == "null" else None

    def _reference(self, node: Node, position: int) -> int | None:
        """The position of one referenced step."""
        if isinstance(node, Word) and node.kind == "integer":
            return self._earlier(int(node.text), node, position)
        if isinstance(node, Text):
            digits = node.value.strip()
            if _DIGITS.fullmatch(digits) and len(digits) <= INTEGER_DIGITS_MAX:
                found = self._earlier(int(digits), node, position)
                if found is not None:
                    self._findings.note(
                        "access-number-quoted",
                        f"{quoted(node.value)} was read as step {digits}",
                        field=self._field,
                        position=position,
                    )
                return found
        self._not_understood(node, position)
        return None

    def _not_understood(self, node: Node, position: int) -> None:
        step = self._numbers.name(position)
        if isinstance(node, Word) and node.kind == "void":
            return
        if isinstance(node, Word) and node.kind == "ambiguous":
            code, shown = "yaml-ambiguous", f"{quoted(node.text)} is not the same to every YAML reader"
        elif isinstance(node, Word) and node.surplus_digits:
            code, shown = "number-too-long", f"a number of {node.surplus_digits} digits"
        elif isinstance(node, Text | Word):
            written = node.value if isinstance(node, Text) else node.text
            code, shown = "access-not-understood", f"{quoted(written)} is no earlier step"
        else:
            code, shown = "access-not-understood", "a bracketed value is no earlier step"
        self._findings.error(code, f"{step}: {shown}", at=node.start, field=self._field, hint=_MEANING)

    def _earlier(self, number: int, node: Node, position: int) -> int | None:
        step = self._numbers.name(position)
        found = self._positions.get(number)
        if found is not None and found < position:
            return found
        if found is None:
            code, text = "access-unknown", f"{step}: there is no step {number}"
        elif found == position:
            code, text = "access-self", f"{step} refers to itself"
        else:
            code, text = "access-later", f"{step} refers to step {number}, which comes later"
        first = self._numbers.numbers[0]
        hint = self._numbers.hint or f"a step may read earlier steps only; this form counts them from {first}"
        self._findings.error(code, text, at=node.start, field=self._field, hint=hint)
        return None
