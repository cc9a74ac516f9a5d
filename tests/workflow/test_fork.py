"""Forks run end to end: what an edit cannot reach is not called again, counted at the provider."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from activities.executions import reconcile
from engine.operations.forking import ForkOrder, ForkProposal, StepEdit, propose_fork, start_fork
from engine.store.runs import create_run
from tests.support.provider import Provider
from tests.support.runs import ended, lists_plan, submit_plan
from tests.support.stored import record
from tests.support.workflows import pool_of
from worker_pools.process import WorkerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

DIAMOND = [[], [0], [0], [1, 2]]
SUBTASKS = ["Say zero.", "Say one.", "Say two.", "Join them."]


async def proposed(process: WorkerProcess, run_id: UUID, *edits: StepEdit, **order: Any) -> ForkProposal:
    return await propose_fork(process.database, ForkOrder(str(run_id), "forker", edits=edits, **order))


async def forked(process: WorkerProcess, run_id: UUID, *edits: StepEdit, **order: Any) -> UUID:
    proposal = await proposed(process, run_id, *edits, **order)
    return (await start_fork(process.database, process.client, proposal)).id


def called(provider: Provider) -> list[str]:
    return [request["model"] for request in provider.requests]


async def test_only_what_the_edit_reaches_is_called_and_it_sees_the_outputs_of_the_source(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"text": "The word is heron."}, model="a")
    pool = pool_of(tmp_path, provider.base_url, "a", "b", "echo", "echo-2")
    run_id = await submit_plan(process, pool, lists_plan(SUBTASKS, DIAMOND, [0, 1, 1, 1]))
    await ended(process.database, run_id)
    source = await record(process.database.url, run_id)
    assert provider.count == 4
    provider.reset()
    proposal = await proposed(process, run_id, StepEdit(3, worker="w2"))
    fork_id = (await start_fork(process.database, process.client, proposal)).id
    run = await ended(process.database, fork_id)
    assert run.state == "succeeded"
    assert called(provider) == ["echo"]
    assert [step.state for step in run.steps] == ["reused", "reused", "reused", "succeeded"]
    (only,) = provider.requests
    (attempt,) = run.steps[3].attempts
    assert only["attempt_id"] == str(attempt.id)
    assert run.answer is not None
    assert run.steps[1].output is not None
    assert run.steps[1].output in run.answer
    # What it cost is what it called; the source is as it was, byte for byte.
    assert run.cost_usd == attempt.cost_usd
    assert proposal.worst_usd is not None
    assert Decimal(0) < run.cost_usd <= proposal.worst_usd
    assert await record(process.database.url, run_id) == source
    provider.reset()
    again = await ended(process.database, await forked(process, fork_id, StepEdit(2, subtask="Say heron.")))
    assert again.state == "succeeded"
    assert called(provider) == ["b", "echo"]
    assert again.source_run_id == fork_id
    assert again.steps[0].output == "The word is heron."


async def test_a_run_that_failed_goes_on_in_a_fork_with_another_worker(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"status": 401, "body": {}}, model="b", times=None)
    pool = pool_of(tmp_path, provider.base_url, "a", "b", "c")
    run_id = await submit_plan(process, pool, lists_plan(SUBTASKS[:3], [[], [0], [1]], [0, 1, 2]))
    assert (await ended(process.database, run_id)).state == "failed"
    provider.reset()
    run = await ended(process.database, await forked(process, run_id, StepEdit(1, worker="w2")))
    assert run.state == "succeeded"
    assert called(provider) == ["c", "c"]
    assert [step.state for step in run.steps] == ["reused", "succeeded", "succeeded"]


async def test_a_fork_of_a_run_that_goes_on_disturbs_neither(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    pool = pool_of(tmp_path, provider.base_url, "a", "sleep-800ms", "c")
    run_id = await submit_plan(process, pool, lists_plan(SUBTASKS[:3], [[], [0], [1]], [0, 1, 2]))
    await asyncio.to_thread(provider.wait_for, 2)
    fork_id = await forked(process, run_id, StepEdit(1, worker="w2"))
    runs = [await ended(process.database, each) for each in (run_id, fork_id)]
    assert [run.state for run in runs] == ["succeeded", "succeeded"]
    assert [step.worker for step in runs[0].steps] == ["w0", "w1", "w2"]
    assert [step.state for step in runs[1].steps] == ["reused", "succeeded", "succeeded"]
    assert sorted(called(provider)) == ["a", "c", "c", "c", "sleep-800ms"]


async def test_a_fork_whose_answer_is_reused_still_ends(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    pool = pool_of(tmp_path, provider.base_url, "a", "b")
    run_id = await submit_plan(process, pool, lists_plan(SUBTASKS[:2], [[], []], [0, 1]))
    source = await ended(process.database, run_id)
    provider.reset()
    run = await ended(process.database, await forked(process, run_id, StepEdit(0, worker="w1")))
    assert (run.state, run.answer) == ("succeeded", source.answer)
    assert [step.state for step in run.steps] == ["succeeded", "reused"]
    assert called(provider) == ["b"]


async def test_a_fork_with_another_task_calls_every_step_with_it(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    pool = pool_of(tmp_path, provider.base_url, "echo")
    run_id = await submit_plan(process, pool, lists_plan(SUBTASKS[:2], [[], []], [0, 0]))
    await ended(process.database, run_id)
    provider.reset()
    run = await ended(process.database, await forked(process, run_id, task="What is a heron?"))
    assert provider.count == 2
    assert all("What is a heron?" in str(request["body"]) for request in provider.requests)
    assert run.task == "What is a heron?"


async def test_a_fork_whose_submitter_died_is_started_by_the_reconciler(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    pool = pool_of(tmp_path, provider.base_url, "a", "b")
    run_id = await submit_plan(process, pool, lists_plan(SUBTASKS[:2], [[], [0]], [0, 0]))
    await ended(process.database, run_id)
    provider.reset()
    proposal = await proposed(process, run_id, StepEdit(1, worker="w1"))
    created = await create_run(process.database, proposal.new)
    await reconcile(process.database, process.client)
    run = await ended(process.database, created.id)
    assert run.state == "succeeded"
    assert called(provider) == ["b"]
