"""A worker process that also says how it is: `python -m benchmarks.gauged_worker DATABASE_URL TEMPORAL_ADDRESS KEYS`.

Prints ``ready``, then a line of JSON a second: the longest that its event loop has stood still since it was ready, the
longest that it was busy meanwhile (on a machine with other work the rest is waiting for a processor), and the most
memory that it has had. It is the product's worker with the product's settings; only the gauge is added.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
import time
from dataclasses import dataclass, field

from engine.settings import TemporalSettings
from worker_pools.process import WorkerOptions, WorkerProcess
from worker_pools.secrets import SecretStore

SAMPLE_EVERY_S = 0.01
SAY_EVERY_S = 1.0


@dataclass(slots=True)
class GaugedWorker:
    """The other side: such a process as a child, and the last gauges that it told."""

    database_url: str
    temporal_address: str
    key_store: str
    gauges: dict[str, float] = field(default_factory=dict)
    _process: asyncio.subprocess.Process | None = None
    _reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when the worker polls."""
        places = (self.database_url, self.temporal_address, self.key_store)
        command = (sys.executable, "-m", "benchmarks.gauged_worker", *places)
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if line.strip() != b"ready":
            raise RuntimeError("the worker did not start")
        self._reader = asyncio.create_task(self._read(self._process.stdout))

    async def kill(self) -> None:
        """SIGKILL; returns when it is dead."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> None:
        """Ends it in order."""
        await self._end(signal.SIGTERM)

    async def _end(self, number: signal.Signals) -> None:
        assert self._process is not None
        assert self._reader is not None
        self._process.send_signal(number)
        await self._process.wait()
        await self._reader

    async def _read(self, output: asyncio.StreamReader) -> None:
        while line := await output.readline():
            self.gauges.update(json.loads(line))


async def _gauge() -> None:
    lag_max_s = busy_max_s = 0.0
    say_at = time.perf_counter() + SAY_EVERY_S
    while True:
        before, busy_before = time.perf_counter(), time.thread_time()
        await asyncio.sleep(SAMPLE_EVERY_S)
        now = time.perf_counter()
        lag_max_s = max(lag_max_s, now - before - SAMPLE_EVERY_S)
        busy_max_s = max(busy_max_s, time.thread_time() - busy_before)
        if now >= say_at:
            say_at = now + SAY_EVERY_S
            # Linux counts in KiB.
            peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            gauges = {"lag_max_s": lag_max_s, "busy_max_s": busy_max_s, "peak_bytes": peak_bytes}
            print(json.dumps(gauges), flush=True)


async def _main(database_url: str, address: str, key_store: str) -> None:
    temporal = TemporalSettings(address)
    options = WorkerOptions(database_url, temporal, queues=("bench",), grace_s=1.0, key_store=key_store)
    process = WorkerProcess(options, SecretStore({}))
    await process.start()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, process.stop)
    # Its end comes when the benchmark is gone, however that ended.
    loop.add_reader(sys.stdin.fileno(), lambda: os._exit(1))
    print("ready", flush=True)
    gauging = asyncio.create_task(_gauge())
    await process.run()
    gauging.cancel()


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:4]))
    # A process that used Temporal's SDK may abort while the interpreter shuts down, so it does not.
    os._exit(0)
