"""Worker processes: a lease row each, by which a successor proves its predecessor dead and takes over its attempts."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psutil
from psycopg.rows import dict_row

from engine.store.database import Database
from engine.store.exchange import Connection

_INSERT = "INSERT INTO worker_processes (id, host, boot_id, pid, pid_started) VALUES (%s, %s, %s, %s, %s)"
_OPEN = "SELECT id, host, boot_id, pid, pid_started FROM worker_processes WHERE ended_at IS NULL AND id <> %s"
_END = "UPDATE worker_processes SET ended_at = clock_timestamp() WHERE id = %s AND ended_at IS NULL"
# A successor takes the orphaned calls over, so that two that start at once do not both fail them: the second failure
# would hit the repeated call. Its own are named again, because the answer to the COMMIT may have been lost.
_ORPHANS = """
    UPDATE attempts SET process_id = %(own)s
    FROM runs
    WHERE runs.id = attempts.run_id AND runs.execution = attempts.execution AND attempts.state = 'sent'
      AND (attempts.process_id = %(own)s
           OR attempts.process_id IN (SELECT id FROM worker_processes WHERE ended_at IS NOT NULL))
    RETURNING attempts.run_id, attempts.round, attempts.position, attempts.execution, attempts.dispatch
"""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """What tells a process from all others: host, boot of that host, process id and its start time."""

    id: UUID
    host: str
    boot_id: str
    pid: int
    pid_started: str


@dataclass(frozen=True, slots=True)
class OrphanedAttempt:
    """A call that was in flight in a process that is proven dead."""

    run_id: UUID
    round: int
    position: int | None
    execution: int
    dispatch: int


def this_process() -> ProcessIdentity:
    """The identity of the calling process, with a fresh id."""
    pid = os.getpid()
    return ProcessIdentity(uuid4(), _host(), _boot_id(), pid, _started(pid) or "")


def is_dead(row: Mapping[str, Any], here: ProcessIdentity) -> bool:
    """Whether the process of a lease is proven dead: only a process of this host can be; no clock is judged."""
    if str(row["host"]) != here.host:
        return False
    if row["boot_id"] != here.boot_id:
        return True
    return _started(int(row["pid"])) != str(row["pid_started"])


@dataclass(frozen=True, slots=True)
class Inheritance:
    """What a process finds when it starts: the calls that were in flight in dead ones, and those that it proved dead.

    Each dead process is in the ``dead`` of one successor only.
    """

    orphans: tuple[OrphanedAttempt, ...]
    dead: tuple[UUID, ...]


async def register_process(database: Database, here: ProcessIdentity) -> Inheritance:
    """Takes a lease, ends those of dead predecessors, and returns what they left behind."""

    async def work(connection: Connection) -> Inheritance:
        await connection.execute(
            _INSERT + " ON CONFLICT (id) DO NOTHING", (here.id, here.host, here.boot_id, here.pid, here.pid_started)
        )
        cursor = connection.cursor(row_factory=dict_row)
        await cursor.execute(_OPEN, (here.id,))
        dead = [row["id"] for row in await cursor.fetchall() if is_dead(row, here)]
        for process_id in dead:
            await connection.execute(_END, (process_id,))
        await cursor.execute(_ORPHANS, {"own": here.id})
        return Inheritance(tuple(OrphanedAttempt(**row) for row in await cursor.fetchall()), tuple(dead))

    return await database.write(work)


async def end_process(database: Database, here: ProcessIdentity) -> None:
    """Gives the lease back."""

    async def work(connection: Connection) -> None:
        await connection.execute(_END, (here.id,))

    await database.write(work)


def _host() -> str:
    """The host's name with its process-id namespace: containers of one machine may share name, boot and ids."""
    namespace = Path("/proc/self/ns/pid")
    try:
        return f"{socket.gethostname()}/{namespace.stat().st_ino}"
    except OSError:
        return socket.gethostname()


def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else f"{psutil.boot_time():.0f}"


def _started(pid: int) -> str | None:
    """When a process started, or None if it is gone or a zombie.

    On Linux in clock ticks since boot: unlike the time of day, no clock correction changes it.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
        return _started_elsewhere(pid)
    # The command's name is in parentheses and may hold anything; the fields behind the last one are plain.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in {"Z", "X"} else fields[19]


def _started_elsewhere(pid: int) -> str | None:
    try:
        return f"{psutil.Process(pid).create_time():.2f}"
    except psutil.NoSuchProcess:
        return None
