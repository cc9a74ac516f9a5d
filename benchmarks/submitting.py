"""Many runs at once for a worker in another process: submitted over the product's own path, then waited for."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import func, select
from temporalio.client import Client

from benchmarks.rig import Services, make_pool
from engine.errors import UnavailableError
from engine.keystore import open_keyring
from engine.service import Submission, submit
from engine.settings import TemporalSettings
from engine.store.database import Database
from engine.store.states import RUN_LIVE
from engine.store.tables import Run
from engine.temporal_client import connect_temporal
from tests.support.workflows import until

AT_ONCE = 20


@dataclass(frozen=True, slots=True)
class Submitter:
    """The side of the users: a database, a Temporal client, and nothing of the worker."""

    services: Services
    database: Database
    client: Client

    async def submit(self, count: int, model: str, reads: list[list[int]]) -> list[UUID]:
        """Submits the same graph ``count`` times; the ids."""
        pool = make_pool(self.services.folder, self.services.provider.base_url, model)
        texts = [f"Do part {position}." for position in range(len(reads))]
        plan = json.dumps({"model_id": [0] * len(reads), "subtasks": texts, "access_list": reads})
        gate = asyncio.Semaphore(AT_ONCE)

        async def one() -> UUID:
            async with gate:
                submission = Submission("Measure.", pool, "benchmark", plan_text=plan)
                return (await submit(self.database, self.client, submission)).id

        return await asyncio.gather(*(one() for _ in range(count)))

    async def until_ended(self, *, timeout_s: float) -> None:
        """Returns when no run is live any more; AssertionError after ``timeout_s``."""
        await until(self._all_ended, timeout_s=timeout_s)

    async def _all_ended(self) -> bool:
        try:
            async with self.database.read() as connection:
                return await connection.scalar(select(func.count()).where(Run.state.in_(RUN_LIVE))) == 0
        except UnavailableError:
            # The benchmark has killed the server and starts it again.
            return False


async def submitter(services: Services) -> Submitter:
    """Connects; the caller closes ``database``."""
    client = await connect_temporal(TemporalSettings(services.temporal.address))
    return Submitter(services, Database(services.postgres.url, keys=open_keyring(services.key_store)), client)
