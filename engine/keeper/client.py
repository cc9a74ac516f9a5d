"""A command's way to its services: the keeper of its home, started if there is none, or the user's own servers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import PodiumError, UnavailableError
from engine.keeper import space
from engine.keeper.home import Home, leave_run_folder, lock_home, open_home
from engine.keeper.protocol import LINE_BYTES_MAX, PROTOCOL_VERSION, error_of, receive, send
from engine.settings import Settings, TemporalSettings

START_WAIT_S = 90.0
STOP_WAIT_S = 60.0
# The keeper's exit code when another one has the home (EX_TEMPFAIL of sysexits.h).
BUSY_EXIT = 75
RETRY_PAUSE_S = 0.05
# What a keeper may know of the environment of the command that starts it: never keys.
_PASSED_ON = ("PATH", "HOME", "LANG", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR")
_PASSED_ON_PREFIXES = ("LC_", "PODIUM_", "PYTHON")
_PASSED_ON_SUFFIXES = ("_proxy", "_PROXY")


@dataclass(frozen=True, slots=True)
class Needs:
    """What a command needs of its keeper. Secrets are name and value; they go over the private socket only."""

    queues: tuple[str, ...] = ()
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    local_model: bool = False


@dataclass(frozen=True, slots=True)
class Services:
    """Where database and Temporal are. ``home`` is None when they are the user's own."""

    database_url: str = field(repr=False)
    temporal: TemporalSettings
    embedded: bool
    home: Path | None


def forget_other_servers() -> None:
    """Takes out of the environment what libpq reads where an address is silent: it means another server than ours."""
    for name in [name for name in os.environ if name.startswith("PG")]:
        del os.environ[name]


@contextlib.asynccontextmanager
async def open_services(
    settings: Settings, needs: Needs | None = None, *, on_status: Callable[[str], None] = lambda _: None
) -> AsyncIterator[Services]:
    """The services for as long as the context is open; the keeper stays at least as long.

    Raises UnavailableError when they cannot be had or are incompatible, InputError for a home that cannot be used.
    """
    if settings.database_url is not None and settings.temporal is not None:
        # Imported here: commands of the embedded default leave the schema to the keeper.
        from engine.store.schema import require_current_schema  # noqa: PLC0415  # heavy, and not every command needs it

        await asyncio.to_thread(require_current_schema, settings.database_url)
        yield Services(settings.database_url, settings.temporal, embedded=False, home=None)
        return
    forget_other_servers()
    home = open_home(settings.home)
    reader, writer, ready = await _hello(home, needs or Needs(), on_status)
    try:
        del reader
        yield Services(
            ready["database_url"], TemporalSettings(ready["temporal_address"]), embedded=True, home=home.root
        )
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def stop_keeper(home_path: Path) -> bool:
    """Stops the keeper of a home and waits until it is gone; False if there was none."""
    home = _existing_home(home_path)
    if home is None:
        return False
    connection = await _connect(home)
    if connection is None:
        if _is_nobodys(home):
            return False
    else:
        reader, writer = connection
        await send(writer, {"op": "stop"})
        await receive(reader)
        writer.close()
    give_up_at = time.monotonic() + STOP_WAIT_S
    while time.monotonic() < give_up_at:
        if _is_nobodys(home):
            return True
        await asyncio.sleep(RETRY_PAUSE_S)
    raise UnavailableError("keeper-stuck", "the keeper does not end", hint=f"its log is {home.logs_dir}/keeper.log")


def _is_nobodys(home: Home) -> bool:
    """Whether no keeper holds the home. Looking may have made the sockets' folder, so it goes again."""
    lock = lock_home(home)
    if lock is None:
        return False
    with lock:
        leave_run_folder(home)
    return True


async def keeper_status(home_path: Path) -> dict[str, Any] | None:
    """What the keeper of a home says of itself, or None if there is none."""
    home = _existing_home(home_path)
    connection = None if home is None else await _connect(home)
    if connection is None:
        return None
    reader, writer = connection
    try:
        await send(writer, {"op": "status"})
        return await receive(reader)
    finally:
        writer.close()


def _existing_home(path: Path) -> Home | None:
    """The home at a path, without making one."""
    return open_home(path) if path.exists() else None


async def _hello(
    home: Home, needs: Needs, on_status: Callable[[str], None]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, dict[str, Any]]:
    give_up_at = time.monotonic() + START_WAIT_S
    hello = {
        "op": "hello",
        "version": PROTOCOL_VERSION,
        "queues": list(needs.queues),
        "secrets": dict(needs.secrets),
        "local_model": needs.local_model,
    }
    while time.monotonic() < give_up_at:
        connection = await _connect(home)
        if connection is None:
            await _start_keeper(home, on_status)
            await asyncio.sleep(RETRY_PAUSE_S)
            continue
        reader, writer = connection
        ready = await _talk(reader, writer, hello, on_status, give_up_at)
        if ready is not None:
            return reader, writer, ready
        # The keeper was about to leave: wait until it has, then start another.
        writer.close()
        await asyncio.sleep(RETRY_PAUSE_S)
    raise UnavailableError(
        "keeper-unavailable", "the keeper does not become ready", hint=f"its log is {home.logs_dir}/keeper.log"
    )


async def _talk(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    hello: Mapping[str, Any],
    on_status: Callable[[str], None],
    give_up_at: float,
) -> dict[str, Any] | None:
    """Says hello and follows what the keeper answers; None when it is better to try again."""
    try:
        await send(writer, hello)
        while True:
            async with asyncio.timeout(max(give_up_at - time.monotonic(), 0.1)):
                message = await receive(reader)
            if message is None or "retry" in message:
                return None
            if "error" in message:
                writer.close()
                raise error_of(message)
            if "ready" in message:
                ready: dict[str, Any] = message["ready"]
                return ready
            on_status(str(message.get("status", "")))
    except (ConnectionError, TimeoutError):
        return None


async def _connect(home: Home) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
    try:
        return await asyncio.open_unix_connection(str(home.socket_path), limit=LINE_BYTES_MAX)
    except (FileNotFoundError, ConnectionError):
        return None


async def _start_keeper(home: Home, on_status: Callable[[str], None]) -> None:
    """Starts a keeper of its own session. If another command's is quicker, ours ends by itself."""
    lock = lock_home(home)
    if lock is None:
        # Somebody has the home: a keeper that does not listen yet, or one that is leaving.
        return
    lock.release()
    on_status("starting the keeper")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "engine.keeper.daemon",
        "--home",
        str(home.root),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        cwd=str(home.root),
        env=_keeper_environment(),
        start_new_session=True,
    )
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        code = await process.wait()
        if code == BUSY_EXIT:
            return
        raise _early_failure(home, code)


def _early_failure(home: Home, code: int) -> PodiumError:
    return space.shortage(home.root) or UnavailableError(
        "keeper-failed",
        f"the keeper ended with code {code} before it listened",
        hint=f"its log is {home.logs_dir}/keeper.log",
    )


def _keeper_environment() -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES) or name.endswith(_PASSED_ON_SUFFIXES)
    }
    kept.pop("PODIUM_TEMPORAL_API_KEY", None)
    return kept
