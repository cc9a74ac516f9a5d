"""``kill -9`` with 20 runs in flight, restarted at once: how much longer everything takes than its calls alone."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from uuid import UUID

from benchmarks.gauged_worker import GaugedWorker
from benchmarks.results import Figure
from benchmarks.rig import Services, services
from benchmarks.submitting import Submitter, submitter
from engine.keeper.postgres import PostgresServer
from engine.keeper.temporal import TemporalServer
from engine.store.snapshots import RunSnapshot, read_run
from tests.support.workflows import until

RUNS = 20
CALL_S = 0.5
CHAIN: list[list[int]] = [[], [0], [1], [2], [3]]
# Killed in the middle: some chains are at their second call, some at their third.
CALLS_BEFORE = 30
WAIT_S = 180.0


async def recovery() -> list[Figure]:
    """Nobody, the worker, Temporal and PostgreSQL in turn, each with runs of its own."""
    figures = []
    async with services() as running:
        users = await submitter(running)
        worker = GaugedWorker(running.postgres.url, running.temporal.address, running.key_store)
        await worker.start()

        async def restart_worker() -> None:
            await worker.kill()
            await worker.start()

        async def spare() -> None:
            return

        victims: list[tuple[str, float | None, Callable[[], Awaitable[None]]]] = [
            # What the runs take besides their calls without any kill: the rest is what recovery costs.
            ("nobody", None, spare),
            ("the worker", 5.0, restart_worker),
            ("Temporal", None, lambda: _restart(running.temporal)),
            ("PostgreSQL", None, lambda: _restart(running.postgres)),
        ]
        for name, bound_s, restart in victims:
            figures += await _measure(running, users, name, bound_s, restart)
        await worker.stop()
        await users.database.close()
    return figures


async def _restart(server: TemporalServer | PostgresServer) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    await server.wait()
    await server.start()


async def _measure(
    running: Services, users: Submitter, name: str, bound_s: float | None, restart: Callable[[], Awaitable[None]]
) -> list[Figure]:
    provider = running.provider
    before = await asyncio.to_thread(lambda: provider.count)
    ids = await users.submit(RUNS, f"sleep-{CALL_S * 1000:.0f}ms", CHAIN)

    async def begun() -> bool:
        return await asyncio.to_thread(lambda: provider.count) >= before + CALLS_BEFORE

    await until(begun, timeout_s=WAIT_S)
    killed_at = time.time()
    await restart()
    back_at = time.time()
    await users.until_ended(timeout_s=WAIT_S)
    requests = (await asyncio.to_thread(lambda: provider.requests))[before:]
    first = min((one["started_at"] for one in requests if one["started_at"] > back_at), default=back_at)
    extra_s = await _extra_s(users, ids, killed_at)
    twice = len(requests) - RUNS * len(CHAIN)
    what = f"{RUNS} chains of {len(CHAIN)} calls of {CALL_S} s; it was back after {back_at - killed_at:.1f} s"
    return [
        Figure(f"{name} killed: all done", extra_s, "s + calls", bound_s, at_least=False, detail=what),
        Figure(
            f"{name} killed: next call", first - killed_at, "s", None, at_least=False, detail="from the kill to a call"
        ),
        # Only what was in flight may be called again: one call of each run.
        Figure(f"{name} killed: calls twice", twice, "calls", RUNS, at_least=False, detail=f"{RUNS} were in flight"),
    ]


async def _extra_s(users: Submitter, ids: Sequence[UUID], killed_at: float) -> float:
    """How long after the kill the last run ended, without the time of the calls that each had still before it."""
    return max([_excess(await _snapshot(users, run_id), killed_at) for run_id in ids])


def _excess(run: RunSnapshot, killed_at: float) -> float:
    assert run.ended_at is not None
    assert run.state == "succeeded", (run.state, run.reason)
    ends = [attempt.ended_at for step in run.steps for attempt in step.attempts if attempt.state == "succeeded"]
    left = sum(end is None or end.timestamp() > killed_at for end in ends)
    return run.ended_at.timestamp() - killed_at - left * CALL_S


async def _snapshot(users: Submitter, run_id: UUID) -> RunSnapshot:
    run = await read_run(users.database, run_id)
    assert run is not None
    return run
