"""Worker processes that end: in order, in the middle of a call, and by kill -9."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from tests.support.provider import Provider
from tests.support.runs import worker_process
from tests.support.servers import TestServers
from tests.support.workflows import handle_of, provider_reaches, temporal_record
from tests.workflow.aviary import Aviary


async def test_a_worker_that_is_shut_down(
    servers: TestServers, database_url: str, provider: Provider, tmp_path: Path
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        process = await stack.enter_async_context(worker_process(database_url, servers.temporal_address, grace_s=0.1))
        aviary = Aviary(process, provider, tmp_path)
        provider.script({"text": aviary.word, "delay_first_s": 60}, model="slow")
        run_id = await aviary.start(aviary.pool("slow"), access=[[]])
        await provider_reaches(provider, 1)
        process.stop()
        await asyncio.sleep(0.3)
        client = process.client
        await stack.aclose()
        record = await temporal_record(client, run_id)
        assert b"worker-shutdown" in record
        await aviary.search()
        assert await history_events(client, run_id)
        await handle_of(client, run_id).terminate("end of the test")
