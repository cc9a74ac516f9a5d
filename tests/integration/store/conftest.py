"""One database for the tests of a module: runs do not touch each other, and cloning costs more than most tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from engine.store.database import Database
from tests.support.sealed import sealed_database
from tests.support.servers import TestServers


@pytest.fixture(scope="module")
def database_url(servers: TestServers, template_database: str) -> Iterator[str]:
    url = servers.new_database(template_database)
    yield url
    servers.drop_database(url)


@pytest.fixture
def own_database_url(servers: TestServers, template_database: str) -> Iterator[str]:
    """A database that no other test uses, for tests that read or change all of it."""
    url = servers.new_database(template_database)
    yield url
    servers.drop_database(url)


@pytest.fixture
async def sealed(own_database_url: str, tmp_path: Path) -> AsyncIterator[Database]:
    """Such a database with a key store."""
    opened = sealed_database(own_database_url, tmp_path / "keys")
    yield opened
    await opened.close()
