"""A plan from a file runs end to end on real servers."""

from __future__ import annotations

from pathlib import Path

from tests.support.provider import Provider
from tests.support.runs import ended, lists_plan, make_pool, submit_plan, worker_process
from tests.support.servers import TestServers


async def test_a_plan_runs_and_every_output_is_stored(
    servers: TestServers, database_url: str, provider: Provider, tmp_path: Path
) -> None:
    pool = make_pool(tmp_path, provider.base_url, worker={"model": "echo"})
    plan = lists_plan(["Say one.", "Say two.", "Join them."], [[], [], [0, 1]])
    async with worker_process(database_url, servers.temporal_address) as process:
        run_id = await submit_plan(process, pool, plan)
        run = await ended(process.database, run_id)
        assert run.state == "succeeded"
        assert [step.state for step in run.steps] == ["succeeded"] * 3
        assert run.answer is not None
        assert "Join them." in run.answer
        assert provider.count == 3
