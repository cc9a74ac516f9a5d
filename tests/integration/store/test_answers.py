"""What operators answer to steps that wait: one transaction each, with who and why, and nothing changed if refused."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import pytest

from engine.errors import InputError, PodiumError, RefusedError
from engine.ledger.commitment import ARTIFACT_DOMAIN, commitment
from engine.store.answers import Answer, Answered, answer_step
from engine.store.attempts import FailurePolicy, Substitute, open_attempt
from engine.store.closing import close_step_attempt
from engine.store.database import Database
from engine.store.inputs import read_step_inputs
from engine.store.orders import Order, pause_run, request_cancel, unpause_run
from engine.store.run_writer import AttemptResult
from engine.store.settling import Settlement, settle_run
from engine.store.snapshots import read_run
from tests.support.link import Cut, Link
from tests.support.stored import (
    answered,
    check_invariants,
    ended_with,
    execute,
    opening,
    record,
    stored_run,
)

WAIT = FailurePolicy(wait=True)
FAILED = AttemptResult("failed", "auth-failed", provider_status=401)
DIAMOND = [[], [0], [0], [1, 2]]
ANSWERS = [Answer("retry"), Answer("skip"), Answer("abort")]


def order(run_id: UUID, reason: str | None = None, actor: str = "operator-1") -> Order:
    return Order(run_id, actor, "somebody", reason)


async def waiting_run(
    database: Database, access: Sequence[Any] = DIAMOND, waits: Sequence[int] = (1,), done: Sequence[int] = (0,)
) -> UUID:
    """A run whose steps ``done`` are answered and whose steps ``waits`` failed and wait for an operator."""
    run_id = await stored_run(database, access)
    for position in done:
        opened = opening(run_id, position)
        await open_attempt(database, opened)
        await close_step_attempt(database, answered(opened))
    for position in waits:
        opened = opening(run_id, position, attempts_max=1)
        await open_attempt(database, opened)
        ruling = await close_step_attempt(database, ended_with(opened, FAILED, on_failure=WAIT))
        assert (ruling.verdict, ruling.code) == ("held", "operator")
    return run_id


async def refusal(database: Database, order_: Order, answer: Answer) -> PodiumError:
    """What is said to an answer that changes nothing."""
    before = await record(database.url, order_.run_id)
    with pytest.raises(PodiumError) as refused:
        await answer_step(database, order_, answer)
    assert await record(database.url, order_.run_id) == before
    assert refused.value.hint
    return refused.value


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda one: one.kind)
async def test_an_answer_says_who_what_and_why_and_keeps_the_words_out_of_the_ledger(
    database: Database, answer: Answer
) -> None:
    run_id = await waiting_run(database)
    given = order(run_id, "the cänary sang")
    await answer_step(database, given, answer)
    kept = await record(database.url, run_id)
    check_invariants(kept)
    (entry,) = kept.entries("operator.answered")
    assert (entry["actor"], entry["on_behalf_of"]) == ("operator-1", "somebody")
    data = entry["data"]
    assert (data["order"], data["answer"], data["round"], data["step"]) == (str(given.id), answer.kind, 0, 1)
    (said,) = data["artifacts"]
    (artifact,) = [row for row in kept.artifacts if row["kind"] == "reason"]
    path = f"{given.id}/reason/0"
    expected = commitment(bytes(artifact["salt"]), ARTIFACT_DOMAIN, path, "the cänary sang".encode())
    assert said["commitment"] == expected.hex()
    assert b"sang" not in b"".join(kept.bodies)
    assert kept.run["wake_requested_at"] is not None


async def test_a_retry_makes_the_step_pending_and_what_was_tried_before_does_not_count(database: Database) -> None:
    run_id = await waiting_run(database)
    await answer_step(database, order(run_id), Answer("retry", 1))
    kept = await record(database.url, run_id)
    assert (kept.steps[1]["state"], kept.steps[1]["reason"], kept.steps[1]["attempts_base"]) == ("pending", None, 1)
    assert kept.steps[1]["planned_worker"] is None
    again = opening(run_id, 1, (1, 1, 1), attempts_max=1)
    assert (await open_attempt(database, again)).verdict == "call"
    ruling = await close_step_attempt(database, ended_with(again, FAILED, on_failure=WAIT))
    assert (ruling.verdict, ruling.code) == ("held", "operator")
    await answer_step(database, order(run_id), Answer("retry", 1))
    assert (await record(database.url, run_id)).steps[1]["attempts_base"] == 2
    check_invariants(await record(database.url, run_id))


async def test_another_worker_takes_the_step_and_the_plans_worker_is_remembered(database: Database) -> None:
    run_id = await waiting_run(database)
    digest = (await record(database.url, run_id)).run["pool_digest"]
    to = Substitute("gamma", "better", "elsewhere")
    done = await answer_step(database, order(run_id), Answer("retry", 1, to, digest))
    assert (done.position, done.worker) == (1, "gamma")
    step = (await record(database.url, run_id)).steps[1]
    moved = ("gamma", "better", "elsewhere", "beta")
    assert (step["worker"], step["model"], step["queue"], step["planned_worker"]) == moved
    # A call that was asked for before finds that the step is somebody else's.
    assert (await open_attempt(database, opening(run_id, 1, (1, 1, 1)))).verdict == "moved"
    opened = opening(run_id, 1, (1, 2, 1), worker="gamma", attempts_max=1)
    await open_attempt(database, opened)
    await close_step_attempt(database, ended_with(opened, FAILED, on_failure=WAIT))
    # Back to the worker of the plan: then there is no substitute any more.
    await answer_step(database, order(run_id), Answer("retry", 1, Substitute("beta", "plain", "stand-in"), digest))
    step = (await record(database.url, run_id)).steps[1]
    assert (step["worker"], step["planned_worker"]) == ("beta", None)
    check_invariants(await record(database.url, run_id))


async def test_a_worker_of_another_pool_than_the_runs_is_refused(database: Database) -> None:
    run_id = await waiting_run(database)
    stale = Answer("retry", 1, Substitute("gamma", "plain", "stand-in"), "0" * 64)
    assert (await refusal(database, order(run_id), stale)).code == "run-changed"


async def test_readers_of_a_skipped_step_see_nothing_of_it(database: Database) -> None:
    run_id = await waiting_run(database, done=(0, 2))
    await answer_step(database, order(run_id), Answer("skip", 1))
    assert (await open_attempt(database, opening(run_id, 1, (1, 1, 1)))).verdict == "done"
    inputs = await read_step_inputs(database, run_id, 0, 3)
    assert [step.position for step in inputs.visible] == [2]
    last = opening(run_id, 3, worker="alpha")
    await open_attempt(database, last)
    await close_step_attempt(database, answered(last, ends_run=True))
    kept = await record(database.url, run_id)
    check_invariants(kept)
    assert (kept.run["state"], kept.steps[1]["state"], kept.steps[1]["reason"]) == ("succeeded", "skipped", "operator")


async def test_the_last_step_of_a_plan_cannot_be_left_out(database: Database) -> None:
    run_id = await waiting_run(database, [[]], waits=(0,), done=())
    assert (await refusal(database, order(run_id), Answer("skip"))).code == "answer-needed"
    await answer_step(database, order(run_id), Answer("retry"))


async def test_an_aborted_step_fails_and_the_workflow_is_told_so(database: Database) -> None:
    run_id = await waiting_run(database)
    done = await answer_step(database, order(run_id), Answer("abort", 1))
    assert done.ordered.state == "running"
    ruling = await open_attempt(database, opening(run_id, 1, (1, 1, 1)))
    assert (ruling.verdict, ruling.code) == ("failed", "aborted")
    await settle_run(database, Settlement(run_id, 1, "failed", "aborted"))
    kept = await record(database.url, run_id)
    check_invariants(kept)
    assert (kept.run["state"], kept.run["reason"]) == ("failed", "aborted")
    assert [step["state"] for step in kept.steps] == ["succeeded", "failed", "cancelled", "cancelled"]


async def test_the_run_goes_on_unless_another_step_still_keeps_all_of_it_waiting(database: Database) -> None:
    run_id = await waiting_run(database, waits=(1, 2))
    kept = await record(database.url, run_id)
    assert (kept.run["state"], kept.run["reason"]) == ("waiting", "operator")
    assert (await refusal(database, order(run_id), Answer("retry"))).code == "step-missing"
    done = await answer_step(database, order(run_id), Answer("skip", 2))
    assert (done.ordered.state, done.ordered.reason) == ("waiting", "operator")
    done = await answer_step(database, order(run_id), Answer("retry"))
    assert (done.position, done.ordered.state) == (1, "running")
    check_invariants(await record(database.url, run_id))


async def test_a_run_says_since_when_its_step_waits_and_no_longer_once_it_was_answered(database: Database) -> None:
    run_id = await waiting_run(database)
    kept = await record(database.url, run_id)
    run = await read_run(database, run_id)
    assert run is not None
    assert run.steps[1].waiting_since == kept.attempts[1]["ended_at"]
    # Step 2 can still begin, so the run itself does not wait.
    assert (run.state, run.waiting_since) == ("running", None)
    assert [step.waiting_since for step in run.steps if step.position != 1] == [None] * 3
    await answer_step(database, order(run_id), Answer("retry"))
    run = await read_run(database, run_id)
    assert run is not None
    assert run.steps[1].waiting_since is None


async def test_answers_to_a_paused_run_hold_until_it_goes_on(database: Database) -> None:
    run_id = await waiting_run(database, waits=(1, 2))
    await pause_run(database, order(run_id))
    await answer_step(database, order(run_id), Answer("retry", 1))
    assert (await open_attempt(database, opening(run_id, 1, (1, 1, 1)))).code == "paused"
    await unpause_run(database, order(run_id))
    assert (await open_attempt(database, opening(run_id, 1, (1, 2, 1)))).verdict == "call"
    check_invariants(await record(database.url, run_id))


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda one: one.kind)
async def test_what_does_not_wait_for_an_operator_takes_no_answer(database: Database, answer: Answer) -> None:
    run_id = await stored_run(database, DIAMOND)
    assert (await refusal(database, order(run_id), answer)).code == "step-not-waiting"
    opened = opening(run_id, 0)
    await open_attempt(database, opened)
    at = Answer(answer.kind, 0)
    said = await refusal(database, order(run_id), at)
    assert (said.code, "it is running" in said.message) == ("step-not-waiting", True)
    await close_step_attempt(database, answered(opened))
    said = await refusal(database, order(run_id), at)
    assert "it is succeeded" in said.message
    await execute(
        database.url, "UPDATE steps SET state = 'waiting', reason = 'secret-missing' WHERE position = 1 AND run_id = %s",
        run_id,
    )  # fmt: skip
    said = await refusal(database, order(run_id), Answer(answer.kind, 1))
    assert "waiting (secret-missing)" in said.message
    unknown = await refusal(database, order(run_id), Answer(answer.kind, 4))
    assert (unknown.code, isinstance(unknown, InputError)) == ("step-unknown", True)


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda one: one.kind)
@pytest.mark.parametrize("state", ["failed", "cancelled", "succeeded"])
async def test_a_run_that_has_ended_takes_no_answer_and_says_when_it_ended(
    database: Database, answer: Answer, state: str
) -> None:
    run_id = await waiting_run(database)
    if state == "succeeded":
        await execute(
            database.url, "UPDATE runs SET state = 'succeeded', ended_at = clock_timestamp() WHERE id = %s", run_id
        )
    else:
        await settle_run(database, Settlement(run_id, 1, state, "x"))  # type: ignore[arg-type]  # a state
    said = await refusal(database, order(run_id), Answer(answer.kind, 1))
    assert (said.code, said.exit_code) == ("run-ended", 1)
    assert "had already" in said.message


async def test_a_run_whose_cancel_is_under_way_takes_no_answer(database: Database) -> None:
    run_id = await waiting_run(database)
    await request_cancel(database, order(run_id))
    assert (await refusal(database, order(run_id), Answer("retry", 1))).code == "run-cancelling"


@pytest.mark.parametrize("cut", ["before-commit", "after-commit"])
@pytest.mark.parametrize("answer", ANSWERS, ids=lambda one: one.kind)
async def test_an_answer_whose_link_dies_around_its_commit_counts_once(
    database: Database, answer: Answer, cut: Cut
) -> None:
    run_id = await waiting_run(database)
    given = order(run_id, "once")
    async with Link(database.url) as link:
        linked = Database(link.url, pool_size=1)
        link.cut_next(cut)
        result = await answer_step(linked, given, answer)
        await linked.close()
        assert link.cuts == 1
    before = await record(database.url, run_id)
    check_invariants(before)
    assert [entry["data"]["order"] for entry in before.entries("operator.answered")] == [str(given.id)]
    assert (result.position, result.worker, result.ordered.changed) == (1, "beta", True)
    again = await answer_step(database, given, answer)
    assert (again.position, again.worker) == (1, "beta")
    assert await record(database.url, run_id) == before


PAIRS = [("retry", "skip"), ("retry", "retry"), ("skip", "abort"), ("abort", "cancel"), ("retry", "settle")]


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
@pytest.mark.parametrize("times", [10, pytest.param(50, marks=pytest.mark.slow)])
async def test_of_two_operators_at_once_one_wins_and_the_other_is_told(
    database: Database, one: str, other: str, times: int
) -> None:
    """The record is always what one after the other would have made."""
    for _ in range(times):
        run_id = await waiting_run(database, [[], []], waits=(0,), done=())

        async def give(what: str, order_: Order) -> Answered | None:
            if what == "cancel":
                await request_cancel(database, order_)
            elif what == "settle":
                await settle_run(database, Settlement(order_.run_id, 1, "failed", "deadline-exceeded"))
            else:
                return await answer_step(database, order_, Answer(what, 0))  # type: ignore[arg-type]  # a kind
            return None

        orders = [order(run_id, f"by {name}", name) for name in ("one", "two")]
        results = await asyncio.gather(
            *(give(what, given) for what, given in zip((one, other), orders, strict=True)), return_exceptions=True
        )
        for result in results:
            assert not isinstance(result, BaseException) or isinstance(result, RefusedError), result
        won = [not isinstance(result, BaseException) for result in results]
        kept = await record(database.url, run_id)
        check_invariants(kept)
        accepted = [
            str(given.id)
            for what, given, good in zip((one, other), orders, won, strict=True)
            if good and what != "settle"
        ]
        new = [entry["data"]["order"] for entry in kept.entries() if "order" in entry["data"]]
        assert sorted(new) == sorted(accepted)
        assert len(kept.entries("operator.answered")) <= 1
        if other in {"skip", "retry", "abort"}:
            assert sum(won) == 1
            winner = (one, other)[won.index(True)]
            expected = {"retry": "pending", "skip": "skipped", "abort": "failed"}[winner]
            assert kept.steps[0]["state"] == expected
            assert results[won.index(False)].code == "step-not-waiting"  # type: ignore[union-attr]  # the refusal
