"""Run programs for tests: holders of a home (`tests.support.holder`), and programs as another user of this machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import site
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import psutil

CHECKOUT: Final = Path(__file__).parents[2]
# A user whom every Linux knows, and whose name initdb can look up.
OTHER_UID: Final = 65534
IS_ROOT: Final = os.geteuid() == 0


def environment() -> dict[str, str]:
    paths = [str(CHECKOUT), *site.getsitepackages()]
    return {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}


def as_other(command: Sequence[str]) -> list[str]:
    """The command line that runs `command` as another user; only root can."""
    # setpriv keeps root's powers up to its own exec; env's exec is the first without them.
    return ["setpriv", f"--reuid={OTHER_UID}", f"--regid={OTHER_UID}", "--clear-groups", "env", *command]


def python_for_other() -> str | None:
    """A Python of our version that another user can run with our packages; None where there is none."""
    if not IS_ROOT or shutil.which("setpriv") is None:
        return None
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        probe = [python, "-c", "import psycopg, psutil, temporalio, engine.keeper.postgres"]
        try:
            done = subprocess.run(as_other(probe), env=environment(), cwd="/", capture_output=True, check=False)
        except OSError:
            continue
        if done.returncode == 0:
            return python
    return None


@contextmanager
def public_folder() -> Iterator[Path]:
    """A temporary folder that other users can enter, which pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="pd-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


class Holder:
    """A running `tests.support.holder`."""

    def __init__(self, home: Path, *wanted: str, prefix: Sequence[str] = (), python: str = sys.executable) -> None:
        self._process = subprocess.Popen(
            [*prefix, python, "-W", "error", "-m", "tests.support.holder", str(home), *wanted],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
            cwd="/",
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def facts(self) -> dict[str, Any]:
        """What it printed when it was ready, or its error."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the holder ended with {self._process.wait()} and without a word"
        return dict(json.loads(line))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> int:
        """Let it stop its servers and end; return its exit code."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(timeout=30)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


def is_dead(pid: int) -> bool:
    """Whether the process has ended; a zombie has."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until(condition: Callable[[], bool], *, within_s: float) -> float:
    """Wait for the condition; return the seconds that it took. Fails after `within_s`."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < within_s, f"not within {within_s} s"
        time.sleep(0.01)
    return time.monotonic() - start


def kill_hard(*pids: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def permissions(*paths: Path) -> dict[Path, tuple[int, int, int]]:
    """Mode, owner and group of each path and of everything above it."""
    every = {above for path in paths for above in (path, *path.parents)}
    return {
        path: (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid)
        for path in every
        for status in (path.stat(),)
    }
