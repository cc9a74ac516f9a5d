"""What the activities of one worker process share: database, pinned pools, adapters, secrets, the local model."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from uuid import UUID

from activities.heartbeat import HeartbeatPace
from activities.progress import ProgressBoard
from engine.store.database import Database
from engine.store.inputs import read_pool_document
from worker_pools.adapters import ModelAdapter
from worker_pools.adapters.openai import OpenAiAdapter
from worker_pools.pool import Pool, Worker, pool_from_document
from worker_pools.secrets import SecretStore

POOLS_CACHED_MAX = 256


@dataclass(frozen=True, slots=True)
class LocalEndpoint:
    """Where the embedded model server listens; the key is of this process's making."""

    base_url: str
    api_key: str = field(repr=False)


@dataclass(slots=True)
class ActivityContext:
    """Shared by all activities of a process. ``local_endpoint`` starts the embedded model server when first asked."""

    database: Database
    secrets: SecretStore
    process_id: UUID
    progress: ProgressBoard
    local_endpoint: Callable[[], Awaitable[LocalEndpoint]]
    pace: HeartbeatPace = field(default_factory=HeartbeatPace)
    _pools: OrderedDict[str, Pool] = field(default_factory=OrderedDict)
    _adapters: dict[str, ModelAdapter] = field(default_factory=dict)
    _loading: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def pool(self, digest: str) -> Pool:
        """The pinned pool of a digest; read once, then kept."""
        pool = self._pools.get(digest)
        if pool is None:
            pool = pool_from_document(await read_pool_document(self.database, digest))
            self._pools[digest] = pool
            while len(self._pools) > POOLS_CACHED_MAX:
                self._pools.popitem(last=False)
        return pool

    def key_of(self, worker: Worker) -> str | None:
        """The worker's key, if it names one and this process has it."""
        return None if worker.api_key is None else self.secrets.get(worker.api_key)

    async def adapter(self, worker: Worker) -> ModelAdapter:
        """The adapter for a worker, made when first needed: importing litellm takes seconds and 200 MB."""
        known = self._adapters.get(worker.adapter)
        if known is not None:
            # Not behind the lock, where a first call by litellm holds up everybody for the seconds of its import.
            return known
        async with self._loading:
            if worker.adapter not in self._adapters:
                self._adapters[worker.adapter] = await _make_adapter(worker.adapter)
            return self._adapters[worker.adapter]

    async def close(self) -> None:
        """Closes the adapters' connections."""
        for adapter in self._adapters.values():
            await adapter.aclose()


async def _make_adapter(name: str) -> ModelAdapter:
    if name == "litellm":
        # In a thread, so that the import does not stop the heartbeats of calls in flight.
        from worker_pools.adapters.litellm import LiteLlmAdapter  # noqa: PLC0415  # heavy and optional

        return await asyncio.to_thread(LiteLlmAdapter)
    return OpenAiAdapter()
