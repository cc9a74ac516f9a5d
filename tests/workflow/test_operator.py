"""Operators: a step that failed waits for an answer, and the answer is carried out at once, whoever gives it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import pytest_asyncio

from activities.executions import reconcile
from engine.errors import InputError, RefusedError
from engine.operations.answers import AnswerGiven, abort_step, retry_step, skip_step
from engine.settings import TemporalSettings
from engine.store.database import Database
from engine.temporal_client import connect_temporal
from tests.support.orders import Connect, connecting, nothing_more_is_called, order, resume, temporal_is_away
from tests.support.provider import Provider
from tests.support.runs import ended, lists_plan, submit_plan, worker_process
from tests.support.servers import TestServers
from tests.support.stored import check_invariants, record
from tests.support.workflows import pool_of, provider_reaches, run_of, until
from worker_pools.pool import Pool
from worker_pools.process import WorkerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

BAD_KEY = {"status": 401, "body": {"error": {"message": "no such key"}}}
ONE = lists_plan(["Go."], [[]], [0])
# Step 1 is the one that fails; step 2 reads it, and step 3 does not.
PLAN = lists_plan(["one", "two", "three", "four"], [[], [0], [0, 1], [0, 2]], [0, 1, 0, 0])
PAIR = lists_plan(["a", "b", "c"], [[], [], [0, 1]], [0, 1, 2])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def second_queue(process: WorkerProcess, servers: TestServers) -> AsyncIterator[None]:
    """A worker of the same database that serves the queue ``other``."""
    async with worker_process(process.database.url, servers.temporal_address, queues=("other",)):
        yield


def waiting_pool(folder: Path, provider: Provider, *models: str, **changes: Any) -> Pool:
    policy = {"on_failed_step": "wait", **changes.pop("policy", {})}
    return pool_of(folder, provider.base_url, *(models or ("plain", "broken", "spare")), policy=policy, **changes)


async def waits(database: Database, run_id: UUID, reason: str = "operator") -> None:
    async def shown() -> bool:
        run = await run_of(database, run_id)
        return (run.state, run.reason) == ("waiting", reason)

    await until(shown)


async def stopped(process: WorkerProcess, provider: Provider, pool: Pool, plan: str = PLAN) -> UUID:
    """A run whose step 1 failed and waits."""
    provider.script(BAD_KEY, model="broken", times=1)
    run_id = await submit_plan(process, pool, plan)
    await waits(process.database, run_id)
    return run_id


async def retry(
    process: WorkerProcess,
    run_id: UUID,
    step: int | None = None,
    worker: str | None = None,
    connect: Connect | None = None,
) -> AnswerGiven:
    way = connect or connecting(process.client)
    return await retry_step(process.database, way, order(run_id, reason="why"), position=step, worker=worker)


async def skip(process: WorkerProcess, run_id: UUID, step: int | None = None) -> AnswerGiven:
    return await skip_step(process.database, connecting(process.client), order(run_id), position=step)


async def abort(process: WorkerProcess, run_id: UUID, step: int | None = None) -> AnswerGiven:
    return await abort_step(process.database, connecting(process.client), order(run_id), position=step)


async def test_a_failed_step_keeps_its_run_alive_until_somebody_wants_another_try(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    run_id = await stopped(process, provider, waiting_pool(tmp_path, provider))
    assert len(await nothing_more_is_called(provider)) == 2
    step = (await run_of(process.database, run_id)).steps[1]
    assert (step.state, step.reason, step.attempts[0].error_code) == ("waiting", "operator", "auth-failed")
    assert step.waiting_since == step.attempts[0].ended_at
    given = await retry(process, run_id)
    assert (given.delivered, given.answered.position, given.answered.worker) == (True, 1, "w1")
    run = await ended(process.database, run_id, timeout_s=5)
    assert (run.state, len(run.steps[1].attempts)) == ("succeeded", 2)
    assert [request["model"] for request in provider.requests] == ["plain", "broken", "broken", "plain", "plain"]
    kept = await record(process.database.url, run_id)
    check_invariants(kept)
    assert kept.run["wake_requested_at"] is None
    (entry,) = kept.entries("operator.answered")
    assert (entry["actor"], entry["data"]["answer"]) == ("operator", "retry")


@pytest.mark.usefixtures("second_queue")
async def test_a_retry_may_go_to_another_worker_with_another_queue_and_longer_calls(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    pool = waiting_pool(
        tmp_path,
        provider,
        "plain",
        "broken",
        more=[
            {
                "name": "spare",
                "description": "stands in",
                "model": "spare",
                "base_url": provider.base_url,
                "queue": "other",
                "timeouts": {"call_s": 60},
            }
        ],
    )
    run_id = await stopped(process, provider, pool)
    await retry(process, run_id, 1, "spare")
    run = await ended(process.database, run_id, timeout_s=10)
    assert (run.state, run.steps[1].worker, run.steps[1].model) == ("succeeded", "spare", "spare")
    assert provider.requests[2]["model"] == "spare"
    kept = await record(process.database.url, run_id)
    check_invariants(kept)
    assert (kept.steps[1]["planned_worker"], kept.steps[1]["queue"]) == ("w1", "other")


async def test_a_retry_may_give_the_step_to_the_conductor_and_not_below_the_depth(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    inner = lists_plan(["Look closely."], [[]], [0])
    provider.script({"text": inner}, model="planner")
    self_ = {"name": "self", "description": "plans a part of its own", "kind": "conductor"}
    pool = waiting_pool(
        tmp_path, provider, "plain", "broken", conductor={"model": "planner"}, more=[self_], policy={"depth_max": 1}
    )
    run_id = await stopped(process, provider, pool)
    await retry(process, run_id, 1, "self")
    run = await ended(process.database, run_id, timeout_s=10)
    assert (run.state, run.steps[1].worker, len(run.children)) == ("succeeded", "self", 1)
    child = await run_of(process.database, run.children[0])
    assert run.steps[1].output == child.answer is not None
    for one in (run_id, child.id):
        check_invariants(await record(process.database.url, one))
    # A run at the pool's depth has no room below it.
    provider.script({"text": lists_plan(["a"], [[]], [1])}, {"text": inner}, model="planner")
    provider.script(BAD_KEY, model="broken", times=1)
    deep = await submit_plan(process, pool, lists_plan(["Split."], [[]], [2]))

    async def child_waits() -> bool:
        below = (await run_of(process.database, deep)).children
        return bool(below) and (await run_of(process.database, below[0])).reason == "operator"

    await until(child_waits)
    below = (await run_of(process.database, deep)).children[0]
    before = await record(process.database.url, below)
    with pytest.raises(InputError) as refused:
        await retry(process, below, 0, "self")
    assert refused.value.code == "worker-too-deep"
    with pytest.raises(InputError) as refused:
        await retry(process, below, 0, "nobody")
    assert refused.value.code == "worker-unknown"
    assert await record(process.database.url, below) == before
    # The child's own answer lets the whole tree go on.
    await retry(process, below)
    assert (await ended(process.database, deep, timeout_s=10)).state == "succeeded"


async def test_a_skipped_step_is_left_out_and_nobody_is_shown_anything_of_it(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    run_id = await stopped(process, provider, waiting_pool(tmp_path, provider))
    await skip(process, run_id, 1)
    run = await ended(process.database, run_id, timeout_s=5)
    assert (run.state, [step.state for step in run.steps]) == (
        "succeeded", ["succeeded", "skipped", "succeeded", "succeeded"],
    )  # fmt: skip
    shown = provider.requests[2]["body"]["messages"][-1]["content"]
    assert 'position="0"' in shown
    assert 'position="1"' not in shown
    assert "two" not in shown
    check_invariants(await record(process.database.url, run_id))


async def test_an_aborted_step_fails_the_run_and_a_resume_tries_it_again(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    run_id = await stopped(process, provider, waiting_pool(tmp_path, provider))
    await abort(process, run_id)
    run = await ended(process.database, run_id, timeout_s=5)
    assert (run.state, run.reason) == ("failed", "aborted")
    assert [step.state for step in run.steps] == ["succeeded", "failed", "cancelled", "cancelled"]
    for write in (retry, skip, abort):
        with pytest.raises(RefusedError, match="had already failed at") as refused:
            await write(process, run_id, 1)
        assert refused.value.code == "run-ended"
    await resume(process, run_id)
    run = await ended(process.database, run_id, timeout_s=5)
    assert (run.state, len(run.steps[0].attempts), len(run.steps[1].attempts)) == ("succeeded", 1, 2)
    check_invariants(await record(process.database.url, run_id))


async def test_an_abort_ends_the_run_though_another_step_waits_too(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script(BAD_KEY, model="broken", times=2)
    run_id = await submit_plan(process, waiting_pool(tmp_path, provider, "broken", "broken", "plain"), PAIR)
    await waits(process.database, run_id)

    async def both() -> bool:
        return [step.state for step in (await run_of(process.database, run_id)).steps[:2]] == ["waiting"] * 2

    await until(both)
    await abort(process, run_id, 0)
    run = await ended(process.database, run_id, timeout_s=5)
    assert (run.state, run.reason, provider.count) == ("failed", "aborted", 2)
    assert [step.state for step in run.steps] == ["failed", "cancelled", "cancelled"]
    check_invariants(await record(process.database.url, run_id))


async def test_other_steps_go_on_while_one_waits_and_the_run_waits_only_then(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script(BAD_KEY, model="broken", times=1)
    run_id = await submit_plan(process, waiting_pool(tmp_path, provider, "sleep-400ms", "broken", "plain"), PAIR)
    await provider_reaches(provider, 2)
    await asyncio.sleep(0.1)
    run = await run_of(process.database, run_id)
    assert (run.state, [step.state for step in run.steps]) == ("running", ["running", "waiting", "pending"])
    await waits(process.database, run_id)
    assert (await run_of(process.database, run_id)).steps[0].state == "succeeded"
    await retry(process, run_id)
    assert (await ended(process.database, run_id, timeout_s=5)).state == "succeeded"


async def test_a_step_that_fails_again_waits_again(process: WorkerProcess, provider: Provider, tmp_path: Path) -> None:
    run_id = await stopped(process, provider, waiting_pool(tmp_path, provider), PLAN)
    for _ in range(2):
        provider.script(BAD_KEY, model="broken", times=1)
        await retry(process, run_id, 1)
        await waits(process.database, run_id)
    await retry(process, run_id, 1)
    run = await ended(process.database, run_id, timeout_s=5)
    assert (run.state, len(run.steps[1].attempts)) == ("succeeded", 4)


async def test_retryable_failures_are_used_up_before_anybody_is_asked(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    pool = waiting_pool(tmp_path, provider, worker={"attempts_max": 2})
    provider.script({"status": 503, "headers": {"Retry-After": "0"}}, model="broken", times=2)
    run_id = await submit_plan(process, pool, PLAN)
    await waits(process.database, run_id)
    assert [one.error_code for one in (await run_of(process.database, run_id)).steps[1].attempts] == ["overloaded"] * 2
    # The operator's retry has all tries again.
    provider.script({"status": 503, "headers": {"Retry-After": "0"}}, model="broken", times=1)
    await retry(process, run_id)
    run = await ended(process.database, run_id, timeout_s=10)
    assert (run.state, len(run.steps[1].attempts)) == ("succeeded", 4)


async def test_an_answer_given_while_temporal_is_away_holds_and_is_delivered_later(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    run_id = await stopped(process, provider, waiting_pool(tmp_path, provider))
    assert not (await retry(process, run_id, connect=temporal_is_away)).delivered
    assert len(await nothing_more_is_called(provider)) == 2
    await reconcile(process.database, process.client)
    assert (await ended(process.database, run_id, timeout_s=5)).state == "succeeded"


async def test_answers_given_while_the_worker_is_down_are_carried_out_by_the_next(
    servers: TestServers, template_database: str, provider: Provider, tmp_path: Path
) -> None:
    url = servers.new_database(template_database)
    client = await connect_temporal(TemporalSettings(servers.temporal_address))
    database = Database(url)
    # A queue of its own: the module's worker has another database.
    pool = waiting_pool(tmp_path, provider, worker={"queue": "down"})
    async with worker_process(url, servers.temporal_address, queues=("down",)) as first:
        run_id = await stopped(first, provider, pool)
    await skip_step(database, connecting(client), order(run_id), position=None)
    before = provider.count
    async with worker_process(url, servers.temporal_address, queues=("down",)):
        run = await ended(database, run_id, timeout_s=20)
    assert (run.state, run.steps[1].state, provider.count) == ("succeeded", "skipped", before + 2)
    await database.close()
    servers.drop_database(url)


async def test_two_operators_at_once_and_the_run_does_what_the_first_said(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    pool = waiting_pool(tmp_path, provider)
    for _ in range(5):
        provider.reset()
        run_id = await stopped(process, provider, pool)
        results = await asyncio.gather(retry(process, run_id, 1), skip(process, run_id, 1), return_exceptions=True)
        (lost,) = [result for result in results if isinstance(result, BaseException)]
        assert isinstance(lost, RefusedError)
        run = await ended(process.database, run_id, timeout_s=10)
        state = "skipped" if isinstance(results[0], BaseException) else "succeeded"
        assert (run.state, run.steps[1].state) == ("succeeded", state)


async def test_a_delegated_step_that_failed_is_retried_in_the_same_child_run(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    inner = lists_plan(["Look closely."], [[]], [0])
    # The first child gives no plan at all; the pool's repairs are used up.
    provider.script(*[{"text": "no plan"}] * 3, {"text": inner}, model="planner")
    self_ = {"name": "self", "description": "plans a part of its own", "kind": "conductor"}
    pool = waiting_pool(tmp_path, provider, "plain", conductor={"model": "planner"}, more=[self_])
    run_id = await submit_plan(process, pool, lists_plan(["Split."], [[]], [1]))
    await waits(process.database, run_id)
    await retry(process, run_id)
    run = await ended(process.database, run_id, timeout_s=10)
    (child,) = run.children
    kept = await record(process.database.url, child)
    assert (run.state, kept.run["execution"], kept.run["state"]) == ("succeeded", 2, "succeeded")
    check_invariants(kept)
    check_invariants(await record(process.database.url, run_id))
