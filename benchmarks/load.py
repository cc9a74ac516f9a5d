"""A thousand runs in flight in one worker process: its memory, its event loop, and whether a call was made twice."""

from __future__ import annotations

import asyncio
import time

from benchmarks.gauged_worker import GaugedWorker
from benchmarks.results import Figure
from benchmarks.rig import Services, services
from benchmarks.submitting import submitter
from tests.support.workflows import until

RUNS = 1000
# All of them shall be in flight together for so long; taking them up takes its time, so a call lasts longer.
TOGETHER_S = 30
CALL_S = TOGETHER_S + 90
WAIT_S = 900.0


async def load() -> list[Figure]:
    """The runs wait when the worker starts, so that it takes them up as fast as it can."""
    async with services() as running:
        users = await submitter(running)
        await users.submit(RUNS, f"sleep-{CALL_S * 1000}ms", [[]])
        worker = GaugedWorker(running.postgres.url, running.temporal.address, running.key_store)
        await worker.start()
        began_at = time.perf_counter()
        await until(lambda: _reached(running), timeout_s=WAIT_S)
        ramp_s = time.perf_counter() - began_at
        await users.until_ended(timeout_s=WAIT_S)
        # Its gauges are a second old at most.
        await asyncio.sleep(1.5)
        stats = await asyncio.to_thread(lambda: running.provider.stats)
        gauges = worker.gauges
        await worker.stop()
        await users.database.close()
    what = f"{RUNS:,} runs, calls of {CALL_S} s, one worker"
    together = f"{what}; taken up in {ramp_s:.0f} s, so together for {max(CALL_S - ramp_s, 0):.0f} s"
    busy = f"{what}; its own work was {gauges['busy_max_s']:.2f} s of that"
    return [
        Figure("calls in flight at once", stats["in_flight_max"], "calls", RUNS, at_least=True, detail=together),
        Figure("memory, peak", gauges["peak_bytes"] / 1e6, "MB", 700, at_least=False, detail=what),
        Figure("event loop stood still, longest", gauges["lag_max_s"], "s", 1.0, at_least=False, detail=busy),
        Figure("calls made twice", stats["requests"] - RUNS, "calls", 0, at_least=False, detail=what),
    ]


async def _reached(running: Services) -> bool:
    """Whether all calls have begun."""
    return await asyncio.to_thread(lambda: running.provider.count) >= RUNS
