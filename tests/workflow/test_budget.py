"""Budgets of real runs: what is reserved decides what starts, the stop is one from which the run goes on."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from activities.executions import reconcile
from engine.errors import InputError
from engine.operations.budgets import BudgetGiven, change_budget, read_budget
from engine.service import Submission, prepare, submit
from engine.settings import TemporalSettings
from engine.store.budgets import BudgetSnapshot, Limits
from engine.store.database import Database
from engine.store.raising import LimitChange
from engine.store.snapshots import RunSnapshot
from engine.temporal_client import connect_temporal
from tests.support.orders import (
    Connect,
    cancel,
    connecting,
    nothing_more_is_called,
    order,
    pause,
    resume,
    temporal_is_away,
    unpause,
)
from tests.support.provider import Provider
from tests.support.runs import ended, lists_plan, submit_plan, worker_process
from tests.support.servers import TestServers
from tests.support.stored import check_invariants, record
from tests.support.workflows import pool_of, provider_reaches, run_of, until
from worker_pools.pool import Pool
from worker_pools.process import WorkerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

FIVE = lists_plan(["a", "b", "c", "d", "e"], [[]] * 5, [0] * 5)
CHAIN = lists_plan(["a", "b", "c"], [[], [0], [1]], [0] * 3)
# Nothing for the prompt, so that a call's worst case is exactly 0.40 USD: 1,000 tokens at 400 USD a million.
PRICE = {"input_usd_per_mtok": "0", "output_usd_per_mtok": "400"}
FULL = {"text": "An answer.", "usage": [10, 1000]}
CHEAP = {"text": "An answer.", "usage": [10, 250]}
DOUBLE = {"text": "An answer.", "usage": [10, 2000]}


def priced(folder: Path, provider: Provider, model: str = "plain", *, usd: str | None = "1.00", **changes: Any) -> Pool:
    """A pool whose calls cost at most 40 cents each, and whose runs may spend so much."""
    budget = {} if usd is None else {"budget": {"usd": usd}}
    worker = {"price": PRICE, "output_tokens_max": 1000, **changes.pop("worker", {})}
    policy = {**budget, **changes.pop("policy", {})}
    return pool_of(folder, provider.base_url, model, worker=worker, policy=policy, **changes)


async def budget(process: WorkerProcess, run_id: UUID) -> BudgetSnapshot:
    found = await read_budget(process.database, run_id)
    assert found is not None
    return found


async def raise_to(
    database: Database, connect: Connect, run_id: UUID, usd: str | None = None, **limits: Any
) -> BudgetGiven:
    run = await run_of(database, run_id)
    wanted = LimitChange(Limits(None if usd is None else Decimal(usd), **limits))
    return await change_budget(database, connect, order(run_id, reason="more"), wanted, pool_digest=run.pool_digest)


async def stops(database: Database, run_id: UUID, reason: str = "budget-usd") -> RunSnapshot:
    """The run once it waits for its budget and nothing of it is in flight."""

    async def shown() -> bool:
        run = await run_of(database, run_id)
        return (run.state, run.reason) == ("waiting", reason)

    await until(shown)
    return await run_of(database, run_id)


async def checked(process: WorkerProcess, run_id: UUID) -> None:
    """The record is consistent, nothing is reserved any more, and the budget says what the attempts say."""
    kept = await record(process.database.url, run_id)
    check_invariants(kept)
    found = await budget(process, run_id)
    assert [account.reserved for account in found.accounts.values()] == [0, 0, 0]
    assert found.usd.spent == sum((row["cost_usd"] or Decimal(0) for row in kept.attempts), Decimal(0))
    assert found.calls.spent + found.calls.assumed == len(kept.attempts)


async def test_two_of_five_parallel_calls_of_40_cents_start_with_a_dollar_and_a_raise_lets_the_others_go_on(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script({**FULL, "delay_first_s": 0.4}, times=None)
    run_id = await submit_plan(process, priced(tmp_path, provider), FIVE)
    await provider_reaches(provider, 2)
    found = await budget(process, run_id)
    assert (found.usd.reserved, found.usd.left) == (Decimal("0.8"), Decimal("0.2"))
    run = await stops(process.database, run_id)
    assert len(await nothing_more_is_called(provider)) == 2
    assert sorted((step.state, step.reason) for step in run.steps) == sorted(
        [("succeeded", None)] * 2 + [("waiting", "budget-usd")] * 3
    )
    assert run.budget is not None
    assert (run.budget.usd.spent, run.budget.usd.reserved, run.budget.usd.left) == (
        Decimal("0.8"), 0, Decimal("0.2"),
    )  # fmt: skip
    # Enough for one more, and then for the rest.
    given = await raise_to(process.database, connecting(process.client), run_id, "1.20")
    assert given.given.delivered
    await provider_reaches(provider, 3)
    await stops(process.database, run_id)
    assert provider.count == 3
    await raise_to(process.database, connecting(process.client), run_id, "2")
    run = await ended(process.database, run_id, timeout_s=10)
    assert (run.state, provider.count, run.cost_usd) == ("succeeded", 5, Decimal(2))
    assert {len(step.attempts) for step in run.steps} == {1}
    await checked(process, run_id)


async def test_calls_that_end_cheaper_than_they_might_have_leave_room_for_the_others(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script({**CHEAP, "delay_first_s": 0.3}, times=None)
    run_id = await submit_plan(process, priced(tmp_path, provider), FIVE)
    run = await ended(process.database, run_id, timeout_s=15)
    assert (run.state, run.cost_usd, provider.stats["in_flight_max"]) == ("succeeded", Decimal("0.5"), 2)
    await checked(process, run_id)


async def test_a_call_that_costs_twice_its_estimate_is_all_that_the_budget_is_passed_by(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script(FULL, DOUBLE)
    run_id = await submit_plan(process, priced(tmp_path, provider), CHAIN)
    run = await stops(process.database, run_id)
    assert (run.cost_usd, provider.count) == (Decimal("1.2"), 2)
    assert run.budget is not None
    assert run.budget.usd.left == 0
    provider.script(FULL)
    await raise_to(process.database, connecting(process.client), run_id, "1.60")
    run = await ended(process.database, run_id, timeout_s=5)
    assert (run.state, provider.count) == ("succeeded", 3)
    await checked(process, run_id)


async def test_a_repeated_step_reserves_for_every_try_and_pays_for_each_once(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    # Cut in the middle of the answer: billed, nobody knows how much.
    provider.script({"end": "reset", "pieces": 3}, FULL)
    run_id = await submit_plan(process, priced(tmp_path, provider), CHAIN)
    run = await stops(process.database, run_id)
    assert (provider.count, [len(step.attempts) for step in run.steps]) == (2, [2, 0, 0])
    found = await budget(process, run_id)
    assert (found.usd.spent, found.usd.assumed, found.calls.spent) == (Decimal("0.4"), Decimal("0.4"), 2)
    assert await cancel(process, run_id)
    assert (await ended(process.database, run_id, timeout_s=5)).state == "cancelled"
    check_invariants(await record(process.database.url, run_id))


async def test_a_budget_raised_while_everything_is_down_holds_and_the_run_goes_on_without_repeats(
    servers: TestServers, template_database: str, provider: Provider, tmp_path: Path
) -> None:
    url = servers.new_database(template_database)
    client = await connect_temporal(TemporalSettings(servers.temporal_address))
    database = Database(url)
    provider.script(FULL, times=None)
    # A queue of its own: the module's worker has another database.
    async with worker_process(url, servers.temporal_address, queues=("down",)) as first:
        run_id = await submit_plan(first, priced(tmp_path, provider, worker={"queue": "down"}), CHAIN)
        await stops(database, run_id)
    assert provider.count == 2
    assert not (await raise_to(database, temporal_is_away, run_id, "1.2")).given.delivered
    async with worker_process(url, servers.temporal_address, queues=("down",)) as second:
        await reconcile(second.database, client)
        run = await ended(database, run_id, timeout_s=20)
    assert (run.state, provider.count, run.cost_usd) == ("succeeded", 3, Decimal("1.2"))
    await database.close()
    servers.drop_database(url)


async def test_calls_and_tokens_are_limits_too_and_a_planning_call_counts(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"text": CHAIN, "usage": [10, 10]}, model="planner")
    pool = pool_of(
        tmp_path,
        provider.base_url,
        "plain",
        conductor={"model": "planner"},
        worker={"output_tokens_max": 100},
        policy={"budget": {"calls": 2}},
    )
    run_id = await submit_plan(process, pool, None)
    run = await stops(process.database, run_id, "budget-calls")
    assert (provider.count, [step.state for step in run.steps]) == (2, ["succeeded", "waiting", "pending"])
    used = (await budget(process, run_id)).tokens.used
    await raise_to(process.database, connecting(process.client), run_id, calls=9, tokens=int(used) + 50)
    await stops(process.database, run_id, "budget-tokens")
    assert provider.count == 2
    await raise_to(process.database, connecting(process.client), run_id, tokens=10**6)
    assert (await ended(process.database, run_id, timeout_s=5)).state == "succeeded"
    await checked(process, run_id)


async def test_a_planning_call_that_does_not_fit_waits_and_goes_on_after_a_raise(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    """The prompt is longer than the task, which is all that the check at the start can know of it."""
    provider.script({"text": CHAIN}, model="planner")
    pool = pool_of(
        tmp_path, provider.base_url, "plain", conductor={"model": "planner"}, worker={"output_tokens_max": 100}
    )
    asked = Submission("Go.", pool, "tester", limits=Limits(tokens=300))
    run_id = (await submit(process.database, process.client, asked)).id
    await stops(process.database, run_id, "budget-tokens")
    assert provider.count == 0
    assert (await raise_to(process.database, connecting(process.client), run_id, tokens=10**6)).given.delivered
    assert (await ended(process.database, run_id, timeout_s=5)).state == "succeeded"


async def test_the_runs_of_a_tree_share_one_budget(process: WorkerProcess, provider: Provider, tmp_path: Path) -> None:
    inner = lists_plan(["x", "y"], [[], [0]], [0, 0])
    provider.script({"text": inner, "usage": [10, 500]}, model="planner")
    provider.script(FULL, model="plain", times=None)
    self_ = {"name": "self", "description": "plans a part of its own", "kind": "conductor"}
    pool = priced(tmp_path, provider, usd="1.30", conductor={"model": "planner"}, more=[self_])
    run_id = await submit_plan(process, pool, lists_plan(["a", "b"], [[], [0]], [0, 1]))

    async def child_stops() -> bool:
        below = (await run_of(process.database, run_id)).children
        return bool(below) and (await run_of(process.database, below[0])).reason == "budget-usd"

    await until(child_stops)
    # 0.40 for the first step, 0.20 for the child's plan, 0.40 for its first step; 0.30 are left.
    found = await budget(process, run_id)
    assert (found.usd.spent, found.usd.left, found.calls.spent) == (Decimal("1.0"), Decimal("0.3"), 3)
    (child,) = (await run_of(process.database, run_id)).children
    shared = (await run_of(process.database, child)).budget
    assert shared == found
    await raise_to(process.database, connecting(process.client), run_id, "1.40")
    run = await ended(process.database, run_id, timeout_s=10)
    assert (run.state, provider.count) == ("succeeded", 4)
    found = await budget(process, run_id)
    total = Decimal(0)
    for one in (run_id, child):
        kept = await record(process.database.url, one)
        check_invariants(kept)
        total += kept.run["cost_usd"]
    assert (found.usd.spent, found.usd.reserved, found.calls.spent) == (total, 0, 4)
    assert total == Decimal("1.4")


async def test_what_a_call_leaves_over_is_for_the_other_runs_of_the_tree_too(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    inner = lists_plan(["x"], [[]], [0])
    provider.script({"text": inner, "usage": [10, 1]}, model="planner", times=None)
    provider.script({**CHEAP, "delay_first_s": 0.6}, model="plain", times=None)
    self_ = {"name": "self", "description": "plans a part of its own", "kind": "conductor"}
    pool = priced(tmp_path, provider, usd="0.70", conductor={"model": "planner", "output_tokens_max": 10}, more=[self_])
    run_id = await submit_plan(process, pool, lists_plan(["a", "b", "c"], [[], [], [0, 1]], [1, 1, 0]))

    async def one_is_left() -> bool:
        below = [await run_of(process.database, child) for child in (await run_of(process.database, run_id)).children]
        return sorted(run.state for run in below) == ["succeeded", "waiting"]

    await until(one_is_left)
    calls = provider.count
    # Its own workflow would look again only after half a minute.
    await reconcile(process.database, process.client)
    await provider_reaches(provider, calls + 1, timeout_s=5)
    run = await ended(process.database, run_id, timeout_s=10)
    assert run.state == "succeeded"


async def test_a_run_without_a_budget_gets_one_while_it_runs(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script({**FULL, "delay_first_s": 0.5}, times=None)
    run_id = await submit_plan(process, priced(tmp_path, provider, usd=None), CHAIN)
    await provider_reaches(provider, 2)
    given = await raise_to(process.database, connecting(process.client), run_id, "0.8")
    assert given.budget is not None
    assert (given.budget.usd.spent, given.budget.usd.reserved) == (Decimal("0.4"), Decimal("0.4"))
    await stops(process.database, run_id)
    assert provider.count == 2
    await raise_to(process.database, connecting(process.client), run_id, "5")
    assert (await ended(process.database, run_id, timeout_s=5)).state == "succeeded"
    await checked(process, run_id)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (Limits(usd=Decimal("0.39")), "0.4"),
        (Limits(tokens=1000), "tokens"),
        (Limits(calls=0), "1 call"),
    ],
)
async def test_a_budget_that_the_first_call_could_break_is_refused_and_no_run_is_made(
    provider: Provider, tmp_path: Path, limits: Limits, words: str
) -> None:
    for plan in (CHAIN, None):
        asked = Submission(
            "Go.", priced(tmp_path, provider, usd=None), actor_id="tester", plan_text=plan, limits=limits
        )
        with pytest.raises(InputError) as refused:
            prepare(asked)
        assert (refused.value.code, words in refused.value.message) == ("budget-hopeless", True)


async def test_a_budget_in_dollars_is_refused_where_a_price_is_unknown(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    pool = pool_of(tmp_path, provider.base_url, "plain", worker={"price": None})
    with pytest.raises(InputError) as refused:
        prepare(Submission("Go.", pool, actor_id="tester", plan_text=CHAIN, limits=Limits(usd=Decimal(5))))
    assert refused.value.code == "budget-price-unknown"
    provider.script({"text": "An answer.", "delay_first_s": 0.5}, times=None)
    run_id = await submit_plan(process, pool, CHAIN)
    await provider_reaches(provider, 1)
    with pytest.raises(InputError) as refused:
        await raise_to(process.database, connecting(process.client), run_id, "5")
    assert refused.value.code == "budget-price-unknown"
    assert await read_budget(process.database, run_id) is None
    assert (await ended(process.database, run_id)).state == "succeeded"


async def test_a_run_that_fails_does_not_wait_for_the_budget_of_its_other_steps(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"status": 401, "delay_headers_s": 0.5}, model="broken", times=1)
    pool = priced(tmp_path, provider, "broken", usd="0.60")
    run_id = await submit_plan(process, pool, lists_plan(["a", "b"], [[], []], [0, 0]))
    run = await ended(process.database, run_id, timeout_s=10)
    assert (run.state, run.reason, provider.count) == ("failed", "auth-failed", 1)
    assert sorted(step.state for step in run.steps) == ["cancelled", "failed"]
    # What the failed call had reserved is free again, and a resume finds it.
    await resume(process, run_id)
    run = await ended(process.database, run_id, timeout_s=10)
    assert (run.state, provider.count) == ("succeeded", 3)
    await checked(process, run_id)


async def test_a_resume_with_a_pool_without_prices_is_refused_where_dollars_are_limited(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"status": 401}, model="plain", times=1)
    run_id = await submit_plan(process, priced(tmp_path, provider), CHAIN)
    assert (await ended(process.database, run_id)).state == "failed"
    before = await record(process.database.url, run_id)
    with pytest.raises(InputError) as refused:
        await resume(process, run_id, pool_of(tmp_path, provider.base_url, "plain", worker={"price": None}))
    assert refused.value.code == "budget-price-unknown"
    assert await record(process.database.url, run_id) == before


async def test_a_run_that_waits_for_its_budget_can_be_paused_and_goes_on_only_when_it_may(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script(FULL, times=None)
    run_id = await submit_plan(process, priced(tmp_path, provider), CHAIN)
    await stops(process.database, run_id)
    await pause(process, run_id)
    await raise_to(process.database, connecting(process.client), run_id, "2")
    assert len(await nothing_more_is_called(provider)) == 2
    await unpause(process, run_id)
    assert (await ended(process.database, run_id, timeout_s=5)).state == "succeeded"
    await asyncio.sleep(0)
    await checked(process, run_id)
