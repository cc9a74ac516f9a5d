"""Marks by which models part reasoning from answer. Must never take a sentence about a mark for the mark.

Known are XML-like tags, special tokens of chat templates (Harmony's channels among them), `[THINK]` and `◁think▷`. Of
the first family (`think`, `thinking`, `thought`, `reasoning`) the opening mark may stand in the prompt, so that only
the closing one arrives. A mark in backticks or quotes, or one that prose speaks of ("no <think> tags"), is a mention.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

Family = Literal["template", "harmony", "plain"]
"""Whose closing mark ends what: "template" marks end all reasoning before them, whoever opened it; "plain" ones only
what was opened by a plain mark, if any was; "harmony" ends a channel only if one is open."""

_FIRST: Final = r"think(?:ing)?|thoughts?|reasoning"
_OTHERS: Final = (
    r"reason|analy(?:sis|[sz]e)|scratch[_-]?pad|reflect(?:ions?)?|rationale|monologue|deliberat(?:e|ions?)"
    r"|brainstorm(?:ing)?|musings?|cot|drafts?"
)
_WORDS: Final = (
    rf"(?P<words>(?:[a-z]{{1,16}}[_:.-]){{0,3}}(?:ant)?(?:(?P<first>{_FIRST})|{_OTHERS})(?:[_-][a-z]{{1,16}}){{0,2}})"
)
MARK: Final = (
    rf"<\s{{0,8}}+(?P<slash>/?+)\s{{0,8}}+[|\uff5c]?+\s{{0,8}}+(?P<slash2>/?+)(?=[a-z]){_WORDS}\b(?P<attributes>[^<>]{{0,256}})>"
    r"|\[(?P<square>/?)(?:think(?:ing)?|(?-i:THOUGHTS?|REASONING|ANALYSIS|SCRATCHPAD))\]"
    r"|◁(?P<kimi>/?)think(?:ing)?▷"
    r"|<\|channel\|?>\s{0,8}(?P<channel>\w{1,20})|(?P<turn_end><\|(?:end|return|call)\|>)"
    r"|(?P<channel_end><channel\|>)|<unused9(?P<unused>[45])>|(?P<glued>\A(?-i:analysis(?=[A-Z]))|(?-i:assistantfinal))"
)
_END: Final = (
    r"<\s{0,8}+/\s{0,8}+[|\uff5c]?+\s{0,8}+(?=[a-z])(?:[a-z]{1,16}[_:.-]){0,3}(?:ant)?(?:NAMES)(?:[_-][a-z]{1,16}){0,2}\b[^<>]{0,256}>"
    r"|<[|\uff5c]\s{0,8}+(?:/\s{0,8}+|end[_-])(?:[a-z]{1,16}[_-]){0,2}(?:NAMES)\s{0,8}[|\uff5c]>"
    r"|<[|\uff5c](?:NAMES)[_-]end[|\uff5c]>"
    r"|\[/THINK(?:ING)?\]|◁/think(?:ing)?▷|<\|channel\|>\s{0,8}final\b|<unused95>|<channel\|>|(?-i:assistantfinal)"
)
REASONING_MARK: Final = re.compile(MARK, re.IGNORECASE)
REASONING_END: Final = re.compile(_END.replace("NAMES", _FIRST), re.IGNORECASE)
"""The marks that end reasoning even if none was seen to open."""
REASONING_END_ANY: Final = re.compile(
    _END.replace("NAMES", f"{_FIRST}|{_OTHERS}") + r"|<\|(?:end|return|call)\|>", re.IGNORECASE
)
"""Those, and the marks that end only what a mark of their own family opened."""

_QUOTES: Final = {"`": "`", '"': '"', "'": "'", "\u201c": "\u201d", "\u2018": "\u2019", "«": "»"}
_WORD_BEFORE: Final = re.compile(r"[^\W_][\w'\u2019-]*[,;]?[ \t]*[(\"'\u201c\u2018`]?[ \t]*\Z")
_SPOKEN_OF: Final = re.compile(
    r"[ \t]{0,4}(?:[.,;!?)]"
    r"|(?:[ \t]|[-/])(?:tags?|blocks?|marks?|markers?|tokens?|sections?|elements?|brackets?|delimiters?)\b"
    r"|[ \t](?:or|and|nor)[ \t]+[<\[◁]"
    r"|(?:…|\.{3})?(?:</|\[/|◁/))",
    re.IGNORECASE,
)
_LINE_END: Final = re.compile(r"[\r\n]")
_QUOTE_BEFORE: Final = re.compile(r"(?:^|[\s(\[,:])([`\"'\u201c\u2018«])\Z")
_OPENING_BEFORE: Final = re.compile(
    r"(?:<(?!\s*/)[^<>\n]{1,40}>|\[\w+\]|◁\w+▷)(?:[ \t]+(?:or|and|nor)[ \t]+|…|\.{3}|/)?\Z"
)
_WINDOW_CHARS: Final = 80


@dataclass(frozen=True, slots=True)
class ReasoningMark:
    """One mark: whether it opens or ends reasoning, and of which family it is."""

    ends: bool
    family: Family


def read_mark(text: str, match: re.Match[str]) -> ReasoningMark | None:
    """What a match of `MARK` does, or None if it does nothing (a mention, or a tag that closes itself)."""
    token = _read_token(match)
    if token is not None:
        return token
    words = match["words"]
    ends = bool(match["square"] or match["kimi"]) if words is None else _ends(match, words.casefold())
    itself_closed = words is not None and not ends and match["attributes"].rstrip().endswith("/")
    if itself_closed or _is_mention(text, match, ends=ends):
        return None
    return ReasoningMark(ends, "plain" if words is not None and match["first"] is None else "template")


def _read_token(match: re.Match[str]) -> ReasoningMark | None:
    """What a special token of a chat template does; prose never speaks of one."""
    if (channel := match["channel"]) is not None:
        final = channel.casefold() == "final"
        return ReasoningMark(final, "template" if final else "harmony")
    if match["turn_end"] is not None:
        return ReasoningMark(ends=True, family="harmony")
    if match["channel_end"] is not None or match["glued"] is not None:
        return ReasoningMark(match["glued"] != "analysis", "template")
    if (unused := match["unused"]) is not None:
        return ReasoningMark(unused == "5", "template")
    return None


def _ends(match: re.Match[str], words: str) -> bool:
    return (
        bool(match["slash"] or match["slash2"])
        or words.startswith(("end_", "end-"))
        or words.endswith(("_end", "-end"))
    )


def _is_mention(text: str, match: re.Match[str], *, ends: bool) -> bool:
    """Whether prose on the mark's own line speaks of it, or quotes it; only the nearest characters are looked at."""
    before, after, whole = line_round(text, match.start(), match.end())
    if is_quoted(before, after, whole=whole and not ends):
        return True
    if ends and (opening := _OPENING_BEFORE.search(before)) is not None:
        return _WORD_BEFORE.search(before, 0, opening.start()) is not None
    return _SPOKEN_OF.match(after) is not None and _WORD_BEFORE.search(before) is not None


def line_round(text: str, start: int, end: int) -> tuple[str, str, bool]:
    """What stands on a line before and behind a place, at most 80 characters each; and whether all before is there."""
    before = text[max(0, start - _WINDOW_CHARS) : start]
    line = max(before.rfind("\n"), before.rfind("\r")) + 1
    after = _LINE_END.split(text[end : end + _WINDOW_CHARS], maxsplit=1)[0]
    return before[line:], after, line > 0 or start <= _WINDOW_CHARS


def is_quoted(before: str, after: str, *, whole: bool) -> bool:
    """Whether what stands between two pieces of one line is in quotes, or (if the line is whole) in inline code."""
    opening = _QUOTE_BEFORE.search(before[-2:])
    if opening is not None and after[:1] == _QUOTES[opening[1]]:
        return True
    return whole and before.count("`") % 2 == 1 and "`" in after
