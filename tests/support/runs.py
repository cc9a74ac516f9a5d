"""Helpers for tests that execute runs: a pool on the stand-in provider, a worker in this process, submissions."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

from engine.keystore import PLAIN
from engine.service import Submission, submit
from engine.settings import TemporalSettings
from engine.store.database import Database
from engine.store.snapshots import RunSnapshot, read_run
from engine.store.states import RUN_ENDED
from worker_pools.pool import Pool, load_pool
from worker_pools.process import WorkerOptions, WorkerProcess
from worker_pools.secrets import SecretStore

WORKERS = ("alpha", "beta", "gamma")
# The key stores of databases whose texts are sealed, for whoever opens a second worker on one.
KEY_STORES: dict[str, str] = {}


def make_pool(folder: Path, base_url: str, **changes: Any) -> Pool:
    """A pool of three workers at ``base_url``; ``changes`` replace top-level keys, ``worker`` updates each worker."""
    each = {
        "adapter": "openai",
        "base_url": base_url,
        "model": "plain",
        "queue": "stand-in",
        "price": {"input_usd_per_mtok": "1", "output_usd_per_mtok": "2"},
        "timeouts": {"call_s": 20, "first_token_s": 10, "idle_s": 5},
        "attempts_max": 3,
    }
    each.update(changes.pop("worker", {}))
    conductor = {key: value for key, value in each.items() if key != "fallbacks"}
    conductor.update(changes.pop("conductor", {}))
    document = {
        "name": "test",
        "conductor": conductor,
        "workers": [{**each, "name": name, "description": f"worker {name}"} for name in WORKERS],
        **changes,
    }
    path = folder / "pool.yaml"
    path.write_text(json.dumps(document))
    return load_pool(str(path))


def lists_plan(subtasks: list[str], access: list[Any], workers: list[int] | None = None) -> str:
    """A plan in the paper's form."""
    ids = workers or [number % len(WORKERS) for number in range(len(subtasks))]
    return f"model_id = {ids!r}\nsubtasks = {subtasks!r}\naccess_list = {access!r}\n"


@contextlib.asynccontextmanager
async def worker_process(database_url: str, temporal_address: str, **options: Any) -> AsyncIterator[WorkerProcess]:
    """A worker in this process, polling for the live runs' queues; stopped at the end."""
    process = WorkerProcess(
        WorkerOptions(
            database_url=database_url,
            temporal=TemporalSettings(temporal_address),
            queues=options.pop("queues", ("stand-in",)),
            grace_s=options.pop("grace_s", 0.5),
            key_store=options.pop("key_store", KEY_STORES.get(database_url, PLAIN)),
            **options,
        ),
        SecretStore({}),
    )
    await process.start()
    task = asyncio.create_task(process.run())
    try:
        yield process
    finally:
        process.stop()
        await task


async def submit_plan(process: WorkerProcess, pool: Pool, plan: str | None, task: str = "What is gravity?") -> UUID:
    """Submits a task with a plan's text (None: the Conductor plans)."""
    submission = Submission(task=task, pool=pool, actor_id="tester", plan_text=plan)
    return (await submit(process.database, process.client, submission)).id


async def ended(database: Database, run_id: UUID, *, timeout_s: float = 30.0) -> RunSnapshot:
    """Waits for the end of a run."""
    async with asyncio.timeout(timeout_s):
        while True:
            snapshot = await read_run(database, run_id)
            assert snapshot is not None
            if snapshot.state in RUN_ENDED:
                return snapshot
            await asyncio.sleep(0.02)
