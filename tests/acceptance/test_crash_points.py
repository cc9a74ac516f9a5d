"""A worker process is killed at each point of a step's life, and the link is lost at each (G4-03, G4-05).

One run for each point. All of them are brought to their points, then the worker is killed once and another one
started. For each: what is called again, what the record says, what the total says, held to the endpoint's own count.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from uuid import UUID

import pytest

from engine.ledger.entry import chain_faults
from engine.service import Submission, prepare, submit
from engine.settings import TemporalSettings
from engine.store.database import Database
from engine.temporal_client import connect_temporal
from tests.support.gate import Gate, Moment, Write
from tests.support.processes import CHECKOUT, environment
from tests.support.provider import Provider
from tests.support.runs import ended, lists_plan
from tests.support.servers import TestServers
from tests.support.stored import Record, record
from tests.support.workflows import pool_of, until
from worker_pools.pool import Pool

PLAN = lists_plan(["Answer."], [[]], [0])
USAGE = [1000, 500]
# 1000 tokens at 1 and 500 at 2 dollars a million, the prices of `pool_of`.
PRICE = Decimal("0.002")


@dataclass(frozen=True, slots=True)
class Point:
    """Where a run is interrupted, and what has to come of it: the states of its attempts, each with its cost.

    ``planned`` is a run that the Conductor plans; then it is the planning call that is interrupted.
    """

    write: Write | None
    moment: Moment | None
    calls: int
    attempts: tuple[tuple[str, Decimal | None], ...]
    cut: bool = False
    planned: bool = False


DONE = ("succeeded", PRICE)
LOST = ("unknown", None)
KILLED = {
    "before open commits": Point("open", "before-commit", 1, (DONE,)),
    "after open committed, before the call": Point("open", "after-commit", 1, (LOST, DONE)),
    "during the call": Point(None, None, 2, (LOST, DONE)),
    "after the answer, before close commits": Point("close", "before-commit", 2, (LOST, DONE)),
    "after close committed, before the report": Point("close", "after-commit", 1, (DONE,)),
    "planning, before its close commits": Point("close", "before-commit", 3, (LOST, DONE, DONE), planned=True),
    "planning, before its report": Point("close", "after-commit", 2, (DONE, DONE), planned=True),
}
CUT = {
    "the link dies before open commits": Point("open", "before-commit", 1, (DONE,), cut=True),
    "the link dies between open's commit and its answer": Point("open", "after-commit", 1, (DONE,), cut=True),
    "the link dies before close commits": Point("close", "before-commit", 1, (DONE,), cut=True),
    "the link dies between close's commit and its answer": Point("close", "after-commit", 1, (DONE,), cut=True),
    # While the call lasts no connection is in use; all that are pooled die.
    "idle links die during the call": Point(None, None, 1, (DONE,), cut=True),
}
POINTS = {**KILLED, **CUT}


@dataclass(frozen=True, slots=True)
class Aftermath:
    """The records of all runs, and how often the endpoint was called for each attempt."""

    records: dict[str, Record]
    calls: dict[str, int]


class _Stage:
    """Servers, a worker behind a gate, and one run for each point."""

    def __init__(self, url: str, servers: TestServers, provider: Provider, folder: Path) -> None:
        self.url = url
        self.address = servers.temporal_address
        self.provider = provider
        self.folder = folder
        self.database = Database(url)
        self.runs: dict[str, UUID] = {}

    async def play(self) -> Aftermath:
        """Plays all points; see the module."""
        await asyncio.to_thread(self.provider.script, {"text": PLAN, "usage": USAGE}, model="planner", times=None)
        pool = pool_of(self.folder, self.provider.base_url, "plain", conductor={"model": "planner"})
        async with Gate(self.url) as gate:
            worker = await self._worker(gate.url, "first")
            try:
                await self._cut_links(gate, pool)
                await self._stop_at_points(gate, pool)
            finally:
                worker.send_signal(signal.SIGKILL)
                await worker.wait()
        successor = await self._worker(self.url, "second")
        try:
            for name in KILLED:
                await ended(self.database, self.runs[name])
        finally:
            successor.send_signal(signal.SIGTERM)
            await successor.wait()
        await self.database.close()
        requests = await asyncio.to_thread(lambda: self.provider.requests)
        ids = [str(request["attempt_id"]) for request in requests]
        return Aftermath(
            {name: await record(self.url, run_id) for name, run_id in self.runs.items()},
            {one: ids.count(one) for one in ids},
        )

    async def _cut_links(self, gate: Gate, pool: Pool) -> None:
        for name, point in CUT.items():
            stop = await self._submit(gate, pool, name, point)
            if stop is None:
                await self._called(name)
                gate.hang_up()
            await ended(self.database, self.runs[name])
            assert stop is None or stop.is_set(), f"nothing happened to the link: {name}"

    async def _stop_at_points(self, gate: Gate, pool: Pool) -> None:
        # The call in flight comes first: no run behind it can use up the rule that makes it slow.
        for name, point in sorted(KILLED.items(), key=lambda one: one[1].write is not None):
            stop = await self._submit(gate, pool, name, point)
            if stop is None:
                await self._called(name)
            else:
                async with asyncio.timeout(20):
                    await stop.wait()

    async def _submit(self, gate: Gate, pool: Pool, name: str, point: Point) -> asyncio.Event | None:
        plan = None if point.planned else PLAN
        submission = Submission(task=f"Point: {name}.", pool=pool, actor_id="tester", plan_text=plan)
        new = prepare(submission)
        self.runs[name] = new.id
        reached = None
        if point.write is not None and point.moment is not None:
            reached = gate.stop_at(new.id, point.write, point.moment, cut=point.cut).reached
        else:
            slow = {"usage": USAGE, "delay_first_s": 1.0 if point.cut else 60.0}
            await asyncio.to_thread(self.provider.script, slow, contains=submission.task, times=1)
        await asyncio.to_thread(self.provider.script, {"usage": USAGE}, contains=submission.task, times=None)
        client = await connect_temporal(TemporalSettings(self.address))
        await submit(self.database, client, submission, prepared=new)
        return reached

    async def _called(self, name: str) -> None:
        async def seen() -> bool:
            kept = await record(self.url, self.runs[name])
            own = {str(row["id"]) for row in kept.attempts}
            requests = await asyncio.to_thread(lambda: self.provider.requests)
            return any(request["attempt_id"] in own for request in requests)

        await until(seen)

    async def _worker(self, url: str, name: str) -> asyncio.subprocess.Process:
        path = self.folder / f"{name}.log"
        with path.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.support.worker_main", url, self.address, "0.2"),
                stdout=log,
                stderr=log,
                env=environment(),
                cwd=CHECKOUT,
            )

        async def ready() -> bool:
            assert process.returncode is None, path.read_text()
            return "ready" in path.read_text()

        await until(ready, timeout_s=30)
        return process


@pytest.fixture(scope="module")
def aftermath(
    servers: TestServers, template_database: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Aftermath]:
    url = servers.new_database(template_database)
    with Provider() as provider:
        yield asyncio.run(_Stage(url, servers, provider, tmp_path_factory.mktemp("points")).play())
    servers.drop_database(url)


@pytest.mark.parametrize("name", POINTS)
def test_only_the_call_in_flight_is_made_again_and_each_call_counts_once(aftermath: Aftermath, name: str) -> None:
    point, kept = POINTS[name], aftermath.records[name]
    attempts = {str(row["id"]): row for row in kept.attempts}
    calls = {one: count for one, count in aftermath.calls.items() if one in attempts}
    assert sum(calls.values()) == point.calls
    assert set(calls.values()) == {1}
    # In the order in which they were made.
    made = sorted(kept.attempts, key=lambda row: row["sent_at"])
    assert [(row["state"], row["cost_usd"]) for row in made] == list(point.attempts)
    assert [row["accepted"] for row in made] == [state == "succeeded" for state, _ in point.attempts]
    # A call was made for every attempt, but for the one whose worker died between Open and the call.
    uncalled = [row["state"] for one, row in attempts.items() if one not in calls]
    assert uncalled == ["unknown"] * (len(point.attempts) - point.calls)


@pytest.mark.parametrize("name", POINTS)
def test_the_run_succeeds_with_exact_totals_and_a_whole_ledger(aftermath: Aftermath, name: str) -> None:
    point, kept = POINTS[name], aftermath.records[name]
    assert (kept.run["state"], kept.steps[0]["state"]) == ("succeeded", "succeeded")
    # What the endpoint answered to the end and the record knows of: once.
    assert kept.run["cost_usd"] == PRICE * point.attempts.count(DONE)
    assert kept.run["attempts_unpriced"] == point.attempts.count(LOST)
    assert kept.run["attempts_count"] == len(point.attempts)
    assert chain_faults(kept.bodies) == []
    states = [entry["data"]["state"] for entry in kept.entries("attempt.closed")]
    assert states == [state for state, _ in point.attempts]
    assert len(kept.entries("attempt.sent")) == len(point.attempts)


def test_no_request_came_without_an_attempt_on_record(aftermath: Aftermath) -> None:
    known = {str(row["id"]) for kept in aftermath.records.values() for row in kept.attempts}
    assert set(aftermath.calls) <= known
    assert sum(aftermath.calls.values()) == sum(point.calls for point in POINTS.values())
