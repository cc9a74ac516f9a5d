"""Finds the plans in a text: reasoning, prose, fences, drafts and the final one. Must never build a plan from two.

One pass from left to right. A value that was read completely hides whatever its strings hold (tags, labels, fences).
The end of reasoning throws away what came before it; comments are passed over. Where quotes went so wrong that nobody
can say what is inside a string, nothing that follows counts as a plan, unless a reasoning's end comes between.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from engine.plan import changes
from engine.plan.candidate import Block, LabelledList, group_parts, mark_swallowed_plan
from engine.plan.comments import LineComments, comment_end, line_rest_end
from engine.plan.findings import Fault, Findings
from engine.plan.json_meaning import json_form, meant_as_lists, near_key
from engine.plan.labels import read_label, value_gap
from engine.plan.limits import ATTEMPTS_MAX, LISTS_MAX, STARTS_MAX
from engine.plan.lists import LIST_NAMES
from engine.plan.nodes import Node
from engine.plan.objects import complete_steps
from engine.plan.plan import Form
from engine.plan.reasoning import (
    REASONING_END,
    REASONING_END_ANY,
    REASONING_MARK,
    Family,
    is_quoted,
    line_round,
    read_mark,
)
from engine.plan.scanner import Scanner, ScanStop, WorkMeter
from engine.plan.starts import ANY_LABEL, STARTS, STARTS_WITHOUT_YAML
from engine.plan.yaml_region import Fence, Region, find_flow_end, find_region
from engine.plan.yaml_steps import YamlReader

_FENCE_LINE: Final = re.compile(r"([ \t]*)(`{3,}|~{3,})([^\n]*)")


@dataclass(slots=True)
class Found:
    """Everything in a text that could be a plan, in order, and what became of its reasoning."""

    blocks: list[Block] = field(default_factory=list)
    reasoning_open_at: int | None = None
    reasoning_closed: bool = False
    lost_faults: list[Fault] = field(default_factory=list)  # of unreadable plans that a reasoning's end cut off
    too_complex: Fault | None = None
    hidden: list[tuple[int, int]] = field(default_factory=list)  # comments, and reasoning that opened and closed
    plan_in_comment: bool = False
    comment_open_at: int | None = None


class BlockFinder:
    """Walks through one text and collects its blocks."""

    def __init__(self, text: str, *, lenient: bool, cut_hint: str | None) -> None:
        self._text = text
        self._lenient = lenient
        self._cut_hint = cut_hint
        self._meter = WorkMeter(len(text))
        self._found = Found()
        self._parts: list[Block | LabelledList] = []
        self._fence: Fence | None = None
        self._no_yaml_before = 0
        self._besides_yaml: tuple[int, re.Match[str] | None] = (len(text) + 1, None)  # from where it was looked for
        self._attempts = 0
        self._starts = 0
        self._last_reasoning_ends: dict[re.Pattern[str], int] = {}
        self._reasoning: Family = "template"  # the family of the mark at `reasoning_open_at`
        self._parts_before_reasoning = 0
        self._comments = LineComments(text)
        self._endless: set[str] = set()  # openings of comments for which no end is left

    def find(self) -> Found:
        """All blocks outside of reasoning, in order; see `Found`."""
        self._scan(0)
        while (hidden := self._hidden_reasoning_end()) is not None and self._found.too_complex is None:
            # What looked like a string of an incomplete plan held the end of the reasoning: the plan comes after it.
            before, self._parts = self._parts, []
            self._no_yaml_before = 0
            self._meter.spend(len(self._text) - hidden)
            self._comments.move(hidden)
            self._scan(hidden)
            if not self._parts and self._found.reasoning_open_at is None:
                self._parts = before
                break
        self._found.blocks = group_parts(self._text, self._parts)
        for block in self._found.blocks:
            mark_swallowed_plan(self._text, block)
        return self._found

    def _hidden_reasoning_end(self) -> int | None:
        """The first end of reasoning inside a labelled list whose block is incomplete; only complete ones hide it."""
        for block in group_parts(self._text, self._parts):
            if block.form == "lists" and len(block.lists) < len(LIST_NAMES):
                for part in block.lists.values():
                    end = REASONING_END.search(self._text, part.label.start, part.end)
                    if end is not None:
                        return end.start()
        return None

    def _scan(self, pos: int) -> None:
        """Collect the parts from an offset on."""
        while (match := self._next_start(pos)) is not None:
            pos = self._take(match)
            if pos > match.end():
                self._comments.move(pos)
            self._starts += 1
            if self._meter.exhausted or self._attempts > ATTEMPTS_MAX or self._starts > STARTS_MAX:
                self._found.too_complex = Fault(
                    "too-complex",
                    match.start(),
                    None,
                    "the text holds too many broken or nested values to be read",
                    None,
                )
                break
            if len(self._parts) > LISTS_MAX:
                self._found.too_complex = Fault(
                    "too-many-blocks", match.start(), None, f"the text holds more than {LISTS_MAX} lists or plans", None
                )
                break

    def _next_start(self, pos: int) -> re.Match[str] | None:
        """The next place where something may begin; YAML is not looked for again where it has been ruled out."""
        if pos < self._no_yaml_before:
            match = self._next_besides_yaml(pos)
            if match is not None and match.start() < self._no_yaml_before:
                return match
            pos = self._no_yaml_before
        return STARTS.search(self._text, pos)

    def _next_besides_yaml(self, pos: int) -> re.Match[str] | None:
        """The next start of another kind; what an earlier look found far ahead is kept, or each would look that far."""
        looked_from, match = self._besides_yaml
        if pos < looked_from or (match is not None and match.start() < pos):
            match = STARTS_WITHOUT_YAML.search(self._text, pos)
            self._besides_yaml = pos, match
        return match

    def _take(self, match: re.Match[str]) -> int:
        """Deal with one start; gives the offset at which to go on."""
        hideable = {
            "yaml": self._take_yaml,
            "json": self._take_json,
            "flow": self._take_flow,
            "label": self._take_label,
        }
        always = {"tag": self._take_mark, "comment": self._take_comment, "fence": self._take_fence}
        for kind, take in always.items():
            if match[kind] is not None:
                return take(match)
        if self._is_commented_out(match):
            return max(line_rest_end(self._text, match.start(), match.end()), match.start() + 1)
        return next(take(match) for kind, take in hideable.items() if match[kind] is not None)

    def _take_mark(self, match: re.Match[str]) -> int:
        mark = read_mark(self._text, match)
        opened_at = self._found.reasoning_open_at
        if mark is None:
            return match.end()
        if not mark.ends:
            if opened_at is None:
                self._found.reasoning_open_at = match.start()
                self._reasoning = mark.family
                self._parts_before_reasoning = len(self._parts)
        elif mark.family == "template" or (opened_at is None and mark.family == "plain"):
            self._end_reasoning(0)
        elif opened_at is not None and mark.family == self._reasoning:
            # A plain mark opens only in the reply, so what came before it is no reasoning.
            self._found.hidden.append((opened_at, match.end()))
            self._end_reasoning(self._parts_before_reasoning if mark.family == "plain" else 0)
        return match.end()

    def _end_reasoning(self, parts_kept: int) -> None:
        for part in self._parts[parts_kept:]:
            if part.unsure:
                self._found.lost_faults.extend(part.findings.faults)
        self._parts = self._parts[:parts_kept]
        self._fence = None
        self._found.reasoning_open_at = None
        self._found.reasoning_closed = True
        self._found.comment_open_at = None

    def _take_comment(self, match: re.Match[str]) -> int:
        start, opening = match.start(), match["comment"]
        before, after, whole = line_round(self._text, start, match.end())
        if is_quoted(before, after, whole=whole) or self._comments.hides(start, in_code=self._fence is not None):
            return match.end()
        end = None if opening in self._endless else comment_end(self._text, start)
        if end is None:
            self._endless.add(opening)
            if opening == "<!--" and self._found.comment_open_at is None:
                self._found.comment_open_at = start
            return match.end()
        self._meter.spend(end - start)
        closing = REASONING_END.search(self._text, start, end)
        if closing is not None and not self._opens_reasoning(start, closing.start()):
            return closing.start()
        self._found.hidden.append((start, end))
        self._found.plan_in_comment |= ANY_LABEL.search(self._text, start, end) is not None
        return end

    def _opens_reasoning(self, start: int, end: int) -> bool:
        marks = (read_mark(self._text, match) for match in REASONING_MARK.finditer(self._text, start, end))
        return any(mark is not None and not mark.ends for mark in marks)

    def _is_commented_out(self, match: re.Match[str]) -> bool:
        """Whether a start is in the rest of a line that is a comment; a heading over a list in other lines is none."""
        in_code = self._fence is not None
        if not self._comments.hides(match.start(), in_code=in_code):
            return False
        if (
            match["headed"] is not None
            and not in_code
            and line_rest_end(self._text, match.start(), match.end()) < match.end()
        ):
            return False
        self._found.plan_in_comment |= match["json"] is None
        return True

    def _take_fence(self, match: re.Match[str]) -> int:
        line = _FENCE_LINE.match(self._text, match.start())
        if line is None:
            return match.end()
        indent, marks, info = len(line[1]), line[2], line[3]
        fence = self._fence
        if fence is None:
            if "`" not in info:  # else it is inline code that happens to begin a line
                self._fence = Fence(line.end(), marks[0], len(marks), indent)
        elif marks[0] == fence.char and len(marks) >= fence.length and indent <= fence.indent and not info.strip():
            self._fence = None
        return match.end()

    def _take_json(self, match: re.Match[str]) -> int:
        self._attempts += 1
        start = match.start()
        findings = Findings()
        scanner = Scanner(self._text, findings, lenient=self._lenient, cut_hint=self._cut_hint)
        try:
            node: Node | None = scanner.read(start, None, self._meter)
        except ScanStop:
            node = None
        if node is None:
            if not any(near_key(key) for key in scanner.keys):
                return start + 1
            steps = self._text[start] == "[" or not meant_as_lists(scanner.keys)
            form: Form = "steps-json" if steps else "json"
            self._parts.append(Block(form, start, scanner.pos, findings, unsure=True))
            return self._after_unsure(start, len(self._text))
        known, found_form = json_form(node)
        if not known:
            return scanner.pos
        block = Block(found_form, start, scanner.pos, findings, node, unsure=scanner.unsure)
        if changes.code_behind(self._text, scanner.pos):
            self._report_code(findings, scanner.pos, None)
            block.unsure = True
        self._parts.append(block)
        return self._after_unsure(start, scanner.pos) if block.unsure else scanner.pos

    def _take_flow(self, match: re.Match[str]) -> int:
        self._attempts += 1
        end = find_flow_end(self._text, match.start())
        self._meter.spend((len(self._text) if end is None else end) - match.start())
        if end is None:
            findings = Findings()
            findings.error(
                "truncated", "the text ends before this bracket is closed", at=match.start(), hint=self._cut_hint
            )
            self._parts.append(Block("steps-yaml", match.start(), len(self._text), findings, unsure=True))
            return self._after_unsure(match.start(), len(self._text))
        block = self._yaml_block(Region(match.start(), end, sure_end=True))
        pos = self._take_yaml_block(block)
        if changes.code_behind(self._text, end):
            self._report_code(block.findings, end, None)
            block.unsure = True
        return pos

    def _take_yaml(self, match: re.Match[str]) -> int:
        region = find_region(self._text, match.start(), self._fence)
        self._meter.spend(region.end - match.start())
        prose_end = region.prose_items_end(self._text) if region.looks_like_plan(self._text) else region.end
        if prose_end is None:
            block = self._yaml_block(region)
            # Labels inside the strings of a complete plan are text; otherwise they are where the plan is looked for.
            if complete_steps(block.node) or not region.looks_like_lists(self._text):
                return self._take_yaml_block(block)
            prose_end = region.end
            self._attempts += 1
        self._no_yaml_before = prose_end
        return self._past_indent(match)

    def _past_indent(self, match: re.Match[str]) -> int:
        """Behind the dash and blanks only, so that a JSON value or a label on the line is still seen."""
        pos = match.start()
        while self._text[pos] in " \t-":
            pos += 1
        return pos if pos > match.start() else pos + 1

    def _yaml_block(self, region: Region) -> Block:
        findings = Findings()
        reader = YamlReader(self._text, region.start, region.end, findings, self._cut_hint)
        node = reader.read()
        unsure = node is None and reader.string_open
        block = Block("steps-yaml", region.start, region.end, findings, node, unsure=unsure, sure_end=region.sure_end)
        block.fence_open = region.fence_open
        return block

    def _take_yaml_block(self, block: Block) -> int:
        self._parts.append(block)
        return self._after_unsure(block.start, block.end) if block.node is None else block.end

    def _take_label(self, match: re.Match[str]) -> int:
        label = read_label(self._text, match)
        if label is None:
            return match.end()
        findings = Findings()
        if label.exact != label.name:
            findings.error(
                "unknown-label",
                f"«{label.exact}» is no label",
                at=label.start,
                field=label.name,
                hint=f"write {label.name}",
            )
        value_at = value_gap(self._text, match.end())
        part = LabelledList(label, None, match.end(), findings)
        self._parts.append(part)
        if self._text[value_at : value_at + 1] not in ("[", "("):
            self._no_list(part, value_at)
            return match.end()
        scanner = Scanner(self._text, findings, lenient=self._lenient, cut_hint=self._cut_hint)
        try:
            part.node = scanner.read(value_at, label.name, self._meter)
        except ScanStop:
            part.unsure = True
            return self._after_unsure(label.start, len(self._text) if scanner.truncated else scanner.pos)
        part.end = scanner.pos
        if scanner.unsure:
            part.unsure = True
            return self._after_unsure(label.start, part.end)
        if changes.code_behind(self._text, part.end):
            part.unsure = True
            self._report_code(findings, part.end, label.name)
        elif changes.more_values(self._text, part.end):
            part.unsure = True
            findings.error(
                "stray-text", "more text follows the closing bracket of the list", at=part.end, field=label.name
            )
        return part.end

    @staticmethod
    def _report_code(findings: Findings, at: int, name: str | None) -> None:
        said = "code stands behind the closing bracket and would change the value"
        findings.error("list-modified", said, at=at, field=name, hint=changes.HINT)

    def _no_list(self, part: LabelledList, value_at: int) -> None:
        name = part.label.name
        if value_at >= len(self._text):
            part.unsure = True
            part.findings.error(
                "truncated", f"the text ends after {name}", at=part.label.start, field=name, hint=self._cut_hint
            )
        else:
            part.findings.error(
                "list-expected",
                f"{name} must be a list in brackets",
                at=value_at,
                field=name,
                hint="write the list out: nothing is evaluated",
            )

    def _after_unsure(self, start: int, otherwise: int) -> int:
        """After an unreadable value: on to the next end of reasoning behind its start, if there is one."""
        opened_plainly = self._found.reasoning_open_at is not None and self._reasoning != "template"
        ending = REASONING_END_ANY if opened_plainly else REASONING_END
        if ending not in self._last_reasoning_ends:
            self._last_reasoning_ends[ending] = max(
                (match.start() for match in ending.finditer(self._text)), default=-1
            )
        if start > self._last_reasoning_ends[ending]:
            return otherwise
        end = ending.search(self._text, start)
        return otherwise if end is None else end.start()
