"""Requests and decisions that say something else than the pool's rule and the engine make of it, signed and all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid5

import pytest

from engine.operations.meanings import MEANINGS
from engine.operations.reviewing import OWN_MEANING
from engine.store.ids import artifact_id
from engine.verifier import reviews
from engine.verifier.pools import read_pool
from engine.verifier.review_requests import PEOPLE_MAX
from tests.support.bundles import RUN, PaperRun, Record, pool_of
from tests.support.paper_reviews import Reviewing, accept, finish, paper, propose
from tests.support.verdicts import faults, verified
from worker_pools.pool import pool_digest, pool_document

LATER = "2026-11-30T12:59:00.000000Z"
RULE_EXPIRES = "{gate: plan, expires_s: 60, on_expiry: reject}"
ESCALATES = (
    "{gate: plan, expires_s: 60, on_expiry: escalate, "
    "escalate: {approvals: 1, reviewers: [boss], expires_s: 30, on_expiry: reject}}"
)
AFTER = "{gate: after, workers: [beta]}"
BEFORE = "{gate: before, workers: [beta]}"


def planned(rule: str = "{gate: plan}", **more: Any) -> PaperRun:
    run = paper(rule)
    run.plan(**more)
    return run


def proposed(rule: str = AFTER) -> PaperRun:
    """Step 1's output waits for people."""
    run = planned(rule)
    run.perform(0)
    propose(run, 1)
    return run


def fine(run: PaperRun) -> None:
    report = verified(run)
    assert (report.findings.faults, report.verdict) == ([], "valid")


# When it expires, and what follows


@pytest.mark.parametrize(
    ("rule", "more"),
    [
        (RULE_EXPIRES, {"on_expiry": "approve"}),
        (RULE_EXPIRES, {"expires_at": LATER, "on_expiry": "reject"}),
        (RULE_EXPIRES, {"expires_at": None, "on_expiry": None}),
        ("{gate: plan}", {"expires_at": LATER, "on_expiry": "approve"}),
    ],
)
def test_a_review_expires_when_and_as_its_rule_says(rule: str, more: dict[str, Any]) -> None:
    run = planned(rule)
    Reviewing(run, "plan", None, **more).approve("eve")
    assert "does not expire when and as the pool's rule says" in faults(run)
    run = planned(RULE_EXPIRES)
    Reviewing(run, "plan", None).approve("eve")
    finish(run, 0, 1, 2)
    fine(run)


@pytest.mark.parametrize("more", [{}, {"on_expiry": "approve"}, {"expires_at": LATER, "on_expiry": "reject"}])
def test_those_who_are_asked_next_have_the_time_of_their_own_group(more: dict[str, Any]) -> None:
    run = planned(ESCALATES)
    review = Reviewing(run, "plan", None)
    run.record.wait(60)
    review.close("expired")
    Reviewing(run, "plan", None, level=1, approvals=1, reviewers=["boss"], **more).approve("boss")
    finish(run, 0, 1, 2)
    if more:
        assert "does not expire when and as the pool's rule says" in faults(run)
    else:
        fine(run)


def test_a_look_at_what_is_done_never_expires() -> None:
    run = planned(RULE_EXPIRES)
    Reviewing(run, "plan", None).break_glass("zed")
    later = {"reason": "break-glass", "holds": False, "excluded": ["ann", "zed"]}
    Reviewing(run, "plan", None, **later, expires_at=LATER, on_expiry="reject")
    assert "does not expire when and as the pool's rule says" in faults(run)


def test_a_decision_at_the_very_moment_of_the_expiry_is_too_late() -> None:
    run = planned(RULE_EXPIRES)
    review = Reviewing(run, "plan", None)
    run.record.wait(59)
    review.decide("eve")
    assert "came when the review had expired" in faults(run)


# What a decision means


def test_the_meanings_are_those_of_the_engine() -> None:
    known = {(gate, kind): code for (gate, kind), (code, _) in MEANINGS.items()}
    table = reviews._MEANINGS
    assert {(gate, kind): code for kind, codes in table.items() for gate, code in codes.items()} == known
    assert reviews._OWN_WORDS == OWN_MEANING


@pytest.mark.parametrize("meaning", ["answer-checked", "plan-rejected", "whatever"])
def test_an_approval_with_another_meaning_than_was_asked_for_is_found(meaning: str) -> None:
    run = planned()
    Reviewing(run, "plan", None).decide("eve", meaning=meaning)
    assert "means something else than what was asked" in faults(run)


WORDS = "I read the plan and take the responsibility for it."


@pytest.mark.parametrize(
    ("words", "meaning", "is_fine"),
    [
        (WORDS, "plan-checked", True),
        ("Fine with me.", "own-words", True),
        ("Fine with me.", "plan-checked", False),
    ],
)
def test_an_approval_says_what_the_pool_makes_approvals_say(words: str, meaning: str, is_fine: bool) -> None:
    run = planned(f"{{gate: plan, meaning: {WORDS}}}")
    Reviewing(run, "plan", None).decide("eve", words=words, meaning=meaning).close()
    finish(run, 0, 1, 2)
    if is_fine:
        fine(run)
    else:
        assert "does not say what the pool's rule makes approvals say" in faults(run)


def test_a_decision_commits_to_its_meaning_and_a_rejection_to_its_reason() -> None:
    run = planned()
    Reviewing(run, "plan", None).decide("eve", artifacts=[])
    assert "does not commit to what the decision means" in faults(run)
    run = planned()
    review = Reviewing(run, "plan", None)
    order = uuid5(RUN, "no reason")
    said = [run.chain.commit(order, "meaning", "No.")]
    review.decide("eve", "reject", order=str(order), artifacts=said)
    assert "is given without a reason" in faults(run)
    run = planned()
    review = Reviewing(run, "plan", None)
    review.break_glass("eve", order=str(order), artifacts=[run.chain.commit(order, "meaning", "Later.")])
    assert "is given without a reason" in faults(run)


# What a request says


@pytest.mark.parametrize(
    ("rule", "more", "reason"),
    [
        ("{gate: plan}", {"reason": "label"}, "asks for the reason `policy`"),
        ("{gate: plan}", {"reason": "whatever"}, "no such reason"),
        ("{gate: plan}", {"holds": False}, "waits for what a rule asks for"),
        ("{gate: plan}", {"reason": "order"}, "waits for what a rule asks for"),
        ("{gate: plan}", {"reason": "break-glass", "holds": False}, "nobody broke it"),
        ("{gate: plan, bypass: never}", {"bypass": "anyone"}, "lets others break the glass"),
        ("{gate: plan}", {"step": 0}, "about a plan and a step at once"),
        ("{gate: plan}", {"attempt": str(RUN)}, "names an output where none"),
        ("{gate: plan}", {"basis": {"worker": "beta"}}, "a call that is not asked about"),
        ("{gate: plan}", {"excluded": ["ann", *map(str, range(PEOPLE_MAX))]}, "more people than any review"),
        ("{gate: plan}", {"policy": None, "reason": "order", "reviewers": ["x"] * 257}, "more people than any review"),
    ],
)
def test_a_request_that_the_engine_never_writes_is_found(rule: str, more: dict[str, Any], reason: str) -> None:
    run = planned(rule)
    Reviewing(run, "plan", None, **more)
    assert reason in faults(run)


@pytest.mark.parametrize(
    "name", ["holds", "plan", "execution", "level", "excluded", "attempt", "expires_at", "on_expiry", "bypass", "basis"]
)
def test_a_request_that_leaves_something_out_is_found(name: str) -> None:
    run = planned()
    add = run.chain.add

    def forge(type_: str, **data: Any) -> Any:
        data.pop(name, None)
        return add(type_, **data)

    run.chain.add = forge  # type: ignore[method-assign]  # the forger
    Reviewing(run, "plan", None)
    assert "it does not say" in faults(run)


@pytest.mark.parametrize(
    ("instead", "reason"),
    [
        ({"attempt": None}, "does not say which output"),
        ({"step": 9}, "not the entry that is to be reviewed"),
        ({"round": 7}, "not the entry that is to be reviewed"),
    ],
)
def test_a_request_about_no_output_is_found(instead: dict[str, Any], reason: str) -> None:
    run = proposed()
    add = run.chain.add
    run.chain.add = lambda type_, **data: add(type_, **{**data, **instead})  # type: ignore[method-assign]  # the forger
    Reviewing(run, "after", 1)
    assert reason in faults(run)


# What is displayed


def test_the_output_of_another_step_is_not_reviewed_in_a_steps_place() -> None:
    run = planned("{gate: answer}")
    other = run.perform(0)
    run.perform(1)
    own = propose(run, 2)
    Reviewing(run, "answer", 2, attempt=other, subject=run.chain.hash(5)).approve("eve")
    accept(run, 2, own)
    assert "is no output of the step" in faults(run)


def test_an_output_that_was_replaced_is_not_reviewed() -> None:
    run = proposed()
    old = Reviewing(run, "after", 1)
    run.chain.add("step.changed", round=0, step=1, state="pending", reason=None, old="waiting")
    run.states[1] = "pending"
    propose(run, 1, "Another output.")
    old.decide("eve")
    assert "when the step had been called again" in faults(run)


def display(run: PaperRun, gate: str, position: int, change: Callable[[dict[str, Any]], None]) -> Reviewing:
    """A review whose manifest was changed before it was committed to."""
    return Reviewing(run, gate, position, manifest=change)


def drop_input(manifest: dict[str, Any]) -> None:
    manifest["parts"] = [part for part in manifest["parts"] if part["role"] != "input"]


def rename_output(manifest: dict[str, Any]) -> None:
    manifest["parts"][-1]["role"] = "input"


def repeat_task(manifest: dict[str, Any]) -> None:
    manifest["parts"].append(manifest["parts"][0])


def other_worker(manifest: dict[str, Any]) -> None:
    manifest["steps"][0]["worker"] = "gamma"


def other_model(manifest: dict[str, Any]) -> None:
    manifest["steps"][0]["model"] = "gamma-1"


def other_pool(manifest: dict[str, Any]) -> None:
    manifest["pool"] = "0" * 64


@pytest.mark.parametrize(
    ("gate", "change", "reason"),
    [
        ("before", drop_input, "other parts than what is reviewed"),
        ("before", repeat_task, "other parts than what is reviewed"),
        ("after", rename_output, "other parts than what is reviewed"),
        ("before", other_worker, "other workers, than those that have the steps"),
        ("before", other_model, "another worker than the request"),
        ("after", other_pool, "names another pool"),
    ],
)
def test_a_display_that_misleads_is_found(gate: str, change: Callable[[dict[str, Any]], None], reason: str) -> None:
    run = planned(f"{{gate: {gate}, workers: [beta]}}")
    run.perform(0)
    if gate == "after":
        propose(run, 1)
    display(run, gate, 1, change)
    assert reason in faults(run)


def test_somebody_looked_at_what_is_to_be_decided_on() -> None:
    run = planned()
    review = Reviewing(run, "plan", None)
    run.chain.add("review.opened", by="eve", review=str(review.id), person="eve", shown="0" * 64)
    assert "something else was displayed than what is to be decided on" in faults(run)


def test_what_one_person_rejected_is_not_approved_by_another() -> None:
    run = planned()
    Reviewing(run, "plan", None).decide("bob", "reject").decide("eve").close()
    assert "it was rejected" in faults(run)


# What a step would be done with


def basis(worker: str, **more: int) -> dict[str, Any]:
    return {"worker": worker, "model": f"{worker}-1", "attempts_base": 0, "sent_back": 0, **more}


@pytest.mark.parametrize(
    "said", [None, {}, {"worker": "beta"}, {**basis("beta"), "attempts_base": "0"}, {**basis("beta"), "more": 1}]
)
def test_a_request_before_a_step_says_by_whom_it_would_be_done(said: Any) -> None:
    run = planned(BEFORE)
    run.perform(0)
    Reviewing(run, "before", 1, basis=said).approve("eve")
    run.send(1)
    assert "by which worker the step would be done" in faults(run)


@pytest.mark.parametrize("more", [{"worker": "gamma"}, {"model": "beta-2"}, {"attempts_base": 1}, {"sent_back": 1}])
def test_an_approval_before_a_step_counts_for_this_worker_and_these_tries_only(more: dict[str, Any]) -> None:
    run = planned(BEFORE)
    run.perform(0)
    Reviewing(run, "before", 1, basis={**basis("beta"), **more}).approve("eve")
    run.send(1)
    assert "the gate `before` of step 1 was passed without a review" in faults(run)


def retried(again: dict[str, Any] | None) -> PaperRun:
    """An operator has the same worker try once more, after it was approved once."""
    run = paper(BEFORE)
    run.plan()
    run.perform(0)
    Reviewing(run, "before", 1).approve("eve")
    run.close(1, run.send(1), None, moved={"state": "waiting", "reason": "operator", "old": "running"})
    run.states[1] = "pending"
    order = str(uuid5(RUN, "retry"))
    moved = {"state": "pending", "reason": None, "old": "waiting"}
    run.chain.add(
        "operator.answered", by="ann", order=order, answer="retry", round=0, step=1, worker="beta", model="beta-1",
        old_worker="beta", attempts_base=1, artifacts=[], moved=moved,
    )  # fmt: skip
    if again is not None:
        Reviewing(run, "before", 1, basis=again).approve("eve")
    finish(run, 1, 2)
    return run


def test_an_approval_before_a_step_does_not_count_for_an_operators_retry() -> None:
    assert "the gate `before` of step 1 was passed without a review" in faults(retried(None))
    assert "the gate `before` of step 1 was passed without a review" in faults(retried(basis("beta")))
    fine(retried(basis("beta", attempts_base=1)))


@pytest.mark.parametrize("count", [0, 1])
def test_an_approval_before_a_step_does_not_count_once_it_was_sent_back(count: int) -> None:
    run = paper(BEFORE, AFTER)
    run.plan()
    run.perform(0)
    Reviewing(run, "before", 1).approve("eve")
    propose(run, 1)
    Reviewing(run, "after", 1, rule=1).decide("bob", "reject").close("rejected", sent_back=True)
    run.chain.add("step.changed", round=0, step=1, state="pending", reason=None, old="waiting")
    run.states[1] = "pending"
    if count:
        Reviewing(run, "before", 1, basis=basis("beta", sent_back=1)).approve("eve")
    own = propose(run, 1, "Another output.")
    Reviewing(run, "after", 1, rule=1).approve("bob")
    accept(run, 1, own, "Another output.")
    finish(run, 2)
    if count:
        fine(run)
    else:
        assert "the gate `before` of step 1 was passed without a review" in faults(run)


@pytest.mark.parametrize("end", ["rejected", "expired"])
@pytest.mark.parametrize("on_reject", ["fail", "wait"])
def test_a_step_is_not_done_again_after_a_rejection_with_which_the_run_has_to_fail(on_reject: str, end: str) -> None:
    run = proposed(f"{{gate: after, workers: [beta], expires_s: 60, on_reject: {on_reject}}}")
    review = Reviewing(run, "after", 1)
    if end == "rejected":
        review.decide("bob", "reject")
    run.record.wait(60)
    review.close(end)
    run.chain.add("step.changed", round=0, step=1, state="pending", reason=None, old="waiting")
    run.states[1] = "pending"
    own = propose(run, 1, "Another output.")
    Reviewing(run, "after", 1).approve("eve")
    accept(run, 1, own, "Another output.")
    finish(run, 2)
    found = verified(run).findings.faults
    assert ["a review had ended in a rejection" in fault for fault in found] == ([True] if on_reject == "fail" else [])


@pytest.mark.parametrize(("gate", "state"), [("after", "stale"), ("plan", "rejected")])
def test_only_a_rejected_output_is_sent_back(gate: str, state: str) -> None:
    run = proposed() if gate == "after" else planned()
    review = Reviewing(run, gate, 1 if gate == "after" else None)
    review.decide("bob", "reject").close(state, sent_back=True)
    assert "only an output that was rejected" in faults(run)


def test_nobody_closes_a_review_as_bypassed() -> None:
    run = planned()
    Reviewing(run, "plan", None).close("bypassed")
    assert "nobody broke the glass" in faults(run)


# What a hostile bundle may cost


def test_a_review_has_no_more_decisions_than_people_could_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reviews, "DECISIONS_MAX", 5)
    run = planned("{gate: plan, approvals: 2}")
    review = Reviewing(run, "plan", None)
    for number in range(7):
        review.decide(f"p{number}")
    assert faults(run).count("more decisions than a review ever has") == 2


def test_a_review_is_asked_for_once_and_a_run_has_no_more_than_any_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = planned()
    first = Reviewing(run, "plan", None).close("stale")
    again = Reviewing(run, "plan", None, review=str(first.id), artifacts=[])
    run.record.artifacts.pop(artifact_id(again.id, "review_manifest"))
    assert "a review is asked for once" in faults(run)
    monkeypatch.setattr(reviews, "REVIEWS_MAX", 1)
    run = planned()
    for _ in range(2):
        Reviewing(run, "plan", None).close("stale")
    assert "not too many are" in faults(run)


def test_the_same_is_not_reviewed_without_end_and_by_people_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reviews, "SAME_MAX", 2)
    monkeypatch.setattr(reviews, "PEOPLE_MAX", 2)
    run = planned()
    for _ in range(3):
        Reviewing(run, "plan", None).close("stale")
    for number in range(3):
        run.chain.add("run.repinned", by=f"p{number}", order=str(RUN), old=run.digest, new=run.digest)
    found = faults(run)
    assert "the same is not reviewed so often" in found
    assert "more people had a hand in the run" in found


@pytest.mark.parametrize("what", ["rules", "reviewers"])
def test_a_pool_has_no_more_rules_and_reviewers_than_any_pool(what: str) -> None:
    pool = pool_of("{reviews: [{gate: plan}]}")
    rule = pool.policy.reviews[0]
    many = (rule,) * 257 if what == "rules" else (rule.model_copy(update={"reviewers": ("x",) * 257}),)
    changed = pool.model_copy(update={"policy": pool.policy.model_copy(update={"reviews": many})})
    document = pool_document(changed)
    with pytest.raises(ValueError, match=r"more r.* than any pool has"):
        read_pool(pool_digest(document), document)


def test_the_rules_of_a_pool_are_read_as_the_engine_reads_them() -> None:
    run = PaperRun(Record(), pool_of(f"{{reviews: [{ESCALATES}, {BEFORE}, {{gate: answer, sample_percent: 5}}]}}"))
    found = read_pool(run.digest, run.record.pools[run.digest]).rules
    assert [rule.reason for rule in found] == ["policy", "label", "sample"]
    assert [[(group.expires_s, group.on_expiry) for group in rule.groups] for rule in found] == [
        [(60, "escalate"), (30, "reject")],
        [(None, "reject")],
        [(None, "reject")],
    ]
