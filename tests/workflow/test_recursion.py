"""Recursion: a step whose worker is the Conductor itself becomes a run of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from engine.contracts import child_run_id
from engine.store.snapshots import RunSnapshot, read_run
from tests.support.provider import Provider
from tests.support.runs import ended, lists_plan, submit_plan
from tests.support.stored import check_invariants, record
from tests.support.workflows import pool_of
from worker_pools.pool import Pool
from worker_pools.process import WorkerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

INNER = lists_plan(["Look at one side.", "Look at the other side and conclude."], [[], [0]], [0, 0])


def recursive_pool(folder: Path, provider: Provider, **policy: Any) -> Pool:
    """A pool of a model (0) and the Conductor (1)."""
    return pool_of(
        folder,
        provider.base_url,
        "plain",
        conductor={"model": "planner"},
        more=[{"name": "self", "description": "plans a part of its own", "kind": "conductor"}],
        policy=policy,
    )


async def child_of(process: WorkerProcess, run_id: UUID, position: int) -> RunSnapshot:
    child = await read_run(process.database, child_run_id(run_id, round=0, position=position))
    assert child is not None
    return child


async def test_the_answer_of_the_child_run_is_the_output_of_the_step(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"text": INNER}, model="planner")
    pool = recursive_pool(tmp_path, provider)
    plan = lists_plan(["Say one.", "Split this up.", "Conclude."], [[], [0], [1]], [0, 1, 0])
    run = await ended(process.database, await submit_plan(process, pool, plan))
    assert (run.state, run.reason) == ("succeeded", None)
    child = await child_of(process, run.id, 1)
    assert child.state == "succeeded"
    assert run.steps[1].output == child.answer is not None
    assert run.children == (child.id,)
    assert "Split this up." in (child.task or "")
    assert [request["model"] for request in provider.requests] == ["plain", "planner", "plain", "plain", "plain"]
    for one in (run.id, child.id):
        check_invariants(await record(process.database.url, one))


async def test_a_round_that_keeps_the_answer_ends_the_run_with_it(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    keep = "The answer is right.\nmodel_id = []\nsubtasks = []\naccess_list = []\n"
    provider.script({"text": INNER}, {"text": keep}, model="planner")
    pool = pool_of(tmp_path, provider.base_url, "plain", conductor={"model": "planner"}, policy={"rounds_max": 3})
    run = await ended(process.database, await submit_plan(process, pool, None))
    assert (run.state, run.reason, run.round) == ("succeeded", None, 1)
    assert [request["model"] for request in provider.requests] == ["planner", "plain", "plain", "planner"]
    assert run.answer == run.steps[-1].output is not None
    check_invariants(await record(process.database.url, run.id))


async def test_all_in_a_later_round_opens_the_round_before(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    again = lists_plan(["Mend it."], ["all"], [0])
    provider.script({"text": INNER}, {"text": again}, model="planner")
    pool = pool_of(tmp_path, provider.base_url, "echo", conductor={"model": "planner"}, policy={"rounds_max": 2})
    run = await ended(process.database, await submit_plan(process, pool, None))
    assert (run.state, run.reason, run.round) == ("succeeded", None, 1)
    assert [(step.round, step.position) for step in run.steps] == [(0, 0), (0, 1), (1, 0)]
    assert run.answer == run.steps[-1].output
    last = provider.requests[-1]["body"]["messages"][-1]["content"]
    assert "Look at one side." in last
    assert 'round="0" position="1"' in last
    shown = provider.requests[3]["body"]["messages"][-1]["content"]
    assert "Look at the other side" in shown
    check_invariants(await record(process.database.url, run.id))
