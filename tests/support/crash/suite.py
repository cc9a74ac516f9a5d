"""One run of the crash suite: submit, strike, let things settle, judge."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Final
from uuid import UUID

from sqlalchemy import func, select
from temporalio.client import Client

from engine.errors import UnavailableError
from engine.keystore import open_keyring
from engine.service import Submission, submit
from engine.settings import TemporalSettings
from engine.store.database import Database
from engine.store.states import RUN_LIVE
from engine.store.tables import Run
from engine.temporal_client import connect_temporal
from tests.support.crash import endpoint
from tests.support.crash.books import Books, Fault, read_books
from tests.support.crash.fleet import VICTIMS, Fleet, Victim
from tests.support.crash.invariants import find_faults, summary
from tests.support.crash.orders import Give
from tests.support.crash.record import describe_runs
from tests.support.crash.shapes import SHAPES, Shape, load_pools
from tests.support.provider import Provider
from worker_pools.pool import Pool

# Every kind of process alone, and every pair: one deck. Decks are shuffled, so even a short test has them all.
DECK: Final[tuple[tuple[Victim, ...], ...]] = (*((one,) for one in VICTIMS), *combinations(VICTIMS, 2))
SUBMITTERS: Final = 4
# A blow falls when so many calls have begun since the last one, so that something is in flight; or after so long.
CALLS_BETWEEN: Final = 4
QUIET_MAX_S: Final = 15.0
LOOK_EVERY_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class CrashTest:
    """How much is done. ``runs`` are in flight at a time; with ``top_up`` new ones follow those that end."""

    seed: int
    kills: int
    runs: int
    workers: int = 3
    top_up: bool = False
    pause_max_s: float = 2.0
    settle_s: float = 180.0
    say: Callable[[str], None] = print


@dataclass(slots=True)
class Verdict:
    """What came of it: ``faults`` is empty if every promise was kept; ``report`` is for people."""

    books: Books
    requests: list[endpoint.Request]
    submitted: dict[UUID, Shape]
    faults: list[Fault]
    report: str


@dataclass(slots=True)
class _Field:
    """Everything that one test shares."""

    test: CrashTest
    fleet: Fleet
    database: Database
    client: Client
    pools: dict[str, Pool]
    chance: random.Random
    submitted: dict[UUID, Shape] = field(default_factory=dict)
    started_at: float = field(default_factory=time.monotonic)
    numbered: int = 0
    struck_out: bool = False

    def say(self, text: str) -> None:
        self.test.say(f"{time.monotonic() - self.started_at:7.1f} s  {text}")


async def crash(test: CrashTest) -> Verdict:
    """Runs the suite once."""
    # One stream of chance for each part, so that what one does cannot shift the others.
    deal, restart = random.Random(test.seed), random.Random(test.seed + 1)
    with tempfile.TemporaryDirectory(prefix="podium-crash-") as name, Provider(bodies=False) as provider:
        endpoint.script(provider)
        async with Fleet(Path(name), workers=test.workers, chance=restart) as fleet:
            await fleet.ready()
            place = _Field(
                test=test,
                fleet=fleet,
                database=Database(fleet.postgres.url, keys=open_keyring(fleet.key_store)),
                client=await connect_temporal(TemporalSettings(fleet.temporal.address)),
                pools=load_pools(Path(name), provider.base_url),
                chance=deal,
            )
            place.say(f"seed {test.seed}: {test.workers} workers are ready; runs in flight: {test.runs}")
            async with asyncio.TaskGroup() as tasks:
                for _ in range(SUBMITTERS):
                    tasks.create_task(_keep_in_flight(place, tasks))
                tasks.create_task(_strike(place, provider))
            place.say(f"{fleet.kills} processes were killed; {len(place.submitted)} runs were submitted")
            await _until_ended(place)
            books = await read_books(fleet.postgres.url)
            requests = await asyncio.to_thread(endpoint.requests_of, provider)
            faults = find_faults(books, requests, place.submitted)
            faults += [Fault(None, f"a worker says: {line}") for line in bugs(fleet.worker_log())]
            place.say("judged")
            report = [summary(books, requests), *_own_ends(fleet)]
            if faults:
                report += [f"FAULT {fault.run_id or ''}: {fault.text}" for fault in faults]
                report += await describe_runs(place.client, books, requests, faults)
                report += ["---- the end of the workers' log", fleet.worker_log()[-20_000:]]
            await place.database.close()
    return Verdict(books, requests, place.submitted, faults, "\n".join(report))


async def _keep_in_flight(place: _Field, tasks: asyncio.TaskGroup) -> None:
    """One of several submitters, which together keep runs in flight."""
    test = place.test
    while (test.top_up and not place.struck_out) or place.numbered < test.runs:
        if place.numbered >= test.runs and await _live(place) >= test.runs:
            await asyncio.sleep(0.3)
            continue
        number = place.numbered
        place.numbered += 1
        shape = SHAPES[number % len(SHAPES)]
        run_id = await _submit(place, number, shape)
        place.submitted[run_id] = shape
        if shape.order is not None:
            tasks.create_task(_order(place, shape, shape.order, run_id))


async def _order(place: _Field, shape: Shape, give: Give, run_id: UUID) -> None:
    """Lets people do to the run what its shape says; a run that comes of it is one that was asked for."""
    made = await give(place.database, place.client, run_id)
    if made is not None:
        assert shape.becomes is not None
        place.submitted[made] = shape.becomes


async def _submit(place: _Field, number: int, shape: Shape) -> UUID:
    """The run's id; a submission that got no answer is repeated with the same idempotency key."""
    submission = Submission(
        task=shape.task,
        pool=place.pools[shape.pool],
        actor_id="crash-suite",
        plan_text=shape.plan_text,
        idempotency_key=f"crash-{number}",
    )
    while True:
        try:
            return (await submit(place.database, place.client, submission)).id
        except UnavailableError:
            await asyncio.sleep(0.2)


async def _strike(place: _Field, provider: Provider) -> None:
    """Kills one hand of the deck after the other, each time when calls have begun since the last."""
    deck: list[tuple[Victim, ...]] = []
    while place.fleet.kills < place.test.kills:
        await _until_calls_begin(provider)
        await asyncio.sleep(place.chance.uniform(0, place.test.pause_max_s))
        if not deck:
            deck = place.chance.sample(DECK, len(DECK))
        hit = place.fleet.kill(deck.pop())
        if hit:
            place.say(f"killed {' and '.join(hit)}")
    place.struck_out = True


async def _until_calls_begin(provider: Provider) -> None:
    def count() -> int:
        return provider.count

    wanted = await asyncio.to_thread(count) + CALLS_BETWEEN
    for _ in range(int(QUIET_MAX_S / LOOK_EVERY_S)):
        await asyncio.sleep(LOOK_EVERY_S)
        if await asyncio.to_thread(count) >= wanted:
            return


async def _until_ended(place: _Field) -> None:
    for _ in range(int(place.test.settle_s / LOOK_EVERY_S)):
        if not await _live(place):
            place.say("all runs have ended")
            return
        await asyncio.sleep(LOOK_EVERY_S)
    place.say(f"{await _live(place)} runs have not ended after {place.test.settle_s:.0f} s")


async def _live(place: _Field) -> int:
    while True:
        try:
            async with place.database.read() as connection:
                return await connection.scalar(select(func.count()).where(Run.state.in_(RUN_LIVE))) or 0
        except UnavailableError:
            await asyncio.sleep(0.2)


def bugs(log: str) -> list[str]:
    """Lines of the workers' log that tell of an error which the code did not foresee."""
    return [line for line in log.splitlines() if "failed with a bug" in line or "could not be reconciled" in line]


def _own_ends(fleet: Fleet) -> list[str]:
    ends = [f"worker {slot.number} ended by itself: {slot.own_ends}" for slot in fleet.slots if slot.own_ends]
    return [*ends, *(f"did not come back at once: {text}" for text in fleet.revival_failures)]
