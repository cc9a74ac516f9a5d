"""Reviews beside everything else that a run may meet: deadlines, orders, restarts, forks, children, rounds, budgets."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest

from activities.executions import reconcile
from engine.contracts import child_run_id
from engine.errors import RefusedError
from engine.operations.forking import ForkOrder, StepEdit, propose_fork, start_fork
from engine.operations.reviewing import decide_review, resolve_review
from engine.store.budgets import Limits
from engine.store.database import Database
from engine.store.snapshots import read_run
from tests.support.nested import CHAIN, KEEP, PLANNER, check_family, recursive_pool
from tests.support.orders import (
    cancel,
    nothing_more_is_called,
    pause,
    resume,
    temporal_is_away,
    unpause,
)
from tests.support.provider import Provider
from tests.support.reviews import asked, decide_as, every_run_is_proven, reviewed_pool, reviews_of, submit_as
from tests.support.runs import ended, lists_plan, worker_process
from tests.support.servers import TestServers
from tests.support.stored import check_invariants, record, rows
from tests.support.workflows import run_of, until
from worker_pools.process import REVIEW_EXPIRY_INTERVAL_S, WorkerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

ONE = lists_plan(["one"], [[]], [0])
TWO = lists_plan(["one", "two"], [[], [0]], [0, 1])


async def states(database: Database, run_id: UUID) -> list[tuple[str, str]]:
    return [(line.gate, line.state) for line in await reviews_of(database, run_id)]


async def waits(database: Database, run_id: UUID, reason: str = "review") -> None:
    async def shown() -> bool:
        run = await run_of(database, run_id)
        return (run.state, run.reason) == ("waiting", reason)

    await until(shown)


async def expire(process: WorkerProcess, run_id: UUID) -> None:
    """Lets the time of a review of one second pass, and the reconciler look."""

    async def expired() -> bool:
        await reconcile(process.database, process.client)
        return any(line.state == "expired" for line in await reviews_of(process.database, run_id))

    await until(expired)


async def test_an_expired_review_rejects_unless_the_policy_says_something_else(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    pool = reviewed_pool(tmp_path, provider, {"gate": "answer", "expires_s": 1})
    run_id = await submit_as(process, pool, ONE)
    (review,) = await asked(process.database, run_id)
    await until(lambda: _overdue(process.database, run_id))
    # By the database's clock, whether or not anybody has looked since.
    with pytest.raises(RefusedError) as refused:
        await decide_as(process, review.id, "bob")
    assert refused.value.code in {"review-expired", "review-closed"}
    await expire(process, run_id)
    run = await ended(process.database, run_id, timeout_s=10)
    assert (run.state, run.reason, run.answer) == ("failed", "review-expired", None)
    check_invariants(await record(process.database.url, run_id))


async def test_a_review_expires_soon_after_its_time_without_the_reconciler(
    database_url: str, servers: TestServers, provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker_pools.process.RECONCILE_INTERVAL_S", 3600.0)
    async with worker_process(database_url, servers.temporal_address) as own:
        pool = reviewed_pool(tmp_path, provider, {"gate": "answer", "expires_s": 1})
        run_id = await submit_as(own, pool, ONE)
        # Its workflow is woken, too.
        run = await ended(own.database, run_id, timeout_s=15)
        assert (run.state, run.reason) == ("failed", "review-expired")
        (review,) = await rows(own.database.url, "SELECT expires_at, closed_at FROM reviews WHERE run_id = %s", run_id)
        assert 0 <= (review["closed_at"] - review["expires_at"]).total_seconds() < REVIEW_EXPIRY_INTERVAL_S + 1


async def _overdue(database: Database, run_id: UUID) -> bool:
    (line,) = await reviews_of(database, run_id)
    return line.expires_at is not None and line.expires_at <= line.read_at


async def test_an_expired_review_goes_to_others_where_it_escalates(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    rule = {
        "gate": "answer", "reviewers": ["bob"], "expires_s": 1, "on_expiry": "escalate",
        "escalate": {"reviewers": ["carol", "dan"], "approvals": 2},
    }  # fmt: skip
    run_id = await submit_as(process, reviewed_pool(tmp_path, provider, rule), ONE)
    await asked(process.database, run_id)
    await expire(process, run_id)
    (second,) = await asked(process.database, run_id)
    assert (second.level, second.reviewers, second.approvals, second.expires_at) == (1, ("carol", "dan"), 2, None)
    with pytest.raises(RefusedError) as refused:
        await decide_as(process, second.id, "bob")
    assert refused.value.code == "review-not-asked"
    await decide_as(process, second.id, "carol")
    await decide_as(process, second.id, "dan")
    assert (await ended(process.database, run_id, timeout_s=10)).state == "succeeded"
    check_invariants(await record(process.database.url, run_id))


async def test_a_policy_may_let_an_expired_review_through_and_the_record_says_that_nobody_looked(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    pool = reviewed_pool(tmp_path, provider, {"gate": "answer", "expires_s": 1, "on_expiry": "approve"})
    run_id = await submit_as(process, pool, ONE)
    await asked(process.database, run_id)
    await expire(process, run_id)
    assert (await ended(process.database, run_id, timeout_s=10)).state == "succeeded"
    kept = await record(process.database.url, run_id)
    check_invariants(kept)
    assert kept.entries("review.decided") == []
    assert [entry["data"]["state"] for entry in kept.entries("review.closed")] == ["expired"]


async def test_a_broken_glass_lets_the_run_go_on_and_forces_a_review_by_somebody_else(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    run_id = await submit_as(process, reviewed_pool(tmp_path, provider, {"gate": "answer"}), ONE)
    (review,) = await asked(process.database, run_id)
    await decide_as(process, review.id, "bob", "bypass", reason="the customer waits")
    assert (await ended(process.database, run_id, timeout_s=10)).state == "succeeded"
    (later,) = await asked(process.database, run_id)
    assert (later.reason, later.holds, later.subject) == ("break-glass", False, review.subject)
    for who in ("bob", "alice"):
        with pytest.raises(RefusedError) as refused:
            await decide_as(process, later.id, who)
        assert refused.value.code == "review-own"
    await decide_as(process, later.id, "carol")
    assert await states(process.database, run_id) == [("answer", "bypassed"), ("answer", "approved")]
    kept = await record(process.database.url, run_id)
    check_invariants(kept)
    assert [entry["data"]["person"] for entry in kept.entries("review.bypassed")] == ["bob"]


async def test_who_may_break_the_glass_is_for_the_policy_to_say(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    run_id = await submit_as(process, reviewed_pool(tmp_path, provider, {"gate": "plan", "bypass": "never"}), ONE)
    (review,) = await asked(process.database, run_id)
    with pytest.raises(RefusedError) as refused:
        await decide_as(process, review.id, "bob", "bypass")
    assert refused.value.code == "bypass-not-allowed"
    await cancel(process, run_id)
    run_id = await submit_as(process, reviewed_pool(tmp_path, provider, {"gate": "plan", "bypass": "anyone"}), ONE)
    (review,) = await asked(process.database, run_id)
    await decide_as(process, review.id, "alice", "bypass")
    assert (await ended(process.database, run_id, timeout_s=10)).state == "succeeded"


async def test_a_run_that_waits_outlives_its_worker_and_decisions_outlive_temporals_absence(
    servers: TestServers, template_database: str, provider: Provider, tmp_path: Path
) -> None:
    url = servers.new_database(template_database)
    pool = reviewed_pool(tmp_path, provider, {"gate": "plan"}, {"gate": "answer"}, worker={"queue": "restart"})
    async with worker_process(url, servers.temporal_address, queues=("restart",)) as first:
        run_id = await submit_as(first, pool, ONE)
        (plan,) = await asked(first.database, run_id)
        await waits(first.database, run_id)
    async with worker_process(url, servers.temporal_address, queues=("restart",)) as second:
        # With everything up again it still waits, and nothing was called.
        assert await nothing_more_is_called(provider) == []
        database = second.database
        given = await decide_as(second, plan.id, "bob", connect=temporal_is_away)
        assert not given.delivered
        await reconcile(database, second.client)
        (answer,) = await asked(database, run_id)
        await waits(database, run_id)
    database = Database(url)
    # Nobody works now; the decision is a row, and the next worker carries it out.
    kept = await read_run(database, run_id)
    assert kept is not None
    assert kept.state == "waiting"
    await decide_review(database, temporal_is_away, answer.id, "approve", actor_id="carol")
    async with worker_process(url, servers.temporal_address, queues=("restart",)):
        run = await ended(database, run_id, timeout_s=30)
    assert (run.state, provider.count) == ("succeeded", 1)
    check_invariants(await record(url, run_id))
    await database.close()
    servers.drop_database(url)


@pytest.mark.parametrize("gate", ["plan", "before", "after", "answer"])
async def test_a_cancel_while_people_are_asked_ends_the_run_and_withdraws_the_question(
    process: WorkerProcess, provider: Provider, tmp_path: Path, gate: str
) -> None:
    """G5-02: cancel during an approval; what was paid for is kept, and a resume asks again without paying again."""
    run_id = await submit_as(process, reviewed_pool(tmp_path, provider, {"gate": gate}), ONE)
    (review,) = await asked(process.database, run_id)
    await waits(process.database, run_id)
    await cancel(process, run_id)
    run = await ended(process.database, run_id, timeout_s=10)
    assert (run.state, run.answer) == ("cancelled", None)
    assert await states(process.database, run_id) == [(gate, "withdrawn")]
    with pytest.raises(RefusedError) as refused:
        await decide_as(process, review.id, "bob")
    assert refused.value.code == "review-closed"
    paid = provider.count
    assert len(await nothing_more_is_called(provider)) == paid
    await resume(process, run_id)
    (again,) = await asked(process.database, run_id)
    assert (again.gate, provider.count) == (gate, paid)
    await decide_as(process, again.id, "bob")
    run = await ended(process.database, run_id, timeout_s=10)
    assert (run.state, provider.count, len(run.steps[0].attempts)) == ("succeeded", 1, 1)
    check_invariants(await record(process.database.url, run_id))


async def test_an_approval_during_a_pause_counts_when_the_pause_is_over(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    run_id = await submit_as(process, reviewed_pool(tmp_path, provider, {"gate": "before"}), ONE)
    (review,) = await asked(process.database, run_id)
    await waits(process.database, run_id)
    await pause(process, run_id)
    await decide_as(process, review.id, "bob")
    assert await nothing_more_is_called(provider) == []
    await unpause(process, run_id)
    assert (await ended(process.database, run_id, timeout_s=10)).state == "succeeded"
    check_invariants(await record(process.database.url, run_id))


async def test_the_deadline_counts_while_people_are_asked(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    pool = reviewed_pool(tmp_path, provider, {"gate": "answer"}, policy={"deadline_s": 2})
    run_id = await submit_as(process, pool, ONE)
    await asked(process.database, run_id)
    run = await ended(process.database, run_id, timeout_s=15)
    assert (run.state, run.reason) == ("failed", "deadline-exceeded")
    assert await states(process.database, run_id) == [("answer", "withdrawn")]


async def test_a_step_that_fails_ends_the_run_though_another_waits_for_people(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"status": 404, "delay_headers_s": 0.7}, model="broken")
    pool = reviewed_pool(tmp_path, provider, {"gate": "after", "workers": ["w0"]}, models=("plain", "broken", "plain"))
    run_id = await submit_as(process, pool, lists_plan(["a", "b", "c"], [[], [], [0, 1]], [0, 1, 2]))
    await asked(process.database, run_id)
    run = await ended(process.database, run_id, timeout_s=10)
    assert (run.state, run.reason) == ("failed", "endpoint-not-found")
    assert await states(process.database, run_id) == [("after", "withdrawn")]
    await resume(process, run_id)
    (review,) = await asked(process.database, run_id)
    await decide_as(process, review.id, "bob")
    run = await ended(process.database, run_id, timeout_s=10)
    assert (run.state, [len(step.attempts) for step in run.steps]) == ("succeeded", [1, 2, 1])
    check_invariants(await record(process.database.url, run_id))


async def test_a_fork_inherits_outputs_and_no_approvals(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    pool = reviewed_pool(tmp_path, provider, {"gate": "after", "workers": ["w0"]}, {"gate": "answer"})
    run_id = await submit_as(process, pool, TWO)
    for _ in range(2):
        (review,) = await asked(process.database, run_id)
        await decide_as(process, review.id, "bob")
    await ended(process.database, run_id, timeout_s=10)
    proposal = await propose_fork(
        process.database, ForkOrder(str(run_id), "fay", edits=[StepEdit(1, subtask="two, again")])
    )
    fork_id = (await start_fork(process.database, process.client, proposal)).id
    (review,) = await asked(process.database, fork_id)
    assert (review.gate, review.step, provider.count) == ("after", 0, 2)
    for author in ("alice", "fay"):
        # The fork is fay's; the plan that it edits is alice's.
        with pytest.raises(RefusedError) as refused:
            await decide_as(process, review.id, author)
        assert refused.value.code == "review-own"
    await decide_as(process, review.id, "bob")
    (answer,) = await asked(process.database, fork_id)
    await decide_as(process, answer.id, "bob")
    run = await ended(process.database, fork_id, timeout_s=10)
    assert (run.state, [step.state for step in run.steps], provider.count) == (
        "succeeded", ["reused", "succeeded"], 3,
    )  # fmt: skip
    check_invariants(await record(process.database.url, fork_id))


async def test_a_resume_with_a_pool_that_asks_for_reviews_asks_about_what_was_done_before(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    free = reviewed_pool(tmp_path, provider, models=("plain", "broken"))
    provider.script({"status": 404}, model="broken")
    run_id = await submit_as(process, free, TWO)
    assert (await ended(process.database, run_id, timeout_s=10)).state == "failed"
    strict = reviewed_pool(tmp_path, provider, {"gate": "after", "workers": ["w0"]}, models=("plain", "broken"))
    await resume(process, run_id, strict)
    (review,) = await asked(process.database, run_id)
    assert (review.gate, review.step) == ("after", 0)
    assert len(await nothing_more_is_called(provider)) == 2
    with pytest.raises(RefusedError) as refused:
        # Whoever gives a run another pool changes what it does.
        await decide_as(process, review.id, "operator")
    assert refused.value.code == "review-own"
    with pytest.raises(RefusedError) as refused:
        await decide_as(process, review.id, "bob", "reject", send_back=True)
    assert refused.value.code == "send-back-impossible"
    await decide_as(process, review.id, "bob")
    run = await ended(process.database, run_id, timeout_s=10)
    assert (run.state, [len(step.attempts) for step in run.steps]) == ("succeeded", [1, 2])
    check_invariants(await record(process.database.url, run_id))


async def test_a_substitute_is_reviewed_before_it_is_called_though_the_worker_before_it_was(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"status": 404}, model="broken")
    workers = [
        {
            "name": name, "description": name, "model": model, "base_url": provider.base_url, "queue": "stand-in",
            "fallbacks": fallbacks,
        }
        for name, model, fallbacks in (("first", "broken", ["second"]), ("second", "plain", []))
    ]  # fmt: skip
    pool = reviewed_pool(
        tmp_path, provider, {"gate": "before"}, models=(), more=workers, policy={"on_failed_step": "fallback"}
    )
    run_id = await submit_as(process, pool, ONE)
    (first,) = await asked(process.database, run_id)
    await decide_as(process, first.id, "bob")
    (second,) = await asked(process.database, run_id)
    assert (second.id != first.id, provider.count) == (True, 1)
    await decide_as(process, second.id, "bob")
    run = await ended(process.database, run_id, timeout_s=10)
    assert (run.state, run.steps[0].worker) == ("succeeded", "second")
    assert await states(process.database, run_id) == [("before", "stale"), ("before", "approved")]
    check_invariants(await record(process.database.url, run_id))


async def test_a_childs_plan_is_reviewed_and_so_is_the_answer_that_its_parent_takes_over(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"text": CHAIN}, model=PLANNER)
    rules = [{"gate": "plan"}, {"gate": "after", "workers": ["self"]}, {"gate": "answer"}]
    pool = recursive_pool(tmp_path, provider, policy={"reviews": rules, "depth_max": 1})
    run_id = await submit_as(process, pool, lists_plan(["Split.", "Conclude."], [[], [0]], [1, 0]))
    child_id = child_run_id(run_id, round=0, position=0)
    (plan,) = await asked(process.database, run_id)
    await decide_as(process, plan.id, "bob")
    (inner,) = await asked(process.database, child_id)
    assert inner.gate == "plan"
    assert await resolve_review(process.database, str(run_id)) == inner.id
    with pytest.raises(RefusedError) as refused:
        # A child is made by the engine; whose it is is found above.
        await decide_as(process, inner.id, "alice")
    assert refused.value.code == "review-own"
    await decide_as(process, inner.id, "bob")
    (output,) = await asked(process.database, run_id)
    assert (output.gate, output.step) == ("after", 0)
    with pytest.raises(RefusedError) as refused:
        await decide_as(process, output.id, "bob", "reject", send_back=True)
    assert refused.value.code == "send-back-impossible"
    await decide_as(process, output.id, "bob")
    (answer,) = await asked(process.database, run_id)
    await decide_as(process, answer.id, "bob")
    run = await ended(process.database, run_id, timeout_s=10)
    assert (run.state, run.steps[0].state) == ("succeeded", "succeeded")
    # A child's own answer is no run's answer to anybody.
    assert await states(process.database, child_id) == [("plan", "approved")]
    await check_family(process.database, run_id)


async def test_the_answer_that_a_later_round_keeps_is_reviewed_and_so_is_every_rounds_plan(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"text": ONE}, {"text": KEEP}, model=PLANNER)
    pool = reviewed_pool(tmp_path, provider, {"gate": "answer"}, conductor={"model": PLANNER}, policy={"rounds_max": 3})
    run_id = await submit_as(process, pool, None)
    (review,) = await asked(process.database, run_id)
    await waits(process.database, run_id)
    run = await run_of(process.database, run_id)
    assert (review.round, review.step, run.steps[0].state) == (0, 0, "succeeded")
    with pytest.raises(RefusedError) as refused:
        await decide_as(process, review.id, "bob", "reject", send_back=True)
    assert refused.value.code == "send-back-impossible"
    await decide_as(process, review.id, "bob")
    assert (await ended(process.database, run_id, timeout_s=10)).state == "succeeded"
    check_invariants(await record(process.database.url, run_id))


async def test_a_kept_answer_that_is_rejected_fails_the_run_and_the_last_rounds_answer_is_reviewed_like_any_other(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"text": ONE}, {"text": KEEP}, model=PLANNER)
    pool = reviewed_pool(tmp_path, provider, {"gate": "answer"}, conductor={"model": PLANNER}, policy={"rounds_max": 2})
    run_id = await submit_as(process, pool, None)
    (review,) = await asked(process.database, run_id)
    await decide_as(process, review.id, "bob", "reject")
    run = await ended(process.database, run_id, timeout_s=10)
    assert (run.state, run.reason, run.answer) == ("failed", "review-rejected", None)
    provider.reset()
    provider.script({"text": ONE}, {"text": lists_plan(["Mend it."], ["all"], [0])}, model=PLANNER)
    run_id = await submit_as(process, pool, None)
    (review,) = await asked(process.database, run_id)
    assert (review.round, review.step) == (1, 0)
    await decide_as(process, review.id, "bob")
    assert (await ended(process.database, run_id, timeout_s=10)).state == "succeeded"
    check_invariants(await record(process.database.url, run_id))


async def test_a_call_is_reviewed_for_whoever_makes_it_a_run_of_its_own_or_another_pools_model(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    """An auditor compares what was approved with the call: worker, model, tries. So does the engine, and both agree."""
    provider.script({"text": ONE}, model=PLANNER)
    provider.script({"status": 404}, model="broken")
    rules = [{"gate": "before"}, {"gate": "plan"}]
    pool = recursive_pool(tmp_path, provider, policy={"reviews": rules, "depth_max": 1})
    run_id = await submit_as(process, pool, lists_plan(["Split."], [[]], [1]))
    child_id = child_run_id(run_id, round=0, position=0)
    for review in await asked(process.database, run_id, count=2):
        await decide_as(process, review.id, "bob")
    for review in await asked(process.database, child_id, count=2):
        await decide_as(process, review.id, "bob", "bypass")
    for review in await asked(process.database, child_id, count=2):
        await decide_as(process, review.id, "carol")
    assert (await ended(process.database, run_id, timeout_s=10)).state == "succeeded"
    run_id = await submit_as(process, reviewed_pool(tmp_path, provider, *rules, models=("broken",)), ONE)
    for number in (1, 2):
        for review in await asked(process.database, run_id, count=2):
            await decide_as(process, review.id, "bob")
        run = await ended(process.database, run_id, timeout_s=10)
        assert run.state == ("failed", "succeeded")[number - 1]
        if number == 1:
            await resume(process, run_id, reviewed_pool(tmp_path, provider, *rules, models=("plain",)))


async def test_a_kept_answer_is_drawn_for_on_record_like_any_other(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"text": ONE}, {"text": KEEP}, model=PLANNER)
    rule = {"gate": "answer", "sample_percent": 50}
    pool = reviewed_pool(tmp_path, provider, rule, conductor={"model": PLANNER}, policy={"rounds_max": 2})
    run_id = await submit_as(process, pool, None)

    async def settled() -> bool:
        for line in await reviews_of(process.database, run_id):
            if line.state == "open":
                await decide_as(process, line.id, "bob")
        return (await run_of(process.database, run_id)).state == "succeeded"

    await until(settled)
    drawn = await rows(
        process.database.url,
        "SELECT convert_from(body, 'UTF8')::json -> 'data' AS data FROM ledger_entries "
        "WHERE run_id = %s AND type = 'review.sampled'",
        run_id,
    )
    assert [(row["data"]["gate"], row["data"]["round"], row["data"]["step"]) for row in drawn] == [("answer", 0, 0)]
    assert drawn[0]["data"]["chosen"] == bool(await reviews_of(process.database, run_id))


async def test_a_budget_reserves_nothing_while_people_are_asked_and_a_sent_back_step_is_paid_from_it(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    pool = reviewed_pool(tmp_path, provider, {"gate": "before"}, {"gate": "answer"})
    run_id = await submit_as(process, pool, ONE, limits=Limits(None, None, 1))
    (before,) = await asked(process.database, run_id)
    run = await run_of(process.database, run_id)
    assert run.budget is not None
    assert run.budget.accounts["calls"].reserved == 0
    await decide_as(process, before.id, "bob")
    (answer,) = await asked(process.database, run_id)
    await decide_as(process, answer.id, "bob", "reject", send_back=True)
    # What is asked for is now another prompt, so it is reviewed before it is sent, too.
    (before,) = await asked(process.database, run_id)
    assert before.gate == "before"
    await decide_as(process, before.id, "bob")
    await waits(process.database, run_id, "budget-calls")
    assert provider.count == 1
    await cancel(process, run_id)
    await ended(process.database, run_id, timeout_s=10)
    check_invariants(await record(process.database.url, run_id))


async def test_every_run_of_this_module_is_valid_for_a_verifier_that_has_only_the_bundle(
    process: WorkerProcess, tmp_path: Path
) -> None:
    await every_run_is_proven(process, tmp_path)
