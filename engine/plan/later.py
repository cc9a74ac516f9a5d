"""Signs of another plan behind the one that was read, in a form that is not read. Must never read it by guess.

The rule of the last plan holds for these too: if the model went on to a plan that we cannot read, the earlier one is
a draft, and a draft does not run. Looked for are the keys of a plan in any spelling (other words for them, tables,
bullets, tags), the announcement of a final plan, and the beginning of one that was cut off.
"""

from __future__ import annotations

import re
from typing import Final, Literal

_Role = Literal["worker", "task", "access"]

_FIRM: Final = r"model[_ -]?ids?|sub[_ -]?tasks?|acc?ess?[_ -]?lists?"
_KEY: Final = re.compile(
    rf"""(?<![^\W_])(?:(?P<list>{_FIRM})|(?P<object>agent|instruction)
      | (?P<weak>models?|workers?|worker[_ -]?ids?|agents|agent[_ -]?ids?|tasks?|instructions|prompts?
        |access|accesses|visib(?:le|ility)|depend(?:s[_ -]on|encies)|can[_ -]see|context))
      (?:_[a-z0-9]{{1,12}}|\d)?(?![^\W_])
      (?P<marks>[\"'\u201d\u2019`*_]{{0,4}})
      (?P<separator>[ \t]{{0,8}}(?::=|[=-]>|<-|[:=|>](?!=)|[\u2190\u2192\u21d0\u21d2\u27f5\u27f6])
        [ \t*_`]{{0,8}}(?:\r?\n[ \t]{{0,8}})?)?
      (?P<gap>\s{{1,8}}(?=\[))?""",
    re.VERBOSE | re.IGNORECASE,
)
_VALUES: Final = ("[", "(", "{", '"', "'", "\u201c", "\u2018")
_BEFORE_CHARS: Final = 32
_HEAD: Final = re.compile(r"[\W\d_]*")
_INSIDE: Final = re.compile(r"[|,;{(\[<.][\s\"'\u201c\u2018`*_]*\Z")
_COLUMNS: Final = re.compile(
    rf"^[^\w\r\n]{{0,8}}(?:(?:{_FIRM}|agent|instruction|step|id|no|depends[_ -]on)\b[^\w\r\n]{{1,8}}){{1,5}}"
    rf"(?:{_FIRM}|agent|instruction)\b[^\w\r\n]{{0,8}}\r?$",
    re.MULTILINE | re.IGNORECASE,
)
_KEY_PIECES: Final = ("model", "task", "acc", "agent", "instr", "worker", "prompt")
_ANNOUNCING: Final = (
    "final",
    "revised",
    "corrected",
    "better",
    "improved",
    "updated",
    "new",
    "second",
    "actual",
    "real",
)
_ANNOUNCED: Final = re.compile(
    r"""(?:^[^\w\r\n]{0,8}|(?<=[.!?][ ]))
        (?:(?:and|so|now|here(?:['\u2019]s|[ ]is)?|is|the|my|a|an|ok|okay|then|this)[^\w\r\n]{1,3}){0,5}
        (?:ANNOUNCING)
        (?:[^\w\r\n]{1,3}(?:final|plan|version|workflow|lists?|one|attempt|try|solution)){0,3}
        [^\w\r\n:]{0,4}:[^\w\r\n]{0,4}\r?$""".replace("ANNOUNCING", "|".join(_ANNOUNCING)),
    re.VERBOSE | re.MULTILINE | re.IGNORECASE,
)
_BEGINNINGS: Final = ("model_id", "subtasks", "access_list", "agent", "instruction", "steps")
_LAST_LINE: Final = re.compile(r"[^\w\r\n]{0,8}(?P<word>[a-z_]{3,})[\"'\u201d\u2019`*]{0,4}")
_OPENED: Final = re.compile(r"(?:`{3,}|~{3,})[ \t]*\w{1,20}|[-*][ \t]*[{\[]?|\[")
_OPENED_OBJECT: Final = re.compile(r"(?:\[[ \t]*)?\{[ \t]*(?:[\"'\u201c](?P<word>[a-z_]*)[\"'\u201d]?)?")


def later_plan(outside: str, behind: int) -> int | None:
    """Where a plan that is not read seems to stand, in a text whose plan, up to the offset `behind`, is blanked out."""
    found = _keys(outside, behind)
    folded = outside.lower()  # its length may differ; it only tells what need not be looked for
    if found is None and any(word in folded for word in _KEY_PIECES):
        match = _COLUMNS.search(outside)
        found = None if match is None else match.start() + _blanks(match[0])
    if found is None and any(word in folded for word in _ANNOUNCING):
        match = _ANNOUNCED.search(outside)
        found = None if match is None else match.start() + _blanks(match[0])
    return _cut_beginning(outside, behind) if found is None else found


def _keys(outside: str, behind: int) -> int | None:
    """Where keys of a plan stand that are not read: two of its three roles, or all three in weaker words."""
    folded = outside.lower()
    if not any(word in folded for word in _KEY_PIECES):
        return None
    firm: dict[_Role, int] = {}
    weak: dict[_Role, int] = {}
    for match in _KEY.finditer(outside):
        if match["separator"] is None and match["gap"] is None:
            continue
        following = outside[match.end() : match.end() + 1]
        if match["list"] is not None and match["separator"] is not None and following in ("[", "("):
            return match.start()
        if not _at_key_place(outside, match.start(), behind):
            continue
        role = _role(match[0])
        if match["weak"] is None or following in _VALUES:
            firm.setdefault(role, match.start())
        weak.setdefault(role, match.start())
        if len(firm) > 1 or len(weak) == 3:  # noqa: PLR2004 - worker, task, access
            return min([*firm.values(), *weak.values()])
    return None


def _role(word: str) -> _Role:
    folded = word.casefold()
    if folded.startswith(("sub", "task", "instr", "prompt")):
        return "task"
    return "worker" if folded.startswith(("model", "worker", "agent")) else "access"


def _at_key_place(text: str, start: int, behind: int) -> bool:
    """Whether a key may stand here: at the head of a line, or behind a mark that parts keys or cells."""
    before = text[max(0, start - _BEFORE_CHARS) : start]
    line = max(before.rfind("\n"), before.rfind("\r")) + 1
    if _INSIDE.search(before[line:]) is not None:
        return True
    return (line > 0 or start <= behind + _BEFORE_CHARS) and _HEAD.fullmatch(before[line:]) is not None


def _cut_beginning(outside: str, behind: int) -> int | None:
    """Where the last line is only the beginning of a plan: part of a key, an opening bracket or fence."""
    end = len(outside.rstrip())
    start = max(outside.rfind("\n", 0, end), outside.rfind("\r", 0, end)) + 1
    line = outside[start : min(end, start + 64)]
    if start < behind or end - start > len(line):
        return None
    at = start + _blanks(line)
    key = _LAST_LINE.fullmatch(line) or _OPENED_OBJECT.fullmatch(line.strip())
    begun = key is not None and any(name.startswith(key["word"] or "") for name in _BEGINNINGS)
    return at if begun or _OPENED.fullmatch(line.strip()) is not None else None


def _blanks(piece: str) -> int:
    return len(piece) - len(piece.lstrip())
