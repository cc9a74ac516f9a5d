"""A PostgreSQL server of a home, as the keeper holds it: not started yet, and gone after the test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine.keeper.home import Home, HomeLock, lock_home, open_home
from engine.keeper.postgres import PostgresServer
from engine.keeper.process import find_leftovers


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return open_home(tmp_path / "home")


@pytest.fixture
def lock(home: Home) -> HomeLock:
    lock = lock_home(home)
    assert lock is not None
    return lock


@pytest.fixture
async def server(home: Home, lock: HomeLock) -> AsyncIterator[PostgresServer]:
    server = PostgresServer(home)
    yield server
    await server.stop(fast_s=0.0)
    lock.release()
    assert find_leftovers(home.root, frozenset({"postgres"})) == []
