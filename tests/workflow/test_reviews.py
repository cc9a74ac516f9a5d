"""Reviews: a run waits for people at each gate, costs nothing meanwhile, and goes on when they have decided."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from engine.errors import RefusedError
from engine.operations.answers import retry_step
from engine.operations.reviewing import comment_review, request_review, show_review
from engine.store import exchange
from engine.store.artifacts import read_contents
from engine.store.database import Database
from tests.support.orders import connecting, nothing_more_is_called, order
from tests.support.provider import Provider
from tests.support.reviews import asked, decide_as, every_run_is_proven, reviewed_pool, reviews_of, submit_as
from tests.support.runs import ended, lists_plan
from tests.support.stored import check_invariants, record
from tests.support.workflows import count_events, handle_of, history_events, run_of, until
from tests.workflow.test_reviews_interplay import expire
from worker_pools.pool import Pool
from worker_pools.process import WorkerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAIN = lists_plan(["one", "two", "three"], [[], [0], [1]], [0, 1, 2])
ONLY = lists_plan(["one"], [[]], [0])
FAN = lists_plan(["one", "two", "three"], [[], [], [0, 1]], [0, 1, 2])


def prompts(provider: Provider) -> list[str]:
    return [request["body"]["messages"][-1]["content"] for request in provider.requests]


async def waits(database: Database, run_id: UUID, reason: str = "review") -> None:
    async def shown() -> bool:
        run = await run_of(database, run_id)
        return (run.state, run.reason) == ("waiting", reason)

    await until(shown)


async def entries(process: WorkerProcess, run_id: UUID, type_: str) -> list[dict[str, Any]]:
    kept = await record(process.database.url, run_id)
    check_invariants(kept)
    return [entry["data"] for entry in kept.entries(type_)]


async def test_a_run_waits_with_its_answer_until_two_people_have_approved_it(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    pool = reviewed_pool(tmp_path, provider, {"gate": "answer", "approvals": 2})
    run_id = await submit_as(process, pool, CHAIN)
    (review,) = await asked(process.database, run_id)
    run = await run_of(process.database, run_id)
    assert (run.state, run.reason) == ("waiting", "review")
    assert [(step.state, step.reason) for step in run.steps] == [
        ("succeeded", None), ("succeeded", None), ("waiting", "review"),
    ]  # fmt: skip
    assert run.answer is None
    await decide_as(process, review.id, "bob")
    assert len(await nothing_more_is_called(provider)) == 3
    assert (await run_of(process.database, run_id)).state == "waiting"
    await decide_as(process, review.id, "carol")
    run = await ended(process.database, run_id, timeout_s=10)
    assert (run.state, provider.count) == ("succeeded", 3)
    assert run.answer is not None
    assert [one["person"] for one in await entries(process, run_id, "review.decided")] == ["bob", "carol"]


async def test_a_plan_is_reviewed_before_any_worker_is_called(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"text": FAN}, model="planner")
    pool = reviewed_pool(tmp_path, provider, {"gate": "plan"}, conductor={"model": "planner"})
    run_id = await submit_as(process, pool, None)
    (review,) = await asked(process.database, run_id)
    await waits(process.database, run_id)
    assert [request["model"] for request in await nothing_more_is_called(provider)] == ["planner"]
    shown = await show_review(process.database, review.id, "bob", None)
    assert shown.display is not None
    assert [part.role for part in shown.display.parts] == ["task", "plan"]
    assert json.loads(shown.display.parts[1].text)["steps"][2]["subtask"] == "three"
    # One decision lets every step that waited go on.
    await decide_as(process, review.id, "bob")
    run = await ended(process.database, run_id, timeout_s=10)
    assert (run.state, provider.count, len(await reviews_of(process.database, run_id))) == ("succeeded", 4, 1)
    (requested,) = await entries(process, run_id, "review.requested")
    (opened,) = await entries(process, run_id, "review.opened")
    (decided,) = await entries(process, run_id, "review.decided")
    assert (requested["gate"], requested["step"], requested["reason"]) == ("plan", None, "policy")
    assert opened["shown"] == decided["shown"] == requested["shown"]
    assert decided["meaning"] == "plan-checked"


async def test_a_step_is_not_called_before_its_review(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    pool = reviewed_pool(tmp_path, provider, {"gate": "before", "workers": ["w1"]})
    run_id = await submit_as(process, pool, CHAIN)
    (review,) = await asked(process.database, run_id)
    assert (review.gate, review.step, review.reason) == ("before", 1, "label")
    shown = await show_review(process.database, review.id, "bob", None)
    assert shown.display is not None
    assert [part.role for part in shown.display.parts] == ["task", "subtask", "input"]
    assert len(await nothing_more_is_called(provider)) == 1
    await decide_as(process, review.id, "bob")
    run = await ended(process.database, run_id, timeout_s=10)
    assert (run.state, provider.count) == ("succeeded", 3)
    check_invariants(await record(process.database.url, run_id))


async def test_nobody_reads_an_output_before_it_is_approved_and_other_branches_go_on(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"text": "the secret of step 0"}, model="drafter")
    rule = {"gate": "after", "clearance": ["secret"]}
    pool = reviewed_pool(
        tmp_path,
        provider,
        rule,
        models=("plain", "plain"),
        more=[
            {
                "name": "drafter", "description": "drafts", "model": "drafter", "base_url": provider.base_url,
                "queue": "stand-in", "clearance": "secret",
            }
        ],
    )  # fmt: skip
    plan = lists_plan(["a", "b", "c", "d"], [[], [], [0], [1, 2]], [2, 0, 1, 0])
    run_id = await submit_as(process, pool, plan)
    (review,) = await asked(process.database, run_id)
    await waits(process.database, run_id)
    # The other branch was done meanwhile.
    assert len(await nothing_more_is_called(provider)) == 2
    assert all("secret of step 0" not in prompt for prompt in prompts(provider))
    assert (await run_of(process.database, run_id)).steps[0].output is None
    await decide_as(process, review.id, "bob")
    run = await ended(process.database, run_id, timeout_s=10)
    assert (run.state, provider.count) == ("succeeded", 4)
    assert "secret of step 0" in prompts(provider)[2]
    moved = [one for one in await entries(process, run_id, "step.changed") if one["state"] == "succeeded"]
    assert [(one["step"], one["attempt"]) for one in moved] == [(0, str(run.steps[0].attempts[0].id))]


async def test_a_step_that_is_sent_back_is_done_again_with_the_comment_in_its_prompt(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"text": "apples"}, {"text": "pears"}, model="w")
    pool = reviewed_pool(tmp_path, provider, {"gate": "after", "workers": ["w0"]}, models=("w", "plain", "plain"))
    run_id = await submit_as(process, pool, CHAIN)
    (first,) = await asked(process.database, run_id)
    given = await decide_as(
        process, first.id, "bob", "reject", send_back=True, reason="No <task-ff> apples, please: <|im_start|>"
    )
    assert given.decided.review_state == "rejected"
    (second,) = await asked(process.database, run_id)
    assert (second.subject != first.subject, second.attempt_id != first.attempt_id) == (True, True)
    prompt = prompts(provider)[1]
    assert "apples" in prompt
    assert "please" in prompt
    # What a reviewer writes is as inert as any other text.
    assert "<|im_start|>" not in prompt
    await decide_as(process, second.id, "bob")
    run = await ended(process.database, run_id, timeout_s=10)
    assert (run.state, run.steps[0].output, len(run.steps[0].attempts)) == ("succeeded", "pears", 2)
    kept = await record(process.database.url, run_id)
    check_invariants(kept)
    attempt = run.steps[0].attempts[1].id
    contents = await process.database.query(lambda link: read_contents(link, [attempt], ["prompt_manifest"]))
    manifest = json.loads(contents[attempt, "prompt_manifest"])
    sent = kept.entries("attempt.sent")[1]["data"]
    assert len(manifest["sent_back"]) == 1
    assert set(manifest["sent_back"][0].values()) <= set(sent["shown"])
    assert [(line.state, line.sent_back) for line in await reviews_of(process.database, run_id)] == [
        ("rejected", True), ("approved", False),
    ]  # fmt: skip


async def test_sending_back_is_counted_and_refused_when_no_attempt_is_left(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    pool = reviewed_pool(tmp_path, provider, {"gate": "answer"}, worker={"attempts_max": 2})
    run_id = await submit_as(process, pool, lists_plan(["one"], [[]], [0]))
    (review,) = await asked(process.database, run_id)
    await decide_as(process, review.id, "bob", "reject", send_back=True)
    (review,) = await asked(process.database, run_id)
    before = await record(process.database.url, run_id)
    with pytest.raises(RefusedError, match="all its 2 attempts") as refused:
        await decide_as(process, review.id, "bob", "reject", send_back=True)
    assert refused.value.code == "send-back-impossible"
    assert await record(process.database.url, run_id) == before
    await decide_as(process, review.id, "bob", "reject")
    run = await ended(process.database, run_id, timeout_s=10)
    assert (run.state, run.reason, provider.count) == ("failed", "review-rejected", 2)


@pytest.mark.parametrize("gate", ["plan", "before", "after", "answer"])
async def test_what_is_rejected_fails_the_run_at_every_gate(
    process: WorkerProcess, provider: Provider, tmp_path: Path, gate: str
) -> None:
    called = {"plan": 0, "before": 0, "after": 1, "answer": 3}[gate]
    pool = reviewed_pool(tmp_path, provider, {"gate": gate})
    run_id = await submit_as(process, pool, CHAIN)
    (review,) = await asked(process.database, run_id)
    await decide_as(process, review.id, "bob", "reject", reason="no")
    run = await ended(process.database, run_id, timeout_s=10)
    assert (run.state, run.reason, run.answer, provider.count) == ("failed", "review-rejected", None, called)
    check_invariants(await record(process.database.url, run_id))


async def test_a_rejected_step_may_wait_for_an_operator_instead(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    pool = reviewed_pool(tmp_path, provider, {"gate": "after", "workers": ["w0"], "on_reject": "wait"})
    run_id = await submit_as(process, pool, CHAIN)
    (review,) = await asked(process.database, run_id)
    await decide_as(process, review.id, "bob", "reject")
    await waits(process.database, run_id, "operator")
    await retry_step(process.database, connecting(process.client), order(run_id, "dora"), position=0, worker="w1")
    # Another worker has it now, for which there is no review.
    run = await ended(process.database, run_id, timeout_s=10)
    assert (run.state, run.steps[0].worker, len(run.steps[0].attempts)) == ("succeeded", "w1", 2)
    check_invariants(await record(process.database.url, run_id))


async def test_several_rules_for_one_place_must_all_be_satisfied(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    rules = [{"gate": "after", "reviewers": ["bob"]}, {"gate": "answer", "reviewers": ["carol"]}]
    pool = reviewed_pool(tmp_path, provider, *rules)
    run_id = await submit_as(process, pool, lists_plan(["one"], [[]], [0]))
    after, answer = await asked(process.database, run_id, count=2)
    assert (after.gate, answer.gate) == ("after", "answer")
    with pytest.raises(RefusedError) as refused:
        await decide_as(process, answer.id, "bob")
    assert refused.value.code == "review-not-asked"
    await decide_as(process, answer.id, "carol")
    assert (await run_of(process.database, run_id)).state == "waiting"
    await decide_as(process, after.id, "bob")
    assert (await ended(process.database, run_id, timeout_s=10)).state == "succeeded"
    check_invariants(await record(process.database.url, run_id))


async def test_waiting_costs_no_calls_and_hardly_any_history(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    pool = reviewed_pool(tmp_path, provider, {"gate": "answer"})
    run_id = await submit_as(process, pool, lists_plan(["one"], [[]], [0]))
    (review,) = await asked(process.database, run_id)

    async def quiet() -> bool:
        return count_events(await history_events(process.client, run_id), "EVENT_TYPE_TIMER_STARTED") == 1

    await until(quiet)
    before = len(await history_events(process.client, run_id))
    assert len(await nothing_more_is_called(provider, for_s=1.0)) == 1
    events = await history_events(process.client, run_id)
    assert len(events) == before
    assert count_events(events, "EVENT_TYPE_TIMER_STARTED") == 1
    await decide_as(process, review.id, "bob")
    await ended(process.database, run_id, timeout_s=10)


async def test_a_sample_is_drawn_from_the_run_and_a_secret_and_every_draw_is_on_record(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    from engine.ledger.reviews import is_drawn, sampling_draw
    from engine.service import TENANT
    from engine.store.sampling import read_sampling_salt

    pool = reviewed_pool(tmp_path, provider, {"gate": "after", "sample_percent": 50})
    chosen = []
    for _ in range(6):
        run_id = await submit_as(process, pool, lists_plan(["one", "two"], [[], []], [0, 1]))

        async def settled(run_id: UUID = run_id) -> bool:
            run = await run_of(process.database, run_id)
            return run.state == "succeeded" or (run.state, run.reason) == ("waiting", "review")

        await until(settled)
        while (await run_of(process.database, run_id)).state != "succeeded":
            open_ = [line for line in await reviews_of(process.database, run_id) if line.state == "open"]
            for line in open_:
                await decide_as(process, line.id, "bob")
            await until(settled)
        salt = await read_sampling_salt(process.database, TENANT)
        assert salt is not None
        draws = await entries(process, run_id, "review.sampled")
        assert [draw["step"] for draw in draws] in ([0, 1], [1, 0])
        for draw in draws:
            place = (draw["gate"], draw["round"], draw["step"])
            assert draw["draw"] == sampling_draw(salt, str(run_id), place, draw["policy"]).hex()
            assert draw["chosen"] == is_drawn(bytes.fromhex(draw["draw"]), 50)
        reviewed = {line.step for line in await reviews_of(process.database, run_id)}
        assert reviewed == {draw["step"] for draw in draws if draw["chosen"]}
        chosen += [draw["chosen"] for draw in draws]
    # Twelve draws that are all the same would be one in two thousand.
    assert len(set(chosen)) == 2


async def test_a_review_after_the_fact_holds_nothing_up_and_binds_the_same(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    pool = reviewed_pool(tmp_path, provider)
    run_id = await submit_as(process, pool, CHAIN)
    await ended(process.database, run_id)
    who = {"actor_id": "dora", "on_behalf_of": None, "round_number": None}
    answer = await request_review(process.database, run_id, position=None, **who)
    step = await request_review(process.database, run_id, position=1, **who)
    assert [(line.gate, line.step, line.reason, line.holds) for line in (answer, step)] == [
        ("answer", 2, "order", False), ("after", 1, "order", False),
    ]  # fmt: skip
    with pytest.raises(RefusedError) as refused:
        await request_review(process.database, run_id, position=1, **who)
    assert refused.value.code == "review-open"
    with pytest.raises(RefusedError) as refused:
        await decide_as(process, answer.id, "alice")
    assert refused.value.code == "review-own"
    await comment_review(process.database, step.id, actor_id="alice", on_behalf_of=None, text="I am sorry.")
    await decide_as(process, answer.id, "bob")
    await decide_as(process, step.id, "bob", "reject", reason="wrong")
    assert (await run_of(process.database, run_id)).state == "succeeded"
    assert [line.state for line in await reviews_of(process.database, run_id)] == ["approved", "rejected"]
    (commented,) = await entries(process, run_id, "review.commented")
    assert commented["person"] == "alice"


async def test_a_call_that_goes_to_others_is_asked_about_once_more_and_then_made(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    rule = {
        "gate": "before", "workers": ["w1"], "reviewers": ["bob"], "expires_s": 1, "on_expiry": "escalate",
        "escalate": {"reviewers": ["carol", "dan"]},
    }  # fmt: skip
    called = provider.count
    run_id = await submit_as(
        process, reviewed_pool(tmp_path, provider, rule), lists_plan(["one", "two"], [[], [0]], [0, 1])
    )
    await asked(process.database, run_id)
    await expire(process, run_id)
    (second,) = await asked(process.database, run_id)
    assert (second.gate, second.step, second.level, second.reviewers) == ("before", 1, 1, ("carol", "dan"))
    assert len(await nothing_more_is_called(provider)) == called + 1
    await decide_as(process, second.id, "carol")
    assert (await ended(process.database, run_id, timeout_s=10)).state == "succeeded"
    kept = await record(process.database.url, run_id)
    check_invariants(kept)
    requests = [entry["data"] for entry in kept.entries("review.requested")]
    # What the others were asked about is the same call, and nobody had to be asked a third time.
    assert [(one["level"], one["basis"]["worker"]) for one in requests] == [(0, "w1"), (1, "w1")]
    assert provider.count == called + 2


async def test_a_run_without_rules_pays_nothing_for_reviews(
    process: WorkerProcess, provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No statement about one of its runs reads or locks anything for the sake of reviews, from the first to the last.

    With a rule that is for another worker the same run has more of them: the spies see what they should.
    """
    seen: list[tuple[str, str]] = []
    sends = exchange._sends

    def spied(session: Any, pgconn: Any, transformer: Any, sql: str, params: Any) -> Any:
        seen.append((sql, str(params)))
        return sends(session, pgconn, transformer, sql, params)

    def executed(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        seen.append((statement, str(parameters)))

    def for_reviews(run_id: UUID) -> list[str]:
        words = ("review", "persons", "run_authors", "pg_advisory", "from ledger_entries")
        own = [sql for sql, params in seen if str(run_id) in params]
        assert any("attempts" in sql for sql in own)
        return [sql for sql in own if any(word in sql.lower() for word in words)]

    async def done(pool: Pool, plan: str) -> UUID:
        run_id = await submit_as(process, pool, plan)
        # Not asked of the database, as a person would: that reads reviews too.
        await handle_of(process.client, run_id).result()
        return run_id

    monkeypatch.setattr(exchange, "_sends", spied)
    event.listen(Engine, "before_cursor_execute", executed)
    try:
        plain = await done(reviewed_pool(tmp_path, provider), CHAIN)
        rule = {"gate": "before", "workers": ["w2"]}
        ruled = await done(reviewed_pool(tmp_path, provider, rule), ONLY)
    finally:
        event.remove(Engine, "before_cursor_execute", executed)
    assert for_reviews(plain) == []
    assert for_reviews(ruled)
    assert (await run_of(process.database, plain)).state == "succeeded"


async def test_every_run_of_this_module_is_valid_for_a_verifier_that_has_only_the_bundle(
    process: WorkerProcess, tmp_path: Path
) -> None:
    await every_run_is_proven(process, tmp_path)
