"""Helpers for workflow tests: pools with a model for each worker, everything that Temporal keeps, a worker by hand."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import temporalio.api.common.v1 as common
import temporalio.api.enums.v1 as enums
import temporalio.api.workflowservice.v1 as workflowservice
from temporalio.client import Client, WorkflowHandle
from temporalio.converter import DataConverter
from temporalio.service import RPCError, RPCStatusCode
from temporalio.worker import Worker
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from activities.bookkeeping import BookkeepingActivities
from activities.context import ActivityContext, LocalEndpoint
from activities.planning import PlanActivities
from activities.progress import ProgressBoard
from activities.steps import StepActivities
from engine import contracts
from engine.errors import UnavailableError
from engine.store.database import Database
from engine.store.processes import register_process, this_process
from engine.store.snapshots import RunSnapshot, StepSnapshot, read_run
from engine.temporal_client import connect_temporal
from engine.workflow import RunWorkflow
from tests.support.runs import make_pool
from worker_pools.pool import Pool
from worker_pools.process import WorkerOptions, WorkerProcess, workflow_runner
from worker_pools.secrets import SecretStore

QUEUE = "stand-in"


def pool_of(
    folder: Path,
    base_url: str,
    *models: str,
    worker: dict[str, Any] | None = None,
    more: Sequence[dict[str, Any]] = (),
    **changes: Any,
) -> Pool:
    """A pool whose worker number n is called w<n> and has the n-th model; ``changes`` replace top-level keys.

    ``more`` are workers of other kinds behind them, as they stand.
    """
    each = {
        "base_url": base_url,
        "queue": QUEUE,
        "price": {"input_usd_per_mtok": "1", "output_usd_per_mtok": "2"},
        "timeouts": {"call_s": 20, "first_token_s": 10, "idle_s": 5},
        "attempts_max": 3,
        **(worker or {}),
    }
    workers = [
        {**each, "name": f"w{number}", "description": f"worker {number}", "model": model}
        for number, model in enumerate(models)
    ]
    return make_pool(folder, base_url, workers=[*workers, *more], worker=worker or {}, **changes)


def handle_of(client: Client, run_id: UUID, execution: int = 1) -> WorkflowHandle[Any, Any]:
    """The workflow of an execution of a run."""
    return client.get_workflow_handle(contracts.workflow_id(str(run_id), execution))


async def terminate_workflow(client: Client, run_id: UUID, execution: int = 1) -> None:
    """Ends a run's workflow as an operator of Temporal can, without a word to anybody."""
    await handle_of(client, run_id, execution).terminate("by hand")


async def delete_workflow(client: Client, run_id: UUID, execution: int = 1) -> None:
    """Makes Temporal forget a run's workflow, and waits until it has; a running one is ended first."""
    handle = handle_of(client, run_id, execution)
    await client.workflow_service.delete_workflow_execution(
        workflowservice.DeleteWorkflowExecutionRequest(
            namespace=client.namespace, workflow_execution=common.WorkflowExecution(workflow_id=handle.id)
        )
    )

    async def forgotten() -> bool:
        try:
            await handle.describe()
        except RPCError as error:
            return error.status == RPCStatusCode.NOT_FOUND
        return False

    await until(forgotten, timeout_s=120)


async def history_events(client: Client, run_id: UUID, execution: int = 1) -> list[Any]:
    """The events of a run's workflow as the service keeps them."""
    return list((await handle_of(client, run_id, execution).fetch_history()).events)


async def temporal_record(client: Client, run_id: UUID, execution: int = 1) -> bytes:
    """Everything that Temporal tells of a run's workflow: its history, and its description with pending activities."""
    return await workflow_record(client, contracts.workflow_id(str(run_id), execution))


async def workflow_record(client: Client, workflow_id: str) -> bytes:
    """The same of any workflow."""
    events = (await client.get_workflow_handle(workflow_id).fetch_history()).events
    description = await client.workflow_service.describe_workflow_execution(
        workflowservice.DescribeWorkflowExecutionRequest(
            namespace=client.namespace, execution=common.WorkflowExecution(workflow_id=workflow_id)
        )
    )
    return b"\n".join([*(event.SerializeToString() for event in events), description.SerializeToString()])


def count_events(events: list[Any], name: str) -> int:
    """How many events are of a type, such as ``EVENT_TYPE_ACTIVITY_TASK_SCHEDULED``."""
    return sum(event.event_type == enums.EventType.Value(name) for event in events)


def scheduled_activities(events: list[Any]) -> list[str]:
    """The ids of the activities that a workflow asked for, in order."""
    return [
        event.activity_task_scheduled_event_attributes.activity_id
        for event in events
        if event.HasField("activity_task_scheduled_event_attributes")
    ]


def spellings(secret: str) -> list[bytes]:
    """A word as it stands and in base64 at each of the three offsets."""
    found = [secret.encode()]
    for offset in range(3):
        coded = base64.b64encode(b"\0" * offset + secret.encode())
        # The first and last group also depend on the neighbours.
        found.append(coded[4:-4])
    return found


async def until(condition: Callable[[], Awaitable[bool]], *, timeout_s: float = 15.0) -> None:
    """Waits until the condition holds; AssertionError after ``timeout_s``."""
    end = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < end, f"not within {timeout_s} s"
        await asyncio.sleep(0.02)


async def step_of(database: Database, run_id: UUID, position: int) -> StepSnapshot:
    """A step as it stands on record."""
    run = await read_run(database, run_id)
    assert run is not None
    return run.steps[position]


async def run_of(database: Database, run_id: UUID) -> RunSnapshot:
    """A run as it stands on record."""
    run = await read_run(database, run_id)
    assert run is not None
    return run


async def provider_reaches(provider: Any, count: int, *, timeout_s: float = 15.0) -> None:
    """Waits for calls without blocking the worker that makes them, which lives on this event loop."""
    end = time.monotonic() + timeout_s
    while provider.count < count:
        assert time.monotonic() < end, f"{provider.count} of {count} requests after {timeout_s} s"
        await asyncio.sleep(0.02)


async def interpreted(
    client: Client,
    reads: list[list[int]],
    perform_step: Callable[..., Any],
    *,
    workflow: type = RunWorkflow,
    run_id: str | None = None,
) -> contracts.RunResult:
    """The result of the real workflow for a plan with these access lists, whose steps are performed by a stand-in.

    Only for what depends on moments that no record and no provider could be made to hit. ``workflow`` may be another
    version of it.
    """
    run_id, queue = run_id or str(uuid4()), f"by-hand-{uuid4().hex[:8]}"
    plan = [contracts.StepSpec(position, seen, queue, 10.0) for position, seen in enumerate(reads)]
    request = contracts.RunRequest(run_id, 1, steps=plan, queue=contracts.pool_queue(queue))
    async with Worker(
        client,
        task_queue=request.queue,
        workflows=[workflow],
        activities=[perform_step],
        workflow_runner=workflow_runner(watched=True),
    ):
        result: contracts.RunResult = await client.execute_workflow(
            contracts.WORKFLOW_TYPE,
            request,
            id=contracts.workflow_id(run_id, 1),
            task_queue=request.queue,
            result_type=contracts.RunResult,
        )
        return result


async def no_model() -> LocalEndpoint:
    """A local model that cannot be started."""
    raise UnavailableError("local-model-failed", "there is no model here")


@contextlib.asynccontextmanager
async def hand_worker(
    database_url: str, options: WorkerOptions, workflow_class: type, converter: DataConverter | None = None
) -> AsyncIterator[WorkerProcess]:
    """A worker like ``WorkerProcess`` with another workflow class, or with another converter (for control runs)."""
    process = WorkerProcess(options, SecretStore({}))
    process.database = Database(database_url)
    process.client = await connect_temporal(options.temporal)
    if converter is not None:
        process.client = await Client.connect(options.temporal.address, data_converter=converter)
    identity = this_process()
    await register_process(process.database, identity)
    context = ActivityContext(process.database, process.secrets, identity.id, ProgressBoard(process.database), no_model)
    bookkeeping = BookkeepingActivities(context)
    passed = ("engine.contracts", "engine.converter", "engine.graph", "engine.errors", "pydantic", "pydantic_core")
    runner = SandboxedWorkflowRunner(restrictions=SandboxRestrictions.default.with_passthrough_modules(*passed))
    books = Worker(
        process.client,
        task_queue=contracts.WORKFLOW_QUEUE,
        workflows=[workflow_class],
        activities=[bookkeeping.settle_run, bookkeeping.note_waiting],
        workflow_runner=runner,
    )
    calls = Worker(
        process.client,
        task_queue=contracts.pool_queue(QUEUE),
        workflows=[workflow_class],
        activities=[StepActivities(context).perform_step, PlanActivities(context).plan_task],
        workflow_runner=runner,
    )
    async with books, calls:
        yield process
    await context.close()
    await process.database.close()
