"""A worker process for tests that kill one: `python -m tests.support.worker_main DATABASE_URL TEMPORAL GRACE_S [QUEUE]`.

Prints `ready` when it polls; SIGTERM stops it in order.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from engine.settings import TemporalSettings
from worker_pools.process import WorkerOptions, WorkerProcess
from worker_pools.secrets import SecretStore


async def main(database_url: str, address: str, grace_s: float, queue: str = "stand-in") -> None:
    options = WorkerOptions(database_url, TemporalSettings(address), queues=(queue,), grace_s=grace_s)
    process = WorkerProcess(options, SecretStore({}))
    await process.start()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, process.stop)
    print("ready", flush=True)
    await process.run()
    print("stopped", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3]), *sys.argv[4:]))
    # A process that used Temporal's SDK sometimes aborts when the interpreter shuts down.
    os._exit(0)
