"""Workers in processes of their own: of this checkout or another one, with another clock, killed or asked to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.processes import CHECKOUT, environment


class WorkerChild:
    """A running worker; what it says goes to ``log``."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: Path, log: Path) -> None:
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen([*command], stdout=output, stderr=output, env=dict(env), cwd=cwd)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Its exit code, None while it runs."""
        return self._process.poll()

    @property
    def said(self) -> str:
        """What it has said so far."""
        return self.log.read_text()

    def says(self, word: str, *, timeout_s: float = 40.0) -> None:
        """Waits until it has said this."""
        end = time.monotonic() + timeout_s
        while word not in self.said:
            assert self._process.poll() is None, self.said
            assert time.monotonic() < end, self.said
            time.sleep(0.02)

    def send(self, number: int) -> None:
        """Sends the signal, if there is anybody left to get it."""
        if self._process.poll() is None:
            os.kill(self._process.pid, number)

    def end(self, number: int = signal.SIGTERM, *, timeout_s: float = 40.0) -> int:
        """Sends the signal and waits for the end; gives the exit code."""
        self.send(number)
        return self._process.wait(timeout_s)


class Workers:
    """Starts workers for one database and Temporal; none outlives it."""

    def __init__(self, database_url: str, address: str, folder: Path) -> None:
        self.database_url = database_url
        self.address = address
        self.folder = folder
        self.children: list[WorkerChild] = []

    def start(
        self, *, grace_s: float = 0.2, env: Mapping[str, str] | None = None, queue: str = "stand-in"
    ) -> WorkerChild:
        """A worker by ``tests.support.worker_main``, which says ``ready`` when it polls."""
        command = [sys.executable, "-W", "always", "-m", "tests.support.worker_main"]
        arguments = [self.database_url, self.address, str(grace_s), queue]
        return self.run([*command, *arguments], environment() | dict(env or {}), CHECKOUT)

    def run(self, command: Sequence[str], env: Mapping[str, str], cwd: Path) -> WorkerChild:
        """A worker by any command."""
        log = self.folder / f"worker-{len(self.children)}.log"
        self.children.append(WorkerChild(command, env, cwd, log))
        return self.children[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self.children:
            child.end(signal.SIGKILL)
