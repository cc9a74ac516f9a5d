"""Steps start when their inputs exist; the last step ends the run; Temporal's history stays small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.provider import Provider
from tests.support.runs import ended, lists_plan, submit_plan
from tests.support.workflows import history_events, pool_of, scheduled_activities
from worker_pools.process import WorkerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")


def by_model(provider: Provider) -> dict[str, dict[str, Any]]:
    return {request["model"]: request for request in provider.requests}


async def test_steps_without_inputs_overlap_and_readers_wait_for_exactly_what_they_read(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    models = ("sleep-600ms-a", "sleep-600ms-b", "sleep-200ms-c", "sleep-100ms-d", "e")
    pool = pool_of(tmp_path, provider.base_url, *models)
    plan = lists_plan(["Go."] * 5, [[], [], [], [0, 1, 2], [3]], [0, 1, 2, 3, 4])
    run = await ended(process.database, await submit_plan(process, pool, plan))
    assert run.state == "succeeded"
    calls = by_model(provider)
    first = [calls[model] for model in models[:3]]
    assert max(call["started_at"] for call in first) < min(call["ended_at"] for call in first)
    assert calls[models[3]]["started_at"] > max(call["ended_at"] for call in first)
    assert calls[models[4]]["started_at"] > calls[models[3]]["ended_at"]
    assert provider.count == 5


async def test_a_step_does_not_wait_for_a_slow_step_that_it_does_not_read(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    pool = pool_of(tmp_path, provider.base_url, "sleep-1500ms", "quick", "next", "last")
    plan = lists_plan(["Go."] * 4, [[], [], [1], [0, 2]], [0, 1, 2, 3])
    run = await ended(process.database, await submit_plan(process, pool, plan))
    assert run.state == "succeeded"
    calls = by_model(provider)
    assert calls["next"]["started_at"] < calls["sleep-1500ms"]["ended_at"]
    assert calls["last"]["started_at"] > calls["sleep-1500ms"]["ended_at"]


async def test_the_sole_last_step_ends_the_run_without_an_activity_of_its_own(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    pool = pool_of(tmp_path, provider.base_url, "a", "b")
    run_id = await submit_plan(process, pool, lists_plan(["Go."] * 2, [[], [0]], [0, 1]))
    await ended(process.database, run_id)
    await process.client.get_workflow_handle(f"run-{run_id}.1").result()
    events = await history_events(process.client, run_id)
    assert scheduled_activities(events) == ["step-0-0-0", "step-0-1-0"]


async def test_two_steps_that_end_together_are_settled(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    pool = pool_of(tmp_path, provider.base_url, "sleep-200ms", "sleep-300ms")
    run_id = await submit_plan(process, pool, lists_plan(["Go."] * 2, [[], []], [0, 1]))
    run = await ended(process.database, run_id)
    assert run.state == "succeeded"
    assert run.answer is not None
    assert "sleep-300ms" in run.answer
    await process.client.get_workflow_handle(f"run-{run_id}.1").result()
    assert scheduled_activities(await history_events(process.client, run_id))[-1] == "settle-1"


@pytest.mark.parametrize(("policy", "calls", "state"), [("run", 3, "succeeded"), ("skip", 2, "skipped")])
async def test_unread_steps_follow_the_pool(  # noqa: PLR0917  # pytest passes names
    process: WorkerProcess, provider: Provider, tmp_path: Path, policy: str, calls: int, state: str
) -> None:
    pool = pool_of(tmp_path, provider.base_url, "a", "b", "c", policy={"unread_steps": policy})
    run = await ended(
        process.database, await submit_plan(process, pool, lists_plan(["Go."] * 3, [[], [], [0]], [0, 1, 2]))
    )
    assert run.state == "succeeded"
    assert run.steps[1].state == state
    assert provider.count == calls
    assert "unread-step" in {note["code"] for note in run.notes}


async def test_a_step_takes_under_two_kilobytes_of_history_whatever_the_models_write(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"text_bytes": 200_000}, model="wordy", times=None)
    pool = pool_of(tmp_path, provider.base_url, "wordy", policy={"steps_max": 20})
    plan = lists_plan(["Go."] * 12, [[], *[["all"]] * 11], [0] * 12)
    run_id = await submit_plan(process, pool, plan)
    run = await ended(process.database, run_id)
    assert run.state == "succeeded"
    events = await history_events(process.client, run_id)
    assert sum(event.ByteSize() for event in events) / 12 < 2048


async def test_a_wide_plan_of_64_steps_runs(process: WorkerProcess, provider: Provider, tmp_path: Path) -> None:
    pool = pool_of(tmp_path, provider.base_url, "a", policy={"steps_max": 64})
    access: list[Any] = [[]] * 63 + [["all"]]
    run = await ended(process.database, await submit_plan(process, pool, lists_plan(["Go."] * 64, access, [0] * 64)))
    assert run.state == "succeeded"
    assert provider.count == 64
