"""An operator's answers to a step that failed and waits: retry it, perhaps with another worker, skip it, or abort.

The answer goes on record, then the run's workflow is woken. Must never change a run whose answer it refuses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from uuid import UUID

from sqlalchemy import select

from activities.prompts import usable_workers
from engine.errors import InputError, RefusedError
from engine.operations.cancelling import Given
from engine.operations.waking import Connect, wake_when_connected
from engine.store.answers import Answer, Answered, answer_step
from engine.store.attempts import Substitute
from engine.store.database import Database
from engine.store.inputs import read_pool_document
from engine.store.lineage import FAMILY
from engine.store.orders import Order
from engine.store.tables import Run
from worker_pools.pool import Pool, pool_from_document

# Steps of a run and of all runs below it that wait for an operator, from the top.
_READ_WAITING: Final = f"""{FAMILY}
    SELECT runs.id, position, height FROM family JOIN runs ON runs.id = family.id
    JOIN steps ON steps.run_id = runs.id AND steps.round = runs.round
    WHERE steps.state = 'waiting' AND steps.reason = 'operator'
    ORDER BY height, runs.id, position
"""  # noqa: S608  # a constant


@dataclass(frozen=True, slots=True)
class AnswerGiven:
    """An answer as it stands, and whether the workflow was told; if not, the reconciler of any worker tells it."""

    answered: Answered
    delivered: bool

    @property
    def given(self) -> Given:
        """The same as an order like any other."""
        return Given(self.answered.ordered, self.delivered)


async def retry_step(
    database: Database, connect: Connect, order: Order, *, position: int | None, worker: str | None
) -> AnswerGiven:
    """Lets a step be tried again; what was tried before does not count. ``worker`` gives it to another one for good.

    Raises what `engine.store.answers.answer_step` does, and InputError ``worker-unknown``, ``worker-too-deep``.
    """
    if worker is None:
        return await _give(database, connect, order, Answer("retry", position))
    digest, depth = await _pinned(database, order.run_id)
    pool = pool_from_document(await read_pool_document(database, digest))
    to = _substitute(pool, worker, depth)
    return await _give(database, connect, order, Answer("retry", position, to, digest))


async def skip_step(database: Database, connect: Connect, order: Order, *, position: int | None) -> AnswerGiven:
    """Leaves a step out; steps that may read it see nothing of it. Raises what `answer_step` does."""
    return await _give(database, connect, order, Answer("skip", position))


async def abort_step(database: Database, connect: Connect, order: Order, *, position: int | None) -> AnswerGiven:
    """Gives a step up, and with it the run, which fails with ``aborted``. Raises what `answer_step` does."""
    return await _give(database, connect, order, Answer("abort", position))


async def _give(database: Database, connect: Connect, order: Order, answer: Answer) -> AnswerGiven:
    try:
        answered = await answer_step(database, order, answer)
    except RefusedError as error:
        hint = await _hint_below(database, order.run_id, answer) if error.code == "step-not-waiting" else None
        if hint is None:
            raise
        raise RefusedError(error.code, error.message, hint=hint) from None
    return AnswerGiven(answered, await wake_when_connected(database, connect, order.run_id))


async def _hint_below(database: Database, run_id: UUID, answer: Answer) -> str | None:
    """Where the answer would fit: the step of a run below that waits, if none of the run's own does."""
    (rows,) = await database.fetch((_READ_WAITING, (run_id,)))
    if not rows or any(row["height"] == 0 for row in rows):
        return None
    first = rows[0]
    command = f"podium {answer.kind} {first['id']} --step {first['position']}"
    more = "" if len(rows) == 1 else f" (and {len(rows) - 1} more)"
    return f"run {first['id']} below it waits{more}: `{command}`"


async def _pinned(database: Database, run_id: UUID) -> tuple[str, int]:
    """The digest of the pool that the run is pinned to, and the run's depth."""
    async with database.read() as connection:
        row = (await connection.execute(select(Run.pool_digest, Run.depth).where(Run.id == run_id))).one_or_none()
    if row is None:
        raise InputError("run-unknown", f"there is no run {run_id}", hint="`podium list` shows the runs there are")
    return row.pool_digest, row.depth


def _substitute(pool: Pool, name: str, depth: int) -> Substitute:
    names = pool.worker_names
    if name not in names:
        raise InputError(
            "worker-unknown",
            f"the run's pool {pool.name} has no worker {name[:64]!r}",
            hint=f"it has {', '.join(names)}",
        )
    usable = [names[number] for number in usable_workers(pool, depth)]
    if name not in usable:
        raise InputError(
            "worker-too-deep",
            f"worker {name} would plan a run below this one, and depth_max is {pool.policy.depth_max}",
            hint=f"here it may be {', '.join(usable)}",
        )
    worker = pool.worker(name)
    return Substitute(worker.name, worker.model, worker.queue)
