"""The keeper: the one process of a home that owns its servers, its model and its worker.

Commands are clients on its socket. It leaves when there is neither a client nor a live run. Everything that it needs
to go on after ``kill -9`` is in the home; secrets that clients handed over are in its memory only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import json
import logging
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import ExitCode, PodiumError, UnavailableError
from engine.keeper import space
from engine.keeper.client import BUSY_EXIT, forget_other_servers
from engine.keeper.home import Home, explained, leave_run_folder, lock_home, open_home
from engine.keeper.own_log import log_to
from engine.keeper.protocol import LINE_BYTES_MAX, PROTOCOL_VERSION, error_message, receive, send
from engine.keeper.servers import Servers
from engine.settings import Settings, TemporalSettings, load_settings

IDLE_CHECK_S = 0.5
SPACE_CHECK_S = 1.0
_log = logging.getLogger(__name__)


class Keeper:
    """The state of one keeper. ``run`` returns its exit code."""

    def __init__(self, home: Home, settings: Settings, *, foreground: bool, say: Callable[[str], None]) -> None:
        self._home = home
        self._settings = settings
        self._foreground = foreground
        self._say = say
        self._servers = Servers(home, temporal_port=settings.temporal_port)
        self._worker: Any = None
        self._ready = asyncio.Event()
        self._failed: PodiumError | None = None
        self._stopping = asyncio.Event()
        self._clients: set[asyncio.Task[Any]] = set()
        self._status_listeners: set[Callable[[str], None]] = set()
        self._status = "starting"
        self._started = time.monotonic()
        self._needed_at = time.monotonic()
        self._background: set[asyncio.Task[Any]] = set()

    async def run(self) -> ExitCode:
        """Listens first, so that clients see what is going on; then starts the rest; then watches."""
        server = await self._listen()
        tasks = [asyncio.create_task(self._bring_up()), asyncio.create_task(self._stopping.wait())]
        try:
            await self._until_stopped(tasks)
        finally:
            self._stopping.set()
            server.close()
            self._home.socket_path.unlink(missing_ok=True)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._tear_down()
        if self._failed is not None:
            return self._failed.exit_code
        return ExitCode.OK

    def stop(self) -> None:
        """Asks for the end: calls in flight get their grace, the servers are shut down in order."""
        self._stopping.set()

    async def _listen(self) -> asyncio.Server:
        # We hold the home's lock, so a socket that is there belongs to a dead keeper.
        self._home.socket_path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        previous = os.umask(0o177)
        try:
            listener.bind(str(self._home.socket_path))
        finally:
            os.umask(previous)
        return await asyncio.start_unix_server(self._serve, sock=listener, limit=LINE_BYTES_MAX)

    async def _until_stopped(self, tasks: list[asyncio.Task[Any]]) -> None:
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if self._stopping.is_set():
                return
            tasks.append(asyncio.create_task(self._servers.watch()))
            tasks.append(asyncio.create_task(self._worker.run()))
            tasks.append(asyncio.create_task(self._watch_space()))
            if not self._foreground:
                tasks.append(asyncio.create_task(self._stop_when_idle()))
            done, _ = await asyncio.wait(tasks[1:], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except BaseExceptionGroup as errors:
            self._failed = _podium_error(errors.exceptions[0])
        except Exception as error:  # noqa: BLE001  # reported to clients and to the log
            self._failed = _podium_error(error)
        if self._failed is not None:
            # Servers without space fail in many ways, and most of them do not say why.
            self._failed = self._shortage() or self._failed
            self._announce(self._failed.message)
            self._ready.set()
            # Clients that wait get the reason before the process goes.
            await asyncio.sleep(0.2)

    async def _bring_up(self) -> None:
        starting = asyncio.create_task(self._servers.start(self._announce))
        # The imports take as long as the servers' start; in a thread they cost nothing beside it.
        process = await asyncio.to_thread(importlib.import_module, "worker_pools.process")
        secrets = importlib.import_module("worker_pools.secrets")
        await starting
        self._announce("starting the worker")
        options = process.WorkerOptions(
            database_url=self._servers.postgres.url,
            temporal=TemporalSettings(self._servers.temporal.address),
            all_queues=True,
            # The file of this home's Temporal is ours: if it is new, the old cluster is gone for good.
            adopt_cluster=self._servers.temporal.was_new_file,
            model_log=self._home.logs_dir / "model.log",
            key_store=self._settings.key_store_url(),
            retention_days=self._settings.retention_days,
            audit=importlib.import_module("engine.signing").AuditSettings.of(self._settings),
        )
        # Secrets come from clients, never from the environment of whichever command happened to be the first.
        self._worker = process.WorkerProcess(options, secrets.SecretStore({}))
        await self._worker.start()
        self._announce("ready")
        self._ready.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        # Clients may come and go between two looks, so each leaves its mark.
        self._needed_at = time.monotonic()
        try:
            if _is_ours(writer):
                await self._answer(reader, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._clients.discard(task)
            self._needed_at = time.monotonic()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        message = await receive(reader)
        if message is None:
            return
        if self._stopping.is_set():
            await send(writer, {"retry": True})
        elif message.get("op") == "stop":
            await send(writer, {"stopping": True, "pid": os.getpid()})
            self._stopping.set()
        elif message.get("op") == "status":
            await send(writer, self._describe())
        elif message.get("op") == "hello" and message.get("version") == PROTOCOL_VERSION:
            await self._welcome(message, reader, writer)
        else:
            other = UnavailableError(
                "keeper-other-version",
                "the keeper of this home was started by another version of Podium",
                hint="run `podium down`, then try again",
            )
            await send(writer, error_message(other))

    async def _welcome(
        self, message: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        statuses: asyncio.Queue[str] = asyncio.Queue()
        self._status_listeners.add(statuses.put_nowait)
        try:
            waiting = asyncio.create_task(self._ready.wait())
            await send(writer, {"status": self._status})
            while not waiting.done():
                status = asyncio.create_task(statuses.get())
                await asyncio.wait([waiting, status], return_when=asyncio.FIRST_COMPLETED)
                if status.done():
                    await send(writer, {"status": status.result()})
                else:
                    status.cancel()
        finally:
            self._status_listeners.discard(statuses.put_nowait)
            waiting.cancel()
        if self._failed is not None:
            await send(writer, error_message(self._failed))
            return
        self._provide(message)
        temporal = self._servers.temporal
        await send(
            writer, {"ready": {"database_url": self._servers.postgres.url, "temporal_address": temporal.address}}
        )
        # The client is here as long as its end of the socket is open; nothing else is said.
        await reader.read()

    def _provide(self, message: dict[str, Any]) -> None:
        for name, value in message.get("secrets", {}).items():
            self._worker.secrets.put(str(name), str(value))
        self._worker.ensure_queues(str(queue) for queue in message.get("queues", []))
        if message.get("local_model"):
            # It loads while the run is planned; a failure shows at the first call, with its reason.
            task = asyncio.create_task(_quietly(self._worker.local_endpoint()))
            self._background.add(task)
            task.add_done_callback(self._background.discard)

    def _describe(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "status": self._status,
            "uptime_s": round(time.monotonic() - self._started, 1),
            "postgres_pid": self._servers.postgres.pid,
            "temporal_pid": self._servers.temporal.pid,
            "temporal_address": self._servers.temporal.address if self._ready.is_set() else None,
            "clients": len(self._clients) - 1,
            "foreground": self._foreground,
            "disk_full": self._shortage() is not None,
        }

    def _shortage(self) -> UnavailableError | None:
        """What keeps the servers from writing: what the disks say, and failed writes, which also know of quotas."""
        found = space.shortage(self._home.root)
        if found is None and self._ready.is_set() and self._failed is None and self._worker.database.is_full:
            found = space.full(self._home.root)
        return found

    async def _watch_space(self) -> None:
        """Says when space runs out, and when there is some again."""
        was_short = False
        while True:
            found = self._shortage()
            if found is not None and not was_short:
                self._announce(f"{found.code}: {found.message}; {found.hint}")
            elif found is None and was_short:
                self._announce("ready")
            was_short = found is not None
            await asyncio.sleep(SPACE_CHECK_S)

    async def _stop_when_idle(self) -> None:
        """Leaves when neither a client nor a live run needs the keeper for a while."""
        self._needed_at = time.monotonic()
        while True:
            await asyncio.sleep(IDLE_CHECK_S)
            if self._clients or await self._has_live_runs():
                self._needed_at = time.monotonic()
            elif time.monotonic() - self._needed_at > self._settings.keeper_idle_s:
                return

    async def _has_live_runs(self) -> bool:
        try:
            return bool(await self._worker.has_live_runs())
        except PodiumError:
            return True

    async def _tear_down(self) -> None:
        for task in list(self._clients):
            task.cancel()
        if self._worker is not None:
            # The worker's own run() hands calls back and closes everything; it was cancelled or has ended by now.
            await self._worker.shut_down()
        await self._servers.stop()

    def _announce(self, status: str) -> None:
        self._status = status
        self._say(status)
        for listener in list(self._status_listeners):
            listener(status)


async def run_keeper(settings: Settings, *, foreground: bool, say: Callable[[str], None] = lambda _: None) -> int:
    """Runs a keeper to its end; ``BUSY_EXIT`` if the home has one. Raises PodiumError for an unusable home."""
    forget_other_servers()
    home = open_home(settings.home)
    lock = lock_home(home)
    if lock is None:
        return BUSY_EXIT
    with lock:
        # Once more: a keeper that was about to leave may have taken the sockets' folder with it after our first look.
        home = open_home(settings.home)
        if foreground:
            # Only now: before it has the lock, another keeper may write there.
            with explained(home.root):
                log_to(home.logs_dir / "keeper.log")
        keeper = Keeper(home, settings, foreground=foreground, say=say)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, keeper.stop)
        say("listening")
        try:
            return await keeper.run()
        finally:
            leave_run_folder(home)


def main() -> None:
    """The entry of a keeper that a command started: says on standard output whether it listens, then goes quiet."""
    parser = argparse.ArgumentParser(prog="podium-keeper")
    parser.add_argument("--home", type=Path, required=True)
    home_path = parser.parse_args().home
    os.environ["PODIUM_HOME"] = str(home_path)
    code: int = ExitCode.FAILED
    try:
        log_to(home_path / "logs" / "keeper.log")
        code = asyncio.run(run_keeper(load_settings(), foreground=False, say=_Parent().say))
    except PodiumError as error:
        _log.error("%s: %s", error.code, error.message)
        code = error.exit_code
    except BaseException:  # noqa: BLE001  # the last place that can write down why
        _log.exception("the keeper failed")
    finally:
        logging.shutdown()
        # A process that used Temporal's SDK may abort while the interpreter shuts down (temporalio/sdk-python#300), so
        # it does not shut down.
        os._exit(code)


class _Parent:
    """The command that started this keeper: it waits for one line, then standard output is closed."""

    def __init__(self) -> None:
        self._waits = True

    def say(self, status: str) -> None:
        _log.info(status)
        if self._waits:
            self._waits = False
            with contextlib.suppress(OSError):
                sys.stdout.write(json.dumps({"status": status}) + "\n")
                sys.stdout.flush()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _is_ours(writer: asyncio.StreamWriter) -> bool:
    """Whether the client runs as our own user; the socket's mode says so too, this does not depend on it."""
    sock = writer.get_extra_info("socket")
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return bool(uid == os.geteuid())


def _podium_error(error: BaseException) -> PodiumError:
    if isinstance(error, PodiumError):
        return error
    _log.error("the keeper failed", exc_info=error)
    return UnavailableError("keeper-failed", "the keeper failed", hint="its log is logs/keeper.log in the home")


async def _quietly(work: Any) -> None:
    with contextlib.suppress(PodiumError):
        await work


if __name__ == "__main__":
    main()
