"""Finds where a YAML plan begins and ends in a text. Must never parse YAML.

Inside a fence the whole fence is the plan. Elsewhere indentation decides: the plan goes on over deeper lines, further
list items of the same column and, round a `steps:` key, neighbouring lower-case keys; any other line ends it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

_LINE: Final = re.compile(r"([ \t]*)([^\n]*)(?:\n|\Z)")
# Groups are repeated possessively: what may be given back is remembered, at some hundred bytes for each turn.
_KEY_LINE: Final = re.compile(r"[\"']?[a-z_][a-z0-9_-]*[\"']?[ \t]*:(?:\s|\Z)")
_PLAN_KEY: Final = re.compile(
    r"(?:^[ \t]*(?:-[ \t]+)*+|[{,]\s*)[\"']?(?:agents?|instructions?|acc?ess?_?lists?)[\"']?[ \t]*:",
    re.MULTILINE | re.IGNORECASE,
)
_LIST_KEY: Final = re.compile(r"(?:^[ \t]*(?:-[ \t]+)*+|[{,]\s*)[\"'`*]*(?:model_id|subtasks)\b", re.MULTILINE)
_STEPS_LINE: Final = re.compile(r"[ \t]*[\"']?steps[\"']?[ \t]*:")
_FLOW_MARK: Final = re.compile(r"[\[\]{}\"']")


@dataclass(frozen=True, slots=True)
class Fence:
    """An open code fence: where its content starts, the fence character, its length and its indentation."""

    content_start: int
    char: str
    length: int
    indent: int

    def closer(self, text: str, pos: int) -> re.Match[str] | None:
        """The line that closes the fence: at least as many marks, no deeper than the opening, nothing else."""
        pattern = rf"^[ \t]{{0,{self.indent}}}{re.escape(self.char)}{{{self.length},}}[ \t]*\r?$"
        return re.compile(pattern, re.MULTILINE).search(text, pos)


@dataclass(frozen=True, slots=True)
class Region:
    """Offsets of a YAML text.

    `sure_end` tells that a closing fence or bracket ends it, so that nothing can be missing; `fence_open` that the
    text ended inside a fence.
    """

    start: int
    end: int
    sure_end: bool
    fence_open: bool = False

    def looks_like_lists(self, text: str) -> bool:
        """Whether labels of the three lists stand where keys stand; they may be in a text all the same."""
        return _LIST_KEY.search(text, self.start, self.end) is not None

    def looks_like_plan(self, text: str) -> bool:
        """Whether step keys stand where keys stand; they may be in a text all the same."""
        if _PLAN_KEY.search(text, self.start, self.end) is not None:
            return True
        return _EMPTY_STEPS.fullmatch(text, self.start, self.end) is not None

    def prose_items_end(self, text: str) -> int | None:
        """The end of list items that a blank line parts from the plan and that have none of its keys, if any."""
        blank = None if self.sure_end or self.fence_open else _BLANK_LINE.search(text, self.start, self.end)
        if blank is None or _PLAN_KEY.search(text, self.start, blank.start()) is not None:
            return None
        return None if _mentions_steps(text, self.start, blank.start()) else blank.end()


_BLANK_LINE: Final = re.compile(r"\n(?:[ \t]*\r?\n)++")
_EMPTY_STEPS: Final = re.compile(r"\s*[\"']?steps[\"']?[ \t]*:[ \t]*\[\s*\]\s*")


def find_region(text: str, line_start: int, fence: Fence | None) -> Region:
    """The YAML text round the line that starts at `line_start`."""
    if fence is not None:
        closer = fence.closer(text, line_start)
        end = len(text) if closer is None else closer.start()
        return Region(fence.content_start, end, sure_end=closer is not None, fence_open=closer is None)
    start = _first_line(text, line_start)
    first = _LINE.match(text, start)
    indent = len(first[1]) if first else 0
    keyed = first is not None and not first[2].startswith("-")
    ending = _ending_line(indent, keyed=keyed).search(text, first.end() if first else start)
    return Region(start, len(text) if ending is None else ending.start(), sure_end=False)


@lru_cache(maxsize=64)
def _ending_line(indent: int, *, keyed: bool) -> re.Pattern[str]:
    """The first line that no longer belongs to a block that begins at this column."""
    own = r"-[ \t]|-\r?$|\#" + (rf"|{_KEY_LINE.pattern}" if keyed else "")
    shallower = rf"[ \t]{{0,{indent - 1}}}(?=[^ \t\r\n])|" if indent else ""
    return re.compile(rf"^(?:{shallower}[ \t]{{{indent}}}(?=[^ \t\r\n])(?!{own}))", re.MULTILINE)


def find_flow_end(text: str, start: int) -> int | None:
    """The offset behind the bracket that closes the flow collection at `start`, or None if the text ends first.

    A quote opens a string only where a value or key may begin; inside words it is an apostrophe.
    """
    level, pos = 0, start
    while (match := _FLOW_MARK.search(text, pos)) is not None:
        mark, pos = match[0], match.end()
        if mark in "[{":
            level += 1
        elif mark in "]}":
            level -= 1
            if level == 0:
                return pos
        elif _value_may_begin(text, match.start()):
            closing = _string_end(text, pos, mark)
            if closing is None:
                return None
            pos = closing
    return None


def _first_line(text: str, line_start: int) -> int:
    """Go back over lower-case keys right above the first list item, `steps:` among them."""
    start = line_start
    indent = _indent(text, line_start)
    for _ in range(16):
        if start == 0:
            break
        above = text.rfind("\n", 0, start - 1) + 1
        line = text[above:start]
        if not line.strip():
            break
        if _indent(text, above) > indent or not _KEY_LINE.match(line.lstrip(" \t")):
            break
        start = above
    own_line_end = text.find("\n", line_start)
    end = len(text) if own_line_end < 0 else own_line_end
    return start if _mentions_steps(text, start, end) else line_start


def _mentions_steps(text: str, start: int, end: int) -> bool:
    return any(_STEPS_LINE.match(line) for line in text[start:end].split("\n"))


def _indent(text: str, line_start: int) -> int:
    line = _LINE.match(text, line_start)
    return len(line[1]) if line else 0


def _value_may_begin(text: str, at: int) -> bool:
    before = at - 1
    while before >= 0 and text[before] in " \t\r\n":
        before -= 1
    return before < 0 or text[before] in "[{,:"


def _string_end(text: str, pos: int, quote: str) -> int | None:
    stops = re.compile(r'[\\"]' if quote == '"' else "'")
    while (match := stops.search(text, pos)) is not None:
        if match[0] == "\\" or (quote == "'" and text.startswith("''", match.start())):
            pos = match.end() + 1
        else:
            return match.end()
    return None
