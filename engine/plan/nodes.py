"""Values as written, before anybody says what they mean. Must never decide whether a value is legal.

The scanner (lists and JSON) and the YAML reader both give these, so that workers, access and step objects are read
by the same code whatever the form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.plan.clean import CleanedText
from engine.plan.limits import INTEGER_DIGITS_MAX

WordKind = Literal["integer", "null", "boolean", "number", "ambiguous", "empty", "name", "void"]
"""What an unquoted value is. "number" is any number but a plain decimal integer; "ambiguous" is a YAML value that is
not the text it looks like; "void" has been reported already and must be passed over in silence."""


@dataclass(slots=True)
class Text:
    """A string: its meaning, and what happened to it on the way. `start` and `end` are offsets of the whole token."""

    cleaned: CleanedText
    start: int
    end: int
    quote: str = ""
    tex_kept: tuple[str, ...] = ()
    comment_at: int | None = None  # a YAML comment follows the unquoted text on its line

    @property
    def value(self) -> str:
        """The decoded, storable text."""
        return self.cleaned.text


@dataclass(slots=True)
class Word:
    """An unquoted value as written."""

    text: str
    start: int
    end: int
    kind: WordKind

    @property
    def surplus_digits(self) -> int:
        """The number of digits of a whole number that is too long to be read, 0 for anything else."""
        digits = self.text.strip("-")
        return len(digits) if len(digits) > INTEGER_DIGITS_MAX and digits.isdecimal() else 0


@dataclass(slots=True)
class Sequence:
    """A list or tuple; `bracket` is the opening character ("-" in YAML's block form)."""

    items: list[Node]
    start: int
    end: int
    bracket: str


@dataclass(slots=True)
class Mapping:
    """An object: its entries in order, repeated keys included."""

    entries: list[tuple[Text, Node]]
    start: int
    end: int


Node = Text | Word | Sequence | Mapping
