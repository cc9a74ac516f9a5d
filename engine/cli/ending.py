"""How a command says that it did not work: one line, a hint, an exit code. Must never show a traceback unasked.

With `--json` standard output also gets one object: {schema_version, error: {code, message, hint}}.
"""

from __future__ import annotations

import os
import re
import tempfile
import traceback
from pathlib import Path
from typing import Final

import click

from engine.cli import terminal
from engine.errors import BugError, ExitCode, PodiumError
from engine.settings import DEBUG_VARIABLE

SCHEMA_VERSION: Final = 1
USAGE: Final = "usage"


def report_error(error: PodiumError, *, as_json: bool) -> int:
    """Says what is wrong; returns the error's exit code."""
    _say(error.code, error.message, error.hint, as_json=as_json)
    return error.exit_code


def report_usage(error: click.ClickException, *, as_json: bool) -> int:
    """Says how the command was misused; returns 2."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        terminal.err(error.format_message())
        return ExitCode.BAD_INPUT
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "podium"
    _say(USAGE, error.format_message().rstrip("."), f"`{path} --help` shows how it is used", as_json=as_json)
    return ExitCode.BAD_INPUT


def report_interrupt() -> int:
    """Says that the command was interrupted; returns 130."""
    terminal.err("interrupted")
    return ExitCode.INTERRUPTED


def report_bug(error: BaseException, *, as_json: bool) -> int:
    """Writes the trace to a file of mode 600 and says in one line where it is; returns 1."""
    code = error.code if isinstance(error, BugError) else _bug_code(error)
    trace = "".join(traceback.format_exception(error))
    if os.environ.get(DEBUG_VARIABLE) == "1":
        terminal.err(trace.rstrip())
    path = _store(trace)
    where = f"the trace is in {path}" if path is not None else "its trace could not be stored"
    hint = "please report it with that file; it may hold text of your task"
    _say(code, f"internal error (code {code}), {where}", hint, as_json=as_json)
    return ExitCode.FAILED


def error_object(code: str, message: str, hint: str | None) -> dict[str, object]:
    """An error as `--json` prints it."""
    return {"schema_version": SCHEMA_VERSION, "error": {"code": code, "message": message, "hint": hint}}


def _say(code: str, message: str, hint: str | None, *, as_json: bool) -> None:
    if as_json:
        terminal.out_json(error_object(code, message, hint))
    lines = terminal.inert(message).splitlines() or [code]
    terminal.err(f"error: {lines[0]}")
    for line in lines[1:]:
        terminal.err(f"       {line}")
    if hint:
        terminal.err(f"hint: {terminal.inert(hint)}")


def _bug_code(error: BaseException) -> str:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", type(error).__name__).lower()
    return f"bug-{words}"


def _store(trace: str) -> Path | None:
    """Into the home's logs if there is a home, else into the temporary folder; None if neither takes it."""
    home = Path(os.environ.get("PODIUM_HOME") or ".podium").absolute() / "logs"
    for folder in (home, Path(tempfile.gettempdir())):
        if not folder.is_dir():
            continue
        try:
            descriptor, name = tempfile.mkstemp(prefix="podium-bug-", suffix=".txt", dir=folder)
        except OSError:
            continue
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as target:
            target.write(trace)
        return Path(name)
    return None
