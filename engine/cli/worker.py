"""`podium worker`: a worker process for servers of one's own, until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from typing import TYPE_CHECKING

import click

from engine.cli import terminal
from engine.errors import ExitCode, InputError

if TYPE_CHECKING:
    from engine.settings import Settings
    from worker_pools.process import WorkerProcess


@click.command()
@click.option("--pool", "pool_names", multiple=True, metavar="NAME|FILE", help="Serve this pool's queues; repeatable.")
@click.option("--all-queues", is_flag=True, help="Serve the queues of all live runs (the default without --pool).")
def worker(pool_names: tuple[str, ...], all_queues: bool) -> int:
    """Work for the servers that PODIUM_DATABASE_URL and PODIUM_TEMPORAL_ADDRESS name.

    SIGTERM and Ctrl-C let calls in flight finish for some seconds; a second Ctrl-C ends at once. Keys come from the
    environment of this process.
    """
    from engine.cli.session import run_async
    from engine.settings import load_settings
    from worker_pools.pool import load_pool
    from worker_pools.pool_check import missing_keys

    settings = load_settings()
    if settings.embedded:
        raise InputError(
            "worker-needs-servers",
            "a worker needs servers of your own; the embedded ones have theirs",
            hint="set PODIUM_DATABASE_URL and PODIUM_TEMPORAL_ADDRESS, or use `podium up`",
        )
    settings.key_store_url()
    pools = [load_pool(name) for name in pool_names]
    for pool in pools:
        for finding in missing_keys(pool, os.environ):
            terminal.err(f"warning: {terminal.inert(finding.text)}; its steps will wait for it")
    queues = sorted({queue for pool in pools for queue in pool.queues})
    run_async(_work(settings, tuple(queues), all_queues=all_queues or not pools))
    return ExitCode.OK


async def _work(settings: Settings, queues: tuple[str, ...], *, all_queues: bool) -> None:
    from engine.signing import AuditSettings
    from engine.store.schema import require_current_schema
    from worker_pools.process import WorkerOptions, WorkerProcess
    from worker_pools.secrets import SecretStore

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    assert settings.database_url is not None
    assert settings.temporal is not None
    await asyncio.to_thread(require_current_schema, settings.database_url)
    options = WorkerOptions(
        database_url=settings.database_url,
        temporal=settings.temporal,
        queues=queues,
        all_queues=all_queues,
        key_store=settings.key_store_url(),
        retention_days=settings.retention_days,
        audit=AuditSettings.of(settings),
    )
    process = WorkerProcess(options, SecretStore())
    await process.start()
    _stop_on_signals(process)
    served = ", ".join(queues) or "none of a pool"
    more = ", and those of all live runs" if all_queues else ""
    terminal.err(f"worker {process.identity.id} is ready; queues: {served}{more}")
    await process.run()
    terminal.err("worker stopped")


def _stop_on_signals(process: WorkerProcess) -> None:
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        # From now on the kernel answers: nothing that hangs in here can keep the user. Said only once it is true.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        terminal.err("stopping: calls in flight may finish; Ctrl-C again ends at once")
        process.stop()

    loop.add_signal_handler(signal.SIGINT, interrupted)
    loop.add_signal_handler(signal.SIGTERM, process.stop)
