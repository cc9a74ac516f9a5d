"""What a user hands in: tasks and plans as arguments, files or standard input. Must never read without a bound."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

from engine.errors import InputError

STDIN: Final = "-"
# Above every limit of the readers behind it, so that those can say how large the text is; below what hurts.
FILE_BYTES_MAX: Final = 256 * 1024 * 1024
_TASK_HINT: Final = 'podium run "What is gravity? Explain it to a child."  (or --file FILE, or a pipe)'


def task_bytes(argument: str | None, file: str | None) -> bytes:
    """The task as it was given, in bytes; it is judged by `engine.service.read_task`.

    An argument, a file (`-`: standard input), or what is piped in. Raises InputError for none, for two, and for a file
    that cannot be read.
    """
    if argument is not None and file is not None:
        raise InputError("task-twice", "the task is given twice, as an argument and by --file", hint="give one of them")
    if file is not None:
        return read_bytes(file, what="task file")
    if argument is not None and argument != STDIN:
        # Arguments are bytes to the system; what was no valid UTF-8 comes back as it was.
        return os.fsencode(argument)
    if argument is None and (sys.stdin is None or sys.stdin.isatty()):
        raise InputError("task-missing", "there is no task", hint=_TASK_HINT)
    return read_bytes(STDIN, what="task")


def read_bytes(path: str, *, what: str) -> bytes:
    """The bytes of a file or of standard input; InputError `file-unreadable` or `file-too-large`."""
    try:
        if path == STDIN:
            content = b"" if sys.stdin is None else sys.stdin.buffer.read(FILE_BYTES_MAX + 1)
        else:
            with Path(path).open("rb") as source:
                content = source.read(FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        reason = (getattr(error, "strerror", None) or "not a file name").lower()
        name = "standard input" if path == STDIN else path
        hint = "give a file, or '-' for standard input" if path != STDIN else "give a file, or pipe the text in"
        raise InputError("file-unreadable", f"the {what} {name} cannot be read: {reason}", hint=hint) from None
    if len(content) > FILE_BYTES_MAX:
        raise InputError(
            "file-too-large", f"the {what} has more than {FILE_BYTES_MAX:,} bytes", hint="give a smaller one"
        )
    return content


def plan_text(path: str) -> str:
    """The text of a plan file or of standard input. Lone surrogates pass: the parser replaces them visibly.

    Raises InputError `plan-not-text` for anything else that is not UTF-8.
    """
    content = read_bytes(path, what="plan")
    try:
        return content.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise InputError(
            "plan-not-text",
            f"the plan is not UTF-8 text (byte {error.start})",
            hint="save it as UTF-8; a plan is text: lists, JSON or YAML",
        ) from None
