"""The labels of the three lists in free text. Must never take a word of prose for a label.

A label counts at the start of a line, or right after `]` or `>`, before `=` or `:`. Inside a line of prose it counts
only if a bracket follows. A label that is merely close to a known one counts at those places too, as an error, so that
a plan with a mistyped label is never passed over in favour of an earlier one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from engine.plan.lists import ACCESS_LIST, LIST_NAMES, MODEL_ID, SUBTASKS

_BLANKS: Final = r"[^\S\r\n]*"
LABEL: Final = (
    r"\b(?P<name>model[_ -]?ids?|sub[_ -]?tasks?|acc?ess?[_ -]?lists?)(?P<mark>[\"'\u201d\u2019`*]{0,4})"
    rf"(?:{_BLANKS}(?::=|[=:](?!=))|(?={_BLANKS}\Z))"
)
_GAP: Final = re.compile(r"[*_]*\s*[*_]*\s*(?:`+\w*\s*)?")


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
    return pos == 0 or text[pos - 1] in "\n\r]>"
