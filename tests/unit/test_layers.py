"""Imports point one way. The layers themselves are in pyproject.toml; import-linter checks them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
PACKAGES = ("engine", "activities", "worker_pools", "migrations")


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """The verdict of import-linter on a folder, as `make lint` gets it."""
    program = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    return subprocess.run(
        [sys.executable, "-c", program, "--no-cache"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_imports_point_one_way() -> None:
    verdict = lint(CHECKOUT)
    assert verdict.returncode == 0, verdict.stdout
    assert "0 broken" in verdict.stdout


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("engine/graph.py", "import engine.workflow", "Imports point one way BROKEN"),
        ("engine/workflow.py", "import sqlalchemy", "The workflow does no I/O BROKEN"),
    ],
)
def test_a_forbidden_import_is_found(tmp_path: Path, module: str, line: str, contract: str) -> None:
    for package in PACKAGES:
        shutil.copytree(CHECKOUT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(CHECKOUT / "pyproject.toml", tmp_path)
    with (tmp_path / module).open("a") as source:
        source.write(f"\n{line}\n")
    verdict = lint(tmp_path)
    assert verdict.returncode == 1
    assert contract in verdict.stdout
