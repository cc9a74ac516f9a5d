"""The control run of the canary tests, alone on its server: if it finds nothing, their search is blind."""

from __future__ import annotations

from pathlib import Path

from temporalio.converter import DataConverter

from engine.settings import TemporalSettings
from tests.support.provider import Provider
from tests.support.servers import TestServers
from tests.support.workflows import hand_worker
from tests.workflow.aviary import fail_a_workflow_task
from tests.workflow.buggy import SECRET, BuggyRun
from worker_pools.process import WorkerOptions


async def test_with_the_default_converter_the_same_bug_is_all_over_the_history(
    servers: TestServers, database_url: str, provider: Provider, tmp_path: Path
) -> None:
    options = WorkerOptions(database_url, TemporalSettings(servers.temporal_address))
    async with hand_worker(database_url, options, BuggyRun, DataConverter.default) as process:
        record = await fail_a_workflow_task(process, provider, tmp_path)
    assert SECRET.encode() in record
    assert b'File "' in record
