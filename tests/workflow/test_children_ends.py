"""Children end with their parents, and say how they ended (G3-14): nothing below an ended run calls anything more."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from temporalio.client import WorkflowExecutionStatus

from activities.executions import reconcile
from engine.contracts import child_run_id
from engine.errors import InputError, RefusedError
from engine.operations.answers import abort_step
from engine.store.attempts import FailurePolicy, Place
from engine.store.children import ChildOpening, begin_child
from engine.store.settling import Settlement, settle_run
from tests.support.nested import (
    CHAIN,
    PLANNER,
    check_family,
    child_of,
    children_of,
    family_of,
    pair_plan,
    recursive_pool,
)
from tests.support.orders import cancel, connecting, nothing_more_is_called, order, pause, resume, unpause
from tests.support.provider import Provider
from tests.support.runs import ended, lists_plan, submit_plan
from tests.support.stored import execute, record
from tests.support.workflows import (
    delete_workflow,
    handle_of,
    provider_reaches,
    run_of,
    terminate_workflow,
    until,
)
from worker_pools.pool import Pool
from worker_pools.process import WorkerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

ONE_CHILD = lists_plan(["Split A."], [[]], [1])


async def two_children_in_calls(
    process: WorkerProcess, provider: Provider, folder: Path, *, slow_s: float = 60, **policy: Any
) -> UUID:
    """A run whose two children have each planned and wait for the answer to their first step."""
    provider.script({"text": CHAIN}, model=PLANNER, times=None)
    provider.script({"delay_first_s": slow_s}, model="slow", times=2)
    pool = recursive_pool(folder, provider, "slow", policy=policy)
    run_id = await submit_plan(process, pool, pair_plan(1))
    await provider_reaches(provider, 4)
    return run_id


async def settled(process: WorkerProcess, run_id: UUID) -> None:
    """Waits until nothing of the tree is alive, with the reconciler's help."""

    async def over() -> bool:
        await reconcile(process.database, process.client)
        return all(run["ended_at"] is not None for run in await family_of(process.database, run_id))

    await until(over)


async def test_cancelling_the_parent_closes_the_calls_of_its_children(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    run_id = await two_children_in_calls(process, provider, tmp_path)
    await cancel(process, run_id)
    run = await ended(process.database, run_id)
    assert (run.state, run.reason) == ("cancelled", "cancelled")
    requests = await nothing_more_is_called(provider)
    assert sorted((one["model"], one["disconnected"]) for one in requests) == [
        (PLANNER, False), (PLANNER, False), ("slow", True), ("slow", True)
    ]  # fmt: skip
    children = await children_of(process.database, run_id)
    assert [(child.state, child.reason) for child in children] == [("cancelled", "cancelled")] * 2
    assert [child.steps[0].attempts[0].state for child in children] == ["cancelled"] * 2
    await check_family(process.database, run_id)


@pytest.mark.parametrize("way", [terminate_workflow, delete_workflow])
async def test_a_parent_ended_by_hand_takes_its_children_with_it(
    process: WorkerProcess, provider: Provider, tmp_path: Path, way: Callable[..., Awaitable[None]]
) -> None:
    run_id = await two_children_in_calls(process, provider, tmp_path)
    await way(process.client, run_id)
    await settled(process, run_id)
    await nothing_more_is_called(provider)
    run = await run_of(process.database, run_id)
    assert (run.state, run.reason) == ("failed", "workflow-lost")
    assert provider.count == 4
    assert {child.state for child in await children_of(process.database, run_id)} == {"cancelled"}
    await check_family(process.database, run_id)
    # What was lost goes on where it was; no plan is paid again.
    await resume(process, run_id)
    assert (await ended(process.database, run_id)).state == "succeeded"
    assert [one["model"] for one in provider.requests].count(PLANNER) == 2
    await check_family(process.database, run_id)


async def test_a_parent_that_fails_lets_its_children_finish_calls_and_begin_none(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"text": CHAIN}, model=PLANNER, times=None)
    provider.script({"delay_first_s": 1.5}, model="slow", times=2)
    provider.script({"status": 401, "delay_headers_s": 0.8}, model="broken", times=1)
    pool = recursive_pool(tmp_path, provider, "slow", "broken")
    plan = lists_plan(["Split A.", "Split B.", "Fail.", "Conclude."], [[], [], [], "all"], [2, 2, 1, 0])
    run_id = await submit_plan(process, pool, plan)
    run = await ended(process.database, run_id)
    assert (run.state, run.reason) == ("failed", "auth-failed")
    assert len(await nothing_more_is_called(provider)) == 5
    children = await children_of(process.database, run_id)
    assert [(child.state, child.reason) for child in children] == [("cancelled", "parent-failed")] * 2
    assert [[step.state for step in child.steps] for child in children] == [["succeeded", "cancelled"]] * 2
    family = await check_family(process.database, run_id)
    assert sum(one["attempts_count"] for one in family) == 5
    # What they had paid for is kept.
    await resume(process, run_id)
    assert (await ended(process.database, run_id)).state == "succeeded"
    assert [one["model"] for one in provider.requests[5:]].count("slow") == 3
    assert provider.count == 9


async def test_a_child_that_waits_for_an_operator_does_not_hold_up_its_parents_failure(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"text": CHAIN}, model=PLANNER, times=None)
    provider.script({"status": 401, "delay_headers_s": 1.0}, model="broken", times=1)
    pool = recursive_pool(tmp_path, provider, "plain", "broken")
    plan = lists_plan(["Split A.", "Fail.", "Conclude."], [[], [], "all"], [2, 1, 0])
    run_id = await submit_plan(process, pool, plan)
    await provider_reaches(provider, 2)
    await pause(process, child_run_id(run_id, round=0, position=0))
    run = await ended(process.database, run_id, timeout_s=10)
    assert (run.state, run.reason) == ("failed", "auth-failed")
    child = await child_of(process.database, run_id, 0)
    assert (child.state, child.reason) in {("cancelled", "parent-failed"), ("cancelled", "auth-failed")}
    await check_family(process.database, run_id)


def opening(run_id: UUID) -> ChildOpening:
    return ChildOpening(Place(run_id, 0, 0), 1, "self", "A task.", 2, FailurePolicy())


async def test_a_child_that_was_never_started_ends_with_its_parent(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    """The parent ends right after it wrote its child down: a child started as the last act may never start."""
    provider.script({"text": CHAIN}, model=PLANNER, times=None)
    run_id = await submit_plan(process, recursive_pool(tmp_path, provider, "slow"), ONE_CHILD)
    await pause(process, run_id)
    await terminate_workflow(process.client, run_id)
    await unpause(process, run_id)
    await begin_child(process.database, opening(run_id))
    await settle_run(process.database, Settlement(run_id, 1, "failed", "workflow-lost"))
    child = await child_of(process.database, run_id, 0)
    assert (child.state, child.reason) == ("cancelled", "parent-ended")
    await check_family(process.database, run_id)
    before = provider.count
    await resume(process, run_id)
    assert (await ended(process.database, run_id)).state == "succeeded"
    assert (await child_of(process.database, run_id, 0)).execution == 2
    assert provider.count > before


async def test_the_reconciler_ends_the_children_of_an_ended_run(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"text": CHAIN}, model=PLANNER, times=None)
    provider.script({"delay_first_s": 60}, model="slow", times=1)
    run_id = await submit_plan(process, recursive_pool(tmp_path, provider, "slow"), ONE_CHILD)
    await provider_reaches(provider, 2)
    # As if the parent's workflow had been lost together with its word to the child.
    await settle_run(process.database, Settlement(run_id, 1, "failed", "workflow-lost"))
    with pytest.raises(RefusedError, match="below"):
        await resume(process, run_id)
    await settled(process, run_id)
    child = await child_of(process.database, run_id, 0)
    assert child.state == "cancelled"
    assert child.reason is not None
    await nothing_more_is_called(provider)
    await check_family(process.database, run_id)
    status = (await handle_of(process.client, child.id).describe()).status
    assert status != WorkflowExecutionStatus.RUNNING


@pytest.mark.parametrize("way", [terminate_workflow, delete_workflow])
async def test_a_child_ended_by_hand_fails_its_step_at_once(
    process: WorkerProcess, provider: Provider, tmp_path: Path, way: Callable[..., Awaitable[None]]
) -> None:
    run_id = await two_children_in_calls(process, provider, tmp_path)
    await way(process.client, child_run_id(run_id, round=0, position=1))
    await cancel(process, child_run_id(run_id, round=0, position=0))
    run = await ended(process.database, run_id)
    assert run.state == "failed"
    assert run.reason in {"child-failed", "child-cancelled"}
    lost = await child_of(process.database, run_id, 1)
    assert (lost.state, lost.reason) == ("failed", "workflow-lost")
    await nothing_more_is_called(provider)
    await check_family(process.database, run_id)


async def failing_child(process: WorkerProcess, provider: Provider, folder: Path, **changes: Any) -> UUID:
    provider.script({"text": CHAIN}, model=PLANNER, times=None)
    provider.script({}, {"status": 401}, model="plain")
    return await submit_plan(process, recursive_pool(folder, provider, "plain", "other", **changes), _two(2))


def _two(own: int) -> str:
    return lists_plan(["Split A.", "Conclude."], [[], [0]], [own, 0])


async def test_a_child_that_fails_fails_its_step_and_is_not_paid_twice_after_a_resume(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    run_id = await failing_child(process, provider, tmp_path)
    run = await ended(process.database, run_id)
    assert (run.state, run.reason) == ("failed", "child-failed")
    assert (run.steps[0].state, run.steps[0].reason) == ("failed", "child-failed")
    child = await child_of(process.database, run_id, 0)
    assert (child.state, child.reason, child.execution) == ("failed", "auth-failed", 1)
    with pytest.raises(RefusedError, match="belongs to step 0"):
        await resume(process, child.id)
    await resume(process, run_id)
    run = await ended(process.database, run_id)
    child = await child_of(process.database, run_id, 0)
    assert (run.state, child.state, child.execution) == ("succeeded", "succeeded", 2)
    assert [one["model"] for one in provider.requests] == [PLANNER, "plain", "plain", "plain", "plain"]
    assert run.steps[0].output == child.answer is not None
    await check_family(process.database, run_id)


async def test_a_failed_child_waits_for_an_operator_where_the_pool_says_so(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    run_id = await failing_child(process, provider, tmp_path, policy={"on_failed_step": "wait"})

    async def child_waits() -> bool:
        family = await family_of(process.database, run_id)
        return [(run["state"], run["reason"]) for run in family[1:]] == [("waiting", "operator")]

    # The failed call is the child's own, so it is the child that waits; nothing else of the tree could go on.
    await until(child_waits)
    await cancel(process, child_run_id(run_id, round=0, position=0))

    async def parent_waits() -> bool:
        run = await run_of(process.database, run_id)
        return (run.state, run.reason, run.steps[0].state) == ("waiting", "operator", "waiting")

    # A child that was cancelled on its own is a failed step of its parent.
    await until(parent_waits)
    await cancel(process, run_id)
    assert (await ended(process.database, run_id)).state == "cancelled"
    await check_family(process.database, run_id)


async def test_a_failed_child_gives_its_step_to_the_substitute(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    policy = {"on_failed_step": "fallback"}
    run_id = await failing_child(process, provider, tmp_path, policy=policy, own={"fallbacks": ["w1"]})
    run = await ended(process.database, run_id)
    assert run.state == "succeeded"
    assert run.steps[0].worker == "w1"
    assert [one["model"] for one in provider.requests] == [PLANNER, "plain", "plain", "other", "plain"]
    (entry,) = (await record(process.database.url, run_id)).entries("step.substituted")
    assert entry["data"]["old_worker"] == "self"
    await check_family(process.database, run_id)


async def test_a_child_cancelled_on_its_own_fails_its_step(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    run_id = await two_children_in_calls(process, provider, tmp_path, slow_s=3)
    await cancel(process, child_run_id(run_id, round=0, position=0))
    run = await ended(process.database, run_id)
    assert (run.state, run.reason) == ("failed", "child-cancelled")
    states = [(child.state, child.reason) for child in await children_of(process.database, run_id)]
    assert states == [("cancelled", "cancelled"), ("cancelled", "parent-failed")]
    await nothing_more_is_called(provider)
    await check_family(process.database, run_id)


async def test_the_deadline_of_the_parent_stops_its_children(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    run_id = await two_children_in_calls(process, provider, tmp_path, deadline_s=3.0, on_failed_step="wait")
    run = await ended(process.database, run_id, timeout_s=15)
    assert (run.state, run.reason) == ("failed", "deadline-exceeded")
    requests = await nothing_more_is_called(provider)
    assert len(requests) == 4
    assert [one["disconnected"] for one in requests] == [one["model"] == "slow" for one in requests]
    for child in await children_of(process.database, run_id):
        # The child's own timer and its parent's word come at the same moment.
        assert (child.state, child.reason) in {("failed", "deadline-exceeded"), ("cancelled", "cancelled")}
        assert [(step.state, len(step.attempts)) for step in child.steps] == [("cancelled", 1), ("cancelled", 0)]
        assert [attempt.state for attempt in child.steps[0].attempts] == ["cancelled"]
    family = await check_family(process.database, run_id)
    assert len({one["deadline_at"] for one in family}) == 1
    # Temporal's timer and the database's clock: when the time is up, and at once then.
    assert all(-0.5 < (one["ended_at"] - one["deadline_at"]).total_seconds() < 3 for one in family)


async def test_a_pause_of_the_parent_holds_its_children_and_the_end_of_it_wakes_them(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    run_id = await two_children_in_calls(process, provider, tmp_path, slow_s=1)
    await pause(process, run_id)

    async def first_done() -> bool:
        children = await children_of(process.database, run_id)
        return [child.steps[0].state for child in children] == ["succeeded"] * 2

    await until(first_done)
    assert len(await nothing_more_is_called(provider, for_s=1.0)) == 4
    await unpause(process, run_id)
    run = await ended(process.database, run_id, timeout_s=10)
    assert run.state == "succeeded"
    await check_family(process.database, run_id)


async def test_runs_nest_to_the_pools_depth_and_a_plan_that_goes_deeper_is_sent_back(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    deeper = lists_plan(["Split further."], [[]], [1])
    provider.script({"text": deeper}, {"text": deeper}, {"text": CHAIN}, model=PLANNER)
    pool = recursive_pool(tmp_path, provider, policy={"depth_max": 2})
    run = await ended(process.database, await submit_plan(process, pool, ONE_CHILD))
    assert run.state == "succeeded"
    family = await check_family(process.database, run.id)
    assert [(one["depth"], one["state"]) for one in family] == [(0, "succeeded"), (1, "succeeded"), (2, "succeeded")]
    asked = [one["body"]["messages"] for one in provider.requests if one["model"] == PLANNER]
    prompts = ["\n".join(message["content"] for message in messages) for messages in asked]
    shown = ["1: self" in prompt for prompt in prompts]
    # The first plan is the child's; the grandchild may not split any further, is not told of it, and tries.
    assert shown == [True, False, False]
    assert "may not plan any deeper" in prompts[2]
    grandchild = await run_of(process.database, family[2]["id"])
    assert [attempt.error_code for attempt in grandchild.planning] == ["plan-invalid", None]
    assert run.steps[0].output == grandchild.answer


async def test_cancelling_reaches_grandchildren(process: WorkerProcess, provider: Provider, tmp_path: Path) -> None:
    deeper = lists_plan(["Split further.", "Conclude."], [[], [0]], [1, 0])
    provider.script({"text": deeper}, {"text": CHAIN}, model=PLANNER)
    provider.script({"delay_first_s": 60}, model="slow", times=1)
    run_id = await submit_plan(process, recursive_pool(tmp_path, provider, "slow"), ONE_CHILD)
    await provider_reaches(provider, 3)
    await cancel(process, run_id)
    await ended(process.database, run_id)
    family = await check_family(process.database, run_id)
    assert [one["state"] for one in family] == ["cancelled"] * 3
    assert [one["disconnected"] for one in await nothing_more_is_called(provider)] == [False, False, True]


async def test_a_tree_shares_one_budget(process: WorkerProcess, provider: Provider, tmp_path: Path) -> None:
    provider.script({"text": CHAIN}, model=PLANNER, times=None)
    pool = recursive_pool(tmp_path, provider, policy={"budget": {"calls": 5}})
    run_id = await submit_plan(process, pool, pair_plan(1))
    # Two plans and three of the four steps below; then nobody may call any more.
    await provider_reaches(provider, 5)

    async def held() -> bool:
        family = await family_of(process.database, run_id)
        return any((run["state"], run["reason"]) == ("waiting", "budget-calls") for run in family)

    await until(held)
    assert len(await nothing_more_is_called(provider)) == 5
    await cancel(process, run_id)
    await ended(process.database, run_id)
    await check_family(process.database, run_id)


async def test_a_part_whose_prompt_is_too_large_for_a_task_fails_with_the_limit(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    """G3-01 through a child: three megabytes are one call and reach the next step whole; more than a task is refused."""
    provider.script({"text_bytes": 3_000_000}, model="wordy", times=None)
    provider.script({"text": lists_plan(["Go."], [[]], [1])}, model=PLANNER, times=None)
    pool = recursive_pool(tmp_path, provider, "wordy", "plain")
    fits = lists_plan(["Write.", "Split."], [[], [0]], [0, 2])
    run = await ended(process.database, await submit_plan(process, pool, fits))
    assert run.state == "succeeded"
    child = await child_of(process.database, run.id, 1)
    assert len(child.task or "") > 3_000_000
    assert provider.count == 3
    large = lists_plan(["Write.", "Write.", "Split."], [[], [], [0, 1]], [0, 0, 2])
    run = await ended(process.database, await submit_plan(process, pool, large))
    assert (run.state, run.reason) == ("failed", "task-too-large")
    assert provider.count == 5
    await check_family(process.database, run.id)


async def test_a_resume_with_another_pool_is_the_childrens_pool_too(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    run_id = await failing_child(process, provider, tmp_path)
    await ended(process.database, run_id)

    def changed(*models: str) -> Pool:
        folder = tmp_path / "-".join(models)
        folder.mkdir()
        return recursive_pool(folder, provider, *models)

    await resume(process, run_id, changed("third", "other"))
    run = await ended(process.database, run_id)
    assert run.state == "succeeded"
    assert [one["model"] for one in provider.requests] == [PLANNER, "plain", "plain", "third", "third"]
    child = await child_of(process.database, run_id, 0)
    assert [step.model for step in child.steps] == ["plain", "third"]
    assert child.pool_digest == run.pool_digest
    await check_family(process.database, run_id)


async def test_a_pool_that_lacks_a_worker_of_a_run_below_is_refused(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"text": lists_plan(["Look.", "Conclude."], [[], [0]], [1, 1])}, model=PLANNER)
    provider.script({}, {"status": 401}, model="other")
    run_id = await submit_plan(process, recursive_pool(tmp_path, provider, "plain", "other"), _two(2))
    before = await ended(process.database, run_id)
    folder = tmp_path / "changed"
    folder.mkdir()
    # The run itself needs `self` and `w0` only; its child needs `w1`.
    with pytest.raises(InputError, match=r"step 1 of run .* is for worker w1"):
        await resume(process, run_id, recursive_pool(folder, provider, "plain"))
    run = await run_of(process.database, run_id)
    assert (run.state, run.execution, run.pool_digest) == ("failed", 1, before.pool_digest)


async def test_a_child_that_is_held_before_its_first_call_does_not_look_like_one_without_a_worker(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    # The budget is used up by the first step, so the child cannot even plan.
    pool = recursive_pool(tmp_path, provider, policy={"budget": {"calls": 1}})
    run_id = await submit_plan(process, pool, lists_plan(["Go.", "Split A."], [[], [0]], [0, 1]))

    async def held() -> bool:
        family = await family_of(process.database, run_id)
        return [(run["state"], run["reason"]) for run in family[1:]] == [("waiting", "budget-calls")]

    await until(held)
    child_id = child_run_id(run_id, round=0, position=1)
    await execute(
        process.database.url, "UPDATE runs SET created_at = created_at - interval '1 hour' WHERE id = %s", child_id
    )
    assert await reconcile(process.database, process.client) == 0
    child = await run_of(process.database, child_id)
    assert (child.state, child.reason) == ("waiting", "budget-calls")
    await cancel(process, run_id)
    await ended(process.database, run_id)
    await check_family(process.database, run_id)


async def test_an_operator_who_gives_up_a_step_ends_the_runs_below_too(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"text": CHAIN}, model=PLANNER, times=None)
    provider.script({"status": 401}, model="broken")
    provider.script({"delay_first_s": 2.0}, model="slow", times=1)
    pool = recursive_pool(tmp_path, provider, "slow", "broken", policy={"on_failed_step": "wait"})
    plan = lists_plan(["Fail.", "Split A.", "Conclude."], [[], [], "all"], [1, 2, 0])
    run_id = await submit_plan(process, pool, plan)
    await provider_reaches(provider, 3)

    async def step_waits() -> bool:
        return (await run_of(process.database, run_id)).steps[0].state == "waiting"

    await until(step_waits)
    await abort_step(process.database, connecting(process.client), order(run_id), position=0)
    run = await ended(process.database, run_id)
    assert (run.state, run.reason) == ("failed", "aborted")
    assert len(await nothing_more_is_called(provider)) == 3
    child = await child_of(process.database, run_id, 1)
    assert (child.state, child.reason, child.steps[0].state) == ("cancelled", "parent-failed", "succeeded")
    await check_family(process.database, run_id)
