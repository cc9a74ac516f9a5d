"""Open and Close run to their end under cancellation; heartbeats keep a pace that the process can afford."""

from __future__ import annotations

import asyncio

import pytest

from activities import transactions
from activities.heartbeat import HeartbeatPace
from activities.transactions import record, to_its_end
from engine import contracts
from engine.errors import UnavailableError
from engine.store.attempts import Ruling


async def test_a_transaction_ends_although_its_activity_is_cancelled_twice() -> None:
    ended = asyncio.Event()

    async def work() -> str:
        await asyncio.sleep(0.1)
        ended.set()
        return "done"

    task = asyncio.create_task(to_its_end(work()))
    for _ in range(2):
        await asyncio.sleep(0.02)
        task.cancel()
    assert await task == ("done", True)
    assert ended.is_set()


async def test_an_undisturbed_transaction_says_so() -> None:
    async def work() -> int:
        return 7

    assert await to_its_end(work()) == (7, False)


async def test_what_a_transaction_raises_is_raised() -> None:
    async def work() -> int:
        raise KeyError

    with pytest.raises(KeyError):
        await to_its_end(work())


async def test_a_close_waits_for_a_database_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "PAUSE_S", 0.01)
    tries = 0

    async def close() -> Ruling:
        nonlocal tries
        tries += 1
        if tries < 4:
            raise UnavailableError("database-unreachable", "away")
        return Ruling("done")

    assert (await record(close)).verdict == "done"
    assert tries == 4


async def test_a_close_that_is_cancelled_while_the_database_is_away_gives_up() -> None:
    async def close() -> Ruling:
        await asyncio.sleep(0.05)
        raise UnavailableError("database-unreachable", "away")

    task = asyncio.create_task(record(close))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(UnavailableError):
        await task


def test_many_calls_beat_less_often_but_always_often_enough() -> None:
    assert HeartbeatPace(1).interval_s == contracts.HEARTBEAT_INTERVAL_MIN_S
    assert HeartbeatPace(300).interval_s == 3.0
    assert HeartbeatPace(100_000).interval_s == contracts.HEARTBEAT_INTERVAL_MAX_S
    assert contracts.HEARTBEAT_TIMEOUT.total_seconds() * 0.7 > contracts.HEARTBEAT_INTERVAL_MAX_S
