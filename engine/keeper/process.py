"""Child processes of the keeper: start, watch, stop, and find those that a dead keeper left. Must know no server.

Three nets keep servers from outliving their keeper. The kernel sends each child a signal when the *thread* that
started it ends (so start children from a thread that lives as long as they shall). Children run in a private folder, so
the next keeper finds leftovers by program name and current folder, which no stranger can share and no reused process
id can imitate. And whoever looks for leftovers holds the home's lock, so there is no live keeper to take them from.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from engine.errors import UnavailableError
from engine.keeper import launch
from engine.keeper.logs import LogFile

POLL_EVERY_S: Final = 0.02
KILL_WAIT_S: Final = 5.0
LOG_CHECK_EVERY_S: Final = 5.0

# What a server may know of our environment: never keys, PG* or TEMPORAL_* variables.
PASSED_ON: Final = ("PATH", "TMPDIR", "LD_LIBRARY_PATH", "ASAN_OPTIONS")


@dataclass(frozen=True)
class Identity:
    """Who a child is: ourselves, `nobody` in a user namespace of its own, or another account of this machine."""

    name: str

    @classmethod
    def account(cls, uid: int, gid: int) -> Identity:
        """Another account; only root can start a child as one."""
        return cls(f"{uid}:{gid}")


SELF: Final = Identity("self")
NAMESPACE: Final = Identity("namespace")


@dataclass(frozen=True)
class Stage:
    """One step of stopping: send `signal_number` (none: just wait) and give the process `wait_s` seconds."""

    signal_number: signal.Signals | None
    wait_s: float


@dataclass(frozen=True)
class Program:
    """A program with its arguments, the private folder it runs in, and who it runs as."""

    path: Path
    arguments: Sequence[str]
    folder: Path
    identity: Identity = SELF
    death_signal: signal.Signals = signal.SIGKILL
    environment: Mapping[str, str] | None = None

    def command(self) -> list[str]:
        """The command line that starts it through `engine.keeper.launch`."""
        start = [sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), str(int(self.death_signal))]
        return [*start, self.identity.name, str(self.folder), str(self.path), *self.arguments]

    def full_environment(self) -> dict[str, str]:
        """Its environment: the few variables of ours that it needs, and its own."""
        kept = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        return {"LANG": "C.UTF-8", "TZ": "UTC", "HOME": str(self.folder), **kept, **(self.environment or {})}


class ChildProcess:
    """A running server whose output goes to a log file that stays bounded."""

    def __init__(self, process: asyncio.subprocess.Process, log: LogFile, log_start: int) -> None:
        self._process = process
        self._log = log
        self._log_start = log_start
        self._log_keeper = asyncio.create_task(self._keep_log_bounded())

    @classmethod
    async def start(cls, program: Program, log: LogFile) -> ChildProcess:
        """Start the program in a session of its own (a Ctrl-C at the terminal is not for servers)."""
        output = log.open()
        try:
            log_start = log.size()
            process = await asyncio.create_subprocess_exec(
                *program.command(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=program.full_environment(),
                start_new_session=True,
            )
        finally:
            os.close(output)
        return cls(process, log, log_start)

    @property
    def pid(self) -> int:
        """Its process id, also after its end."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.returncode

    def output(self, *, bytes_max: int = 4096) -> str:
        """The end of what it has written since its start."""
        return self._log.tail(since=self._log_start, bytes_max=bytes_max)

    async def wait(self) -> int:
        """Wait for its end, however that comes; return the exit code. Any number of callers may wait."""
        return await self._process.wait()

    async def stop(self, stages: Sequence[Stage]) -> int:
        """Stop it in stages and at last with SIGKILL; return the exit code. Bounded by the stages and 5 s."""
        for stage in (*stages, Stage(signal.SIGKILL, KILL_WAIT_S)):
            if self.exit_code is not None:
                break
            if stage.signal_number is not None:
                with suppress(ProcessLookupError):
                    self._process.send_signal(stage.signal_number)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), stage.wait_s)
        if self.exit_code is None:
            raise UnavailableError(
                "process-stuck",
                f"process {self.pid} does not end, not even killed",
                hint="the kernel keeps it, often for a disk that does not answer: look at the disk, then try again",
            )
        return await self.wait()

    async def _keep_log_bounded(self) -> None:
        while self.exit_code is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), LOG_CHECK_EVERY_S)
            # A full disk is no reason to stop trying: trimming is what frees some of it.
            with suppress(OSError):
                await asyncio.to_thread(self._log.trim)


async def run_to_end(program: Program, *, text: str = "", timeout_s: float) -> tuple[int, str]:
    """Run a short program to its end with `text` on its standard input; return exit code and all its output.

    Raises `UnavailableError` when it takes longer than `timeout_s`; it is killed then, and also when the caller is
    cancelled.
    """
    process = await asyncio.create_subprocess_exec(
        *program.command(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=program.full_environment(),
        start_new_session=True,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(text.encode()), timeout_s)
    except TimeoutError:
        raise UnavailableError(
            "process-stuck",
            f"{program.path.name} took more than {timeout_s:.0f} s",
            hint="the machine or its disk is very busy: try again later",
        ) from None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    return await process.wait(), output.decode(errors="replace")


def find_leftovers(folder: Path, program_names: frozenset[str]) -> list[psutil.Process]:
    """Live processes of these programs whose current folder is `folder` or below it. Zombies are dead."""
    wanted = os.path.realpath(folder)
    found = []
    for pid in psutil.pids():
        # A process may end at any time.
        with suppress(psutil.NoSuchProcess, OSError):
            # A new object each time: `process_iter` keeps them, and they keep the program from before an exec.
            process = psutil.Process(pid)
            if _belongs(process, wanted, program_names):
                found.append(process)
    return found


def _belongs(process: psutil.Process, folder: str, program_names: frozenset[str]) -> bool:
    try:
        if Path(process.exe().removesuffix(" (deleted)")).name not in program_names:
            return False
        places = [process.cwd().removesuffix(" (deleted)")]
    except psutil.AccessDenied:
        # In a container root may not look into the processes of another account; then the command line must do.
        # Whoever forges one is another user whose process root ends, and nothing more.
        if process.status() == psutil.STATUS_ZOMBIE or process.name() not in program_names:
            return False
        places = process.cmdline()
    return any(place == folder or place.startswith(folder + os.sep) for place in places)


async def stop_leftovers(folder: Path, program_names: frozenset[str], stages: Sequence[Stage]) -> int:
    """Stop what a dead keeper left in `folder`; return how many processes there were.

    Call it only while you hold the home's lock. Raises `UnavailableError` when one of them cannot be stopped.
    """
    first = left = await asyncio.to_thread(find_leftovers, folder, program_names)
    for stage in (*stages, Stage(signal.SIGKILL, KILL_WAIT_S)):
        if not left:
            break
        for process in left:
            if stage.signal_number is not None:
                with suppress(psutil.Error):
                    process.send_signal(stage.signal_number)
        deadline = time.monotonic() + stage.wait_s
        while left and time.monotonic() < deadline:
            await asyncio.sleep(POLL_EVERY_S)
            left = await asyncio.to_thread(find_leftovers, folder, program_names)
    if left:
        pids = ", ".join(str(process.pid) for process in left)
        raise UnavailableError(
            "leftover-process",
            f"servers of an earlier run do not end: process {pids}",
            hint="stop these processes, then try again",
        )
    return len(first)
