"""The next release of Podium, made of this checkout: one more migration, and a workflow that does one thing more.

A real copy of the code in a folder, so that its workers and commands are real processes of another version.
"""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from engine.store.schema import scripts
from tests.support.command import Done
from tests.support.processes import CHECKOUT
from tests.support.workers import WorkerChild, Workers

PACKAGES: Final = ("engine", "activities", "worker_pools", "migrations")
NEXT_REVISION: Final = "9001"
PATCH: Final = "next-release"
_MIGRATION: Final = '''"""The next release's: expands, and takes nothing away.

Revision ID: {revision}
Revises: {head}
"""

import sqlalchemy as sa
from alembic import op

revision = "{revision}"
down_revision = "{head}"


def upgrade():
    op.add_column("runs", sa.Column("next_note", sa.Text(), nullable=True))
    op.add_column("steps", sa.Column("next_count", sa.Integer(), server_default="0", nullable=False))
    op.add_column("attempts", sa.Column("next_note", sa.Text(), nullable=True))


def downgrade():
    op.drop_column("attempts", "next_note")
    op.drop_column("steps", "next_count")
    op.drop_column("runs", "next_note")
'''
# A timer before each step: a new command, which a history without it does not expect.
_WORKFLOW: Final = """

_perform_of_the_release_before = RunWorkflow._perform


async def _perform_of_the_next_release(self, *arguments, **options):
    if {condition}:
        await asyncio.sleep(0.01)
    return await _perform_of_the_release_before(self, *arguments, **options)


RunWorkflow._perform = _perform_of_the_next_release
"""


class Release:
    """A version of the program in a folder, spoken to by its commands."""

    def __init__(self, checkout: Path, folder: Path, settings: Mapping[str, str]) -> None:
        self.checkout = checkout
        self.folder = folder
        self.settings = dict(settings)

    def _environment(self, **more: str) -> dict[str, str]:
        # The environment's own packages come after, so that this version's modules are the ones that are found.
        paths = [str(self.checkout), *site.getsitepackages()]
        return {
            "PATH": os.environ.get("PATH", ""),
            "PYTHONPATH": os.pathsep.join(paths),
            "LANG": "C.UTF-8",
            "PODIUM_HOME": str(self.folder / "home"),
            **self.settings,
            **more,
        }

    def podium(self, *arguments: str, **more: str) -> Done:
        """Runs a command to its end."""
        done = subprocess.run(
            [sys.executable, "-m", "engine.cli.main", *arguments],
            env=self._environment(**more),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=120,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr.decode())

    def worker(self, workers: Workers, *options: str, **more: str) -> WorkerChild:
        """Starts `podium worker` and waits until it is ready; without options it serves the queues of all live runs."""
        child = workers.run(
            [sys.executable, "-m", "engine.cli.main", "worker", *options], self._environment(**more), self.folder
        )
        child.says(" is ready; ")
        return child


def this_release(folder: Path, settings: Mapping[str, str]) -> Release:
    """The code of this checkout."""
    return Release(CHECKOUT, folder, settings)


def next_release(folder: Path, settings: Mapping[str, str], *, patched: bool = True, migrates: bool = True) -> Release:
    """The release after it. Without ``patched`` its workflow has changed in the way that the policy forbids."""
    checkout = folder / f"next-{patched}-{migrates}"
    for package in PACKAGES:
        shutil.copytree(CHECKOUT / package, checkout / package, ignore=shutil.ignore_patterns("__pycache__"))
    if migrates:
        text = _MIGRATION.format(revision=NEXT_REVISION, head=scripts().get_current_head())
        (checkout / "migrations" / "versions" / f"{NEXT_REVISION}_next.py").write_text(text)
    condition = f'workflow.patched("{PATCH}")' if patched else "True"
    with (checkout / "engine" / "workflow.py").open("a") as source:
        source.write(_WORKFLOW.format(condition=condition))
    return Release(checkout, folder, settings)
