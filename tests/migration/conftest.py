"""Fixtures for schema tests: empty databases, and folders with one migration more than the program has."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from alembic.script import ScriptDirectory

from engine.store.schema import scripts, upgrade_schema
from tests.support.servers import TestServers

NEXT_REVISION = "9001"
_SCRIPT = '''"""A migration that only tests have."""

import os
import time
from pathlib import Path

import sqlalchemy as sa
from alembic import op

revision = "{revision}"
down_revision = "{head}"


def upgrade() -> None:
    {body}
'''


@pytest.fixture(scope="session")
def template_database(servers: TestServers) -> str:
    """As on a server of one's own with one role, which owns what it makes and may change it by hand."""
    url = servers.new_database()
    upgrade_schema(url)
    return url


@pytest.fixture
def empty_database_url(servers: TestServers) -> Iterator[str]:
    url = servers.new_database()
    yield url
    servers.drop_database(url)


@pytest.fixture
def with_next_migration(tmp_path: Path) -> Callable[[str], ScriptDirectory]:
    """Makes a folder that holds the program's migrations and one more, whose upgrade is the given statements."""

    def make(body: str) -> ScriptDirectory:
        program = scripts()
        folder = tmp_path / "migrations"
        shutil.copytree(Path(program.dir), folder, ignore=shutil.ignore_patterns("__pycache__"))
        text = _SCRIPT.format(revision=NEXT_REVISION, head=program.get_current_head(), body=body)
        (folder / "versions" / f"{NEXT_REVISION}_next.py").write_text(text)
        return ScriptDirectory(str(folder))

    return make
