"""The yardstick: the same graph as plain Temporal activities that make the same call through the same adapter.

No record, no fence, no manifest; outputs travel through Temporal's payloads, as in hand-written code.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from uuid import uuid4

from temporalio import activity, workflow

with workflow.unsafe.imports_passed_through():
    from engine.graph import PlanGraph
    from worker_pools.adapters import Message, ModelCall, Progress
    from worker_pools.adapters.openai import OpenAiAdapter
    from worker_pools.pool import Worker

RAW_QUEUE = "raw"


@dataclass(frozen=True)
class RawCall:
    """One call: the prompt as hand-written code would pass it."""

    prompt: str


@dataclass(frozen=True)
class RawRequest:
    """A graph by its access lists, with the subtasks' texts."""

    reads: list[list[int]]
    subtasks: list[str]


class RawActivities:
    """One activity: the call."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._adapter = OpenAiAdapter()

    @activity.defn(name="raw_call")
    async def call(self, request: RawCall) -> str:
        """Calls the model and returns its text."""
        reply = await self._adapter.call(
            ModelCall(self._worker, [Message("user", request.prompt)], attempt_id=str(uuid4())), _ignore
        )
        return reply.text

    async def close(self) -> None:
        """Closes the adapter's connections."""
        await self._adapter.aclose()


def _ignore(_: Progress) -> None:
    return


@workflow.defn(name="RawWorkflow")
class RawWorkflow:
    """The graph, written by hand."""

    @workflow.run
    async def run(self, request: RawRequest) -> str:
        """Runs each step as soon as what it reads is there; returns the last answer."""
        graph = PlanGraph.of(request.reads)
        outputs: dict[int, str] = {}
        tasks: dict[int, asyncio.Task[str]] = {}
        while len(outputs) < graph.size:
            for position in graph.ready(done=outputs, begun={*outputs, *tasks}):
                seen = "\n".join(outputs[source] for source in request.reads[position])
                tasks[position] = asyncio.create_task(
                    workflow.execute_activity(
                        "raw_call",
                        RawCall(f"{seen}\n{request.subtasks[position]}"),
                        result_type=str,
                        start_to_close_timeout=timedelta(seconds=60),
                    )
                )
            await workflow.wait(list(tasks.values()), return_when=asyncio.FIRST_COMPLETED)
            for position in [position for position, task in tasks.items() if task.done()]:
                outputs[position] = tasks.pop(position).result()
        return outputs[graph.answer]
