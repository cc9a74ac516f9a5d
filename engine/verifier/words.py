"""Words of others for a terminal: names and codes come from the bundle, and must neither steer it nor forge a line."""

from __future__ import annotations

from typing import Final

# What the program's other words for people say, too.
SENT_BACK: Final = "sent back"


def one_line(text: str) -> str:
    """The text with everything that is not printable (control characters, line ends, marks of direction) escaped."""
    return text if text.isprintable() else "".join(map(_printable, text))


def _printable(sign: str) -> str:
    return sign if sign.isprintable() else sign.encode("unicode_escape").decode("ascii")


def let_pass(*, looked: bool) -> str:
    """How a review ended whose rule approves on expiry; ``looked``: somebody had it displayed, or decided."""
    return f"let pass by the rule, {'not enough people decided' if looked else 'nobody looked'}"
