"""Time: a step's overhead, a graph against its critical path, runs a second. Each beside raw Temporal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

from benchmarks.results import Figure
from benchmarks.rig import Rig, median, rig
from engine.graph import PlanGraph

ROUNDS = 15
WARM_UP = 3
CHAIN = [[], [0], [1]]
DAG: list[list[int]] = [[], [], [], [0, 1, 2], [3]]
DAG_CALL_S = 0.3
CONCURRENCY = 50


async def step_overhead() -> list[Figure]:
    """A chain of three at zero model latency."""
    async with rig("plain") as one:
        ours, raw = await _alternate(one, CHAIN, ROUNDS, partial(_podium, one))
    return [
        Figure(
            "step at zero latency",
            ours / raw,
            "x raw",
            1.5,
            at_least=False,
            detail=f"chain of 3: {ours * 1000:.0f} ms against {raw * 1000:.0f} ms",
        )
    ]


async def dag() -> list[Figure]:
    """The graph of the issue: three at once, one that reads them, one that reads that."""
    async with rig("sleep-300ms") as one:
        ours, raw = await _alternate(one, DAG, ROUNDS, one.answered_s)
    path_s = PlanGraph.of(DAG).critical_path(dict.fromkeys(range(len(DAG)), DAG_CALL_S)).duration_s
    return [
        Figure(
            "DAG of 300 ms calls",
            ours / path_s,
            "x path",
            1.15,
            at_least=False,
            detail=f"on record after {ours * 1000:.0f} of {path_s * 1000:.0f} ms; raw Temporal {raw / path_s:.3f} x",
        )
    ]


async def throughput() -> list[Figure]:
    """Chains of three, 50 ms a call, 50 at a time."""
    async with rig("sleep-50ms") as one:
        texts = _subtasks(CHAIN)
        rates: dict[str, list[float]] = {"ours": [], "raw": []}
        for number in range(4):
            raw_s = await _many(CONCURRENCY * 2, lambda: one.raw(CHAIN, texts))
            ours_s = await _many(CONCURRENCY * 2, lambda: _podium(one, CHAIN, texts))
            if number:
                rates["raw"].append(CONCURRENCY * 2 / raw_s)
                rates["ours"].append(CONCURRENCY * 2 / ours_s)
    ours, raw = median(rates["ours"]), median(rates["raw"])
    return [
        Figure(
            "runs a second, 50 at a time",
            ours / raw,
            "x raw",
            0.7,
            at_least=True,
            detail=f"{ours:.1f} against {raw:.1f} runs a second",
        )
    ]


Timed = Callable[[list[list[int]], list[str]], Awaitable[float]]


async def _alternate(one: Rig, reads: list[list[int]], rounds: int, podium: Timed) -> tuple[float, float]:
    texts = _subtasks(reads)
    ours: list[float] = []
    raw: list[float] = []
    for number in range(WARM_UP + rounds):
        raw_s = await one.raw(reads, texts)
        ours_s = await podium(reads, texts)
        if number >= WARM_UP:
            raw.append(raw_s)
            ours.append(ours_s)
    return median(ours), median(raw)


async def _podium(one: Rig, reads: list[list[int]], texts: list[str]) -> float:
    duration_s, _ = await one.podium(one.pool, reads, texts)
    return duration_s


async def _many(count: int, work: object) -> float:
    gate = asyncio.Semaphore(CONCURRENCY)

    async def limited() -> None:
        async with gate:
            await work()  # type: ignore[operator]  # a coroutine function without arguments

    started = time.perf_counter()
    await asyncio.gather(*(limited() for _ in range(count)))
    return time.perf_counter() - started


def _subtasks(reads: list[list[int]]) -> list[str]:
    return [f"Do part {position}." for position in range(len(reads))]
