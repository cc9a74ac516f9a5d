"""Fixtures of the whole suite: real PostgreSQL, real Temporal, a stand-in provider over real HTTP.

Each test has its own database, cloned from a migrated template. Nothing of the developer's environment gets in.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator

import pytest

from engine.store.database import Database
from engine.store.schema import upgrade_schema
from tests.support.provider import Provider
from tests.support.servers import TestServers, migrator_url

_KEY_ENDINGS = ("_API_KEY", "_TOKEN", "_SECRET")


def pytest_configure() -> None:
    """Strips what could make a test pass here and fail elsewhere, or reach a real provider."""
    for name in list(os.environ):
        if name.startswith("PODIUM_CRASH_"):
            # How the crash suite is steered, not a setting of the program.
            continue
        if name.startswith("PODIUM_") or name.endswith(_KEY_ENDINGS) or name.lower().endswith("_proxy"):
            del os.environ[name]


@pytest.fixture(scope="session")
def servers() -> Iterator[TestServers]:
    with TestServers() as running:
        yield running


@pytest.fixture(scope="session")
def template_database(servers: TestServers) -> str:
    """With the roles of the embedded default: what the application may not do there, no test can do by mistake."""
    url = servers.new_database(roles=True)
    upgrade_schema(migrator_url(url))
    return url


@pytest.fixture
def database_url(servers: TestServers, template_database: str) -> Iterator[str]:
    url = servers.new_database(template_database)
    yield url
    servers.drop_database(url)


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    opened = Database(database_url)
    yield opened
    await opened.close()


@pytest.fixture(scope="session")
def session_provider() -> Iterator[Provider]:
    with Provider() as running:
        yield running


@pytest.fixture
def provider(session_provider: Provider) -> Provider:
    session_provider.reset()
    return session_provider
