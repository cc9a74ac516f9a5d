"""Giving orders to runs the way the command line does, and looking at what came of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

from temporalio.client import Client

from engine.operations.cancelling import Given, cancel_run
from engine.operations.pausing import pause_run, unpause_run
from engine.operations.resuming import pool_to_use, resume_run
from engine.service import find_run
from engine.settings import TemporalSettings
from engine.store.database import Database
from engine.store.orders import Order
from engine.temporal_client import connect_temporal
from tests.support.provider import Provider
from worker_pools.pool import Pool
from worker_pools.process import WorkerProcess

Connect = Callable[[], Awaitable[Client]]


def order(run_id: UUID, actor: str = "operator", reason: str | None = None) -> Order:
    return Order(run_id, actor, reason=reason)


def connecting(client: Client) -> Connect:
    async def connect() -> Client:
        return client

    return connect


async def temporal_is_away() -> Client:
    """A way to Temporal that finds nobody there."""
    return await connect_temporal(TemporalSettings("127.0.0.1:9"), wait_s=0.0)


async def cancel(process: WorkerProcess, run_id: UUID) -> Given:
    return await cancel_run(process.database, connecting(process.client), order(run_id))


async def pause(process: WorkerProcess, run_id: UUID) -> Given:
    return await pause_run(process.database, connecting(process.client), order(run_id))


async def unpause(process: WorkerProcess, run_id: UUID) -> Given:
    return await unpause_run(process.database, connecting(process.client), order(run_id))


async def resume(
    process: WorkerProcess, run_id: UUID, other: Pool | None = None, connect: Connect | None = None
) -> bool:
    return await resume_on(process.database, connect or connecting(process.client), run_id, other)


async def resume_on(database: Database, connect: Connect, run_id: UUID, other: Pool | None = None) -> bool:
    run = await find_run(database, str(run_id))
    pool = await pool_to_use(database, run, other)
    return await resume_run(database, connect, order(run_id), run=run, pool=pool, repin=other is not None)


async def nothing_more_is_called(provider: Provider, *, for_s: float = 0.5) -> list[dict[str, Any]]:
    """All requests so far; AssertionError if one more comes, or one is still open, within ``for_s``."""
    before = provider.count
    await asyncio.sleep(for_s)
    requests = provider.requests
    assert len(requests) == before
    assert all(request["finished"] or request["disconnected"] for request in requests)
    return requests
