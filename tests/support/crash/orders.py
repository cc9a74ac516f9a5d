"""What people do to a run while processes are killed: each order is repeated until it was taken.

Where the order can be told by its id it is repeated with the same one; a decision or a fork that was taken without an
answer is found again by who decided, or by the fork's own id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar
from uuid import UUID

from temporalio.client import Client

from engine.errors import PodiumError, RefusedError, UnavailableError
from engine.operations.answers import retry_step
from engine.operations.cancelling import cancel_run
from engine.operations.forking import ForkOrder, StepEdit, propose_fork, start_fork
from engine.operations.pausing import pause_run, unpause_run
from engine.operations.resuming import pool_to_use, resume_run
from engine.operations.reviewing import decide_review
from engine.store.database import Database
from engine.store.orders import Order
from engine.store.review_views import reviews_of_run
from engine.store.snapshots import RunSnapshot, read_run
from engine.store.states import RUN_ENDED
from tests.support.workflows import until

PATIENCE_S: Final = 300.0
REVIEWER: Final = "crash-reviewer"
LOOK_EVERY_S: Final = 0.2
# The position and the worker that a fork changes.
FORK_EDIT: Final = StepEdit(2, worker="slow")
# An order may make another run, whose id it gives.
Give = Callable[[Database, Client, UUID], Coroutine[Any, Any, UUID | None]]
Result = TypeVar("Result")


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


async def approve_everything(database: Database, client: Client, run_id: UUID) -> None:
    """Approves, as another account than the run's, whatever review of the run is open, until the run has ended."""
    async with asyncio.timeout(PATIENCE_S):
        while (await _read(database, run_id)).state not in RUN_ENDED:
            lines = await _until_answered(lambda: database.query(lambda connection: reviews_of_run(connection, run_id)))
            for line in lines:
                if line.state == "open":
                    await _approve(database, client, line.id)
            await asyncio.sleep(LOOK_EVERY_S)


async def resume_mended(database: Database, client: Client, run_id: UUID) -> None:
    """Waits until the run has failed, then resumes it with a pool in which the refused key is another one."""
    await _until_ended(database, run_id)
    run = await _read(database, run_id)
    pool = await _until_answered(lambda: pool_to_use(database, run, None))
    workers = [one.model_copy(update={"model": "quick"}) if one.name == "keyless" else one for one in pool.workers]
    mended = pool.model_copy(update={"workers": tuple(workers)})
    await _until_taken(
        lambda order: resume_run(database, _connected(client), order, run=run, pool=mended, repin=True), run_id
    )


async def fork_when_done(database: Database, client: Client, run_id: UUID) -> UUID:
    """Forks the run when it has ended, with another worker for one step; gives the fork's id."""
    await _until_ended(database, run_id)
    wish = ForkOrder(str(run_id), "crash-forker", edits=(FORK_EDIT,))
    proposal = await _until_answered(lambda: propose_fork(database, wish))
    # The proposal holds the new run's id, so however often it is started there is one fork.
    return (await _until_answered(lambda: start_fork(database, client, proposal))).id


async def _approve(database: Database, client: Client, review_id: UUID) -> None:
    try:
        await _until_answered(
            lambda: decide_review(database, _connected(client), review_id, "approve", actor_id=REVIEWER)
        )
    except RefusedError:
        # The decision had been taken before its answer was lost, or the review is gone; the record is judged later.
        return


async def _until_ended(database: Database, run_id: UUID) -> None:
    async def has_ended() -> bool:
        return (await _read(database, run_id)).state in RUN_ENDED

    await until(has_ended, timeout_s=PATIENCE_S)


async def _until_answered(ask: Callable[[], Awaitable[Result]]) -> Result:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await ask()
            except UnavailableError:
                await asyncio.sleep(LOOK_EVERY_S)


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
