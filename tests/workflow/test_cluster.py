"""A database that meets another Temporal cluster, and two databases that share one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from activities.executions import reconcile
from engine.errors import UnavailableError
from engine.service import Submission, prepare
from engine.store.runs import create_run
from tests.support.provider import Provider
from tests.support.runs import ended, lists_plan, submit_plan, worker_process
from tests.support.servers import TestServers
from tests.support.workflows import handle_of, pool_of, provider_reaches

ONE = lists_plan(["Go."], [[]], [0])


@pytest.fixture
def other_cluster() -> Iterator[TestServers]:
    with TestServers() as running:
        yield running


async def test_another_temporal_is_refused_and_when_adopted_every_live_run_gets_an_end(
    servers: TestServers, database_url: str, other_cluster: TestServers, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"delay_first_s": 60}, model="slow")
    async with worker_process(database_url, servers.temporal_address) as process:
        seen = await submit_plan(process, pool_of(tmp_path, provider.base_url, "slow"), ONE)
        await provider_reaches(provider, 1)
        unseen = Submission(task="Go.", pool=pool_of(tmp_path, provider.base_url, "plain"), actor_id="t", plan_text=ONE)
        never_seen = (await create_run(process.database, prepare(unseen))).id
        old = handle_of(process.client, seen)
    with pytest.raises(UnavailableError) as refused:
        async with worker_process(database_url, other_cluster.temporal_address):
            pass
    assert refused.value.code == "temporal-other-cluster"
    async with worker_process(database_url, other_cluster.temporal_address, adopt_cluster=True) as process:
        lost = await ended(process.database, seen)
        assert (lost.state, lost.reason) == ("failed", "workflow-lost")
        assert (await ended(process.database, never_seen)).state == "succeeded"
        assert await reconcile(process.database, process.client) == 0
    # The old one would go on with what it had; the database lets it neither pay nor win.
    await old.terminate("end of the test")
    assert provider.count == 2


async def test_two_databases_on_one_temporal_lose_no_run(
    servers: TestServers, template_database: str, database_url: str, provider: Provider, tmp_path: Path
) -> None:
    """A mistake in the set-up: each worker also gets what belongs to the other, and must leave it alone."""
    other_url = servers.new_database(template_database)
    async with (
        worker_process(database_url, servers.temporal_address) as mine,
        worker_process(other_url, servers.temporal_address) as other,
    ):
        pool = pool_of(tmp_path, provider.base_url, "plain", "plain")
        runs = [(process, await submit_plan(process, pool, ONE)) for process in (mine, other) for _ in range(3)]
        for process, run_id in runs:
            assert (await ended(process.database, run_id)).state == "succeeded"
    servers.drop_database(other_url)
    assert provider.count == 6
