"""The sweep of retention as workers do it by themselves: without a command, again and again, and several of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import pytest_asyncio

from engine.store.database import Database
from engine.store.snapshots import read_run
from engine.store.tables import DEFAULT_TENANT
from tests.integration.store.test_retention import age
from tests.support.runs import worker_process
from tests.support.sealed import finished_run, sealed_database
from tests.support.servers import TestServers
from tests.support.stored import check_invariants, record, rows, stored_run
from tests.support.workflows import until
from worker_pools import process as process_module

DAYS = 30
TURN_S = 0.1
SWEEP_S = 0.3
TENANT = UUID(DEFAULT_TENANT)


@pytest_asyncio.fixture
async def database(database_url: str, tmp_path: Path) -> AsyncIterator[Database]:
    opened = sealed_database(database_url, tmp_path / "keys")
    yield opened
    await opened.close()


async def entries(database: Database, type_: str) -> list[dict[str, Any]]:
    found = await rows(database.url, "SELECT body FROM ledger_entries WHERE type = %s ORDER BY at", type_)
    return [json.loads(row["body"]) for row in found]


async def test_two_workers_sweep_by_themselves_each_run_once_and_go_on_sweeping(
    servers: TestServers, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "RECONCILE_INTERVAL_S", TURN_S)
    monkeypatch.setattr(process_module, "RETENTION_INTERVAL_S", SWEEP_S)
    sweeps: list[float] = []
    true_sweep = process_module.sweep

    async def counted(*given: object) -> object:
        sweeps.append(asyncio.get_running_loop().time())
        return await true_sweep(*given)  # type: ignore[arg-type]  # handed on as it came

    monkeypatch.setattr(process_module, "sweep", counted)
    old = [await finished_run(database, [f"old answer {number}"]) for number in range(4)]
    young, live = await finished_run(database, ["a young answer"]), await stored_run(database, [[]])
    for run_id in old:
        await age(database, run_id, DAYS + 1)
    options = {"key_store": (tmp_path / "keys").as_uri(), "retention_days": DAYS}

    async def gone(runs: list[UUID]) -> bool:
        found = [await read_run(database, run_id) for run_id in runs]
        return all(run is not None and run.task is None for run in found)

    async with (
        worker_process(database.url, servers.temporal_address, **options),
        worker_process(database.url, servers.temporal_address, **options),
    ):
        await until(lambda: gone(old))
        # One that comes of age while they run is found by a later turn.
        await age(database, young, DAYS + 1)
        await until(lambda: gone([young]))
        count = len(sweeps)
        await until(lambda: _many(sweeps, count + 4))
    for run_id in (*old, young):
        kept = await record(database.url, run_id)
        check_invariants(kept)
        (entry,) = kept.entries("artifact.erased")
        assert (entry["data"]["cause"], entry["actor"]) == ("retention", "podium-engine")
        assert {row["content"] for row in kept.artifacts} == {None}
    assert (await record(database.url, live)).entries("artifact.erased") == []
    swept = await entries(database, "retention.swept")
    # Whoever of the two did it: all in all each run is counted once, and a sweep that finds nothing says nothing.
    assert sum(entry["data"]["runs"] for entry in swept) == len(old) + 1
    assert {entry["data"]["default_days"] for entry in swept} == {DAYS}
    assert await entries(database, "erasure.refused") == []


async def _many(sweeps: list[float], count: int) -> bool:
    return len(sweeps) >= count


async def test_a_worker_without_days_keeps_everything(
    servers: TestServers, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "RECONCILE_INTERVAL_S", TURN_S)
    monkeypatch.setattr(process_module, "RETENTION_INTERVAL_S", TURN_S)
    sweeps: list[float] = []
    true_sweep = process_module.sweep

    async def counted(*given: object) -> object:
        found = await true_sweep(*given)  # type: ignore[arg-type]  # handed on as it came
        sweeps.append(0.0)
        return found

    monkeypatch.setattr(process_module, "sweep", counted)
    run_id = await finished_run(database, ["an answer for ever"])
    await age(database, run_id, 9999)
    async with worker_process(database.url, servers.temporal_address, key_store=(tmp_path / "keys").as_uri()):
        await until(lambda: _many(sweeps, 3))
    run = await read_run(database, run_id)
    assert run is not None
    assert run.answer == "an answer for ever"
    assert await entries(database, "retention.swept") == []
