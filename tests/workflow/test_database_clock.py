"""A database whose clock is off (G5-09), and limits that reach over a change of the clocks (G4-10).

A PostgreSQL of its own under libfaketime; workers, Temporal and this test keep the true time.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import pytest
from temporalio.client import Client

from engine.keeper.cluster import Cluster
from engine.keeper.home import Home
from engine.keeper.postgres import PostgresServer
from engine.keeper.process import Program
from engine.service import Submission, submit
from engine.settings import TemporalSettings
from engine.store.database import Database
from engine.store.review_expiry import expire_reviews
from engine.store.schema import upgrade_schema
from engine.temporal_client import connect_temporal
from tests.support.clocks import WHY_NOT, movable_clock, move_clock
from tests.support.provider import Provider
from tests.support.reviews import asked, reviewed_pool, reviews_of
from tests.support.runs import ended, lists_plan
from tests.support.servers import EXTRA_SETUP, FAST_SETTINGS, TestServers, database_name, migrator_url, superuser_url
from tests.support.stored import check_invariants, execute, record, rows
from tests.support.workers import Workers
from tests.support.workflows import pool_of
from worker_pools.pool import Pool

pytestmark = [pytest.mark.slow, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]

TWO = lists_plan(["Go.", "Go on."], [[], [0]], [0, 1])
ONE = lists_plan(["Go."], [[]], [0])
ZONE = "America/New_York"
# The instants at which that zone's clocks go forward, and back.
CHANGES = {"forward": datetime(2027, 3, 14, 7, tzinfo=UTC), "back": datetime(2027, 11, 7, 6, tzinfo=UTC)}


class OddPostgres(PostgresServer):
    """A server whose clock is set by a file."""

    def __init__(self, home: Home, hands: Path) -> None:
        super().__init__(home, settings=FAST_SETTINGS, extra_setup=EXTRA_SETUP)
        self._clock = {**movable_clock(hands), "NO_FAKE_STAT": "1"}

    def _program(self, cluster: Cluster) -> Program:
        return replace(super()._program(cluster), environment=self._clock)


@pytest.fixture(scope="module")
def hands() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="podium-clock-"))
    # The server may run as another account.
    folder.chmod(0o755)
    yield folder / "hands"
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def odd_servers(hands: Path) -> Iterator[TestServers]:
    with TestServers() as made:
        made.postgres = OddPostgres(made.home, hands)
        yield made


@pytest.fixture(scope="module")
def odd_template(odd_servers: TestServers) -> str:
    url = odd_servers.new_database(roles=True)
    upgrade_schema(migrator_url(url))
    return url


@dataclass
class Odd:
    """A database with its own clock, a worker, and a way to Temporal."""

    database: Database
    client: Client
    hands: Path

    def set_clock(self, shift_s: float) -> None:
        """Sets the database's clock so far ahead of the true one, or (below zero) behind it."""
        move_clock(self.hands, round(shift_s))

    async def now(self) -> datetime:
        """What the database's clock says."""
        (row,) = await rows(self.database.url, "SELECT clock_timestamp() AS now")
        found: datetime = row["now"]
        return found

    async def start(self, pool: Pool, plan: str) -> UUID:
        submission = Submission(task="What?", pool=pool, actor_id="alice", plan_text=plan)
        return (await submit(self.database, self.client, submission)).id


@pytest.fixture
async def odd(
    servers: TestServers, odd_servers: TestServers, odd_template: str, hands: Path, tmp_path: Path
) -> AsyncIterator[Odd]:
    move_clock(hands, 0)
    url = odd_servers.new_database(odd_template)
    name = database_name(url)
    await execute(superuser_url(url), f"ALTER DATABASE \"{name}\" SET timezone = '{ZONE}'")
    database = Database(url)
    with Workers(url, servers.temporal_address, tmp_path) as workers:
        child = workers.start(env={"TZ": ZONE})
        await asyncio.to_thread(child.says, "ready")
        yield Odd(database, await connect_temporal(TemporalSettings(servers.temporal_address)), hands)
    await database.close()
    odd_servers.drop_database(url)


async def _expires_after(odd: Odd, run_id: UUID, seconds: float) -> None:
    """Waits for the review's end; it must come so long after the question, whatever any clock says."""
    (review,) = await asked(odd.database, run_id)
    begun = time.monotonic()
    assert review.expires_at is not None
    assert review.expires_at - review.requested_at == timedelta(seconds=seconds)
    while (await reviews_of(odd.database, run_id))[0].state == "open":
        assert time.monotonic() - begun < seconds + 5
        await expire_reviews(odd.database)
        await asyncio.sleep(0.05)
    # The question may be a moment old when it is first seen.
    assert seconds - 1.5 <= time.monotonic() - begun < seconds + 2
    (review,) = await reviews_of(odd.database, run_id)
    assert review.state == "expired"


@pytest.mark.parametrize("shift_s", [5, -5], ids=["ahead", "behind"])
async def test_a_database_whose_clock_is_seconds_off_changes_no_wait_no_order_and_no_duration(
    odd: Odd, provider: Provider, tmp_path: Path, shift_s: int
) -> None:
    odd.set_clock(shift_s)
    away_s = (await odd.now() - datetime.now(UTC)).total_seconds()
    assert abs(away_s - shift_s) < 1.5
    provider.script({"status": 429, "headers": {"Retry-After": "3"}}, model="busy")
    run = await ended(odd.database, await odd.start(pool_of(tmp_path, provider.base_url, "busy", "sleep-700ms"), TWO))
    assert run.state == "succeeded"
    first, second = (request["started_at"] for request in provider.requests[:2])
    assert 2.9 <= second - first < 8
    kept = await record(odd.database.url, run.id)
    check_invariants(kept)
    entries = await rows(odd.database.url, "SELECT at FROM ledger_entries WHERE run_id = %s ORDER BY seq", run.id)
    assert [row["at"] for row in entries] == sorted(row["at"] for row in entries)
    for attempt in kept.attempts:
        assert attempt["sent_at"] <= attempt["ended_at"]
        assert attempt["duration_ms"] is None or 0 <= attempt["duration_ms"] < 20_000
    # A deadline is told to Temporal as the seconds that are left.
    begun = time.monotonic()
    late = await ended(
        odd.database, await odd.start(pool_of(tmp_path, provider.base_url, "sleep-60000ms", policy={"deadline_s": 4}), ONE)
    )  # fmt: skip
    assert (late.state, late.reason) == ("failed", "deadline-exceeded")
    assert 3.5 <= time.monotonic() - begun < 8
    # A review's time is judged by the clock that it was set by.
    pool = reviewed_pool(tmp_path, provider, {"gate": "answer", "expires_s": 3})
    await _expires_after(odd, await odd.start(pool, ONE), 3)


@pytest.mark.parametrize("change", sorted(CHANGES))
async def test_limits_that_reach_over_a_change_of_the_clocks_are_seconds_and_not_wall_time(
    odd: Odd, provider: Provider, tmp_path: Path, change: str
) -> None:
    """The database's zone changes its clocks in the middle of a review's time and of a deadline."""
    pool = reviewed_pool(tmp_path, provider, {"gate": "answer", "expires_s": 6}, policy={"deadline_s": 7200})
    odd.set_clock((CHANGES[change] - datetime.now(UTC)).total_seconds() - 4)
    run_id = await odd.start(pool, ONE)
    # Python takes two times of one zone apart by what their clocks show, so the database does it here.
    query = "SELECT created_at, deadline_at, extract(epoch FROM deadline_at - created_at) AS s FROM runs WHERE id = %s"
    (row,) = await rows(odd.database.url, query, run_id)
    assert row["created_at"] < CHANGES[change] < row["deadline_at"]
    assert float(row["s"]) == pytest.approx(7200, abs=0.5)
    hours = reviewed_pool(tmp_path, provider, {"gate": "answer", "expires_s": 7200})
    long = await odd.start(hours, ONE)
    await _expires_after(odd, run_id, 6)
    assert await odd.now() > CHANGES[change]
    query = "SELECT requested_at, expires_at, extract(epoch FROM expires_at - requested_at) AS s FROM reviews WHERE run_id = %s"
    (row,) = await rows(odd.database.url, query, long)
    assert row["requested_at"] < CHANGES[change] < row["expires_at"]
    assert float(row["s"]) == 7200
    check_invariants(await record(odd.database.url, run_id))
    pool = pool_of(tmp_path, provider.base_url, "sleep-60000ms", policy={"deadline_s": 5})
    odd.set_clock((CHANGES[change] - datetime.now(UTC)).total_seconds() - 3)
    begun = time.monotonic()
    late = await ended(odd.database, await odd.start(pool, ONE))
    assert (late.state, late.reason) == ("failed", "deadline-exceeded")
    assert 4.5 <= time.monotonic() - begun < 9
