"""The processes that are killed: PostgreSQL, Temporal and several `podium worker`, each revived by a supervisor.

The supervisor does what an operator's process manager does: it starts again what has ended, after a short pause. It
never stops anything gently before the end. Use it on an event loop that lives as long as the processes shall.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

import psutil

from engine.errors import PodiumError
from engine.keeper.home import HomeLock, lock_home, open_home
from engine.keeper.logs import LogFile
from engine.keeper.postgres import PostgresServer
from engine.keeper.process import ChildProcess, Program
from engine.keeper.temporal import TemporalServer
from engine.store.schema import upgrade_schema
from tests.support.processes import CHECKOUT, kill_hard

Victim = Literal["worker", "temporal", "postgres"]
VICTIMS: Final[tuple[Victim, ...]] = ("worker", "temporal", "postgres")
# How long a dead process stays away: at once, as with a supervisor that does not wait, up to a slow restart.
PAUSE_MAX_S: Final = 1.5
# One in so many blows at PostgreSQL hits a session only: the server then ends all of them and recovers by itself.
SESSION_ONE_IN: Final = 3


@dataclass(slots=True)
class WorkerSlot:
    """The place of one worker process; its processes follow each other in it."""

    number: int
    log: Path
    process: ChildProcess | None = None
    starts: int = 0
    # Ends that nobody caused by a kill: the process gave up by itself.
    own_ends: list[int] = field(default_factory=list)


class Fleet:
    """All processes of one test. ``kill`` strikes, and whatever has ended is started again until ``close``."""

    def __init__(self, folder: Path, *, workers: int, chance: random.Random) -> None:
        self._folder = folder
        self.key_store = (folder / "keys").as_uri()
        self._chance = chance
        self.home = open_home(folder / "home")
        self._lock: HomeLock | None = lock_home(self.home)
        # The settings that users get, fsync included: what is lost by a kill must be what users lose.
        self.postgres = PostgresServer(self.home)
        self.temporal = TemporalServer(self.home)
        self.slots = [WorkerSlot(number, folder / f"worker-{number}.log") for number in range(workers)]
        self.kills = 0
        self.revival_failures: list[str] = []
        self._supervisors: list[asyncio.Task[None]] = []
        self._struck: set[int] = set()
        self._closing = False

    async def __aenter__(self) -> Self:
        try:
            await asyncio.gather(self.postgres.start(), self.temporal.start())
            await asyncio.to_thread(upgrade_schema, self.postgres.migration_url)
        except BaseException:
            await self.close()
            raise
        self._supervisors = [
            asyncio.create_task(self._keep_server(self.postgres)),
            asyncio.create_task(self._keep_server(self.temporal)),
            *(asyncio.create_task(self._keep_worker(slot)) for slot in self.slots),
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def ready(self, *, timeout_s: float = 30.0) -> None:
        """Returns when every worker has said that it is ready."""
        give_up_at = time.monotonic() + timeout_s
        while not all(slot.process is not None and "is ready" in slot.process.output() for slot in self.slots):
            assert time.monotonic() < give_up_at, [slot.process and slot.process.output() for slot in self.slots]
            await asyncio.sleep(0.05)

    def kill(self, victims: Iterable[Victim]) -> list[str]:
        """SIGKILL to one process of each kind at the same moment; returns whom it hit."""
        targets: list[tuple[str, int]] = []
        for victim in victims:
            found = {"worker": self._a_worker, "temporal": self._temporal, "postgres": self._a_postgres}[victim]()
            if found is not None:
                targets.append(found)
        pids = [pid for _, pid in targets]
        self._struck.update(pids)
        kill_hard(*pids)
        self.kills += len(pids)
        return [f"{name} {pid}" for name, pid in targets]

    async def close(self) -> None:
        """Ends everything. Idempotent."""
        self._closing = True
        for task in self._supervisors:
            task.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        for slot in self.slots:
            if slot.process is not None:
                await slot.process.stop([])
        await asyncio.gather(self.postgres.stop(fast_s=0.0), self.temporal.stop(graceful_s=0.0))
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        # Outside the home when that lies deep.
        shutil.rmtree(self.home.run_dir, ignore_errors=True)

    def worker_log(self) -> str:
        """What all workers wrote."""
        return "\n".join(slot.log.read_text() for slot in self.slots if slot.log.exists())

    def _a_worker(self) -> tuple[str, int] | None:
        alive = [slot for slot in self.slots if slot.process is not None and slot.process.exit_code is None]
        if not alive:
            return None
        slot = self._chance.choice(alive)
        assert slot.process is not None
        return f"worker {slot.number}", slot.process.pid

    def _temporal(self) -> tuple[str, int] | None:
        return None if self.temporal.pid is None else ("temporal", self.temporal.pid)

    def _a_postgres(self) -> tuple[str, int] | None:
        pid = self.postgres.pid
        if pid is None:
            return None
        if self._chance.randrange(SESSION_ONE_IN) == 0:
            with contextlib.suppress(psutil.Error):
                sessions = [child for child in psutil.Process(pid).children() if "podium" in " ".join(child.cmdline())]
                if sessions:
                    return "a session of postgres", self._chance.choice(sessions).pid
        return "postgres", pid

    async def _keep_server(self, server: PostgresServer | TemporalServer) -> None:
        while True:
            await server.wait()
            await asyncio.sleep(self._chance.uniform(0, PAUSE_MAX_S))
            while server.pid is None:
                try:
                    await server.start()
                except PodiumError as error:
                    # Said at the end; a server that does not come back shows in the runs besides.
                    self.revival_failures.append(f"{type(server).__name__}: {error}")
                    await asyncio.sleep(0.5)

    async def _keep_worker(self, slot: WorkerSlot) -> None:
        while True:
            slot.process = await ChildProcess.start(self._worker_program(), LogFile(slot.log))
            slot.starts += 1
            code = await slot.process.wait()
            if slot.process.pid not in self._struck:
                slot.own_ends.append(code)
            await asyncio.sleep(self._chance.uniform(0, PAUSE_MAX_S))

    def _worker_program(self) -> Program:
        environment = {
            "PYTHONPATH": str(CHECKOUT),
            "PODIUM_DATABASE_URL": self.postgres.url,
            "PODIUM_TEMPORAL_ADDRESS": self.temporal.address,
            "PODIUM_KEY_STORE": self.key_store,
        }
        arguments = ["-m", "engine.cli.main", "worker", "--all-queues"]
        return Program(
            Path(sys.executable), arguments, self._folder, death_signal=signal.SIGKILL, environment=environment
        )
