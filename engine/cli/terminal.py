"""Standard output and standard error: the only module that writes to them.

A reader that goes away (`podium show last | head -1`) is no error: the rest is thrown away and the command ends with
its own exit code. Text by models is made harmless before a terminal sees it. Must never colour what is piped.
"""

from __future__ import annotations

import os
import sys
import time
from typing import IO, Any, Final

# Commands may need the time since they were called; main imports this module first of ours.
STARTED_S: Final = time.monotonic()
_TAB, _LINE_FEED, _DELETE, _LAST_C1 = 0x09, 0x0A, 0x7F, 0x9F
# Controls, and the marks that turn the direction of writing: a terminal would obey them, whoever wrote them.
_CONTROLS: Final = {
    code: f"\\x{code:02x}" for code in (*range(0x20), *range(_DELETE, _LAST_C1 + 1)) if code not in (_TAB, _LINE_FEED)
} | {code: f"\\u{code:04x}" for code in (0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))}


def prepare() -> None:
    """Makes both streams take any text: what a terminal's encoding lacks is replaced, never an error."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def inert(text: str) -> str:
    r"""The text with control characters spelled out (`\x1b`); line feeds and tabs stay."""
    return text.replace("\r\n", "\n").translate(_CONTROLS)


def out(text: str = "") -> None:
    """Writes a line of text to standard output."""
    _write(sys.stdout, text + "\n")


def err(text: str = "") -> None:
    """Writes a line of text to standard error."""
    _write(sys.stderr, text + "\n")


def out_bytes(content: bytes) -> None:
    """Writes bytes as they are to standard output, whatever its encoding."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        _discard(sys.stdout)


def out_json(document: Any) -> None:
    """Writes one JSON document and a line feed to standard output, in UTF-8."""
    import json

    out_bytes(json.dumps(document, ensure_ascii=False, indent=2).encode("utf-8", "replace") + b"\n")


def flush() -> None:
    """Flushes both streams."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except BrokenPipeError:
            _discard(stream)
        except OSError:
            # A full disk behind a redirection: nothing is left that could be said, and to whom.
            continue


def out_is_terminal() -> bool:
    """Whether standard output is a terminal."""
    return sys.stdout is not None and sys.stdout.isatty()


def err_is_terminal() -> bool:
    """Whether standard error is a terminal that can redraw lines."""
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def no_color() -> bool:
    """Whether the user wants no escape codes at all (no-color.org)."""
    return bool(os.environ.get("NO_COLOR"))


def _write(stream: IO[str] | None, text: str) -> None:
    if stream is None:
        return
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        _discard(stream)


def _discard(stream: IO[str]) -> None:
    """Points the stream's descriptor at nothing, so that neither we nor the interpreter trips over it again."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, stream.fileno())
    os.close(nothing)
