"""Finds the plans in a text: reasoning, prose, fences, drafts and the final one. Must never build a plan from two.

One pass from left to right. A value that was read completely hides whatever its strings hold (tags, labels, fences).
The end of reasoning throws away what came before it. Where quotes went so wrong that nobody can say what is inside a
string, nothing that follows counts as a plan, unless a reasoning's end comes between.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from engine.plan.candidate import Block, LabelledList, group_parts, mark_swallowed_plan
from engine.plan.findings import Fault, Findings
from engine.plan.labels import LABEL, read_label, value_gap
from engine.plan.limits import ATTEMPTS_MAX, LISTS_MAX, STARTS_MAX
from engine.plan.lists import LIST_NAMES
from engine.plan.nodes import Mapping, Node, Sequence
from engine.plan.plan import Form
from engine.plan.scanner import Scanner, ScanStop, WorkMeter
from engine.plan.yaml_region import Fence, Region, find_flow_end, find_region
from engine.plan.yaml_steps import YamlReader

_TAG: Final = (
    r"<[ \t]{0,8}(?P<ends>/?)[ \t]{0,8}(?:seed:)?(?:think|thinking|thought|thoughts|reasoning)\b[^<>\n]{0,64}>"
    r"|\[(?P<ends_square>/?)THINK\]|◁(?P<ends_kimi>/?)think▷"
)
_QUOTE_CLASS: Final = "[\"'\u201c\u201d\u2018\u2019]"
_YAML_START: Final = r"""(?P<yaml>^[ ]*(?:
    -[ \t]*(?:\n[ ]*)?(?:\{[ ]*)?["']?[A-Za-z_]\w*["']?[ \t]*:(?:\s|\Z)
  | ["']?steps["']?[ \t]*:))"""
_OTHER_STARTS: Final = rf"""(?P<tag>{_TAG})
  | (?P<fence>^[ \t]*(?:`{{3,}}|~{{3,}}))
  | (?P<json>(?:\[\s*)?\{{\s*{_QUOTE_CLASS})
  | (?P<flow>(?:\[\s*)?\{{\s*(?:agent|instruction|access_list|step|steps)[ \t]*:)
  | (?P<label>{LABEL})"""
_FLAGS: Final = re.VERBOSE | re.MULTILINE | re.IGNORECASE
_STARTS: Final = re.compile(f"{_YAML_START} | {_OTHER_STARTS}", _FLAGS)
_STARTS_WITHOUT_YAML: Final = re.compile(rf"(?P<yaml>(?!)) | {_OTHER_STARTS}", _FLAGS)
_REASONING_END: Final = re.compile(
    r"<[ \t]{0,8}/[ \t]{0,8}(?:seed:)?(?:think|thinking|thought|thoughts|reasoning)\b[^<>\n]{0,64}>"
    r"|\[/THINK\]|◁/think▷",
    re.IGNORECASE,
)
_FENCE_LINE: Final = re.compile(r"([ \t]*)(`{3,}|~{3,})([^\n]*)")

# Behind a list on its line: an operator, or more values after a bracket that closed too early.
_SURPLUS: Final = re.compile(
    rf"[ \t]*(?:\+[ \t]*[\[(]|\*[ \t]*\d|,[ \t]*\[|,[ \t]*[\"“](?!{'|'.join(LIST_NAMES)})|,[ \t]*\d+[ \t]*[,\]])"
)
_NEAR_KEYS: Final = frozenset({"modelid", "subtask", "accesslist", "acceslist", "agent", "instruction"})


@dataclass(slots=True)
class Found:
    """Everything in a text that could be a plan, in order, and what became of its reasoning."""

    blocks: list[Block] = field(default_factory=list)
    reasoning_open_at: int | None = None
    reasoning_closed: bool = False
    lost_faults: list[Fault] = field(default_factory=list)  # of unreadable plans that a reasoning's end cut off
    too_complex: Fault | None = None


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
        self._attempts = 0
        self._starts = 0
        self._last_reasoning_end: int | None = None

    def find(self) -> Found:
        """All blocks outside of reasoning, in order; see `Found`."""
        self._scan(0)
        while (hidden := self._hidden_reasoning_end()) is not None and self._found.too_complex is None:
            # What looked like a string of an incomplete plan held the end of the reasoning: the plan comes after it.
            before, self._parts = self._parts, []
            self._no_yaml_before = 0
            self._meter.spend(len(self._text) - hidden)
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
                    end = _REASONING_END.search(self._text, part.label.start, part.end)
                    if end is not None:
                        return end.start()
        return None

    def _scan(self, pos: int) -> None:
        """Collect the parts from an offset on."""
        while (match := self._next_start(pos)) is not None:
            pos = self._take(match)
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
            match = _STARTS_WITHOUT_YAML.search(self._text, pos)
            if match is not None and match.start() < self._no_yaml_before:
                return match
            pos = self._no_yaml_before
        return _STARTS.search(self._text, pos)

    def _take(self, match: re.Match[str]) -> int:
        """Deal with one start; gives the offset at which to go on."""
        if match["tag"] is not None:
            return self._take_tag(match)
        if match["fence"] is not None:
            return self._take_fence(match)
        if match["yaml"] is not None:
            return self._take_yaml(match)
        if match["json"] is not None:
            return self._take_json(match)
        if match["flow"] is not None:
            return self._take_flow(match)
        return self._take_label(match)

    def _take_tag(self, match: re.Match[str]) -> int:
        if match["ends"] or match["ends_square"] or match["ends_kimi"]:
            for part in self._parts:
                if part.unsure:
                    self._found.lost_faults.extend(part.findings.faults)
            self._parts = []
            self._fence = None
            self._found.reasoning_open_at = None
            self._found.reasoning_closed = True
        elif self._found.reasoning_open_at is None:
            self._found.reasoning_open_at = match.start()
        return match.end()

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
            steps = self._text[start] == "[" or not any(near_key(key) in _LIST_KEYS for key in scanner.keys)
            form: Form = "steps-json" if steps else "json"
            self._add(Block(form, start, scanner.pos, findings, unsure=True))
            return self._after_unsure(start, len(self._text))
        known, found_form = json_form(node)
        if not known:
            return scanner.pos
        block = Block(found_form, start, scanner.pos, findings, node, unsure=scanner.unsure)
        self._add(block)
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
            self._add(Block("steps-yaml", match.start(), len(self._text), findings, unsure=True))
            return self._after_unsure(match.start(), len(self._text))
        return self._read_yaml(Region(match.start(), end, sure_end=True))

    def _take_yaml(self, match: re.Match[str]) -> int:
        region = find_region(self._text, match.start(), self._fence)
        self._meter.spend(region.end - match.start())
        prose_end = region.prose_items_end(self._text) if region.looks_like_plan(self._text) else region.end
        if prose_end is not None:
            self._no_yaml_before = prose_end
            return self._past_indent(match)
        return self._read_yaml(region)

    def _past_indent(self, match: re.Match[str]) -> int:
        """Behind the dash and blanks only, so that a JSON value or a label on the line is still seen."""
        pos = match.start()
        while self._text[pos] in " \t-":
            pos += 1
        return pos if pos > match.start() else pos + 1

    def _read_yaml(self, region: Region) -> int:
        findings = Findings()
        reader = YamlReader(self._text, region.start, region.end, findings, self._cut_hint)
        node = reader.read()
        unsure = node is None and reader.string_open
        block = Block("steps-yaml", region.start, region.end, findings, node, unsure=unsure, sure_end=region.sure_end)
        block.fence_open = region.fence_open
        self._add(block)
        return self._after_unsure(region.start, region.end) if node is None else region.end

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
        surplus = _SURPLUS.match(self._text, part.end)
        if surplus is not None:
            part.unsure = True
            findings.error(
                "stray-text", "more text follows the closing bracket of the list", at=part.end, field=label.name
            )
        return part.end

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

    def _add(self, block: Block) -> None:
        self._parts.append(block)

    def _after_unsure(self, start: int, otherwise: int) -> int:
        """After an unreadable value: on to the next end of reasoning behind its start, if there is one."""
        if self._last_reasoning_end is None:
            ends = [match.start() for match in _REASONING_END.finditer(self._text)]
            self._last_reasoning_end = ends[-1] if ends else -1
        if start > self._last_reasoning_end:
            return otherwise
        end = _REASONING_END.search(self._text, start)
        return otherwise if end is None else end.start()


_LIST_KEYS: Final = frozenset({"modelid", "subtask"})


def near_key(key: str) -> str | None:
    """The bare form of a key that is, or is close to, a key of a plan."""
    bare = "".join(char for char in key[:40].casefold() if char.isalpha()).removesuffix("s")
    return bare if bare in _NEAR_KEYS else None


def json_form(node: Node) -> tuple[bool, Form | None]:
    """Whether a JSON value is meant as a plan, and in which form; a plan inside an unknown wrapper has none."""
    if isinstance(node, Sequence):
        meant = any(isinstance(item, Mapping) and _has_plan_key(item) for item in node.items)
        return meant, "steps-json"
    if not isinstance(node, Mapping):
        return False, None
    keys = {near_key(key.value) for key, _ in node.entries}
    steps = next((value for key, value in node.entries if key.value == "steps"), None)
    form: Form | None = None
    if keys & _LIST_KEYS:
        form = "json"
    elif isinstance(steps, Sequence):
        meant = not steps.items or any(isinstance(item, Mapping) for item in steps.items)
        return meant, "steps-json"
    elif keys & {"agent", "instruction"}:
        form = "steps-json"
    elif keys & _NEAR_KEYS:
        form = "json"
    return _has_plan_key(node), form


def _has_plan_key(node: Node) -> bool:
    if isinstance(node, Sequence):
        return any(_has_plan_key(item) for item in node.items)
    if isinstance(node, Mapping):
        return any(near_key(key.value) is not None or _has_plan_key(value) for key, value in node.entries)
    return False
