"""Separation of duties: who may decide a review is a matter of people, not of accounts, in every place that is asked."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from engine.errors import InputError, RefusedError
from engine.operations.answers import retry_step
from engine.operations.reviewing import decide_review, resolve_review, show_review
from engine.service import TENANT
from engine.store.persons import link_account, list_links
from engine.store.review_views import list_reviews, review_stats
from tests.support.orders import cancel, connecting, order, resume
from tests.support.provider import Provider
from tests.support.reviews import asked, decide_as, every_run_is_proven, reviewed_pool, reviews_of, submit_as
from tests.support.runs import ended, lists_plan
from tests.support.stored import check_invariants, record
from tests.support.workflows import handle_of, run_of, until
from worker_pools.process import WorkerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

ONE = lists_plan(["one"], [[]], [0])
ANSWER = {"gate": "answer"}


async def refused_with(process: WorkerProcess, run_id: UUID, review_id: UUID, who: str, **options: Any) -> str:
    """The code that a decision is refused with; nothing was changed."""
    before = await record(process.database.url, run_id)
    lines = [(line.state, line.approved) for line in await reviews_of(process.database, run_id)]
    with pytest.raises((RefusedError, InputError)) as refused:
        await decide_as(process, review_id, who, **options)
    assert refused.value.hint
    assert await record(process.database.url, run_id) == before
    assert [(line.state, line.approved) for line in await reviews_of(process.database, run_id)] == lines
    return refused.value.code


async def test_nobody_approves_their_own_run_by_whatever_account(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    """Attack 12: a second account, or somebody on behalf of whom it was submitted or is approved."""
    await link_account(process.database, TENANT, "ann-laptop", "ann", actor_id="admin")
    await link_account(process.database, TENANT, "boss-2", "boss", actor_id="admin")
    pool = reviewed_pool(tmp_path, provider, ANSWER)
    run_id = await submit_as(process, pool, ONE, "ann", on_behalf_of="boss")
    (review,) = await asked(process.database, run_id)
    for who, options in (
        ("ann", {}),
        ("ann-laptop", {}),
        ("boss", {}),
        ("boss-2", {}),
        ("bob", {"on_behalf_of": "ann"}),
        ("bob", {"on_behalf_of": "ann-laptop"}),
    ):
        assert await refused_with(process, run_id, review.id, who, **options) == "review-own"
        assert await refused_with(process, run_id, review.id, who, kind="reject", **options) == "review-own"
        assert await refused_with(process, run_id, review.id, who, kind="bypass", **options) == "review-own"
    await decide_as(process, review.id, "bob")
    assert (await ended(process.database, run_id, timeout_s=10)).state == "succeeded"


async def test_four_eyes_are_two_people(process: WorkerProcess, provider: Provider, tmp_path: Path) -> None:
    await link_account(process.database, TENANT, "cy-phone", "cy", actor_id="admin")
    pool = reviewed_pool(tmp_path, provider, {"gate": "answer", "approvals": 2})
    run_id = await submit_as(process, pool, ONE)
    (review,) = await asked(process.database, run_id)
    await decide_as(process, review.id, "cy")
    assert await refused_with(process, run_id, review.id, "cy") == "review-decided"
    assert await refused_with(process, run_id, review.id, "cy-phone") == "review-decided"
    assert await refused_with(process, run_id, review.id, "dan", on_behalf_of="cy-phone") == "review-decided"
    assert await refused_with(process, run_id, review.id, "cy-phone", kind="reject") == "review-decided"
    await decide_as(process, review.id, "dan")
    await ended(process.database, run_id, timeout_s=10)


async def test_an_account_that_turns_out_to_be_the_submitters_does_not_count_any_more(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    pool = reviewed_pool(tmp_path, provider, {"gate": "before"})
    run_id = await submit_as(process, pool, ONE, "eve")
    (review,) = await asked(process.database, run_id)
    # Nobody works on the run while it is approved and the accounts are linked.
    await process.client.get_workflow_handle(f"run-{run_id}.1").describe()
    order_ = await decide_review(process.database, _away, review.id, "approve", actor_id="eve-private")
    assert (order_.delivered, order_.decided.review_state) == (False, "approved")
    await link_account(process.database, TENANT, "eve-private", "eve", actor_id="admin")
    await handle_of(process.client, run_id).signal("wake")
    (again,) = await asked(process.database, run_id)
    assert (again.id != review.id, provider.count) == (True, 0)
    assert [line.state for line in await reviews_of(process.database, run_id)] == ["stale", "open"]
    await decide_as(process, again.id, "bob")
    assert (await ended(process.database, run_id, timeout_s=10)).state == "succeeded"


async def test_a_list_counts_approvals_as_the_next_decision_does(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    """Two accounts that turn out to have been one person's count once, also where one of them was acted for."""
    run_id = await submit_as(process, reviewed_pool(tmp_path, provider, {"gate": "answer", "approvals": 3}), ONE)
    (review,) = await asked(process.database, run_id)
    await decide_as(process, review.id, "pia")
    await decide_as(process, review.id, "quinn", on_behalf_of="pia-2")
    assert [line.approved for line in await list_reviews(process.database, TENANT) if line.id == review.id] == [2]
    await link_account(process.database, TENANT, "pia-2", "pia", actor_id="admin")
    assert [line.approved for line in await list_reviews(process.database, TENANT) if line.id == review.id] == [1]
    for who, approvals, state in (("rosa", 2, "open"), ("stan", 3, "approved")):
        decided = (await decide_as(process, review.id, who)).decided
        assert (decided.approvals, decided.review_state) == (approvals, state)
        assert (await show_review(process.database, review.id, "rosa", None)).snapshot.line.approved == approvals
    assert (await ended(process.database, run_id, timeout_s=10)).state == "succeeded"


async def _away() -> Any:
    from tests.support.orders import temporal_is_away

    return await temporal_is_away()


async def test_a_refusal_says_whose_account_it_is_and_what_makes_the_run_their_own(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    await link_account(process.database, TENANT, "b.miller", "bert", actor_id="admin")
    pool = reviewed_pool(tmp_path, provider, {"gate": "plan"}, {"gate": "answer", "approvals": 2})
    run_id = await submit_as(process, pool, ONE, "zoe", on_behalf_of="yan")

    async def refusal(review_id: UUID, who: str, **options: Any) -> str:
        with pytest.raises(RefusedError) as refused:
            await decide_as(process, review_id, who, **options)
        return refused.value.message

    (plan,) = await asked(process.database, run_id)
    tail = ", and nobody reviews their own"
    assert await refusal(plan.id, "zoe") == f"zoe submitted run {run_id}{tail}"
    assert await refusal(plan.id, "yan") == f"run {run_id} was submitted on behalf of yan{tail}"
    assert await refusal(plan.id, "carol", kind="reject", send_back=True) == (
        f"review {plan.id} is about a plan, and a plan cannot be sent back"
    )
    await decide_as(process, plan.id, "bert", "bypass")
    later, answer = sorted(await asked(process.database, run_id, count=2), key=lambda line: line.gate, reverse=True)
    bypassed = f"bert bypassed the review of run {run_id} that this one makes up for{tail}"
    assert await refusal(later.id, "bert") == bypassed
    assert await refusal(later.id, "b.miller") == f"b.miller is an account of bert: {bypassed}"
    await decide_as(process, answer.id, "bert")
    decided = f"bert has decided review {answer.id} already, at "
    assert (await refusal(answer.id, "bert")).startswith(decided)
    assert (await refusal(answer.id, "b.miller")).startswith(f"b.miller is an account of bert: {decided}")
    await decide_as(process, answer.id, "carol")
    await decide_as(process, later.id, "carol")
    assert (await ended(process.database, run_id, timeout_s=10)).state == "succeeded"


async def test_links_are_never_changed(process: WorkerProcess) -> None:
    database = process.database
    made = await link_account(database, TENANT, "fay-2", "fay", actor_id="admin")
    assert await link_account(database, TENANT, "fay-2", "fay", actor_id="other") == made
    for account, person, code in (
        ("fay-2", "gus", "person-linked"),
        ("gus", "fay-2", "person-is-account"),
        ("fay", "gus", "person-linked"),
    ):
        with pytest.raises(RefusedError) as refused:
            await link_account(database, TENANT, account, person, actor_id="admin")
        assert refused.value.code == code
    # A hint is something that works.
    with pytest.raises(RefusedError) as refused:
        await link_account(database, TENANT, "fay", "fay-2", actor_id="admin")
    assert (refused.value.code, refused.value.hint) == (
        "person-is-account",
        "they are one person already; `podium person list` shows it",
    )
    await link_account(database, TENANT, "hal-2", "hal", actor_id="admin")
    for person in ("hal", "hal-2"):
        with pytest.raises(RefusedError) as refused:
            await link_account(database, TENANT, "fay", person, actor_id="admin")
        assert refused.value.hint == "fay and hal are two people with accounts of their own; a link is never changed"
    with pytest.raises(RefusedError) as refused:
        await link_account(database, TENANT, "gus", "fay-2", actor_id="admin")
    assert refused.value.hint == "podium person link gus fay"
    with pytest.raises(InputError):
        await link_account(database, TENANT, "a b", "fay", actor_id="admin")
    assert [(link.actor_id, link.person) for link in await list_links(database, TENANT) if link.person == "fay"] == [
        ("fay-2", "fay")
    ]


async def test_who_changes_what_a_run_does_does_not_approve_it(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    pool = reviewed_pool(tmp_path, provider, ANSWER, policy={"on_failed_step": "wait"}, models=("broken", "plain"))
    provider.script({"status": 404}, model="broken")
    run_id = await submit_as(process, pool, ONE)

    async def stopped() -> bool:
        return (await run_of(process.database, run_id)).reason == "operator"

    await until(stopped)
    way = connecting(process.client)
    await retry_step(process.database, way, order(run_id, "olga"), position=0, worker="w1")
    (review,) = await asked(process.database, run_id)
    assert await refused_with(process, run_id, review.id, "olga") == "review-own"
    await decide_as(process, review.id, "bob")
    await ended(process.database, run_id, timeout_s=10)


async def test_a_pool_may_let_people_review_their_own(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    run_id = await submit_as(process, reviewed_pool(tmp_path, provider, {"gate": "plan", "four_eyes": False}), ONE)
    (review,) = await asked(process.database, run_id)
    await decide_as(process, review.id, "alice")
    assert (await ended(process.database, run_id, timeout_s=10)).state == "succeeded"


async def test_decisions_that_nobody_waits_for_are_refused_with_the_reason(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    pool = reviewed_pool(tmp_path, provider, ANSWER)
    run_id = await submit_as(process, pool, ONE)
    (review,) = await asked(process.database, run_id)
    assert await refused_with(process, run_id, review.id, "bob", kind="reject", reason=None) == "reason-missing"
    assert await refused_with(process, run_id, review.id, "bob", meaning=" ") == "meaning-invalid"
    assert await refused_with(process, run_id, review.id, "bob", reason="x" * 5000) == "reason-too-long"
    assert await refused_with(process, run_id, uuid4(), "bob") == "review-unknown"
    await decide_as(process, review.id, "bob", meaning="I did.")
    await ended(process.database, run_id, timeout_s=10)
    for kind in ("approve", "reject", "bypass"):
        assert await refused_with(process, run_id, review.id, "carol", kind=kind) == "review-closed"
    with pytest.raises(RefusedError, match="no review of run") as refused:
        await resolve_review(process.database, str(run_id))
    assert refused.value.code == "review-closed"
    with pytest.raises(InputError) as unknown:
        await resolve_review(process.database, "ffffffff")
    assert unknown.value.code == "review-unknown"
    # A plan cannot be sent back, and neither can a step that was not called.
    run_id = await submit_as(process, reviewed_pool(tmp_path, provider, {"gate": "plan"}), ONE)
    (review,) = await asked(process.database, run_id)
    assert (
        await refused_with(process, run_id, review.id, "bob", kind="reject", send_back=True) == "send-back-impossible"
    )
    await cancel(process, run_id)
    await ended(process.database, run_id, timeout_s=10)
    assert [line.state for line in await reviews_of(process.database, run_id)] == ["withdrawn"]
    assert await refused_with(process, run_id, review.id, "bob") == "review-closed"


async def test_two_reviewers_at_once_count_as_two_and_one_reviewer_at_once_as_one(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    pool = reviewed_pool(tmp_path, provider, {"gate": "answer", "approvals": 2})
    for _ in range(3):
        run_id = await submit_as(process, pool, ONE)
        (review,) = await asked(process.database, run_id)
        same = await asyncio.gather(*(decide_as(process, review.id, "bob") for _ in range(4)), return_exceptions=True)
        lost = [result for result in same if isinstance(result, BaseException)]
        assert [type(one) for one in lost] == [RefusedError] * 3
        (line,) = await reviews_of(process.database, run_id)
        assert (line.approved, line.state) == (1, "open")
        others = await asyncio.gather(
            decide_as(process, review.id, "carol"), decide_as(process, review.id, "dan"), return_exceptions=True
        )
        assert sum(isinstance(result, RefusedError) for result in others) == 1
        assert (await ended(process.database, run_id, timeout_s=10)).state == "succeeded"
        check_invariants(await record(process.database.url, run_id))


async def test_an_approval_that_meets_a_cancel_counted_or_was_refused(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    """G3-11: who approves while the run ends is told whether it counted."""
    pool = reviewed_pool(tmp_path, provider, ANSWER)
    seen = set()
    # At first one is clearly before the other, then they meet.
    for approve_s, cancel_s in [(0.0, 0.5), (0.5, 0.0), *((0.002 * (number % 4), 0.004) for number in range(10))]:
        run_id = await submit_as(process, pool, ONE)
        (review,) = await asked(process.database, run_id)

        async def late(work: Any, delay_s: float) -> Any:
            await asyncio.sleep(delay_s)
            return await work

        approve = late(decide_as(process, review.id, "bob"), approve_s)
        approved, _ = await asyncio.gather(approve, late(cancel(process, run_id), cancel_s), return_exceptions=True)
        run = await ended(process.database, run_id, timeout_s=10)
        (line,) = await reviews_of(process.database, run_id)
        counted = not isinstance(approved, BaseException)
        assert counted == (line.state == "approved")
        if not counted:
            assert isinstance(approved, RefusedError)
            assert approved.code in {"run-cancelling", "review-closed"}
            assert run.state == "cancelled"
        assert (run.state == "succeeded") <= counted
        seen.add(counted)
        check_invariants(await record(process.database.url, run_id))
    assert seen == {True, False}


async def test_a_resume_asks_again_before_it_spends_and_never_about_what_was_approved(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    rules = [{"gate": "plan"}, {"gate": "after", "workers": ["w0"]}]
    pool = reviewed_pool(tmp_path, provider, *rules, models=("plain", "broken"))
    provider.script({"status": 404}, model="broken")
    run_id = await submit_as(process, pool, lists_plan(["one", "two"], [[], [0]], [0, 1]))
    (plan,) = await asked(process.database, run_id)
    await decide_as(process, plan.id, "bob")
    (after,) = await asked(process.database, run_id)
    await decide_as(process, after.id, "bob")
    assert (await ended(process.database, run_id, timeout_s=10)).state == "failed"
    await resume(process, run_id)
    (again,) = await asked(process.database, run_id)
    assert (again.gate, provider.count) == ("plan", 2)
    await decide_as(process, again.id, "carol")
    run = await ended(process.database, run_id, timeout_s=10)
    assert (run.state, [len(step.attempts) for step in run.steps]) == ("succeeded", [1, 2])
    assert [(line.gate, line.state) for line in await reviews_of(process.database, run_id)] == [
        ("plan", "stale"), ("after", "approved"), ("plan", "approved"),
    ]  # fmt: skip
    check_invariants(await record(process.database.url, run_id))


async def test_statistics_say_who_looked_how_long_and_who_rejects(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    pool = reviewed_pool(tmp_path, provider, ANSWER)
    for who, kind, looks in (("zoe", "approve", True), ("zoe", "reject", False), ("yan", "approve", False)):
        run_id = await submit_as(process, pool, ONE)
        (review,) = await asked(process.database, run_id)
        if looks:
            await show_review(process.database, review.id, who, None)
            await show_review(process.database, review.id, who, None)
            await asyncio.sleep(0.2)
        await decide_as(process, review.id, who, kind)  # type: ignore[arg-type]  # words
        await ended(process.database, run_id, timeout_s=10)
    people, gates = await review_stats(process.database, TENANT)
    found = {one.person: one for one in people if one.gate == "answer"}
    zoe, yan = found["zoe"], found["yan"]
    assert (zoe.decisions, zoe.approved, zoe.rejected, zoe.opened) == (2, 1, 1, 1)
    assert zoe.dwell_median_s is not None
    assert 0.2 <= zoe.dwell_median_s < 10
    assert (yan.decisions, yan.opened, yan.dwell_median_s) == (1, 0, None)
    assert any((one.gate, one.state) == ("answer", "rejected") for one in gates)


async def test_every_run_of_this_module_is_valid_for_a_verifier_that_has_only_the_bundle(
    process: WorkerProcess, tmp_path: Path
) -> None:
    await every_run_is_proven(process, tmp_path)
