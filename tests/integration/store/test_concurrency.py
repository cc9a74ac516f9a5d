"""Many writers of the same runs at once, and random histories: totals stay exact, one output is accepted, all commits."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from decimal import Decimal
from typing import Any
from urllib.parse import quote
from uuid import UUID

import psycopg
import pytest

from engine.errors import RefusedError
from engine.store.attempts import Opening, open_attempt
from engine.store.closing import Closing, close_step_attempt
from engine.store.database import Database
from engine.store.run_writer import AttemptResult
from engine.store.runs import create_run
from engine.store.settling import Settlement, note_waiting, settle_run
from engine.store.snapshots import read_run
from engine.store.states import RUN_ENDED
from tests.support.servers import superuser_url
from tests.support.stored import (
    COST,
    LOST,
    answered,
    check_invariants,
    ended_with,
    execute,
    new_run,
    opening,
    plain_url,
    record,
    rows,
    stored_run,
)

ISOLATIONS = ["read committed", "repeatable read", "serializable"]


@pytest.fixture(params=ISOLATIONS)
async def isolated(request: pytest.FixtureRequest, database_url: str) -> AsyncIterator[Database]:
    """A pool on a server whose default isolation is another one."""
    options = quote(f"-c default_transaction_isolation={request.param.replace(' ', chr(92) + ' ')}", safe="")
    opened = Database(f"{database_url}&options={options}", pool_size=8)
    yield opened
    await opened.close()


async def _perform(database: Database, run_id: UUID, position: int, *, barrier: asyncio.Barrier) -> str:
    opened = opening(run_id, position)
    await barrier.wait()
    assert (await open_attempt(database, opened)).verdict == "call"
    await barrier.wait()
    return (await close_step_attempt(database, answered(opened, ends_run=True))).verdict


async def test_steps_that_end_in_the_same_instant_count_exactly(isolated: Database) -> None:
    for _ in range(8):
        run_id = await stored_run(isolated, [[]] * 5)
        barrier = asyncio.Barrier(5)
        verdicts = await asyncio.gather(
            *(_perform(isolated, run_id, position, barrier=barrier) for position in range(5))
        )
        assert verdicts == ["done"] * 5
        kept = await record(isolated.url.partition("&options")[0], run_id)
        check_invariants(kept)
        assert kept.run["cost_usd"] == 5 * COST
        # Whoever came last found no other step left, and ended the run; nobody did so before.
        assert kept.run["state"] == "succeeded"
        assert len(kept.entries("run.closed")) == 1


async def test_many_tries_of_one_step_at_once_accept_one_output(isolated: Database) -> None:
    run_id = await stored_run(isolated, [[], [0]])

    async def attempt(number: int) -> str:
        opened = opening(run_id, 0, (1, 0, number), attempts_max=100)
        ruling = await open_attempt(isolated, opened)
        if ruling.verdict == "call":
            await asyncio.sleep(0)
            ruling = await close_step_attempt(isolated, answered(opened, f"Answer {number}."))
        return ruling.verdict

    verdicts = await asyncio.gather(*(attempt(number) for number in range(1, 17)))
    kept = await record(isolated.url.partition("&options")[0], run_id)
    check_invariants(kept)
    assert set(verdicts) <= {"done", "superseded"}
    assert sum(row["accepted"] for row in kept.attempts) == 1
    assert kept.run["cost_usd"] == COST * len(kept.attempts)


async def test_a_settlement_in_the_same_instant_as_closes_leaves_no_attempt_open(database: Database) -> None:
    for _ in range(10):
        run_id = await stored_run(database, [[]] * 4)
        opened = [opening(run_id, position) for position in range(4)]
        await asyncio.gather(*(open_attempt(database, one) for one in opened))
        work: list[Any] = [close_step_attempt(database, answered(one, ends_run=True)) for one in opened]
        work.insert(2, settle_run(database, Settlement(run_id, 1, "cancelled", "cancelled")))
        await asyncio.gather(*work)
        kept = await record(database.url, run_id)
        check_invariants(kept)
        assert kept.run["cost_usd"] == 4 * COST
        assert kept.run["attempts_unpriced"] == 0
        assert kept.run["state"] in {"cancelled", "succeeded"}
        assert all(step["state"] in {"succeeded", "cancelled"} for step in kept.steps)


async def test_a_deadlock_is_repeated_inside_the_write(database: Database) -> None:
    for _ in range(9):
        run_id = await stored_run(database, [[]])
        if await _deadlock(database, opening(run_id, 0)):
            break
    else:
        pytest.fail("the stranger was always the one that the server ended")
    kept = await record(database.url, run_id)
    check_invariants(kept)
    assert len(kept.attempts) == 1


async def _deadlock(database: Database, opened: Opening) -> bool:
    """Brings our transaction and a stranger's into a deadlock; whether ours was the one that the server ended.

    It ends whoever has waited for a second when it looks, which is ours unless the machine is slow.
    """
    run_id = opened.place.run_id
    async with await psycopg.AsyncConnection.connect(plain_url(superuser_url(database.url))) as stranger:
        # The locks in the wrong order: the head, then the run that our transaction holds by now.
        await stranger.execute("SELECT 1 FROM ledger_heads WHERE run_id = %s FOR UPDATE", (run_id,))
        ours = asyncio.create_task(open_attempt(database, opened))
        await _until_waiting(database.url)
        try:
            await stranger.execute("SELECT 1 FROM runs WHERE id = %s FOR UPDATE", (run_id,))
            was_ours = True
        except psycopg.errors.DeadlockDetected:
            was_ours = False
        await stranger.rollback()
        assert (await ours).verdict == "call"
    return was_ours


_WAITING = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


async def _until_waiting(url: str) -> None:
    async with asyncio.timeout(20):
        while not await rows(url, _WAITING):  # noqa: ASYNC110  # the server tells nobody when a session waits
            await asyncio.sleep(0.01)


async def test_one_key_and_ten_submitters_make_one_run(database: Database) -> None:
    for number in range(5):
        requests = [new_run([[]], key=f"same-{number}") for _ in range(10)]
        created = await asyncio.gather(*(create_run(database, request) for request in requests))
        assert len({one.id for one in created}) == 1
        assert sum(not one.existing for one in created) == 1
        check_invariants(await record(database.url, created[0].id))


async def test_one_key_for_another_request_is_refused_and_creates_nothing(database: Database) -> None:
    requests = [new_run([[]], task=f"Question {number}?", key="contested") for number in range(6)]
    results = await asyncio.gather(*(create_run(database, one) for one in requests), return_exceptions=True)
    refused = [one for one in results if isinstance(one, RefusedError)]
    assert len(refused) == 5
    assert {one.code for one in refused} == {"idempotency-conflict"}
    assert len(await rows(database.url, "SELECT id FROM runs WHERE idempotency_key = 'contested'")) == 1


async def test_cancelled_writers_leave_whole_transactions_and_usable_connections(own_database_url: str) -> None:
    database = Database(own_database_url, pool_size=3)
    rng = random.Random(7)
    run_id = await stored_run(database, [[]] * 4)
    for number in range(1, 40):
        task = asyncio.create_task(open_attempt(database, opening(run_id, number % 4, (1, 0, number), attempts_max=99)))
        await asyncio.sleep(rng.uniform(0, 0.012))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    # Three at once: every place of the pool serves.
    rulings = await asyncio.gather(
        *(open_attempt(database, opening(run_id, position, (1, 1, 1), attempts_max=99)) for position in range(3))
    )
    assert [ruling.verdict for ruling in rulings] == ["call"] * 3
    check_invariants(await record(own_database_url, run_id))
    states = await rows(own_database_url, "SELECT state FROM pg_stat_activity WHERE application_name = 'podium'")
    assert {row["state"] for row in states} == {"idle"}
    await database.close()


class History:
    """Random moves on one run, each followed by all invariants."""

    def __init__(self, database: Database, run_id: UUID, rng: random.Random) -> None:
        self.database, self.run_id, self.rng = database, run_id, rng
        self.opened: list[Opening] = []
        self.closed: list[Closing] = []
        self.fences = {position: [0, 1] for position in range(3)}

    async def move(self) -> str:
        moves = [self.open, self.open, self.close, self.close, self.repeat, self.wait]
        if self.rng.random() < 0.04:
            moves = [self.settle]
        return await self.rng.choice(moves)()

    async def open(self) -> str:
        position = self.rng.randrange(3)
        fence = self.fences[position]
        if self.rng.random() < 0.7:
            fence[self.rng.randrange(2)] += 1
        opened = opening(self.run_id, position, (1, fence[0], fence[1]), attempts_max=5)
        ruling = await open_attempt(self.database, opened)
        if ruling.verdict == "call":
            self.opened.append(opened)
        return f"open {position} {fence}: {ruling.verdict}"

    async def close(self) -> str:
        if not self.opened:
            return "nothing to close"
        opened = self.rng.choice(self.opened)
        costs = [None, Decimal(0), COST, Decimal("1.5")]
        failed = AttemptResult("failed", "overloaded", cost_usd=self.rng.choice(costs), input_tokens=3)
        closing = self.rng.choice(
            [
                answered(opened, cost_usd=self.rng.choice(costs), ends_run=True),
                ended_with(opened, failed, retry=True),
                ended_with(opened, LOST, retry=True),
                ended_with(opened, AttemptResult("cancelled", "cancelled")),
            ]
        )
        self.closed.append(closing)
        return f"close {closing.result.state}: {(await close_step_attempt(self.database, closing)).verdict}"

    async def repeat(self) -> str:
        if not self.closed:
            return "nothing to repeat"
        closing = self.rng.choice(self.closed)
        return f"repeat {closing.result.state}: {(await close_step_attempt(self.database, closing)).verdict}"

    async def wait(self) -> str:
        position = self.rng.randrange(3)
        await note_waiting(self.database, self.run_id, 0, position, self.rng.choice(["no-worker", "secret-missing"]))
        return f"wait {position}"

    async def settle(self) -> str:
        state = self.rng.choice(RUN_ENDED)
        settled = await settle_run(self.database, Settlement(self.run_id, 1, state, None))
        return f"settle {state}: {settled.state}"


@pytest.mark.parametrize("seed", range(12))
async def test_invariants_hold_after_every_move_of_a_random_history(database: Database, seed: int) -> None:
    history = History(database, await stored_run(database, [[], [0], [0, 1]]), random.Random(seed))
    told = [f"seed {seed}"]
    for _ in range(25):
        told.append(await history.move())
        print(told[-1])
        check_invariants(await record(database.url, history.run_id))


async def test_invariants_hold_when_random_histories_share_a_run(database: Database) -> None:
    run_id = await stored_run(database, [[], [0], [0, 1]])
    histories = [History(database, run_id, random.Random(seed)) for seed in range(6)]

    async def live(history: History) -> None:
        for _ in range(15):
            print(await history.move())

    await asyncio.gather(*(live(history) for history in histories))
    check_invariants(await record(database.url, run_id))


async def test_a_reader_sees_one_moment_of_a_run_that_changes(database: Database) -> None:
    run_id = await stored_run(database, [[]] * 5)
    stop = asyncio.Event()
    failed = AttemptResult("failed", "overloaded", cost_usd=COST)

    async def write() -> None:
        for position in range(5):
            for number in range(1, 10):
                opened = opening(run_id, position, (1, 0, number), attempts_max=99)
                await open_attempt(database, opened)
                await close_step_attempt(database, ended_with(opened, failed, retry=True))
            last = opening(run_id, position, (1, 1, 1), attempts_max=99)
            await open_attempt(database, last)
            await close_step_attempt(database, answered(last, ends_run=True))
        stop.set()

    async def read() -> int:
        reads = 0
        while not stop.is_set():
            run = await read_run(database, run_id)
            assert run is not None
            attempts = [attempt for step in run.steps for attempt in step.attempts]
            assert run.cost_usd == sum((attempt.cost_usd or Decimal(0) for attempt in attempts), Decimal(0))
            assert all((step.output is not None) == (step.state == "succeeded") for step in run.steps)
            assert (run.state == "succeeded") == all(step.state == "succeeded" for step in run.steps)
            reads += 1
        return reads

    _, *reads = await asyncio.gather(write(), read(), read())
    assert sum(reads) > 2


async def test_a_role_whose_default_is_serializable_works(own_database_url: str) -> None:
    name = own_database_url.partition("?")[0].rpartition("/")[2]
    await execute(
        superuser_url(own_database_url), f"ALTER DATABASE \"{name}\" SET default_transaction_isolation = 'serializable'"
    )
    database = Database(own_database_url)
    run_id = await stored_run(database, [[]] * 4)
    opened = [opening(run_id, position) for position in range(4)]
    await asyncio.gather(*(open_attempt(database, one) for one in opened))
    await asyncio.gather(*(close_step_attempt(database, answered(one)) for one in opened))
    check_invariants(await record(own_database_url, run_id))
    await database.close()
