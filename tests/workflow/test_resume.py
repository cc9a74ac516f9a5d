"""Resuming: what is paid is found, the rest is tried anew, and a run that is refused stays as it is (G5-01, G5-06)."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from activities.executions import reconcile
from engine.errors import InputError, RefusedError
from engine.service import Submission, submit
from engine.store.snapshots import RunSnapshot
from tests.support.orders import cancel, nothing_more_is_called, pause, resume, temporal_is_away
from tests.support.provider import Provider
from tests.support.runs import ended, lists_plan, submit_plan
from tests.support.stored import check_invariants, record
from tests.support.workflows import delete_workflow, handle_of, pool_of, provider_reaches, run_of, terminate_workflow
from worker_pools.pool import Pool
from worker_pools.process import WorkerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

FOUR = lists_plan(["Go."] * 4, [[], [0], [1], [2]], [0, 1, 2, 3])
MODELS = ("one", "two", "three", "four")


def chain(folder: Path, provider: Provider, **changes: Any) -> Pool:
    return pool_of(folder, provider.base_url, *MODELS, **changes)


def spent(run: RunSnapshot) -> Decimal:
    attempts = [*run.planning, *(attempt for step in run.steps for attempt in step.attempts)]
    return sum((attempt.cost_usd or Decimal(0) for attempt in attempts), Decimal(0))


async def failed_in_third(process: WorkerProcess, provider: Provider, folder: Path) -> UUID:
    provider.script({"status": 401}, model="three")
    run_id = await submit_plan(process, chain(folder, provider), FOUR)
    run = await ended(process.database, run_id)
    assert (run.state, run.reason) == ("failed", "auth-failed")
    return run_id


async def test_a_run_that_failed_goes_on_at_the_failed_step_and_pays_nothing_twice(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    run_id = await failed_in_third(process, provider, tmp_path)
    before = await run_of(process.database, run_id)
    started = await resume(process, run_id)
    assert started
    run = await ended(process.database, run_id)
    assert (run.state, run.execution) == ("succeeded", 2)
    assert [request["model"] for request in provider.requests] == ["one", "two", "three", "three", "four"]
    assert run.steps[:2] == before.steps[:2]
    assert [attempt.state for attempt in run.steps[2].attempts] == ["failed", "succeeded"]
    assert run.cost_usd == spent(run)
    kept = await record(process.database.url, run_id)
    check_invariants(kept)
    result = await handle_of(process.client, run_id, execution=2).result()
    assert result["state"] == "succeeded"


async def test_a_run_that_was_cancelled_goes_on(process: WorkerProcess, provider: Provider, tmp_path: Path) -> None:
    provider.script({"delay_first_s": 60}, model="two")
    run_id = await submit_plan(process, chain(tmp_path, provider), FOUR)
    await provider_reaches(provider, 2)
    await cancel(process, run_id)
    assert (await ended(process.database, run_id)).state == "cancelled"
    await resume(process, run_id)
    run = await ended(process.database, run_id)
    assert run.state == "succeeded"
    assert [request["model"] for request in provider.requests] == ["one", "two", "two", "three", "four"]
    # The broken-off call may have been billed: the total says that a part of it is unknown.
    assert [attempt.state for attempt in run.steps[1].attempts] == ["cancelled", "succeeded"]
    assert not run.cost_complete
    check_invariants(await record(process.database.url, run_id))


@pytest.mark.slow  # Temporal takes half a minute to forget a closed workflow
async def test_a_run_whose_closed_workflow_temporal_has_forgotten_is_readable_and_goes_on(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    run_id = await failed_in_third(process, provider, tmp_path)
    before = await run_of(process.database, run_id)
    await delete_workflow(process.client, run_id)
    assert await reconcile(process.database, process.client) == 0
    after = await run_of(process.database, run_id)
    assert (after.steps, after.cost_usd, after.state) == (before.steps, before.cost_usd, "failed")
    await resume(process, run_id)
    assert (await ended(process.database, run_id)).state == "succeeded"
    assert provider.count == 5


@pytest.mark.parametrize("way", ["delete", "terminate"])
async def test_a_run_whose_live_workflow_was_lost_repeats_only_the_call_in_flight(
    process: WorkerProcess, provider: Provider, tmp_path: Path, way: str
) -> None:
    provider.script({"delay_first_s": 60}, model="two")
    run_id = await submit_plan(process, chain(tmp_path, provider), FOUR)
    await provider_reaches(provider, 2)
    await (delete_workflow if way == "delete" else terminate_workflow)(process.client, run_id)
    assert await reconcile(process.database, process.client) == 1
    lost = await run_of(process.database, run_id)
    assert (lost.state, lost.reason) == ("failed", "workflow-lost")
    assert lost.steps[0].output
    await resume(process, run_id)
    run = await ended(process.database, run_id)
    assert run.state == "succeeded"
    assert [request["model"] for request in provider.requests] == ["one", "two", "two", "three", "four"]
    assert [attempt.state for attempt in run.steps[1].attempts][1:] == ["succeeded"]
    # Unknown, or superseded if its call has reported meanwhile: in any case it may have been billed.
    assert run.steps[1].attempts[0].state in {"unknown", "superseded"}
    assert not run.cost_complete


async def test_a_resumed_run_keeps_its_pool_unless_it_is_told_otherwise(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"status": 401}, model="three", times=2)
    run_id = await submit_plan(process, chain(tmp_path, provider), FOUR)
    await ended(process.database, run_id)
    changed = pool_of(tmp_path, provider.base_url, "new-one", "new-two", "new-three", "new-four")
    # The file is another one now; the run knows only what it was pinned to.
    await resume(process, run_id)
    assert (await ended(process.database, run_id)).reason == "auth-failed"
    await resume(process, run_id, changed)
    run = await ended(process.database, run_id)
    assert (run.state, run.execution) == ("succeeded", 3)
    models = [request["model"] for request in provider.requests]
    assert models == ["one", "two", "three", "three", "new-three", "new-four"]
    assert [step.model for step in run.steps] == ["one", "two", "new-three", "new-four"]
    kept = await record(process.database.url, run_id)
    check_invariants(kept)
    (entry,) = kept.entries("run.repinned")
    assert entry["data"]["new"] == run.pool_digest != entry["data"]["old"]


async def test_a_pool_that_lacks_a_worker_is_refused_and_the_same_pool_changes_no_pin(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    run_id = await failed_in_third(process, provider, tmp_path)
    before = await record(process.database.url, run_id)
    with pytest.raises(InputError, match="step 2 is for worker w2"):
        await resume(process, run_id, pool_of(tmp_path, provider.base_url, "one", "two"))
    assert await record(process.database.url, run_id) == before
    await resume(process, run_id, chain(tmp_path, provider))
    assert (await ended(process.database, run_id)).state == "succeeded"
    assert (await record(process.database.url, run_id)).entries("run.repinned") == []


async def test_planning_that_failed_is_tried_anew(process: WorkerProcess, provider: Provider, tmp_path: Path) -> None:
    provider.script({"status": 401}, model="planner")
    pool = pool_of(
        tmp_path, provider.base_url, "plain", conductor={"model": "planner", "structured_output": "json-schema"}
    )
    run_id = await submit_plan(process, pool, None)
    assert (await ended(process.database, run_id)).reason == "auth-failed"
    await resume(process, run_id)
    run = await ended(process.database, run_id)
    assert run.state == "succeeded"
    assert [attempt.state for attempt in run.planning] == ["failed", "succeeded"]


async def test_the_deadline_of_a_resumed_run_counts_anew(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"delay_first_s": 60}, model="one")
    run_id = await submit_plan(process, chain(tmp_path, provider, policy={"deadline_s": 1.5}), FOUR)
    assert (await ended(process.database, run_id)).reason == "deadline-exceeded"
    await resume(process, run_id)
    assert (await ended(process.database, run_id)).state == "succeeded"


async def test_a_resume_while_temporal_is_away_is_started_by_the_reconciler(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    run_id = await failed_in_third(process, provider, tmp_path)
    started = await resume(process, run_id, connect=temporal_is_away)
    assert not started
    waiting = await run_of(process.database, run_id)
    assert (waiting.execution, waiting.state) == (2, "created")
    assert await reconcile(process.database, process.client) == 1
    assert (await ended(process.database, run_id)).state == "succeeded"


@pytest.mark.parametrize("state", ["running", "paused", "succeeded"])
async def test_a_run_that_goes_on_or_has_succeeded_is_not_resumed(
    process: WorkerProcess, provider: Provider, tmp_path: Path, state: str
) -> None:
    run_id = await submit_plan(process, pool_of(tmp_path, provider.base_url, "sleep-800ms"), lists_plan(["Go."], [[]]))
    await provider_reaches(provider, 1)
    if state == "paused":
        await pause(process, run_id)
    if state == "succeeded":
        await ended(process.database, run_id)
    before = await record(process.database.url, run_id)
    with pytest.raises(RefusedError) as refused:
        await resume(process, run_id)
    assert refused.value.code == ("run-succeeded" if state == "succeeded" else "run-live")
    assert await record(process.database.url, run_id) == before
    await ended(process.database, run_id)


@pytest.mark.slow
async def test_a_resume_that_meets_a_cancel_leaves_no_run_without_an_end(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    """Whichever came first: one workflow, one end, and the cancelled run calls nothing more."""
    for _ in range(8):
        provider.reset()
        run_id = await failed_in_third(process, provider, tmp_path)
        results = await asyncio.gather(resume(process, run_id), cancel(process, run_id), return_exceptions=True)
        assert not isinstance(results[0], BaseException)
        assert not isinstance(results[1], BaseException) or isinstance(results[1], RefusedError)
        run = await ended(process.database, run_id, timeout_s=15)
        refused = isinstance(results[1], RefusedError)
        assert run.state == "succeeded" if refused else run.state in {"cancelled", "succeeded"}
        assert run.execution == 2
        await nothing_more_is_called(provider, for_s=0.3)
        check_invariants(await record(process.database.url, run_id))


async def test_the_key_of_a_run_that_failed_gives_that_run_also_after_it_was_resumed(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    """G3-10: the same request again makes no second run; resuming is what brings the failed one on."""
    provider.script({"status": 401}, model="three")
    asked = Submission("Go.", chain(tmp_path, provider), actor_id="t", plan_text=FOUR, idempotency_key="nightly-1")
    run_id = (await submit(process.database, process.client, asked)).id
    assert (await ended(process.database, run_id)).state == "failed"
    again = await submit(process.database, process.client, asked)
    assert (again.id, again.existing) == (run_id, True)
    assert (await run_of(process.database, run_id)).state == "failed"
    await resume(process, run_id)
    assert (await ended(process.database, run_id)).state == "succeeded"
    called = provider.count
    again = await submit(process.database, process.client, asked)
    assert (again.id, again.existing) == (run_id, True)
    assert len(await nothing_more_is_called(provider)) == called
