"""A home with a real keeper for tests of the command line, and a pool of the stand-in provider's models."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.command import PODIUM, Done, environment, podium

POOL = """\
name: stand-in
conductor: {{base_url: "{url}", model: planner, structured_output: json-schema, price: {price}}}
workers:
  - {{name: quick, description: answers, base_url: "{url}", model: quick, price: {price}, attempts_max: 2}}
  - {{name: slow, description: waits, base_url: "{url}", model: sleep-400ms, price: {price}}}
  - {{name: echo, description: repeats, base_url: "{url}", model: echo}}
  - {{name: keyed, description: has a key, base_url: "{url}", model: quick, api_key: {{env: STAND_IN_KEY}}}}
policy: {{steps_max: 8}}
"""
PRICE = "{input_usd_per_mtok: 1, output_usd_per_mtok: 10}"


class PodiumHome:
    """A folder with a home in it. Leaving the context stops the keeper and deletes everything."""

    def __init__(self, provider_url: str) -> None:
        # A short path: the servers' sockets have room for some eighty bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="podium-cli-"))
        self.home = self.folder / "home"
        self.env = {"PODIUM_KEEPER_IDLE_S": "120"}
        (self.folder / "pool.yaml").write_text(POOL.format(url=provider_url, price=PRICE))

    def podium(self, *arguments: str | bytes, stdin: bytes = b"", env: Mapping[str, str] | None = None) -> Done:
        return podium(*arguments, home=self.home, stdin=stdin, env={**self.env, **(env or {})}, cwd=self.folder)

    def run(self, task: str, *options: str, plan: str | None = None, env: Mapping[str, str] | None = None) -> Done:
        """`podium run` with the pool of the stand-in and, if given, the text of a plan."""
        if plan is not None:
            (self.folder / "plan.txt").write_text(plan)
            options = ("--plan", "plan.txt", *options)
        return self.podium("run", task, "--pool", "./pool.yaml", *options, env=env)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """A command that goes on while the test looks; its own process group, like a shell's job."""
        return subprocess.Popen(
            [*PODIUM, *arguments],
            env=environment(self.home, self.env),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )

    def close(self) -> None:
        self.podium("down")
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def interrupt(process: subprocess.Popen[str], number: signal.Signals = signal.SIGINT) -> None:
    """What Ctrl-C in a terminal does: the whole group gets the signal."""
    os.killpg(process.pid, number)
