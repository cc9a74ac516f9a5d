"""The labels of the three lists in free text. Must never take a word of prose for a label.

A label counts at the start of a line, or right after `]` or `>`, before `=` or `:`. Inside a line of prose it counts
only if a bracket follows. As a heading, in emphasis or before an arrow it counts if its list follows. A label that is
merely close to a known one counts at those places too, as an error, so that a plan with a mistyped label is never
passed over in favour of an earlier one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from engine.plan.lists import ACCESS_LIST, LIST_NAMES, MODEL_ID, SUBTASKS

_BLANKS: Final = r"[^\S\r\n]*"
_HEADED: Final = r"(?P<headed>\s+(?:`{3,}\w{0,16}\s+)?(?=\[))"
LABEL: Final = (
    r"(?:\b|(?<=assistantfinal))"
    r"(?P<name>model[_ -]?ids?|sub[_ -]?tasks?|acc?ess?[_ -]?lists?)(?P<mark>[\"'\u201d\u2019`*]{0,4})"
    rf"(?:{_BLANKS}(?::=|[=:](?![=>])|(?P<arrow>->|[=:]>|<-|[\u2190\u2192\u21d0\u21d2\u27f5\u27f6]))"
    rf"|{_HEADED}|(?={_BLANKS}\Z))"
)
_GAP: Final = re.compile(r"[*_]*\s*[*_]*\s*(?:`+\w*\s*)?")
_HEAD: Final = re.compile(r"[\s#>*+_`\"'\u201c\u2018({|-]*(?:\d{1,2}[.)])?[\s*_`\"'\u201c\u2018({]*")
_HEAD_CHARS: Final = 32


@dataclass(frozen=True, slots=True)
class Label:
    """A label: which list it means, how it is written, and where."""

    name: str
    exact: str
    start: int


def read_label(text: str, match: re.Match[str]) -> Label | None:
    """The label at a match of `LABEL`, or None where the word is prose."""
    written = match["name"]
    folded = written.casefold()
    name = MODEL_ID if folded.startswith("m") else SUBTASKS if folded.startswith("s") else ACCESS_LIST
    anchored = _anchored(text, match.start())
    exact = written in LIST_NAMES
    if match["headed"] is not None or match["arrow"] is not None:
        at_head = anchored or _at_line_head(text, match.start())
        value_at = value_gap(text, match.end())
        opened = text[value_at : value_at + 1] in ("[", "(")
        return Label(name, written, match.start()) if at_head and opened else None
    if not (exact and anchored):
        value_at = value_gap(text, match.end())
        if text[value_at : value_at + 1] not in ("[", "(") or not (exact or anchored):
            return None
    return Label(name, written, match.start())


def value_gap(text: str, pos: int) -> int:
    """Where the value after a label begins: behind blanks, emphasis and an opening fence."""
    match = _GAP.match(text, pos)
    return match.end() if match else pos


def _anchored(text: str, start: int) -> bool:
    pos = start
    while pos > 0 and text[pos - 1].isspace() and text[pos - 1] not in "\r\n":
        pos -= 1
    return pos == 0 or text[pos - 1] in "\n\r]>" or text.endswith("assistantfinal", 0, pos)


def _at_line_head(text: str, start: int) -> bool:
    """Whether only marks of a list, a heading, emphasis or a quote stand before the label on its line."""
    before = text[max(0, start - _HEAD_CHARS) : start]
    line = max(before.rfind("\n"), before.rfind("\r")) + 1
    return (line > 0 or start <= _HEAD_CHARS) and _HEAD.fullmatch(before[line:]) is not None
