"""What a person does to a run while processes are killed: each order is repeated, with its id, until it was taken."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final
from uuid import UUID

from temporalio.client import Client

from engine.errors import PodiumError, RefusedError, UnavailableError
from engine.operations.answers import retry_step
from engine.operations.cancelling import cancel_run
from engine.operations.pausing import pause_run, unpause_run
from engine.store.database import Database
from engine.store.orders import Order
from engine.store.snapshots import RunSnapshot, read_run
from engine.store.states import RUN_ENDED
from tests.support.workflows import until

PATIENCE_S: Final = 300.0
Give = Callable[[Database, Client, UUID], Coroutine[Any, Any, None]]


async def cancel_soon(database: Database, client: Client, run_id: UUID) -> None:
    """Cancels the run after a moment."""
    await asyncio.sleep(1.5)
    await _until_taken(lambda order: cancel_run(database, _connected(client), order), run_id)


async def pause_for_a_while(database: Database, client: Client, run_id: UUID) -> None:
    """Pauses the run and, some seconds later, lets it go on."""
    await asyncio.sleep(1.0)
    await _until_taken(lambda order: pause_run(database, _connected(client), order), run_id)
    await asyncio.sleep(4.0)
    await _until_taken(lambda order: unpause_run(database, _connected(client), order), run_id)


async def replace_worker(database: Database, client: Client, run_id: UUID) -> None:
    """Gives the step that waits for an operator to another worker."""

    found: list[int] = []

    async def waits_or_has_ended() -> bool:
        run = await _read(database, run_id)
        found.extend(step.position for step in run.steps if (step.state, step.reason) == ("waiting", "operator"))
        return bool(found) or run.state in RUN_ENDED

    await until(waits_or_has_ended, timeout_s=PATIENCE_S)
    if found:
        await _until_taken(
            lambda order: retry_step(database, _connected(client), order, position=found[0], worker="quick"), run_id
        )


def _connected(client: Client) -> Callable[[], Awaitable[Client]]:
    async def connect() -> Client:
        return client

    return connect


async def _until_taken(give: Callable[[Order], Awaitable[object]], run_id: UUID) -> None:
    order = Order(run_id, "crash-suite", reason="The crash suite wants it.")
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await give(order)
            except UnavailableError:
                await asyncio.sleep(0.2)
            except RefusedError:
                # The run has ended meanwhile; whether it should have is judged by its shape.
                return
            else:
                return


async def _read(database: Database, run_id: UUID) -> RunSnapshot:
    while True:
        try:
            run = await read_run(database, run_id)
        except PodiumError:
            await asyncio.sleep(0.2)
        else:
            assert run is not None
            return run
