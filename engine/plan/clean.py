"""The one function that cleans text which models write. Must never shorten, reorder or otherwise edit it.

PostgreSQL stores no U+0000, and neither it nor HTTP carries half a surrogate pair. Both are replaced one for one by
U+FFFD, so that the damage is seen and every other character keeps its place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

REPLACEMENT: Final = "\ufffd"
_UNSTORABLE: Final = re.compile("[\x00\ud800-\udfff]")
_REPLACED: Final = dict.fromkeys([0, *range(0xD800, 0xE000)], REPLACEMENT)


@dataclass(frozen=True, slots=True)
class CleanedText:
    """Storable text, and how many NUL characters and lone surrogates were replaced in it."""

    text: str
    nul_count: int
    surrogate_count: int

    @property
    def changed(self) -> bool:
        """Whether anything was replaced."""
        return self.nul_count + self.surrogate_count > 0

    def describe(self) -> str:
        """What was replaced, in words for a note."""
        parts = []
        if self.nul_count:
            parts.append(f"{self.nul_count} NUL character(s)")
        if self.surrogate_count:
            parts.append(f"{self.surrogate_count} lone surrogate(s)")
        return " and ".join(parts) + " replaced by U+FFFD"


def clean_text(text: str) -> CleanedText:
    """Replace NUL and lone surrogates by U+FFFD; the length in code points stays the same.

    Two surrogates that form a pair (they arise where halves were joined as separate code points) are halves still:
    only the decoder of an escape may join them.
    """
    if _UNSTORABLE.search(text) is None:
        return CleanedText(text, 0, 0)
    nul_count = text.count("\x00")
    replaced_count = sum(1 for _ in _UNSTORABLE.finditer(text))
    # Not by the pattern's own substitution, which keeps a list of all the pieces between.
    return CleanedText(text.translate(_REPLACED), nul_count, replaced_count - nul_count)


def quote_text(text: str, chars_max: int) -> str:
    """At most `chars_max` characters of a text on one line, storable, with control characters made visible."""
    head = clean_text(text[:chars_max]).text
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in head)
    if len(text) > chars_max or len(shown) > chars_max:
        shown = shown[: chars_max - 1] + "…"
    return shown
