"""The adapters of one process, made when they are first needed.

A pool that needs no litellm never imports it.
"""

from __future__ import annotations

from worker_pools.adapters.base import ModelAdapter
from worker_pools.pool import Worker


class Adapters:
    """One adapter of each kind for all calls of an event loop."""

    def __init__(self) -> None:
        self._made: dict[str, ModelAdapter] = {}

    def for_worker(self, worker: Worker) -> ModelAdapter:
        """The adapter that reaches this worker's model."""
        if worker.adapter not in self._made:
            self._made[worker.adapter] = _make(worker.adapter)
        return self._made[worker.adapter]

    async def aclose(self) -> None:
        """Closes every connection of every adapter."""
        made, self._made = self._made, {}
        for adapter in made.values():
            await adapter.aclose()


def _make(name: str) -> ModelAdapter:
    if name == "litellm":
        from worker_pools.adapters.litellm import LiteLlmAdapter

        return LiteLlmAdapter()
    from worker_pools.adapters.openai import OpenAiAdapter

    return OpenAiAdapter()
