"""An order that meets the end of its run (G3-11): it counted, or whoever gave it is told within seconds that it did not.

A hundred times each, at moments that the seed says; at the two ends of the list one is clearly before the other.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from engine.errors import InputError, RefusedError
from engine.operations.answers import retry_step
from engine.store.review_views import ReviewLine
from tests.support.orders import cancel, connecting, nothing_more_is_called, order
from tests.support.provider import Provider
from tests.support.reviews import asked, decide_as, reviewed_pool, reviews_of, submit_as
from tests.support.runs import ended, lists_plan, submit_plan
from tests.support.stored import Record, check_invariants, record
from tests.support.workflows import pool_of, provider_reaches, run_of, until
from worker_pools.pool import Pool
from worker_pools.process import WorkerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

ONE = lists_plan(["Go."], [[]], [0])
RACES = 100
AT_ONCE = 8
# Whoever gives an order waits no longer than this for its answer, on a machine that does eight things at once.
ANSWER_MAX_S = 10.0


@dataclass(frozen=True)
class Raced:
    """What came of one race: how the run ended, what the order said, and the record."""

    state: str
    told: object
    kept: Record

    @property
    def counted(self) -> bool:
        """Whether the order was taken."""
        return not isinstance(self.told, BaseException)


def moments(spread_s: float) -> list[float]:
    """When the order is given after the other thing; first clearly before it and clearly after it."""
    chance = random.Random(311)
    return [-1.0, 1.0, *(chance.uniform(-spread_s, spread_s) for _ in range(RACES - 2))]


async def race(
    process: WorkerProcess, run_id: UUID, give: Callable[[], Awaitable[Any]], end: Callable[[], Awaitable[Any]], at: float
) -> Raced:  # fmt: skip
    """Gives the order ``at`` seconds after (below zero, before) what ends the run."""

    async def given() -> Any:
        await asyncio.sleep(max(at, 0.0))
        begun = time.monotonic()
        try:
            return await give()
        finally:
            assert time.monotonic() - begun < ANSWER_MAX_S

    async def ending() -> Any:
        await asyncio.sleep(max(-at, 0.0))
        return await end()

    told, _ = await asyncio.gather(given(), ending(), return_exceptions=True)
    assert not isinstance(told, BaseException) or isinstance(told, RefusedError), told
    run = await ended(process.database, run_id, timeout_s=30)
    kept = await record(process.database.url, run_id)
    check_invariants(kept)
    return Raced(run.state, told, kept)


async def all_races(one: Callable[[float], Awaitable[Raced]], spread_s: float) -> list[Raced]:
    """All of them, a few at a time."""
    turn = asyncio.Semaphore(AT_ONCE)

    async def run(at: float) -> Raced:
        async with turn:
            return await one(at)

    return await asyncio.gather(*(run(at) for at in moments(spread_s)))


@pytest.mark.slow
async def test_an_approval_that_meets_a_cancel_counted_or_was_refused(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    pool = reviewed_pool(tmp_path, provider, {"gate": "answer"})

    async def one(at: float) -> Raced:
        run_id = await submit_as(process, pool, ONE)
        (review,) = await asked(process.database, run_id)
        raced = await race(
            process, run_id, lambda: decide_as(process, review.id, "bob"), lambda: cancel(process, run_id), at
        )
        (line,) = await reviews_of(process.database, run_id)
        assert raced.counted == (line.state == "approved")
        assert len(raced.kept.entries("review.decided")) == raced.counted
        if not raced.counted:
            assert isinstance(raced.told, RefusedError)
            assert raced.told.code in {"run-cancelling", "review-closed"}
            assert raced.state == "cancelled"
        return raced

    found = await all_races(one, 0.03)
    assert {raced.counted for raced in found} == {True, False}
    assert {raced.state for raced in found} == {"succeeded", "cancelled"}
    assert len(await nothing_more_is_called(provider)) == RACES


@pytest.mark.slow
async def test_a_cancel_that_meets_the_end_of_its_run_was_in_time_or_is_told_how_it_ended(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    pool = pool_of(tmp_path, provider.base_url, "sleep-200ms")

    async def one(at: float) -> Raced:
        run_id = await submit_plan(process, pool, ONE)
        # What ends the run is its answer, which comes 200 ms after the call.
        raced = await race(process, run_id, lambda: cancel(process, run_id), lambda: asyncio.sleep(0), max(at + 0.3, 0))
        assert len(raced.kept.entries("run.cancel_requested")) == raced.counted
        if not raced.counted:
            assert isinstance(raced.told, RefusedError)
            assert (raced.told.code, raced.state) == ("run-ended", "succeeded")
            assert "already succeeded at" in raced.told.message
        return raced

    found = await all_races(one, 0.2)
    assert {raced.counted for raced in found} == {True, False}
    assert {raced.state for raced in found} == {"succeeded", "cancelled"}
    await nothing_more_is_called(provider)


@pytest.mark.slow
async def test_an_operators_answer_that_meets_a_cancel_counted_or_was_refused(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"status": 401}, model="broken", times=None)
    pool = pool_of(tmp_path, provider.base_url, "broken", "plain", policy={"on_failed_step": "wait"})

    async def one(at: float) -> Raced:
        run_id = await submit_plan(process, pool, ONE)

        async def waits() -> bool:
            return (await run_of(process.database, run_id)).reason == "operator"

        await until(waits)
        answer = order(run_id, reason="another one can do it")
        raced = await race(
            process,
            run_id,
            lambda: retry_step(process.database, connecting(process.client), answer, position=0, worker="w1"),
            lambda: cancel(process, run_id),
            at,
        )
        assert len(raced.kept.entries("operator.answered")) == raced.counted
        # Not answered, so nothing was called for it.
        assert len(raced.kept.attempts) <= 1 + raced.counted
        return raced

    found = await all_races(one, 0.03)
    assert {raced.counted for raced in found} == {True, False}
    assert {raced.state for raced in found} == {"succeeded", "cancelled"}
    await nothing_more_is_called(provider)


def _slow_to_review(folder: Path, provider: Provider, deadline_s: float) -> Pool:
    return reviewed_pool(folder, provider, {"gate": "answer"}, policy={"deadline_s": deadline_s})


async def _timed_out(process: WorkerProcess, run_id: UUID) -> ReviewLine:
    (review,) = await asked(process.database, run_id)
    run = await ended(process.database, run_id, timeout_s=10)
    assert (run.state, run.reason) == ("failed", "deadline-exceeded")
    return review


async def test_an_approval_after_the_deadline_is_refused_and_changes_nothing(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    run_id = await submit_as(process, _slow_to_review(tmp_path, provider, 1.0), ONE)
    review = await _timed_out(process, run_id)
    before = await record(process.database.url, run_id)
    for who, kind in (("bob", "approve"), ("carol", "reject"), ("dan", "bypass")):
        with pytest.raises(RefusedError) as refused:
            await decide_as(process, review.id, who, kind)  # type: ignore[arg-type]  # words
        assert (refused.value.code, bool(refused.value.hint)) == ("review-closed", True)
    assert await record(process.database.url, run_id) == before
    (line,) = await reviews_of(process.database, run_id)
    assert (line.state, provider.count) == ("withdrawn", 1)
    # That there never was such a review is another answer.
    with pytest.raises(InputError) as unknown:
        await decide_as(process, UUID(int=review.id.int ^ 1), "bob")
    assert unknown.value.code == "review-unknown"


@pytest.mark.slow
async def test_an_approval_that_meets_the_deadline_counted_or_was_refused(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    pool = _slow_to_review(tmp_path, provider, 2.0)

    async def one(at: float) -> Raced:
        run_id = await submit_as(process, pool, ONE)
        (review,) = await asked(process.database, run_id)
        row = (await record(process.database.url, run_id)).run
        left_s = (row["deadline_at"] - row["created_at"]).total_seconds() - 0.3
        raced = await race(
            process, run_id, lambda: decide_as(process, review.id, "bob"), lambda: asyncio.sleep(0), left_s + at
        )
        (line,) = await reviews_of(process.database, run_id)
        assert raced.counted == (line.state == "approved")
        assert (raced.state == "succeeded") <= raced.counted
        assert raced.state in {"succeeded", "failed"}
        if raced.state == "failed":
            assert raced.kept.run["reason"] == "deadline-exceeded"
        return raced

    found = await all_races(one, 0.4)
    assert {raced.counted for raced in found} == {True, False}
    assert {raced.state for raced in found} == {"succeeded", "failed"}
    await provider_reaches(provider, RACES)
    assert len(await nothing_more_is_called(provider)) == RACES
