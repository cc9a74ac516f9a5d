"""Reads YAML into nodes from parser events. Must never resolve a value, expand an alias or build an object.

PyYAML's C parser gives events with offsets; they are read one by one, so a bomb is refused before it grows. What a
plain word means is decided here: whole numbers are numbers, what YAML 1.1 readers would turn into something else is
"ambiguous" (an error unless quoted), everything else is text. Backslashes are hidden from the parser and read by the
same table as in the other forms, and so are the characters that only YAML 1.1 takes for line ends. Folding of long
lines is YAML's.
"""

from __future__ import annotations

import re
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final, NoReturn

from engine.plan.clean import CleanedText, clean_text
from engine.plan.escapes import decode_escapes
from engine.plan.findings import Findings, quoted
from engine.plan.limits import DEPTH_MAX, INTEGER_DIGITS_MAX, STEPS_SCANNED_MAX, YAML_EVENTS_MAX
from engine.plan.nodes import Mapping, Node, Sequence, Text, Word, WordKind

if TYPE_CHECKING:
    import yaml

_INTEGER: Final = re.compile(r"0|-?[1-9][0-9]*")
_LINE_ENDS_OF_YAML: Final = "\x85\u2028\u2029"  # YAML 1.1 folds a text at them, 1.2 and all other forms do not
_AMBIGUOUS: Final = re.compile(
    r"""y|n|yes|no|true|false|on|off          # booleans of YAML 1.1
      | [-+]?[0-9][0-9_]*(?::[0-5]?[0-9])++(?:\.[0-9_]*)?   # sexagesimal, 12:30
      | [-+]?0[bxo][0-9a-f_]+ | [-+]?[0-9][0-9_]* # binary, hexadecimal, octal, 010, 1_0, +1
      | [-+]?(?:[0-9][0-9_]*)?\.[0-9_]*(?:e[-+]?[0-9]+)? | [-+]?[0-9][0-9_]*e[-+]?[0-9]+ # floats
      | [-+]?\.inf | \.nan | [-+]?(?:nan|inf|infinity)
      | [0-9]{4}-[0-9]{1,2}-[0-9]{1,2}(?:(?:[t \t].*)?) # dates and times
      | = | <<""",
    re.VERBOSE | re.IGNORECASE,
)
_COMMENT_BELOW: Final = re.compile(r"[ \t]*(?:\r?\n[ \t]*){0,8}?\r?\n([ \t]*)#")
_LINE_INDENT: Final = re.compile(r"[ \t]*(?:-[ \t]+)?")
_COMMENT_LINE: Final = re.compile(r"(?P<indent>[ \t]*)(?:(?P<mark>#)[^\n]*)?(?:\n|\Z|\r\n)")
_COMMENT: Final = re.compile(r"[ \t]+#[^\n]*")


class YamlStop(Exception):  # noqa: N818 - it ends a reading whose error is already on record
    """The YAML text cannot be read further; what is wrong has been recorded."""


class YamlReader:
    """Reads the YAML text between two offsets of a text."""

    def __init__(self, text: str, start: int, end: int, findings: Findings, cut_hint: str | None) -> None:
        self._text = text
        self._start = start
        self._findings = findings
        self._cut_hint = cut_hint
        self._hidden = _HiddenBackslashes(text[start:end])
        self._open: list[tuple[Sequence | Mapping, Text | None]] = []
        self._document: Node | None = None
        self.string_open = False

    def read(self) -> Node | None:
        """The document as nodes, or None after recording why there is none."""
        import yaml  # noqa: PLC0415 - only YAML plans pay for it

        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        try:
            for count, event in enumerate(yaml.parse(self._hidden.masked, Loader=loader)):
                if count >= YAML_EVENTS_MAX:
                    self._stop("too-many-items", f"more than {YAML_EVENTS_MAX} YAML events", event)
                self._take(event)
        except yaml.YAMLError as error:
            self._report(error)
            return None
        except YamlStop:
            return None
        return self._document

    def _take(self, event: yaml.Event) -> None:
        import yaml  # noqa: PLC0415 - loaded already by the caller

        if isinstance(event, yaml.DocumentStartEvent) and self._document is not None:
            self._stop("yaml-many-documents", "a second YAML document begins", event)
        if isinstance(event, yaml.NodeEvent):
            self._refuse_marks(event)
        if isinstance(event, yaml.AliasEvent):
            self._attach(Word("", self._at(event), self._at(event), "void"))
        elif isinstance(event, yaml.ScalarEvent):
            self._attach(self._scalar(event))
        elif isinstance(event, yaml.CollectionStartEvent):
            at = self._at(event)
            sequence = isinstance(event, yaml.SequenceStartEvent)
            node = Sequence([], at, at, "[" if event.flow_style else "-") if sequence else Mapping([], at, at)
            self._attach(node)
            self._open.append((node, None))
            if len(self._open) > DEPTH_MAX:
                self._stop("too-deep", f"YAML collections are nested more than {DEPTH_MAX} deep", event)
        elif isinstance(event, yaml.CollectionEndEvent):
            self._open.pop()

    def _refuse_marks(self, event: Any) -> None:
        """Record anchors, aliases and tags; nothing of them is ever used."""
        at = self._at(event)
        if type(event).__name__ == "AliasEvent":
            self._findings.error("yaml-alias", f"YAML aliases are refused: *{event.anchor[:40]}", at=at)
        elif event.anchor is not None:
            self._findings.error("yaml-anchor", f"YAML anchors are refused: &{event.anchor[:40]}", at=at)
        tag = getattr(event, "tag", None)
        if tag is not None:
            self._findings.error("yaml-tag", f"YAML tags are refused: {quoted(tag)}", at=at)

    def _attach(self, node: Node) -> None:
        if not self._open:
            self._document = node
            return
        parent, key = self._open[-1]
        if isinstance(parent, Sequence):
            if len(parent.items) >= STEPS_SCANNED_MAX:
                self._fail("too-many-items", f"a YAML list has more than {STEPS_SCANNED_MAX} elements", node.start)
            parent.items.append(node)
        elif key is None:
            self._open[-1] = parent, self._key(node, parent)
        else:
            parent.entries.append((key, node))
            self._open[-1] = parent, None

    def _key(self, node: Node, parent: Mapping) -> Text:
        if isinstance(node, Word):  # an unknown key; what it would mean elsewhere does not matter
            node = Text(CleanedText(node.text, 0, 0), node.start, node.end)
        if not isinstance(node, Text):
            self._fail("yaml-key", "a key must be a word", node.start)
        if len(parent.entries) >= STEPS_SCANNED_MAX:
            self._fail("too-many-items", f"a YAML mapping has more than {STEPS_SCANNED_MAX} keys", node.start)
        if node.value in {key.value for key, _ in parent.entries}:
            shown = quoted(node.value)
            self._findings.error(
                "duplicate-key", f"the key {shown} is written twice", at=node.start, field=node.value[:80]
            )
        return node

    def _scalar(self, event: Any) -> Node:
        start, end = self._at(event), self._start + event.end_mark.index
        written = self._hidden.restore(event.value)
        raw = self._text[start:end]
        lost = clean_text(raw)
        if event.style in ('"', "'", "|", ">"):
            tex_kept: tuple[str, ...] = ()
            if event.style == '"':
                if "\\\n" in raw or "\\\r" in raw:
                    self._findings.error("yaml-escape", "a backslash at the end of a line is not read", at=start)
                written, tex_kept = decode_escapes(written)
            meaning = clean_text(written)
            nul_count, surrogate_count = (
                meaning.nul_count + lost.nul_count,
                meaning.surrogate_count + lost.surrogate_count,
            )
            cleaned = CleanedText(meaning.text, nul_count, surrogate_count)
            comment_at = self._comment_below_block(start, end) if event.style in "|>" else None
            return Text(cleaned, start, end, event.style, tex_kept, comment_at)
        kind = plain_kind(written)
        if kind != "name":
            return Word(written, start, end, kind)
        comment = _COMMENT.match(self._text, end)
        comment_at = None if comment is None or comment.end() == end else comment.start()
        if comment_at is None:
            comment_at = self._comment_below(start, end)
        return Text(CleanedText(written, lost.nul_count, lost.surrogate_count), start, end, "", (), comment_at)

    def _comment_below_block(self, start: int, end: int) -> int | None:
        """Where a comment begins below a block text that is indented otherwise than the text's key, if there is one.

        It may be a heading or a line of code of the text that lost its indentation. One under the key belongs to the
        next key.
        """
        line = self._text.rfind("\n", 0, start) + 1
        indent = _LINE_INDENT.match(self._text, line)
        width = 0 if indent is None else len(indent[0])
        at = self._text.rfind("\n", start, end) + 1 if "\n" in self._text[start:end] else end
        while (comment := _COMMENT_LINE.match(self._text, at)) is not None and comment.end() > at:
            if comment["mark"] is not None and len(comment["indent"]) != width:
                return comment.start("mark")
            at = comment.end()
        return None

    def _comment_below(self, start: int, end: int) -> int | None:
        """Where a comment begins that is indented like the next line of the text above it, if there is one.

        YAML drops it; whoever wrote it may have meant it as a part of the text.
        """
        below = _COMMENT_BELOW.match(self._text, end)
        if below is None:
            return None
        line = self._text.rfind("\n", 0, start) + 1
        indent = _LINE_INDENT.match(self._text, line)
        width = 0 if indent is None else len(indent[0])
        begins_with_key = ":" in self._text[line + width : start]
        return below.end() - 1 if len(below[1]) > width - (not begins_with_key) else None

    def _at(self, event: Any) -> int:
        return self._start + int(event.start_mark.index)

    def _report(self, error: Any) -> None:
        """Record a parser's error at its own place; a colon inside unquoted text gets its own hint."""
        mark = getattr(error, "problem_mark", None)
        masked = self._hidden.masked
        if mark is not None:
            index = int(mark.index)
        else:  # an unreadable character, whose place is given in bytes
            position = int(getattr(error, "position", 0))
            index = len(masked.encode()[:position].decode(errors="ignore"))
        problem = str(getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable")
        context = str(getattr(error, "context", None) or "")
        at = self._start + min(index, len(masked))
        if "quoted scalar" in context:
            self.string_open = True
        if "mapping values are not allowed" in problem:
            hint = "an unquoted text may not hold a colon and a blank: put the text in quotes"
        else:
            hint = "put texts in quotes and check the indentation"
        if "nesting depth" in problem:
            self._findings.error("too-deep", f"YAML collections are nested more than {DEPTH_MAX} deep", at=at)
        elif not self._text[at:].strip():
            self._findings.error("truncated", f"the YAML text ends too early: {problem}", at=at, hint=self._cut_hint)
        else:
            self._findings.error("yaml-syntax", f"YAML: {problem}", at=at, hint=hint)

    def _stop(self, code: str, text: str, event: Any) -> None:
        self._fail(code, text, self._at(event))

    def _fail(self, code: str, text: str, at: int) -> NoReturn:
        self._findings.error(code, text, at=at)
        raise YamlStop


class _HiddenBackslashes:
    r"""A text for the YAML parser with its backslashes, and a quote or backslash after them, under other characters.

    So the parser can neither fail on ``\s`` nor turn ``\f`` into a form feed nor fold a text at U+0085; all offsets
    stay the same. NUL and lone
    surrogates, which it cannot read, are replaced on the way.
    """

    def __init__(self, text: str) -> None:
        self.masked = clean_text(text).text
        self._back: dict[int, str] = {}
        used = set(text)
        if used.isdisjoint("\\" + _LINE_ENDS_OF_YAML):
            return
        private = chain(range(0xE000, 0xF8FF), range(0x10000, 0x10FFFE))
        # Using them all up takes 4 MB of text, which the size limit refuses.
        free = (chr(code) for code in private if chr(code) not in used)
        for mark in _LINE_ENDS_OF_YAML:
            stand_in = next(free)
            self.masked = self.masked.replace(mark, stand_in)
            self._back[ord(stand_in)] = mark
        backslash, quote, second = islice(free, 3)
        pairs = {'\\"': backslash + quote, "\\\\": backslash + second, "\\": backslash}
        self.masked = re.sub(r'\\["\\]?', lambda match: pairs[match[0]], self.masked)
        self._back |= {ord(backslash): "\\", ord(quote): '"', ord(second): "\\"}

    def restore(self, value: str) -> str:
        """Put the backslashes back into a value that the parser gave."""
        return value.translate(self._back)


def plain_kind(written: str) -> WordKind:
    """What an unquoted YAML word is to us; "name" is any text."""
    if not written:
        return "empty"
    if _INTEGER.fullmatch(written):
        return "integer" if len(written) <= INTEGER_DIGITS_MAX else "number"
    if written in ("null", "Null", "NULL", "~"):
        return "null"
    return "ambiguous" if _AMBIGUOUS.fullmatch(written) else "name"
