"""One call that drips, names that nobody resolves, and many calls beside them (G3-12): nobody else is held up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.provider import Provider
from tests.support.runs import ended, lists_plan, submit_plan, worker_process
from tests.support.servers import TestServers
from tests.support.stored import rows
from tests.support.workflows import pool_of, provider_reaches

# Longer than the timeout for heartbeats: whoever cannot beat for so long is called again.
BLOCKED_S = 12
ORDINARY = 19
# More than the threads that asyncio has by default on any machine, so that they are all taken.
NAMELESS = min(32, (os.cpu_count() or 1) + 4) + 2
LAG_MAX_S = 1.0


@contextlib.asynccontextmanager
async def lag_watched() -> AsyncIterator[list[float]]:
    """How late the event loop was, in seconds, each twentieth of a second."""
    found: list[float] = []

    async def watch() -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.05)
            found.append(time.monotonic() - began - 0.05)

    task = asyncio.create_task(watch())
    try:
        yield found
    finally:
        task.cancel()


@pytest.mark.slow
async def test_a_call_that_drips_holds_up_none_of_nineteen_others(
    servers: TestServers, database_url: str, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"text": "A slow answer.", "pieces": 2 * BLOCKED_S, "delay_piece_s": 0.5}, model="drips")
    long = {"timeouts": {"call_s": 60, "first_token_s": 40, "idle_s": 20}}
    pool = pool_of(
        tmp_path, provider.base_url, "drips", f"sleep-{BLOCKED_S}000ms", worker=long, policy={"steps_max": 20}
    )
    plan = lists_plan(["Go."] * (ORDINARY + 1), [[]] * (ORDINARY + 1), [0] + [1] * ORDINARY)
    async with worker_process(database_url, servers.temporal_address) as process, lag_watched() as lags:
        began = time.monotonic()
        run = await ended(process.database, await submit_plan(process, pool, plan), timeout_s=60)
        took_s = time.monotonic() - began
    assert run.state == "succeeded"
    # No heartbeat was missed: every call was made once.
    assert provider.count == ORDINARY + 1
    assert {len(step.attempts) for step in run.steps} == {1}
    assert provider.stats["in_flight_max"] == ORDINARY + 1
    assert took_s < 2 * BLOCKED_S
    assert max(lags) < LAG_MAX_S


@pytest.mark.slow
async def test_names_that_take_long_to_resolve_hold_up_only_the_calls_that_need_them(
    servers: TestServers, database_url: str, provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = socket.getaddrinfo

    def slow_for_one_name(host: Any, *arguments: Any, **options: Any) -> Any:
        """The system's resolver, which blocks its thread while a name server says nothing."""
        if host in {"slow.test", b"slow.test"}:
            time.sleep(BLOCKED_S)
            host = "127.0.0.1"
        return resolve(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow_for_one_name)
    each = {"timeouts": {"call_s": 60, "first_token_s": 40, "idle_s": 20}, "attempts_max": 1}
    slow = provider.base_url.replace("127.0.0.1", "slow.test")
    more = [
        {**each, "name": "nameless", "description": "far away", "base_url": slow, "model": "plain", "queue": "stand-in"}
    ]
    pool = pool_of(tmp_path, provider.base_url, "large", worker=each, more=more, policy={"steps_max": 64})
    # Answers of this size are worked on in a thread, of which the resolver has taken as many as there are.
    provider.script({"text_bytes": 200_000}, model="large", times=None)
    plan = lists_plan(["Go."] * (NAMELESS + ORDINARY), [[]] * (NAMELESS + ORDINARY), [1] * NAMELESS + [0] * ORDINARY)
    async with worker_process(database_url, servers.temporal_address) as process, lag_watched() as lags:
        run_id = await submit_plan(process, pool, plan)
        began = time.monotonic()
        await provider_reaches(provider, ORDINARY)
        while await _answers(process.database.url, run_id) < ORDINARY:
            assert time.monotonic() - began < BLOCKED_S * 0.7, "ordinary calls waited for the resolver"
            await asyncio.sleep(0.1)
        run = await ended(process.database, run_id, timeout_s=60)
    # The limit for connecting includes the look-up, so these ended with a code and in time, and cost nothing.
    assert (run.state, run.reason) == ("failed", "connection-failed")
    ends = [[(one.state, one.error_code) for one in step.attempts] for step in run.steps]
    assert ends == [[("failed", "connection-failed")]] * NAMELESS + [[("succeeded", None)]] * ORDINARY
    assert provider.count == ORDINARY
    assert run.cost_complete
    assert max(lags) < LAG_MAX_S


async def _answers(url: str, run_id: Any) -> int:
    (found,) = await rows(
        url, "SELECT count(*) AS count FROM attempts WHERE run_id = %s AND accepted AND worker = 'w0'", run_id
    )
    return int(found["count"])
