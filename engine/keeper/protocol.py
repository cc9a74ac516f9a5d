"""What a command and its keeper say to each other over the socket: one JSON object a line. Pure.

A client says hello with what it needs (queues to poll, secrets that its pool names, whether the local model is
needed). The keeper answers with status lines and then with ``ready`` or ``error``. The connection then stays open: as
long as it does, the keeper counts the client and stays. ``stop`` and ``status`` are the other requests.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Final

from engine.errors import ExitCode, InputError, PodiumError, RefusedError, UnavailableError, WaitingError

PROTOCOL_VERSION: Final = 1
LINE_BYTES_MAX: Final = 1024 * 1024
_BY_EXIT: Final[Mapping[int, type[PodiumError]]] = {
    ExitCode.BAD_INPUT: InputError,
    ExitCode.WAITING: WaitingError,
    ExitCode.UNAVAILABLE: UnavailableError,
    ExitCode.FAILED: RefusedError,
}


async def send(writer: asyncio.StreamWriter, message: Mapping[str, Any]) -> None:
    """Sends one message."""
    writer.write(json.dumps(message).encode() + b"\n")
    await writer.drain()


async def receive(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next message, or None when the other side has gone or does not speak this protocol."""
    try:
        line = await reader.readline()
        message = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, ConnectionError):
        return None
    return message if isinstance(message, dict) else None


def error_message(error: PodiumError) -> dict[str, Any]:
    """An error as a message."""
    return {
        "error": {"code": error.code, "message": error.message, "hint": error.hint, "exit_code": int(error.exit_code)}
    }


def error_of(message: Mapping[str, Any]) -> PodiumError:
    """The error in a message."""
    error = message["error"]
    kind = _BY_EXIT.get(error["exit_code"], UnavailableError)
    return kind(error["code"], error["message"], hint=error["hint"])
