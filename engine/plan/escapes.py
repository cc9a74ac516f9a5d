r"""Backslashes inside quoted strings, the same for every form. Must never raise, whatever follows a backslash.

Only ``\\ \" \' \/ \uXXXX \n \t \r`` are escapes. Everything else stays as written (so ``\frac`` and ``\beta`` reach
the worker), and so do ``\n``, ``\t`` and ``\r`` where the whole run of letters is a TeX command.
"""

from __future__ import annotations

import re
from typing import Final

from engine.plan.tex import TEX_COMMANDS

_ESCAPE: Final = re.compile(
    r"""\\(?: (?P<mark>["'\\/])
          |   u(?P<high>[dD][89abAB][0-9a-fA-F]{2})\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{2})
          |   u(?P<hex>[0-9a-fA-F]{4})
          |   (?P<run>[ntr][A-Za-z]*) )""",
    re.VERBOSE,
)
_BLANKS: Final = {"n": "\n", "t": "\t", "r": "\r"}


def decode_escapes(raw: str) -> tuple[str, tuple[str, ...]]:
    """Decode the escapes of a string's inside; also return the TeX commands that were kept, each once.

    A surrogate pair written as two escapes becomes one character; half of one stays a lone surrogate, which
    `clean_text` replaces afterwards.
    """
    if "\\" not in raw:
        return raw, ()
    kept: dict[str, None] = {}

    def decode(match: re.Match[str]) -> str:
        if (mark := match["mark"]) is not None:
            return mark
        if (high := match["high"]) is not None:
            return chr(0x10000 + ((int(high, 16) - 0xD800) << 10) + int(match["low"], 16) - 0xDC00)
        if (digits := match["hex"]) is not None:
            return chr(int(digits, 16))
        run = match["run"]
        if run in TEX_COMMANDS:
            kept[run] = None
            return match[0]
        return _BLANKS[run[0]] + run[1:]

    return _ESCAPE.sub(decode, raw), tuple(kept)


def encode_escapes(text: str, *, only_ascii_line: bool = False) -> str:
    r"""Write a string's inside for double quotes so that `decode_escapes` and any JSON reader give it back.

    A line break before letters is written ``\u000a``, since ``\n`` and the letters could form a TeX command. With
    `only_ascii_line` the characters that YAML refuses or folds are escaped too.
    """
    unsafe = _YAML_UNSAFE if only_ascii_line else _JSON_UNSAFE
    return unsafe.sub(_encode, text)


_JSON_UNSAFE: Final = re.compile(r'[\\"\x00-\x1f]')
_YAML_UNSAFE: Final = re.compile('[\\\\"\x00-\x1f\x7f-\xa0\u2028\u2029\ufeff\ufffe\uffff]')


def _encode(match: re.Match[str]) -> str:
    char = match[0]
    if char in '\\"':
        return "\\" + char
    following = match.string[match.end() : match.end() + 1]
    if char in "\n\t\r" and not (following.isascii() and following.isalpha()):
        return {"\n": "\\n", "\t": "\\t", "\r": "\\r"}[char]
    return f"\\u{ord(char):04x}"
