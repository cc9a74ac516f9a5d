"""Comments round plans: `<!-- … -->`, `/* … */` and the rest of a line behind `#` or `//`.

Must never look for a comment inside a value: what stands in a string is text.
"""

from __future__ import annotations

import re
from typing import Final

COMMENT_OPENING: Final = r"<!--|(?:^|(?<=[\s\])}]))/\*(?![./\\])"
_CLOSING: Final = {"<!--": "-->", "/*": "*/"}

# A line's rest is a comment behind a mark that begins the line or follows a blank or a closing bracket. Two and more
# `#` are a heading, save in a fence; `#1` is a number.
_IN_PROSE: Final = re.compile(r"(?:^|(?<=[\s\])},;]))(?:(?<!#)\#(?![#\d])|//)", re.MULTILINE)
_IN_CODE: Final = re.compile(r"(?:^|(?<=[\s\])},;]))(?:\#|//)", re.MULTILINE)
_LINE_REST: Final = re.compile(r"(?:^|(?<=[\s\])},;]))(?:\#|//)[^\r\n]*", re.MULTILINE)
_HOLDS_VALUE: Final = re.compile(r"//|#(?![#\d])[^\r\n=:\[|]*[=:\[|]")
_LINE_END: Final = re.compile(r"[\r\n]")


class LineComments:
    """Tells whether a place is in the rest of a line that is a comment. Places must be asked in ascending order."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._looked = 0
        self._inside = False

    def move(self, pos: int) -> None:
        """Go on from the end of a value, whose inside holds no comments."""
        self._looked, self._inside = pos, False

    def hides(self, pos: int, *, in_code: bool) -> bool:
        """Whether the place is commented out. All calls together look at each character once."""
        if pos > self._looked:
            line = max(self._text.rfind("\n", self._looked, pos), self._text.rfind("\r", self._looked, pos)) + 1
            if line > 0:
                self._inside = False
            marks = _IN_CODE if in_code else _IN_PROSE
            self._inside = self._inside or marks.search(self._text, max(line, self._looked), pos) is not None
            self._looked = pos
        return self._inside


def comment_end(text: str, start: int) -> int | None:
    """The offset behind the comment that opens at `start`, or None if the text ends first."""
    opening = "<!--" if text.startswith("<!--", start) else "/*"
    closing = _CLOSING[opening]
    at = text.find(closing, start + len(opening))
    return None if at < 0 else at + len(closing)


def line_rest_end(text: str, pos: int, end: int) -> int:
    """Where the line of a place ends, or `end` if it goes on beyond; what is behind `end` is not looked at."""
    match = _LINE_END.search(text, pos, end)
    return end if match is None else match.start()


def blank_line_comments(text: str, *, headings: bool) -> str:
    """The text with comments behind `#` or `//` replaced by blanks of the same length.

    Without `headings` a line that begins with `#` and holds no value is kept: it may be a heading.
    """

    def blank(match: re.Match[str]) -> str:
        return " " * len(match[0]) if headings or _HOLDS_VALUE.match(match[0]) else match[0]

    return _LINE_REST.sub(blank, text)
