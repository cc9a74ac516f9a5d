"""A whole worker with one connection to the database, and servers that end whoever is idle in a transaction (G4-02)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.provider import Provider
from tests.support.runs import ended, lists_plan, submit_plan, worker_process
from tests.support.servers import TestServers, database_name, superuser_url
from tests.support.stored import check_invariants, execute, record, rows
from tests.support.workflows import pool_of, provider_reaches

pytestmark = pytest.mark.slow

CALLS = 10
CALL_S = 4
PLAN = lists_plan(["Go."] * CALLS, [[]] * CALLS, [0] * CALLS)
SESSIONS = "SELECT state FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'podium'"


async def test_ten_calls_at_once_need_one_connection_and_hold_none(
    servers: TestServers, database_url: str, provider: Provider, tmp_path: Path
) -> None:
    await execute(
        superuser_url(database_url),
        f"ALTER DATABASE \"{database_name(database_url)}\" SET idle_in_transaction_session_timeout = '2s'",
    )
    pool = pool_of(tmp_path, provider.base_url, f"sleep-{CALL_S}000ms", policy={"steps_max": CALLS})
    async with worker_process(database_url, servers.temporal_address, database_connections=1) as process:
        run_id = await submit_plan(process, pool, PLAN)
        await provider_reaches(provider, CALLS)
        seen = []
        for _ in range(10):
            seen += [row["state"] for row in await rows(database_url, SESSIONS)]
            await asyncio.sleep(0.1)
        run = await ended(process.database, run_id, timeout_s=60)
    assert (run.state, provider.count) == ("succeeded", CALLS)
    assert provider.stats["in_flight_max"] == CALLS
    assert "idle in transaction" not in seen
    check_invariants(await record(database_url, run_id))


async def test_a_server_without_room_while_answers_come_in_costs_time_and_no_call(
    servers: TestServers, database_url: str, provider: Provider, tmp_path: Path
) -> None:
    name = database_name(database_url)
    admin = servers.postgres_admin_url
    pool = pool_of(tmp_path, provider.base_url, "sleep-1500ms", policy={"steps_max": CALLS})
    async with worker_process(database_url, servers.temporal_address) as process:
        run_id = await submit_plan(process, pool, PLAN)
        await provider_reaches(provider, CALLS)
        # Whoever is connected now is sent away, and nobody gets in for longer than the calls take.
        await execute(admin, f'ALTER DATABASE "{name}" CONNECTION LIMIT 0')
        await execute(
            admin,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'client backend' AND datname = %s",
            name,
        )
        await asyncio.sleep(6)
        await execute(admin, f'ALTER DATABASE "{name}" CONNECTION LIMIT -1')
        run = await ended(process.database, run_id, timeout_s=60)
    assert (run.state, provider.count) == ("succeeded", CALLS)
    assert {len(step.attempts) for step in run.steps} == {1}
    check_invariants(await record(database_url, run_id))
