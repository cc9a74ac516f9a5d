"""Every error that Podium raises on purpose. Must never import anything of Podium.

    PodiumError                 code, message, hint, exit code
    ├── InputError              the user's input is wrong (exit 2)
    ├── RefusedError            the request is understood and declined (exit 1)
    ├── WaitingError            a person or a secret is needed first (exit 3)
    ├── UnavailableError        a service is missing, unreachable or incompatible (exit 5)
    └── BugError                a broken invariant of our own (exit 1); fails loudly

Codes are lower-case words joined by hyphens. They are stable, safe to store and the only part of an error that
Temporal's history may hold; messages and hints are for people and may quote input.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What a command's exit status means; README.md has the same table."""

    OK = 0
    FAILED = 1
    BAD_INPUT = 2
    WAITING = 3
    CANCELLED = 4
    UNAVAILABLE = 5
    INTERRUPTED = 130


class PodiumError(Exception):
    """An error with a stable code, one line for people and, where there is one, a hint on what to do."""

    exit_code: ExitCode = ExitCode.FAILED

    def __init__(self, code: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint


class InputError(PodiumError):
    """The user's input, usage or plan is wrong; nothing was changed."""

    exit_code = ExitCode.BAD_INPUT


class RefusedError(PodiumError):
    """The request makes sense but is not allowed in the present state; nothing was changed."""

    exit_code = ExitCode.FAILED


class WaitingError(PodiumError):
    """Nothing can go on before a person or a secret is there."""

    exit_code = ExitCode.WAITING


class UnavailableError(PodiumError):
    """A service (database, Temporal, keeper, model server) is missing, unreachable or of the wrong version."""

    exit_code = ExitCode.UNAVAILABLE


class BugError(PodiumError):
    """An invariant of our own does not hold."""

    exit_code = ExitCode.FAILED
