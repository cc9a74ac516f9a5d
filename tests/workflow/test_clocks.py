"""Clocks that disagree (G5-09) and zones that differ (G4-10): order, deadlines, pauses and durations stay right."""

from __future__ import annotations

import asyncio
import email.utils
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from temporalio.client import Client

from engine.service import Submission, submit
from engine.settings import TemporalSettings
from engine.store.database import Database
from engine.store.snapshots import RunSnapshot
from engine.temporal_client import connect_temporal
from tests.support.clocks import WHY_NOT, clock, movable_clock, move_clock
from tests.support.command import podium
from tests.support.provider import Provider
from tests.support.runs import ended, lists_plan
from tests.support.servers import TestServers, database_name, superuser_url
from tests.support.stored import check_invariants, execute, record, rows
from tests.support.workers import Workers
from tests.support.workflows import pool_of, provider_reaches
from worker_pools.pool import Pool

pytestmark = pytest.mark.slow

needs_faketime = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))
TWO = lists_plan(["Go.", "Go on."], [[], [0]], [0, 1])
ONE = lists_plan(["Go."], [[]], [0])
TEN_MINUTES = 600


@pytest.fixture
def workers(servers: TestServers, database_url: str, tmp_path: Path) -> Iterator[Workers]:
    with Workers(database_url, servers.temporal_address, tmp_path) as started:
        yield started


@pytest.fixture
async def client(servers: TestServers) -> Client:
    return await connect_temporal(TemporalSettings(servers.temporal_address))


async def start(database: Database, client: Client, pool: Pool, plan: str) -> UUID:
    submission = Submission(task="What?", pool=pool, actor_id="tester", plan_text=plan)
    return (await submit(database, client, submission)).id


async def check_times(url: str, run: RunSnapshot, began: datetime) -> None:
    """Every time on record is between the test's begin and now, in the order of events; no duration is negative."""
    kept = await record(url, run.id)
    check_invariants(kept)
    now = datetime.now(UTC)
    at = [row["at"] for row in await rows(url, "SELECT at FROM ledger_entries WHERE run_id = %s ORDER BY seq", run.id)]
    assert at == sorted(at)
    assert began <= at[0]
    assert at[-1] <= now
    for attempt in kept.attempts:
        assert began <= attempt["sent_at"] <= attempt["ended_at"] <= now
        assert attempt["duration_ms"] is None or 0 <= attempt["duration_ms"] < 60_000
        assert attempt["first_token_ms"] is None or 0 <= attempt["first_token_ms"] <= attempt["duration_ms"]
    assert [attempt["number"] for attempt in kept.attempts if attempt["position"] == 0] == list(
        range(1, 1 + sum(attempt["position"] == 0 for attempt in kept.attempts))
    )


@needs_faketime
@pytest.mark.slow
@pytest.mark.parametrize("shift_s", [TEN_MINUTES, -TEN_MINUTES], ids=["ahead", "behind"])
async def test_a_worker_whose_clock_is_off_waits_and_ends_by_the_clocks_of_others(  # noqa: PLR0917  # pytest passes names
    workers: Workers, database: Database, client: Client, provider: Provider, tmp_path: Path, shift_s: int
) -> None:
    child = workers.start(env=clock(shift_s))
    await asyncio.to_thread(child.says, "ready")
    began = datetime.now(UTC)
    come_back = email.utils.format_datetime(datetime.fromtimestamp(time.time() + 5, UTC), usegmt=True)
    provider.script({"status": 429, "headers": {"Retry-After": come_back}}, model="busy")
    asked_at = time.time()
    run = await ended(
        database, await start(database, client, pool_of(tmp_path, provider.base_url, "busy", "plain"), TWO)
    )
    assert run.state == "succeeded"
    first, second = (request["started_at"] for request in provider.requests[:2])
    # The date is to the second. Neither at once (ten minutes ahead: long past) nor after ten minutes (behind).
    assert second - asked_at >= 3.5
    assert second - first < 15
    await check_times(database.url, run, began)
    # A deadline is a timer of Temporal's, and the database's clock at Open; not this worker's.
    pool = pool_of(tmp_path, provider.base_url, "sleep-60000ms", policy={"deadline_s": 4})
    run_id = await start(database, client, pool, ONE)
    run = await ended(database, run_id)
    assert (run.state, run.reason) == ("failed", "deadline-exceeded")
    (took,) = await rows(
        database.url, "SELECT extract(epoch FROM ended_at - created_at) AS s FROM runs WHERE id = %s", run_id
    )
    assert 3.5 <= took["s"] < 12


@needs_faketime
@pytest.mark.slow
async def test_a_clock_that_steps_back_an_hour_in_the_middle_of_a_run_changes_nothing(
    workers: Workers, database: Database, client: Client, provider: Provider, tmp_path: Path
) -> None:
    hands = tmp_path / "clock"
    child = workers.start(env=movable_clock(hands))
    await asyncio.to_thread(child.says, "ready")
    began = datetime.now(UTC)
    pool = pool_of(tmp_path, provider.base_url, "sleep-3000ms", "plain")
    run_id = await start(database, client, pool, TWO)
    await provider_reaches(provider, 1)
    move_clock(hands, -3600)
    run = await ended(database, run_id)
    assert (run.state, provider.count) == ("succeeded", 2)
    (duration,) = await rows(
        database.url, "SELECT duration_ms FROM attempts WHERE run_id = %s AND position = 0", run_id
    )
    assert 2900 <= duration["duration_ms"] < 10_000
    await check_times(database.url, run, began)


@needs_faketime
@pytest.mark.slow
async def test_a_worker_with_a_clock_ahead_takes_no_call_from_one_that_lives(
    workers: Workers, database: Database, client: Client, provider: Provider, tmp_path: Path
) -> None:
    first = workers.start(grace_s=10)
    await asyncio.to_thread(first.says, "ready")
    run_id = await start(database, client, pool_of(tmp_path, provider.base_url, "sleep-8000ms"), ONE)
    await provider_reaches(provider, 1)
    second = workers.start(env=clock(TEN_MINUTES))
    await asyncio.to_thread(second.says, "ready")
    run = await ended(database, run_id)
    assert (run.state, provider.count) == ("succeeded", 1)
    assert [attempt.state for attempt in run.steps[0].attempts] == ["succeeded"]


@needs_faketime
@pytest.mark.parametrize("shift_s", [TEN_MINUTES, -TEN_MINUTES], ids=["ahead", "behind"])
def test_doctor_reports_a_clock_that_is_off(
    servers: TestServers, database_url: str, tmp_path: Path, shift_s: int
) -> None:
    env = {"PODIUM_DATABASE_URL": database_url, "PODIUM_TEMPORAL_ADDRESS": servers.temporal_address}
    env["PODIUM_KEY_STORE"] = "none"
    done = podium("doctor", "--json", home=tmp_path / "home", env={**env, **clock(shift_s)})
    (found,) = [check for check in done.valid_json("doctor")["checks"] if check["name"] == "clock"]
    assert found["status"] == "warn"
    assert abs(float(found["text"].split()[0]) - TEN_MINUTES) < 5
    assert "time server" in found["hint"]


@pytest.mark.slow
async def test_worker_database_and_command_in_three_zones_agree_on_every_instant(
    workers: Workers, database: Database, client: Client, provider: Provider, tmp_path: Path
) -> None:
    name = database_name(database.url)
    await execute(superuser_url(database.url), f"ALTER DATABASE \"{name}\" SET timezone = 'America/New_York'")
    began = datetime.now(UTC)
    child = workers.start(env={"TZ": "Asia/Seoul", "PGTZ": "Asia/Seoul"})
    await asyncio.to_thread(child.says, "ready")
    pool = pool_of(tmp_path, provider.base_url, "plain", "plain", policy={"deadline_s": 60})
    run = await ended(database, await start(database, client, pool, TWO))
    assert run.state == "succeeded"
    await check_times(database.url, run, began)
    env = {"PODIUM_DATABASE_URL": database.url, "PODIUM_TEMPORAL_ADDRESS": workers.address, "TZ": "Europe/Berlin"}
    env["PODIUM_KEY_STORE"] = "none"
    shown = await asyncio.to_thread(podium, "show", str(run.id), home=tmp_path / "home", env=env)
    there = run.created_at.astimezone(ZoneInfo("Europe/Berlin"))
    assert f"made    {there:%Y-%m-%d %H:%M:%S %Z} by tester" in shown.out
    listed = await asyncio.to_thread(podium, "list", home=tmp_path / "home", env=env)
    assert f"{there:%m-%d %H:%M %Z}" in listed.out
    told = await asyncio.to_thread(podium, "show", str(run.id), "--json", home=tmp_path / "home", env=env)
    assert run.started_at is not None
    assert told.valid_json("run")["started_at"] == f"{run.started_at:%Y-%m-%dT%H:%M:%S.%f}Z"
