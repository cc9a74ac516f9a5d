"""Runs the real command `podium` in a process of its own, with an environment that holds nothing of the tester's."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema

CHECKOUT = Path(__file__).parents[2]
SCHEMAS = CHECKOUT / "docs" / "schemas"
PODIUM = (sys.executable, "-m", "engine.cli.main")


@dataclass(frozen=True)
class Done:
    """How a command ended: exit code and what it wrote."""

    code: int
    out_bytes: bytes
    err: str

    @property
    def out(self) -> str:
        return self.out_bytes.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.out_bytes)

    def valid_json(self, schema: str) -> Any:
        """What it printed, after it was held to docs/schemas/<schema>.schema.json."""
        document = self.json
        validate(document, schema)
        return document

    @property
    def error_code(self) -> str:
        return str(self.valid_json("error")["error"]["code"])


def validate(document: Any, schema: str) -> None:
    described = json.loads((SCHEMAS / f"{schema}.schema.json").read_text())
    jsonschema.Draft202012Validator(described).validate(document)


def environment(home: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    return {
        "PATH": os.environ.get("PATH", ""),
        "PYTHONPATH": str(CHECKOUT),
        "LANG": "C.UTF-8",
        "PODIUM_HOME": str(home),
        **(extra or {}),
    }


def podium(
    *arguments: str | bytes,
    home: Path,
    env: Mapping[str, str] | None = None,
    stdin: bytes = b"",
    cwd: Path | None = None,
    timeout_s: float = 120.0,
) -> Done:
    """Runs `podium` to its end."""
    done = subprocess.run(
        [*PODIUM, *arguments],
        env=environment(home, env),
        input=stdin,
        capture_output=True,
        cwd=cwd or home.parent,
        timeout=timeout_s,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr.decode())


def terminal_output(
    *arguments: str, home: Path, cwd: Path, columns: int = 80, env: Mapping[str, str] | None = None
) -> str:
    """What `podium` writes to standard output when that is a terminal so wide."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    extra = {"TERM": "xterm", **(env or {})}
    with subprocess.Popen(
        [*PODIUM, *arguments], env=environment(home, extra), stdin=subprocess.DEVNULL, stdout=theirs,
        stderr=subprocess.DEVNULL, cwd=cwd,
    ) as process:  # fmt: skip
        os.close(theirs)
        written = b""
        # The last reader's end of a terminal gives an error instead of an empty read.
        with contextlib.suppress(OSError):
            while piece := os.read(ours, 65_536):
                written += piece
        os.close(ours)
        process.wait(timeout=60)
    return written.decode().replace("\r\n", "\n")
