"""Step objects that are only a part of a plan. Must never let a part run as if it were the whole.

Models lose indentation and put headings between steps. Then one plan looks like several, or a text ends too early.
"""

from __future__ import annotations

import re
from typing import Final

from engine.plan.candidate import Block
from engine.plan.findings import Findings
from engine.plan.lists import ACCESS_LIST
from engine.plan.nodes import Mapping, Node, Sequence, Text, Word
from engine.plan.objects import INSTRUCTION, STEP, STEPS, read_steps
from engine.plan.workers import WorkerNames

_STEP_FORMS: Final = ("steps-yaml", "steps-json")
_STEP_NUMBER: Final = re.compile(r"\bstep[\"']?[ \t]*:[ \t]*[\"']?(\d{1,9})")
_DIGITS: Final = re.compile(r"\d{1,9}")
_WORD: Final = re.compile(r"[^\W\d_]{2,}")
_SHAPE_CODES: Final = frozenset({"missing-key", "unknown-key", "object-expected", "steps-not-a-list", "list-expected"})

# The heading right above the steps says that they go on from those before, not that they replace them.
_GOES_ON: Final = re.compile(
    r"[^\w]{0,8}(?:(?:and|now)\W{1,3})?"
    r"(?:then|next|step|part|second(?:ly)?|third(?:ly)?|fourth|fifth|finally|lastly|after|\d{1,2})\b"
    r"(?!.*\b(?:plan|version|draft|better|revised|improved)\b)",
    re.IGNORECASE,
)
_HEADING_CHARS: Final = 200
_REST_OF_ITEM: Final = re.compile(r"(?:[ \t]+|[-*+>][ \t]|//)[ \t]*[^\s`~]")
_APART: Final = re.compile(
    r"\n[ \t]*\r?\n|^[ \t]*(?:`{3,}|~{3,})|^[^\r\n=(\[]*[^\W\d_]{2}[*_]{0,3}:[*_]{0,3}[ \t]*\r?$", re.MULTILINE
)
_NO_TEXT: Final = re.compile(r"[ \t]*(?:`{3,}|~{3,}|</|<\||\[/|---|\.\.\.)")
_BLANK_LINE_BEFORE: Final = re.compile(r"\n[ \t\r]*\n[ \t\r]*\Z")


def torn_from(text: str, blocks: list[Block], workers: WorkerNames) -> Block | None:
    """The block of steps that looks like the rest of others rather than like a plan of its own, if there is one.

    Blocks that stand before the last run of step objects do not count.
    """
    for index in range(len(blocks) - 1, -1, -1):
        last = blocks[index]
        if last.form not in _STEP_FORMS:
            return None
        if _hangs_on(text, last):
            return last
        before = blocks[index - 1] if index > 0 else None
        if before is not None and before.form == "lists" and set(before.lists) == {ACCESS_LIST}:
            # A key of a step that could not be read.
            if not _stand_apart(text, before, last) or _is_indented(text, last):
                return last
            before = blocks[index - 2] if index > 1 else None
        if before is None or before.form not in _STEP_FORMS:
            return None
        if _goes_on(text, before, last) or _is_broken(before, workers) or text_cut_at(text, before) is not None:
            return last
    return None


def _is_indented(text: str, block: Block) -> bool:
    """Whether a YAML plan outside of any fence begins behind blanks, and not right below a heading."""
    if block.form != "steps-yaml" or block.sure_end or block.fence_open or text[block.start : block.start + 1] != " ":
        return False
    line = text.rfind("\n", 0, max(block.start - 1, 0)) + 1
    return not text[max(line, block.start - _HEADING_CHARS) : block.start].rstrip(" \t\r\n*_").endswith(":")


def _hangs_on(text: str, block: Block) -> bool:
    """Whether the line right above a YAML plan outside of any fence is indented, or an item of a list itself."""
    if block.form != "steps-yaml" or block.sure_end or block.fence_open or block.start == 0:
        return False
    line = text.rfind("\n", 0, block.start - 1) + 1
    return _REST_OF_ITEM.match(text, line, block.start) is not None


def _stand_apart(text: str, before: Block, last: Block) -> bool:
    """Whether a blank line, a fence or a heading parts two blocks."""
    return _APART.search(text, before.end, last.start) is not None


def text_cut_at(text: str, block: Block) -> int | None:
    """Where a line without indentation may have cut the last instruction of a YAML plan that no bracket or fence ends.

    A block text may go on behind a blank line, other unquoted text only on the next line.
    """
    if block.form != "steps-yaml" or block.sure_end or block.end >= len(text):
        return None
    last = _last_instruction(block.node)
    if last is None or last.quote not in ("", "|", ">") or _NO_TEXT.match(text, block.end) is not None:
        return None
    nearby = text[max(block.start, block.end - _HEADING_CHARS) : block.end]
    if last.quote == "" and _BLANK_LINE_BEFORE.search(nearby) is not None:
        return None
    rest = text[block.end : block.end + _HEADING_CHARS]
    return block.end + len(rest) - len(rest.lstrip()) if rest.strip() else None


def _goes_on(text: str, before: Block, last: Block) -> bool:
    """Whether the steps stand close to those before, count on, or stand below a heading that says they go on."""
    if not _stand_apart(text, before, last) or _is_indented(text, last):
        return True
    if _first_number(text, last) > 1 or _WORD.search(text, before.end, last.start) is None:
        return True
    above = text[max(before.end, last.start - _HEADING_CHARS) : last.start]
    lines = [line for line in above.splitlines() if line.strip() and not line.strip().startswith(("```", "~~~"))]
    return bool(lines) and _GOES_ON.match(lines[-1]) is not None


def _first_number(text: str, block: Block) -> int:
    """The number of the first numbered step, or 0 where none has one."""
    if block.node is None:
        match = _STEP_NUMBER.search(text, block.start, block.end)
        return 0 if match is None else int(match[1])
    values = [value for item in _items(block.node) for key, value in item.entries if key.value == STEP]
    written = [
        value.value if isinstance(value, Text) else value.text for value in values if isinstance(value, Text | Word)
    ]
    return next((int(number) for number in written if _DIGITS.fullmatch(number)), 0)


def _is_broken(block: Block, workers: WorkerNames) -> bool:
    """Whether steps could not be read, or lack a key or their list."""
    findings = Findings()
    if block.node is not None:
        read_steps(block.node, workers, findings)
    return bool(block.findings.faults) or any(fault.code in _SHAPE_CODES for fault in findings.faults)


def _last_instruction(node: Node | None) -> Text | None:
    """The text of the last entry of the last step, if it is an instruction."""
    items = _items(node)
    if not items or not items[-1].entries:
        return None
    key, value = items[-1].entries[-1]
    return value if key.value == INSTRUCTION and isinstance(value, Text) else None


def _items(node: Node | None) -> list[Mapping]:
    """The step objects of a list of them or of a `steps:` wrapper round it; one that stands alone is a list of one."""
    if isinstance(node, Mapping):
        node = next((value for key, value in node.entries if key.value == STEPS), node)
    listed = node.items if isinstance(node, Sequence) else [node]
    return [item for item in listed if isinstance(item, Mapping)]
