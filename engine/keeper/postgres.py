"""The embedded PostgreSQL server: start, readiness, address, stop. Must never listen on TCP.

Nobody but the home's owner can reach it: the socket lies in a folder of mode 700, every connection needs the password
of the role `podium`, and that role is no superuser and owns nothing. Logs hold neither statements nor values.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final
from urllib.parse import quote

import psycopg

from engine.errors import BugError, PodiumError, UnavailableError
from engine.keeper.cluster import (
    DATABASE,
    LEFTOVER_STAGES,
    PROGRAM_NAMES,
    ROLE,
    SYNC_METHOD,
    Cluster,
    failure,
    open_cluster,
)
from engine.keeper.home import Home, explained
from engine.keeper.logs import LogFile
from engine.keeper.process import POLL_EVERY_S, ChildProcess, Program, Stage, stop_leftovers
from engine.store.roles import MIGRATOR

# Part of the socket's name only; there is no TCP port.
PORT: Final = 5432
# Crash recovery replays at most a few hundred megabytes of log; a slow disk needs its time for that.
START_WAIT_S: Final = 60.0
CONNECT_WAIT_S: Final = 10
# A session of a killed server may hold its shared memory for a moment; PostgreSQL then refuses to start.
STILL_IN_USE: Final = "is still in use"
START_TRIES_MAX: Final = 10
RETRY_PAUSE_S: Final = 0.5
STATUS_LINE: Final = 7  # of postmaster.pid, from 0 (miscadmin.h: LOCK_FILE_LINE_PM_STATUS)

# "Fast": ends sessions and writes a checkpoint. "Immediate": the next start recovers from the log.
FAST: Final = signal.SIGINT
IMMEDIATE: Final = signal.SIGQUIT

SETTINGS: Final[Mapping[str, str]] = {
    "listen_addresses": "",
    "port": str(PORT),
    "unix_socket_permissions": "0700",
    "cluster_name": "podium",
    "max_connections": "100",
    "shared_buffers": "64MB",
    "max_wal_size": "256MB",  # bounds crash recovery as well as the disk
    "huge_pages": "off",
    "io_method": "sync",  # no idle I/O workers for a small database
    "jit": "off",
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    **({"recovery_init_sync_method": SYNC_METHOD} if SYNC_METHOD else {}),
    "password_encryption": "scram-sha-256",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_destination": "stderr",
    "logging_collector": "off",
    "log_connections": "off",
    "log_checkpoints": "off",
    # A failing statement, its values and DETAIL hold what people and models wrote.
    "log_min_error_statement": "panic",
    "log_error_verbosity": "terse",
    "log_parameter_max_length": "0",
    "log_parameter_max_length_on_error": "0",
}


class PostgresServer:
    """The PostgreSQL server of one home. Use it only while you hold the home's lock.

    Start it from a thread that lives as long as the server shall: the kernel shuts it down when that thread ends.
    """

    def __init__(
        self,
        home: Home,
        *,
        settings: Mapping[str, str] | None = None,
        extra_setup: Sequence[str] = (),
        namespaces: bool = True,
    ) -> None:
        """`settings` override ours; `extra_setup` is for test servers; `namespaces=False` as in `open_cluster`."""
        self._home = home
        self._settings = {**SETTINGS, **(settings or {})}
        self._extra_setup = extra_setup
        self._namespaces = namespaces
        self._cluster: Cluster | None = None
        self._child: ChildProcess | None = None

    @property
    def log_path(self) -> Path:
        """Where it logs; a `.1` beside it holds what came before."""
        return self._home.logs_dir / "postgres.log"

    @property
    def pid(self) -> int | None:
        """The process id of the postmaster while it runs."""
        return self._child.pid if self._child is not None and self._child.exit_code is None else None

    @property
    def url(self) -> str:
        """The address for SQLAlchemy, password included: never log it."""
        return self.url_of(DATABASE)

    def url_of(self, database: str) -> str:
        """The address of another database on this server."""
        return self._url(ROLE, self._running_cluster().password(), database)

    @property
    def migration_url(self) -> str:
        """The address for migrations: a role that may become the owner of everything. For the keeper only."""
        return self._url(MIGRATOR, self._running_cluster().migrator_password(), DATABASE)

    def _url(self, role: str, password: str, database: str) -> str:
        host = quote(str(self._running_cluster().run_dir), safe="")
        return f"postgresql+psycopg://{role}:{password}@/{quote(database)}?host={host}&port={PORT}"

    async def start(self) -> None:
        """Make the cluster if there is none, stop leftovers, start, and return when a connection has succeeded.

        May be called again after the server's end. Raises `UnavailableError` as `open_cluster` does, and
        `postgres-start-failed`.
        """
        if self.pid is not None:
            raise BugError("already-started", "this PostgreSQL server runs already")
        cluster = await open_cluster(self._home, namespaces=self._namespaces, extra_setup=self._extra_setup)
        self._cluster = cluster
        for tries_left in reversed(range(START_TRIES_MAX)):
            child = await self._spawn(cluster)
            try:
                await self._until_ready(child, cluster)
            except BaseException as error:
                await self.stop(fast_s=0.0)
                if isinstance(error, PodiumError) and STILL_IN_USE in child.output() and tries_left:
                    await asyncio.sleep(RETRY_PAUSE_S)
                    continue
                raise
            return

    async def wait(self) -> int:
        """Wait for the server's end, wanted or not, and return its exit code (negative: the signal that ended it)."""
        return await self._started_child().wait()

    async def stop(self, *, fast_s: float = 10.0) -> None:
        """Shut down: up to `fast_s` seconds to write everything, then at once (the next start recovers)."""
        if self._child is None or self._cluster is None:
            return
        stages = [Stage(FAST, fast_s)] if fast_s > 0 else []
        await self._child.stop([*stages, Stage(IMMEDIATE, 3.0)])
        # A postmaster that was killed leaves its children, which notice that within moments.
        await stop_leftovers(self._cluster.base, PROGRAM_NAMES, LEFTOVER_STAGES)

    async def _spawn(self, cluster: Cluster) -> ChildProcess:
        with explained(self._home.root):
            # Nobody runs here any more, so these are stale. They must go because PostgreSQL would believe a process
            # id that is now a zombie's or a stranger's.
            for stale in (cluster.data / "postmaster.pid", *cluster.run_dir.glob(f".s.PGSQL.{PORT}*")):
                stale.unlink(missing_ok=True)
            self._child = await ChildProcess.start(self._program(cluster), LogFile(self.log_path))
            return self._child

    def _program(self, cluster: Cluster) -> Program:
        settings = {**self._settings, "unix_socket_directories": str(cluster.run_dir)}
        arguments = ["-D", str(cluster.data)]
        for name, value in settings.items():
            arguments += ["-c", f"{name}={value}"]
        return Program(cluster.programs / "postgres", arguments, cluster.data, cluster.identity, death_signal=FAST)

    async def _until_ready(self, child: ChildProcess, cluster: Cluster) -> None:
        deadline = time.monotonic() + START_WAIT_S
        while not _says_ready(cluster, child.pid):
            if child.exit_code is not None:
                raise failure("postgres-start-failed", child.output(), self._home.root)
            if time.monotonic() > deadline:
                raise UnavailableError(
                    "postgres-start-failed",
                    f"PostgreSQL was not ready after {START_WAIT_S:.0f} s",
                    hint=f"its log is {self.log_path}",
                )
            await asyncio.sleep(POLL_EVERY_S)
        try:
            connection = await psycopg.AsyncConnection.connect(
                host=str(cluster.run_dir),
                port=PORT,
                user=ROLE,
                password=cluster.password(),
                dbname=DATABASE,
                connect_timeout=CONNECT_WAIT_S,
            )
        except psycopg.OperationalError:
            raise UnavailableError(
                "postgres-start-failed",
                "PostgreSQL runs but refuses the connection",
                hint=f"its log is {self.log_path}",
            ) from None
        await connection.close()

    def _running_cluster(self) -> Cluster:
        if self._cluster is None:
            raise BugError("not-started", "this PostgreSQL server was never started")
        return self._cluster

    def _started_child(self) -> ChildProcess:
        if self._child is None:
            raise BugError("not-started", "this PostgreSQL server was never started")
        return self._child


def _says_ready(cluster: Cluster, pid: int) -> bool:
    """Whether the postmaster with this process id says in its own file that it takes connections."""
    with suppress(OSError, ValueError):
        lines = (cluster.data / "postmaster.pid").read_text(encoding="utf-8", errors="replace").splitlines()
        return len(lines) > STATUS_LINE and int(lines[0]) == pid and lines[STATUS_LINE].strip() == "ready"
    return False
