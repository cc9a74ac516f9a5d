"""Reads one bracketed value: lists, tuples, objects, strings and bare words. Must never close what the text left open.

The grammar is that of Python and JSON literals as models write them: straight or curly quotes, trailing commas, any
white space. It makes nodes and decides nothing about their meaning. A fault that leaves the rest readable is recorded
and reading goes on; one that does not raises `ScanStop`.

Quotes: a straight-quoted string ends at its next unescaped quote, without look-ahead. A curly opening quote nests and
a curly closing one closes; the closing one opens a string only where a value is expected.
"""

from __future__ import annotations

import re
from typing import Final, NoReturn

from engine.plan.clean import clean_text
from engine.plan.escapes import decode_escapes
from engine.plan.findings import Findings, quoted
from engine.plan.limits import DEPTH_MAX, INTEGER_DIGITS_MAX, STEPS_SCANNED_MAX, WORK_FACTOR_MAX
from engine.plan.nodes import Mapping, Node, Sequence, Text, Word, WordKind

_CLOSING: Final = {"[": "]", "(": ")", "{": "}"}
_BLANK: Final = re.compile(r"[\s\ufeff]*")
_WORD: Final = re.compile(r"[^,\[\]{}()\"“”\n\r]+")
_INTEGER: Final = re.compile(r"0|-?[1-9][0-9]*")
_NUMBER: Final = re.compile(r"[-+]?[.0-9][0-9a-zA-Z_.+-]*|[-+]?(?:nan|inf|infinity)", re.IGNORECASE)
_STRING_PREFIX: Final = re.compile("[rbuf]{1,2}['\u2018\u2019]", re.IGNORECASE)

# One surplus mark between a closing quote and the comma or bracket that should follow it (G1-02).
_STRAY_MARK: Final = re.compile(r"(?:[.!?;:…]{1,3}[\"”\u2019']?|[\"”\u2019'])(?=\s*[,\])])")

_SWALLOWED: Final = re.compile(r"(?:model_id|subtasks|access_list)[\"'*`]*\s*[=:]|</|\[/")

# Which characters matter inside a string, by its opening quote: (closing, nesting or "", search).
_QUOTES: Final[dict[str, tuple[str, str, re.Pattern[str]]]] = {
    '"': ('"', "", re.compile(r'[\\"]')),
    "'": ("'", "", re.compile(r"[\\']")),
    "“": ("”", "“", re.compile(r"[\\“”]")),
    "”": ("”", "“", re.compile(r"[\\“”]")),
    "\u2018": ("\u2019", "\u2018", re.compile("[\\\\\u2018\u2019]")),
    "\u2019": ("\u2019", "\u2018", re.compile("[\\\\\u2018\u2019]")),
}
_LENIENT_FIELD: Final = "subtasks"  # the only list in which lenient reading passes over a fault (G1-02, G1-03)
_OPENS_ANYWHERE: Final = "\"'“\u2018"


class ScanStop(Exception):  # noqa: N818 - it ends a scan whose error is already on record
    """The value cannot be read further; what is wrong has been recorded."""


class WorkMeter:
    """Counts characters scanned inside values, so that rereading after faults stays linear in the text."""

    def __init__(self, text_chars: int) -> None:
        self.left = WORK_FACTOR_MAX * text_chars + 10_000

    def spend(self, chars: int) -> None:
        """Count scanned characters."""
        self.left -= chars

    @property
    def exhausted(self) -> bool:
        """Whether the text is too complex to be a plan."""
        return self.left < 0


class Scanner:
    """Reads one value of a text. After it, `pos` is the offset behind what was read.

    `unsure` tells that quotes or brackets went wrong in a way that leaves it open where strings begin and end: then
    nothing that follows may be taken for a plan. `truncated` tells that the text ended inside the value.
    """

    def __init__(self, text: str, findings: Findings, *, lenient: bool = False, cut_hint: str | None = None) -> None:
        self._text = text
        self._findings = findings
        self._lenient = lenient
        self._cut_hint = cut_hint
        self.pos = 0
        self.unsure = False
        self._repaired = False
        self.truncated = False
        self.keys: list[str] = []

    def read(self, pos: int, field: str | None, meter: WorkMeter) -> Node:
        """Read the value that starts at `pos`; raises ScanStop."""
        self.pos = pos
        try:
            return self._value(0, field)
        except ScanStop:
            self.unsure = True
            raise
        finally:
            meter.spend(self.pos - pos)

    def _value(self, depth: int, field: str | None) -> Node:
        char = self._text[self.pos]
        if char in _QUOTES:
            return self._string(field)
        if char in "[(":
            return self._sequence(depth + 1, field)
        if char == "{":
            return self._mapping(depth + 1, field)
        return self._word(field)

    def _sequence(self, depth: int, field: str | None) -> Sequence:
        start, bracket = self.pos, self._text[self.pos]
        self._enter(depth, field)
        items: list[Node] = []
        last: Node | None = None  # the value that no comma has followed yet
        while True:
            char = self._next(start, field)
            if char == _CLOSING[bracket]:
                self.pos += 1
                if self._repaired and field == _LENIENT_FIELD:
                    self._check_repair(items, field)
                if bracket == "(":
                    self._findings.note("tuple", "round brackets were read as a list", field=field)
                return Sequence(items, start, self.pos, bracket)
            if char == ",":
                self._comma(last, field)
                last = None
            elif char in ")]}":
                self._stop("mismatched-bracket", f"{char!r} does not close the {bracket!r} before it", field)
            elif last is None or not self._pass_stray_mark(last, len(items) - 1, field):
                if last is not None:
                    self._missing_comma(last, char, field, len(items))
                if len(items) >= STEPS_SCANNED_MAX:
                    self._stop("too-many-items", f"a list has more than {STEPS_SCANNED_MAX} elements", field)
                last = self._value(depth, field)
                items.append(last)

    def _mapping(self, depth: int, field: str | None) -> Mapping:
        start = self.pos
        self._enter(depth, field)
        mapping = Mapping([], start, start)
        seen: set[str] = set()
        last: Node | None = None
        while True:
            char = self._next(start, field)
            if char == "}":
                self.pos += 1
                mapping.end = self.pos
                return mapping
            if char == ",":
                self._comma(last, field)
                last = None
                continue
            if char in "])":
                self._stop("mismatched-bracket", f"{char!r} does not close the '{{' before it", field)
            if last is not None:
                self._missing_comma(last, char, field)
            if char not in _QUOTES:
                self._stop("key-not-quoted", f"a key must be a quoted string, not {quoted(self._rest())}", field)
            if len(mapping.entries) >= STEPS_SCANNED_MAX:
                self._stop("too-many-items", f"an object has more than {STEPS_SCANNED_MAX} keys", field)
            key = self._string(field)
            self.keys.append(key.value)
            if key.value in seen:
                self._findings.error(
                    "duplicate-key", f"the key {quoted(key.value)} is written twice", at=key.start, field=key.value[:80]
                )
            seen.add(key.value)
            if self._next(start, field) != ":":
                self._stop("colon-expected", f"no colon after the key {quoted(key.value)}", field)
            self.pos += 1
            if self._next(start, field) in ",]})":
                self._stop("missing-value", f"the key {quoted(key.value)} has no value", field)
            last = self._value(depth, key.value[:80])
            mapping.entries.append((key, last))

    def _string(self, field: str | None) -> Text:
        text, start = self._text, self.pos
        closing, nesting, stops = _QUOTES[text[start]]
        level, pos = 1, start + 1
        while level:
            match = stops.search(text, pos)
            if match is None:
                self.pos = len(text)
                self._truncate(f"the text ends inside a string: {quoted(text[start : start + 80])}", start, field)
            char = match[0]
            if char == "\\":
                pos = match.end() + 1
                continue
            pos = match.end()
            if char == closing:
                level -= 1
            elif char == nesting:
                level += 1
        self.pos = pos
        meaning, tex_kept = decode_escapes(text[start + 1 : pos - 1])
        return Text(clean_text(meaning), start, pos, text[start], tex_kept)

    def _word(self, field: str | None) -> Word:
        match = _WORD.match(self._text, self.pos)
        if match is None:
            self._stop("stray-text", f"a value was expected, not {quoted(self._rest())}", field)
        written = match[0].rstrip()
        if _STRING_PREFIX.match(written):
            self.unsure = True
            self._findings.error("stray-text", f"{quoted(written)} is no string", at=self.pos, field=field)
        word = Word(written, self.pos, self.pos + len(written), word_kind(written))
        self.pos = match.end()
        return word

    def _pass_stray_mark(self, last: Node, position: int, field: str | None) -> bool:
        """Step over one surplus mark right behind a closing quote: an error, or a note in a lenient list."""
        if not isinstance(last, Text) or self.pos != last.end:
            return False
        match = _STRAY_MARK.match(self._text, self.pos)
        if match is None:
            return False
        if self._lenient and field == _LENIENT_FIELD:
            self._repaired = True
            self._findings.note(
                "stray-mark",
                f"the surplus {quoted(match[0])} after a quote was passed over",
                field=field,
                position=position,
            )
        else:
            self.unsure = True
            self._findings.error(
                "stray-text",
                f"{quoted(match[0])} stands after a closing quote",
                at=self.pos,
                field=field,
                hint="remove it, or put a backslash before a quote that belongs to the text",
            )
        self.pos = match.end()
        return True

    def _missing_comma(self, last: Node, char: str, field: str | None, position: int | None = None) -> None:
        """Deal with a second value (or text that is none) where a comma belongs; raises ScanStop for the latter."""
        between_strings = isinstance(last, Text) and char in _OPENS_ANYWHERE
        if isinstance(last, Text) and not between_strings and char not in "[({":
            self._stop("stray-text", f"{quoted(self._rest())} stands after a closing quote", field)
        if between_strings and self._lenient and field == _LENIENT_FIELD:
            self._repaired = True
            self._findings.note(
                "missing-comma",
                "two subtasks without a comma between them were read as two",
                field=field,
                position=position,
            )
            return
        if isinstance(last, Text) and between_strings and (self.pos == last.end or char != last.quote):
            self.unsure = self.unsure or not (char == "“" and last.quote in "“”")
        self._findings.error(
            "missing-comma",
            f"no comma before {quoted(self._rest())}",
            at=self.pos,
            field=field,
            hint="put a comma between the two values",
        )

    def _check_repair(self, items: list[Node], field: str) -> None:
        """Take a lenient reading back if it put another list, or the reasoning's end, inside a subtask."""
        for item in items:
            if isinstance(item, Text) and _SWALLOWED.search(item.value):
                self.unsure = True
                self._findings.error(
                    "stray-text", f"the quotes went wrong in {quoted(item.value)}", at=item.start, field=field
                )

    def _comma(self, last: Node | None, field: str | None) -> None:
        if last is None:
            self._findings.error("missing-value", "a comma stands where a value was expected", at=self.pos, field=field)
        self.pos += 1

    def _next(self, start: int, field: str | None) -> str:
        """The next character that is no blank; the end of the text is an error, never a closing bracket."""
        if self._findings.full:
            raise ScanStop
        match = _BLANK.match(self._text, self.pos)
        self.pos = match.end() if match else self.pos
        if self.pos >= len(self._text):
            opened = self._text[start]
            self._truncate(f"the text ends before this {opened!r} is closed", start, field)
        return self._text[self.pos]

    def _enter(self, depth: int, field: str | None) -> None:
        if depth > DEPTH_MAX:
            self._stop("too-deep", f"brackets are nested more than {DEPTH_MAX} deep", field)
        self.pos += 1

    def _rest(self) -> str:
        return self._text[self.pos : self.pos + 40].split("\n", 1)[0]

    def _truncate(self, text: str, at: int, field: str | None) -> NoReturn:
        self.truncated = True
        self._findings.error("truncated", text, at=at, field=field, hint=self._cut_hint)
        raise ScanStop

    def _stop(self, code: str, text: str, field: str | None) -> NoReturn:
        self._findings.error(code, text, at=self.pos, field=field)
        raise ScanStop


def word_kind(written: str) -> WordKind:
    """What an unquoted word of the lists or JSON form is; Python's and JSON's spellings are the same here."""
    if _INTEGER.fullmatch(written):
        return "integer" if len(written) <= INTEGER_DIGITS_MAX else "number"
    if written in ("None", "null"):
        return "null"
    if written in ("True", "False", "true", "false"):
        return "boolean"
    return "number" if _NUMBER.fullmatch(written) else "name"
