"""One worker, one database for each module of workflow tests: starting them costs more than most runs."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.runs import KEY_STORES, worker_process
from tests.support.servers import TestServers
from worker_pools.process import WorkerProcess


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def process(
    servers: TestServers, template_database: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[WorkerProcess]:
    """A running worker with a database of its own; tests that use it run on the module's event loop.

    Texts are sealed, as everywhere but where somebody asks for the opposite.
    """
    url = servers.new_database(template_database)
    KEY_STORES[url] = tmp_path_factory.mktemp("keys").as_uri()
    async with worker_process(url, servers.temporal_address) as running:
        yield running
    servers.drop_database(url)
