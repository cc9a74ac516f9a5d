"""What the ledger costs: appends a second beside plain inserts, and a step with and without it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any
from unittest.mock import patch
from uuid import UUID, uuid4

import psycopg

from benchmarks.execution import CHAIN
from benchmarks.results import Figure
from benchmarks.rig import Rig, median, rig, services
from engine.ledger.entry import GENESIS, EntryPlace, Event, entry_bytes, entry_hash
from engine.store.database import Database
from engine.store.log import extend_log
from engine.store.roles import OWNER, WRITER
from engine.store.run_writer import RunWriter

WRITERS = 32
SLICE_S = 3.0
SLICES = 4
STEP_ROUNDS = 15
STEP_WARM_UP = 3
# About what an attempt's entry says.
FIELDS = {
    "attempt": str(UUID(int=7)),
    "round": 0,
    "step": 3,
    "state": "succeeded",
    "notes": [],
    "accepted": True,
    "input_tokens": 1234,
    "output_tokens": 567,
    "cost_usd": "0.0012345",
    "artifacts": [{"artifact": str(UUID(int=8)), "kind": "output", "bytes": 4321, "commitment": "0" * 64}],
    "moved": {"state": "succeeded", "reason": None, "old": "running"},
}
# The ledger's columns and key, and nothing that checks, chains or queues.
_PLAIN_TABLE = f"""
    SET ROLE {OWNER};
    CREATE TABLE bench_plain (run_id uuid, seq bigint, tenant_id uuid NOT NULL, prev bytea NOT NULL,
                              hash bytea NOT NULL, body bytea NOT NULL, type text NOT NULL, at timestamptz NOT NULL,
                              PRIMARY KEY (run_id, seq), UNIQUE (run_id, hash));
    GRANT INSERT ON bench_plain TO {WRITER};
"""
_PLAIN = "INSERT INTO bench_plain VALUES (%s, %s, %s, %s, %s, %s, %s, %s)"
_HEAD = "INSERT INTO ledger_heads (run_id, seq, hash) VALUES (%s, 0, %s)"
_APPEND = "SELECT ledger_append(%s, %s, %s, %s)"
_NOW = "SELECT clock_timestamp()"
Link = psycopg.AsyncConnection[tuple[Any, ...]]


class _Writer:
    """One chain, which grows by an entry a transaction; both kinds of writing build and hash the same bytes."""

    def __init__(self, link: Link, run_id: UUID) -> None:
        self._link = link
        self._run_id = run_id
        self._at: Any = None
        self._seq = 0
        self._prev = GENESIS

    async def begin(self, *, chained: bool) -> None:
        """A chain of its own. A run is not needed: its id is its tenant's, as for a system chain."""
        (self._at,) = await (await self._link.execute(_NOW)).fetchone() or (None,)
        if chained:
            await self._link.execute(_HEAD, (self._run_id, GENESIS))

    def _next(self) -> bytes:
        self._seq += 1
        place = EntryPlace(self._run_id, self._run_id, self._seq, self._prev)
        return entry_bytes(place, Event("attempt.closed", "podium-engine", "benchmark", FIELDS), self._at)

    async def append(self) -> None:
        """An entry through the function that all of Podium appends with."""
        seq, prev = self._seq, self._prev
        body = self._next()
        await self._link.execute(_APPEND, (self._run_id, seq, prev, [body]))
        self._prev = entry_hash(body)

    async def insert(self) -> None:
        """The same entry as a row of a table."""
        prev = self._prev
        body = self._next()
        self._prev = entry_hash(body)
        row = (self._run_id, self._seq, self._run_id, prev, self._prev, body, "attempt.closed", self._at)
        await self._link.execute(_PLAIN, row)


async def appends() -> list[Figure]:
    """32 writers, each with a chain, an entry a transaction, the sequencer at work beside them."""
    async with services() as running:
        url = running.postgres.url.replace("postgresql+psycopg://", "postgresql://")
        admin = running.postgres.migration_url.replace("postgresql+psycopg://", "postgresql://")
        async with await psycopg.AsyncConnection.connect(admin, autocommit=True) as link:
            await link.execute(_PLAIN_TABLE.encode())
        rates: dict[bool, list[float]] = {True: [], False: []}
        async with _links(url) as links, _sequencing(running.postgres.url):
            for number in range(SLICES):
                for chained in (True, False):
                    rate = await _rate(links, chained=chained)
                    if number:
                        rates[chained].append(rate)
    ours, plain = median(rates[True]), median(rates[False])
    return [
        Figure(
            "ledger appends, 32 writers",
            ours / plain,
            "x plain",
            0.5,
            at_least=True,
            detail=f"{ours:.0f} against {plain:.0f} a second, sequencer included",
        )
    ]


async def ledger_step() -> list[Figure]:
    """A chain of three at zero model latency, with the ledger and with an append that does nothing."""
    async with rig("plain") as one:
        texts = [f"Do {number}." for number in range(len(CHAIN))]

        async def run() -> float:
            return (await one.podium(one.pool, CHAIN, texts))[0]

        with_ledger, without = await _alternating(one, run)
    return [
        Figure(
            "step with the whole ledger",
            with_ledger / without,
            "x without",
            1.15,
            at_least=False,
            detail=f"chain of 3: {with_ledger * 1000:.1f} ms against {without * 1000:.1f} ms",
        )
    ]


async def _alternating(one: Rig, run: Callable[[], Awaitable[float]]) -> tuple[float, float]:
    del one
    samples: dict[bool, list[float]] = {True: [], False: []}
    for number in range(STEP_ROUNDS + STEP_WARM_UP):
        # In turns that change places, so that neither always comes second.
        for on in (True, False) if number % 2 else (False, True):
            with contextlib.nullcontext() if on else _no_ledger():
                taken_s = await run()
            if number >= STEP_WARM_UP:
                samples[on].append(taken_s)
    return median(samples[True]), median(samples[False])


@contextlib.contextmanager
def _no_ledger() -> Iterator[None]:
    """For this benchmark only: entries are neither made nor written, and all else stays."""
    with patch.object(RunWriter, "entry", lambda *_arguments, **_fields: None):
        yield


async def _rate(links: list[Link], *, chained: bool) -> float:
    """Entries a second that all writers together bring to disk."""
    writers = [_Writer(link, uuid4()) for link in links]
    await asyncio.gather(*(writer.begin(chained=chained) for writer in writers))
    started = time.perf_counter()

    async def write(writer: _Writer) -> int:
        count = 0
        while time.perf_counter() - started < SLICE_S:
            await (writer.append() if chained else writer.insert())
            count += 1
        return count

    counts = await asyncio.gather(*(write(writer) for writer in writers))
    return sum(counts) / (time.perf_counter() - started)


@contextlib.asynccontextmanager
async def _links(url: str) -> AsyncIterator[list[Link]]:
    async with contextlib.AsyncExitStack() as stack:
        links = []
        for _ in range(WRITERS):
            link = await psycopg.AsyncConnection.connect(url, autocommit=True)
            links.append(await stack.enter_async_context(link))
        yield links


@contextlib.asynccontextmanager
async def _sequencing(url: str) -> AsyncIterator[None]:
    """The sequencer at its usual pace."""
    database = Database(url, pool_size=2)

    async def sequence() -> None:
        while True:
            await extend_log(database)
            await asyncio.sleep(1.0)

    task = asyncio.create_task(sequence())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await database.close()
