"""Runs the real command `podium` in a process of its own, with an environment that holds nothing of the tester's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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
