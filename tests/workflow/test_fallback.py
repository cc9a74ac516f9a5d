"""Fallbacks: a step that its worker cannot do goes to the substitutes in turn, each on record."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support.orders import resume
from tests.support.provider import Provider
from tests.support.runs import ended, lists_plan, submit_plan, worker_process
from tests.support.servers import TestServers
from tests.support.stored import check_invariants, record
from tests.support.substitutes import BAD_KEY, ONE, pool_with_substitutes, substitutions
from tests.support.workflows import pool_of
from worker_pools.pool import Pool
from worker_pools.process import WorkerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

BUSY = {"status": 503, "headers": {"Retry-After": "0"}}
THREE = lists_plan(["a", "b", "c"], [[], [0], [1]], [1, 0, 1])


@pytest_asyncio.fixture(scope="module", autouse=True, loop_scope="module")
async def second_queue(process: WorkerProcess, servers: TestServers) -> AsyncIterator[None]:
    """A worker of the same database that serves the queue ``other``."""
    async with worker_process(process.database.url, servers.temporal_address, queues=("other",)):
        yield


async def performed(process: WorkerProcess, pool: Pool, plan: str = ONE) -> Any:
    run_id = await submit_plan(process, pool, plan)
    run = await ended(process.database, run_id)
    kept = await record(process.database.url, run_id)
    check_invariants(kept)
    return run, kept


async def test_a_terminal_failure_moves_the_step_to_a_substitute_on_another_queue(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script(BAD_KEY, model="one", times=None)
    run, kept = await performed(process, pool_with_substitutes(tmp_path, provider), THREE)
    assert (run.state, [step.worker for step in run.steps]) == ("succeeded", ["other", "second", "other"])
    assert [request["model"] for request in provider.requests] == ["plain", "one", "two", "plain"]
    assert substitutions(kept) == [("first", "second", 1)]
    step = kept.steps[1]
    assert (step["planned_worker"], step["model"], step["queue"], step["attempts_base"]) == ("first", "two", "other", 1)
    # Who was called stands in each attempt.
    assert [(one.number, one.worker, one.state) for one in run.steps[1].attempts] == [
        (1, "first", "failed"), (2, "second", "succeeded"),
    ]  # fmt: skip


async def test_retryable_failures_are_used_up_before_a_substitute_and_each_has_tries_of_its_own(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script(*[BUSY] * 2, model="one")
    provider.script(*[BUSY] * 2, model="two")
    provider.script(BUSY, model="three")
    run, kept = await performed(process, pool_with_substitutes(tmp_path, provider))
    assert (run.state, run.steps[0].worker) == ("succeeded", "third")
    assert [request["model"] for request in provider.requests] == ["one", "one", "two", "two", "three", "three"]
    assert substitutions(kept) == [("first", "second", 2), ("second", "third", 4)]
    assert kept.steps[0]["planned_worker"] == "first"


async def test_when_the_last_substitute_has_failed_so_has_the_step_with_the_last_reason(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script(BAD_KEY, model="one")
    provider.script({"status": 404}, model="two")
    provider.script(*[BUSY] * 2, model="three")
    run, kept = await performed(process, pool_with_substitutes(tmp_path, provider))
    assert (run.state, run.reason, run.steps[0].state) == ("failed", "overloaded", "failed")
    assert [one.worker for one in run.steps[0].attempts] == ["first", "second", "third", "third"]
    assert len(substitutions(kept)) == 2


async def test_a_worker_without_substitutes_fails_at_once(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script(BAD_KEY, model="plain")
    run, kept = await performed(process, pool_with_substitutes(tmp_path, provider), lists_plan(["Go."], [[]], [1]))
    assert (run.state, run.reason, substitutions(kept)) == ("failed", "auth-failed", [])


async def test_a_resume_begins_with_the_plans_worker_again_and_goes_down_the_chain_anew(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    for model in ("one", "two", "three"):
        provider.script(BAD_KEY, model=model)
    run, _ = await performed(process, pool_with_substitutes(tmp_path, provider))
    assert run.state == "failed"
    provider.reset()
    provider.script(BAD_KEY, model="one")
    await resume(process, run.id)
    run = await ended(process.database, run.id)
    kept = await record(process.database.url, run.id)
    check_invariants(kept)
    assert (run.state, run.steps[0].worker) == ("succeeded", "second")
    assert [request["model"] for request in provider.requests] == ["one", "two"]
    assert substitutions(kept)[-1] == ("first", "second", 4)


async def test_a_delegated_step_falls_back_on_a_model(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"text": "no plan"}, model="planner", times=None)
    self_ = {"name": "self", "description": "plans", "kind": "conductor", "fallbacks": ["w0"]}
    pool = pool_of(
        tmp_path,
        provider.base_url,
        "plain",
        conductor={"model": "planner"},
        more=[self_],
        policy={"on_failed_step": "fallback"},
    )
    run, kept = await performed(process, pool, lists_plan(["Split."], [[]], [1]))
    assert (run.state, run.steps[0].worker) == ("succeeded", "w0")
    assert substitutions(kept) == [("self", "w0", 0)]
