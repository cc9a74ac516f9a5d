"""What all benchmarks share: real servers with the settings that users get, a provider, both kinds of workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID, uuid4

from temporalio.client import Client
from temporalio.worker import Worker

from benchmarks.raw import RAW_QUEUE, RawActivities, RawRequest, RawWorkflow
from engine import contracts
from engine.keeper.home import lock_home, open_home
from engine.keeper.postgres import PostgresServer
from engine.keeper.temporal import TemporalServer
from engine.service import Submission, submit
from engine.settings import TemporalSettings
from engine.store.schema import upgrade_schema
from engine.store.snapshots import RunSnapshot, read_run
from tests.support.provider import Provider
from worker_pools.pool import Pool, load_pool
from worker_pools.process import WorkerOptions, WorkerProcess
from worker_pools.secrets import SecretStore


@dataclass(frozen=True, slots=True)
class Rig:
    """Everything that runs. ``podium`` and ``raw`` execute one graph and return its duration in seconds."""

    process: WorkerProcess
    pool: Pool
    services: Services
    provider: Provider

    @property
    def client(self) -> Client:
        """The Temporal client of the worker."""
        return self.process.client

    def pool_for(self, model: str) -> Pool:
        """A pool whose workers call ``model`` at the stand-in provider."""
        return make_pool(self.services.folder, self.provider.base_url, model)

    async def podium(self, pool: Pool, reads: list[list[int]], subtasks: list[str]) -> tuple[float, UUID]:
        """Submits the graph as a plan and waits for the workflow's end; also gives the run's id.

        The answer is on record, and shown to whoever follows the run, a little earlier: see `answered_s`.
        """
        plan = json.dumps({"model_id": [0] * len(reads), "subtasks": subtasks, "access_list": reads})
        started = time.perf_counter()
        created = await submit(
            self.process.database, self.client, Submission("Measure.", pool, "benchmark", plan_text=plan)
        )
        await self.client.get_workflow_handle(contracts.workflow_id(str(created.id), 1)).result()
        return time.perf_counter() - started, created.id

    async def answered_s(self, reads: list[list[int]], subtasks: list[str]) -> float:
        """Seconds from the submission until the answer was on record. One machine, so one clock for both."""
        submitted_at = time.time()
        _, run_id = await self.podium(self.pool, reads, subtasks)
        ended_at = (await self.snapshot(run_id)).ended_at
        assert ended_at is not None
        return ended_at.timestamp() - submitted_at

    async def raw(self, reads: list[list[int]], subtasks: list[str]) -> float:
        """The same graph as plain activities."""
        started = time.perf_counter()
        await self.client.execute_workflow(
            "RawWorkflow", RawRequest(reads, subtasks), id=f"raw-{uuid4()}", task_queue=RAW_QUEUE
        )
        return time.perf_counter() - started

    async def snapshot(self, run_id: UUID) -> RunSnapshot:
        """The record of a run."""
        snapshot = await read_run(self.process.database, run_id)
        assert snapshot is not None
        return snapshot


@dataclass(frozen=True, slots=True)
class Services:
    """Real servers with the settings that users get, and the stand-in provider."""

    postgres: PostgresServer
    temporal: TemporalServer
    provider: Provider
    folder: Path

    @property
    def key_store(self) -> str:
        """Where the keys of texts are: texts are sealed, as users get it."""
        return (self.folder / "keys").as_uri()


@contextlib.asynccontextmanager
async def services() -> AsyncIterator[Services]:
    """Starts everything but a worker; the schema is there."""
    with tempfile.TemporaryDirectory(prefix="podium-bench-") as name, Provider(bodies=False) as provider:
        home = open_home(Path(name) / "home")
        lock = lock_home(home)
        assert lock is not None
        postgres, temporal = PostgresServer(home), TemporalServer(home)
        await asyncio.gather(postgres.start(), temporal.start())
        try:
            await asyncio.to_thread(upgrade_schema, postgres.migration_url)
            yield Services(postgres, temporal, provider, Path(name))
        finally:
            await asyncio.gather(temporal.stop(), postgres.stop())
            lock.release()
            # Outside the home when that lies deep.
            shutil.rmtree(home.run_dir, ignore_errors=True)


@contextlib.asynccontextmanager
async def rig(model: str) -> AsyncIterator[Rig]:
    """Services and, in this process, both kinds of workers; ``model`` is what the stand-in provider plays."""
    async with services() as running:
        pool = make_pool(running.folder, running.provider.base_url, model)
        options = WorkerOptions(
            running.postgres.url,
            TemporalSettings(running.temporal.address),
            queues=("bench",),
            grace_s=1.0,
            key_store=running.key_store,
        )
        process = WorkerProcess(options, SecretStore({}))
        await process.start()
        task = asyncio.create_task(process.run())
        activities = RawActivities(pool.workers[0])
        async with Worker(
            process.client,
            task_queue=RAW_QUEUE,
            workflows=[RawWorkflow],
            activities=[activities.call],
            max_concurrent_activities=1000,
        ):
            yield Rig(process, pool, running, running.provider)
        await activities.close()
        process.stop()
        await task


def make_pool(folder: Path, base_url: str, model: str) -> Pool:
    """A pool of one worker."""
    worker = {"adapter": "openai", "base_url": base_url, "model": model, "queue": "bench"}
    document = {
        "name": "bench",
        "conductor": worker,
        "workers": [{**worker, "name": "only", "description": "answers"}],
        "policy": {"steps_max": 64},
    }
    path = folder / f"pool-{uuid4().hex}.yaml"
    path.write_text(json.dumps(document))
    return load_pool(str(path))


def median(values: list[float]) -> float:
    """The middle of a list: one slow run does not move it."""
    return statistics.median(values)
