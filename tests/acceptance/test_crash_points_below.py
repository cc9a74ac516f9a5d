"""A worker process is killed at each point of a step that is a run of its own, and between rounds.

One run for each point, as in test_crash_points: whatever was interrupted, there is one child, each of its answers is
paid once, and the run ends as if nothing had happened.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from engine.service import Submission, prepare, submit
from engine.settings import TemporalSettings
from engine.store.database import Database
from engine.temporal_client import connect_temporal
from tests.support.gate import Gate, Moment, Write
from tests.support.nested import CHAIN, KEEP, PLANNER, check_family, recursive_pool
from tests.support.provider import Provider
from tests.support.runs import ended, lists_plan
from tests.support.servers import TestServers
from tests.support.stored import record, rows
from tests.support.workers import Workers
from tests.support.workflows import until

pytestmark = pytest.mark.slow

SPLIT = lists_plan(["Split it.", "Conclude."], [[], [0]], [1, 0])
ONE = lists_plan(["Answer."], [[]], [0])
MEND = lists_plan(["Mend it."], ["all"], [0])


@dataclass(frozen=True, slots=True)
class Point:
    """Where a run is interrupted. ``calls`` is how often models are called in all, planning calls included.

    With ``rounds`` it is a run of two rounds, else one with a child. Without ``write`` it is interrupted in a call.
    """

    write: Write | None
    moment: Moment | None
    calls: int = 4
    cut: bool = False
    rounds: bool = False


KILLED = {
    "during a call of the child": Point(None, None, calls=5),
    "during a call of a later round": Point(None, None, calls=4, rounds=True),
    "before the child is on record": Point("begin", "before-commit"),
    "after the child is on record, before its start": Point("begin", "after-commit"),
    "before its answer is taken over": Point("finish", "before-commit"),
    "after its answer is taken over, before the report": Point("finish", "after-commit"),
    "before a later round is on record": Point("round", "before-commit", calls=2, rounds=True),
    "after a later round is on record, before its call": Point("round", "after-commit", calls=2, rounds=True),
}
CUT = {
    "the link dies before the child is on record": Point("begin", "before-commit", cut=True),
    "the link dies between that commit and its answer": Point("begin", "after-commit", cut=True),
    "the link dies before its answer is taken over": Point("finish", "before-commit", cut=True),
    "the link dies between taking over and its answer": Point("finish", "after-commit", cut=True),
}
POINTS = {**KILLED, **CUT}


@dataclass(frozen=True, slots=True)
class Aftermath:
    """The database, the run of each point, and the ids under which the endpoint was called."""

    url: str
    runs: dict[str, UUID]
    called: list[str]


class _Stage:
    def __init__(self, url: str, servers: TestServers, provider: Provider, folder: Path) -> None:
        self.url, self.address = url, servers.temporal_address
        self.provider = provider
        self.folder = folder
        self.database = Database(url)
        self.runs: dict[str, UUID] = {}

    async def play(self) -> Aftermath:
        with Workers(self.url, self.address, self.folder) as workers:
            async with Gate(self.url) as gate:
                first = await asyncio.to_thread(self._worker, workers, gate.url)
                for name, point in CUT.items():
                    reached = await self._submit(gate, name, point)
                    await ended(self.database, self.runs[name])
                    assert reached is not None
                    assert reached.is_set(), name
                for name, point in KILLED.items():
                    reached = await self._submit(gate, name, point)
                    async with asyncio.timeout(20):
                        await (self._called(name) if reached is None else reached.wait())
                await asyncio.to_thread(first.end, signal.SIGKILL)
            second = await asyncio.to_thread(self._worker, workers, self.url)
            for name in KILLED:
                await ended(self.database, self.runs[name], timeout_s=60)
            await asyncio.to_thread(second.end)
        await self.database.close()
        requests = await asyncio.to_thread(lambda: self.provider.requests)
        return Aftermath(self.url, self.runs, [str(request["attempt_id"]) for request in requests])

    def _worker(self, workers: Workers, url: str) -> Any:
        workers.database_url = url
        worker = workers.start()
        worker.says("ready")
        return worker

    async def _submit(self, gate: Gate, name: str, point: Point) -> asyncio.Event | None:
        # Pools differ by their policy, and a folder holds one.
        folder = self.folder / ("rounds" if point.rounds else "children")
        folder.mkdir(exist_ok=True)
        pool = recursive_pool(folder, self.provider, policy={"rounds_max": 2 if point.rounds else 1})
        submission = Submission(
            task=f"Point: {name}.", pool=pool, actor_id="tester", plan_text=ONE if point.rounds else SPLIT
        )
        new = prepare(submission)
        self.runs[name] = new.id
        revised = KEEP if point.write else MEND
        plan = {"text": revised if point.rounds else CHAIN}
        await asyncio.to_thread(self.provider.script, plan, model=PLANNER, contains=submission.task, times=None)
        reached = None
        if point.write is not None and point.moment is not None:
            reached = gate.stop_at(new.id, point.write, point.moment, cut=point.cut).reached
        else:
            slow, subtask = {"delay_first_s": 60.0}, "Mend it." if point.rounds else "Look at one side."
            await asyncio.to_thread(self.provider.script, slow, model="plain", contains=subtask, times=1)
        client = await connect_temporal(TemporalSettings(self.address))
        await submit(self.database, client, submission, prepared=new)
        return reached

    async def _called(self, name: str) -> None:
        query = """
            SELECT attempts.id FROM attempts JOIN runs ON runs.id = attempts.run_id
            WHERE attempts.position = 0 AND (runs.parent_run_id = %s OR (runs.id = %s AND attempts.round = 1))
        """

        async def seen() -> bool:
            own = {str(row["id"]) for row in await rows(self.url, query, self.runs[name], self.runs[name])}
            requests = await asyncio.to_thread(lambda: self.provider.requests)
            return any(request["attempt_id"] in own for request in requests)

        await until(seen)


@pytest.fixture(scope="module")
def aftermath(
    servers: TestServers, template_database: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Aftermath]:
    url = servers.new_database(template_database)
    with Provider() as provider:
        yield asyncio.run(_Stage(url, servers, provider, tmp_path_factory.mktemp("below")).play())
    servers.drop_database(url)


@pytest.mark.parametrize("name", POINTS)
async def test_there_is_one_child_and_each_of_its_answers_is_paid_once(aftermath: Aftermath, name: str) -> None:
    point, run_id = POINTS[name], aftermath.runs[name]
    database = Database(aftermath.url)
    family = await check_family(database, run_id)
    await database.close()
    assert [run["state"] for run in family] == ["succeeded"] * (1 if point.rounds else 2)
    records = [await record(aftermath.url, run["id"]) for run in family]
    attempts = {str(row["id"]): row for kept in records for row in kept.attempts}
    called = [one for one in aftermath.called if one in attempts]
    assert len(called) == len(set(called)) == point.calls
    lost = [row for row in attempts.values() if row["state"] != "succeeded"]
    assert {row["state"] for row in lost} <= {"unknown"}
    # The call in flight when the worker died, or an attempt that was written down and never made.
    in_call = point.write is None
    assert len([row for row in lost if str(row["id"]) in called]) == in_call
    assert len(lost) == (in_call or name == "after a later round is on record, before its call")
    if not point.rounds:
        assert len(records[0].entries("child.ended")) == 1
        assert family[1]["execution"] == 1
