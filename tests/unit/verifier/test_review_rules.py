"""Reviews checked offline: bound to their subject and display, by people who may, and nothing passes a gate without."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid5

import pytest

from engine.ledger.after_closing import AFTER_CLOSING as ENGINE_AFTER_CLOSING
from engine.ledger.reviews import is_drawn, sampling_draw
from engine.store.ids import artifact_id
from engine.verifier.canonical import canonical
from engine.verifier.entry_types import AFTER_CLOSING
from engine.verifier.pools import read_pool
from engine.verifier.questions import answer_text, find_run, who_approved, who_saw
from engine.verifier.report import Report
from tests.support.bundles import RUN, PaperRun, Record
from tests.support.paper_reviews import Reviewing, accept, finish, paper, propose
from tests.support.verdicts import faults, verified

PLAN_GATE = "{gate: plan, approvals: 2}"
ANSWER_GATE = "{gate: answer, approvals: 2}"
AFTER_BETA = "{gate: after, workers: [beta], reviewers: [bob, eve, joe]}"
BEFORE_BETA = "{gate: before, workers: [beta]}"


def fine(run: PaperRun) -> Report:
    report = verified(run)
    assert report.findings.faults == []
    assert report.verdict == "valid"
    return report


def with_plan_review(*people: str) -> PaperRun:
    run = paper(PLAN_GATE)
    run.plan()
    review = Reviewing(run, "plan", None)
    for person in people:
        review.decide(person)
    return run


def test_what_may_follow_a_closing_entry_is_what_the_engine_lets_follow() -> None:
    assert sorted(AFTER_CLOSING) == sorted(ENGINE_AFTER_CLOSING)


def test_the_rules_of_a_pool_have_the_digests_that_the_engine_gives_them() -> None:
    run = paper(PLAN_GATE, ANSWER_GATE, AFTER_BETA)
    pool = read_pool(run.digest, run.record.pools[run.digest])
    assert [rule.digest for rule in pool.rules] == [rule.digest for rule in run.pool.policy.reviews]


def test_a_plan_that_two_people_approved_is_fine_and_the_auditor_finds_them() -> None:
    run = paper(PLAN_GATE)
    run.plan()
    review = Reviewing(run, "plan", None)
    run.chain.add("review.opened", by="eve", review=str(review.id), person="eve", shown=review.shown)
    review.approve("bob", "eve")
    finish(run, 0, 1, 2)
    report = fine(run)
    answer = who_approved(report, find_run(report, str(RUN)), "plan")
    assert [word["person"] for word in answer["reviews"][0]["decisions"]] == ["bob", "eve"]
    assert 'bob (account bob): approve, "I checked it.", entry' in answer_text(answer)
    assert [word["had_it_displayed"] for word in answer["reviews"][0]["decisions"]] == [False, True]
    assert answer_text(answer).count("no entry says that the review was displayed to this person before") == 1
    assert "reviewed by bob, eve" in report.as_text()


def test_a_gate_passed_without_any_review_is_found() -> None:
    run = paper(PLAN_GATE)
    run.plan()
    run.send(0)
    assert "the gate `plan` of round 0 was passed without a review" in faults(run)


@pytest.mark.parametrize(
    ("people", "state", "reason"),
    [
        (("bob",), "approved", "1 of 2 approvals are on record"),
        (("bob", "bob"), "approved", "bob decided twice"),
        (("ann", "bob"), "approved", "ann decided on a run of their own"),
        ((), "approved", "0 of 2 approvals"),
        (("bob", "eve"), "rejected", "nobody rejected it"),
        (("bob", "eve"), "expired", "it had not expired"),
    ],
)
def test_approvals_that_do_not_suffice_are_found(people: tuple[str, ...], state: str, reason: str) -> None:
    run = with_plan_review()
    review = Reviewing(run, "plan", None)
    for person in people:
        review.decide(person)
    review.close(state)
    assert reason in faults(run)


@pytest.mark.parametrize("state", ["rejected", "stale", "withdrawn"])
def test_a_gate_passed_against_a_decision_is_found(state: str) -> None:
    run = paper(PLAN_GATE)
    run.plan()
    review = Reviewing(run, "plan", None).decide("bob", "reject")
    review.close(state)
    run.send(0)
    assert f"was passed although its review was {state}" in faults(run)


def test_a_gate_passed_while_its_review_is_open_is_found() -> None:
    run = with_plan_review("bob", "eve")
    run.send(0)
    assert "was passed although its review was open" in faults(run)


def test_a_second_account_of_the_submitter_does_not_count() -> None:
    run = paper(PLAN_GATE)
    run.record.system.add("person.linked", by="root", actor="ann-2", person="ann")
    run.plan()
    review = Reviewing(run, "plan", None).decide("bob")
    review.decide("ann-2", person="ann")
    assert "ann decided on a run of their own" in faults(run)


def test_two_accounts_of_one_person_are_one_approval() -> None:
    run = paper(PLAN_GATE)
    run.record.system.add("person.linked", by="root", actor="bob-2", person="bob")
    run.plan()
    review = Reviewing(run, "plan", None).decide("bob")
    review.decide("bob-2", person="bob")
    assert "bob decided twice" in faults(run)


def test_an_account_is_linked_to_one_person() -> None:
    run = paper(PLAN_GATE)
    for person in ("ann", "bob"):
        run.record.system.add("person.linked", by="root", actor="x", person=person)
    assert "is linked to two persons" in faults(run)


def test_an_account_that_says_it_is_somebody_else_is_found() -> None:
    run = with_plan_review("bob")
    review = Reviewing(run, "plan", None)
    review.decide("mallory", person="eve")
    assert "'mallory' does not belong to 'eve'" in faults(run)


def test_a_link_made_later_takes_the_approval_away_from_what_comes_after_it() -> None:
    run = paper(PLAN_GATE)
    run.plan()
    Reviewing(run, "plan", None).approve("bob", "eve")
    run.perform(0)
    run.record.system.add("person.linked", by="root", actor="eve", person="ann")
    run.perform(1)
    assert "with approvals that did not count any more" in faults(run)


def test_a_decision_moved_to_another_subject_is_found() -> None:
    run = paper(AFTER_BETA)
    run.plan()
    run.perform(0)
    propose(run, 1)
    review = Reviewing(run, "after", 1)
    review.decide("bob", subject=run.chain.hash(1))
    assert "given for something else" in faults(run)


def test_a_review_of_another_entry_is_found() -> None:
    run = paper(AFTER_BETA)
    run.plan()
    run.perform(0)
    first = run.chain.hash(-1)
    propose(run, 1)
    Reviewing(run, "after", 1, subject=first)
    assert "its subject is not the entry that is to be reviewed" in faults(run)


def test_a_display_that_was_another_one_is_found() -> None:
    run = paper(AFTER_BETA)
    run.plan()
    run.perform(0)
    propose(run, 1)
    Reviewing(run, "after", 1, text="Something harmless.")
    assert "the display, rendered again, is not the one" in faults(run)


def test_a_display_without_the_output_is_found() -> None:
    run = paper(AFTER_BETA)
    run.plan()
    run.perform(0)
    propose(run, 1)
    review = Reviewing(run, "after", 1)
    run.chain.bodies.pop()
    run.record.leaves.pop()
    output = artifact_id(UUID(review.last("attempt.closed", 1)["attempt"]), "output")
    stored = run.record.artifacts.pop(artifact_id(review.id, "review_manifest"))
    manifest = json.loads(stored.content)
    manifest["parts"] = [part for part in manifest["parts"] if part["artifact"] != str(output)]
    commit = run.chain.commit
    run.chain.commit = lambda owner, kind, _: commit(owner, kind, canonical(manifest))  # type: ignore[method-assign]  # the forger
    Reviewing(run, "after", 1)
    assert "what is to be decided on was not displayed" in faults(run)


def test_a_reviewed_output_is_accepted_afterwards() -> None:
    run = paper(AFTER_BETA)
    run.plan()
    run.perform(0)
    own = propose(run, 1)
    Reviewing(run, "after", 1).approve("joe")
    accept(run, 1, own)
    finish(run, 2)
    report = fine(run)
    answer = who_approved(report, find_run(report, str(RUN)), "1")
    assert [word["person"] for word in answer["reviews"][0]["decisions"]] == ["joe"]


def test_people_who_had_an_output_displayed_are_among_those_who_saw_it() -> None:
    run = paper(AFTER_BETA)
    run.plan()
    run.perform(0)
    own = propose(run, 1)
    review = Reviewing(run, "after", 1)
    run.chain.add("review.opened", by="joe", review=str(review.id), person="joe", shown=review.shown)
    review.approve("joe")
    accept(run, 1, own)
    finish(run, 2)
    report = fine(run)
    assert [row["account"] for row in who_saw(report, find_run(report, str(RUN)), "1")["people"]] == ["joe"]


def test_an_output_accepted_without_its_review_is_found() -> None:
    run = paper(AFTER_BETA)
    run.plan()
    run.perform(0)
    run.perform(1)
    assert "accepted before anybody reviewed it" in faults(run)


def test_an_output_accepted_by_a_review_of_an_older_one_is_found() -> None:
    """The output changed after the approval: what was approved is not what is accepted."""
    run = paper(AFTER_BETA)
    run.plan()
    run.perform(0)
    propose(run, 1)
    Reviewing(run, "after", 1).approve("joe")
    run.chain.add("step.changed", round=0, step=1, state="pending", reason=None, old="waiting")
    run.states[1] = "pending"
    again = propose(run, 1, "Another output.")
    accept(run, 1, again, "Another output.")
    assert "passed without a review of what passed it" in faults(run)


def test_somebody_who_was_not_asked_is_found() -> None:
    run = paper(AFTER_BETA)
    run.plan()
    run.perform(0)
    propose(run, 1)
    Reviewing(run, "after", 1).decide("mallory")
    assert "mallory was not asked to decide" in faults(run)


def answered(*people: str) -> PaperRun:
    run = paper(ANSWER_GATE)
    run.plan()
    run.perform(0)
    run.perform(1)
    own = propose(run, 2)
    if people:
        Reviewing(run, "answer", 2).approve(*people)
    accept(run, 2, own)
    run.end()
    return run


def test_an_answer_that_two_others_approved_is_fine() -> None:
    report = fine(answered("bob", "eve"))
    answer = who_approved(report, find_run(report, str(RUN)), "answer")
    assert [word["person"] for word in answer["reviews"][0]["decisions"]] == ["bob", "eve"]


def test_an_answer_that_nobody_approved_is_found() -> None:
    assert "the gate `answer` of step 2 was passed without a review" in faults(answered())


def test_a_call_under_a_gate_for_its_worker_needs_its_own_review() -> None:
    run = paper(BEFORE_BETA)
    run.plan()
    run.perform(0)
    Reviewing(run, "before", 1).approve("bob")
    finish(run, 1, 2)
    fine(run)
    run = paper(BEFORE_BETA)
    run.plan()
    run.perform(0)
    run.send(1)
    assert "the gate `before` of step 1" in faults(run)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"approvals": 1}, "does not ask for what the pool's rule wants"),
        ({"four_eyes": False}, "does not ask for what the pool's rule wants"),
        ({"policy": "0" * 64}, "no rule that asks for it"),
        ({"level": 1}, "no rule that asks for it"),
        ({"excluded": []}, "does not exclude everybody whose run it is"),
        ({"plan": "0" * 64}, "another plan"),
        ({"reviewers": ["mallory"]}, "does not ask for what the pool's rule wants"),
    ],
)
def test_a_review_asked_for_by_weaker_rules_is_found(more: dict[str, Any], reason: str) -> None:
    run = paper(PLAN_GATE)
    run.plan()
    Reviewing(run, "plan", None, **more)
    assert reason in faults(run)


def test_decisions_about_nothing_and_after_the_end_of_a_review_are_found() -> None:
    run = with_plan_review("bob", "eve")
    run.chain.add("review.closed", review=str(RUN), state="approved", sent_back=False, moved=None)
    assert "no review that was asked for" in faults(run)
    run = paper(PLAN_GATE)
    run.plan()
    Reviewing(run, "plan", None).approve("bob", "eve").decide("joe")
    assert "the review was approved already" in faults(run)


def test_broken_glass_forces_a_later_review_and_is_said() -> None:
    run = paper(PLAN_GATE)
    run.plan()
    Reviewing(run, "plan", None).break_glass("bob")
    Reviewing(run, "plan", None, reason="break-glass", holds=False, excluded=["ann", "bob"])
    finish(run, 0, 1, 2)
    report = fine(run)
    assert any("bob broke the glass" in line for line in report.not_proven)
    assert any("later review is open" in line for line in report.not_proven)
    assert ", BYPASSED by bob, the later review is open\n" in report.as_text()


def test_who_looked_after_the_glass_was_broken_reviewed_later() -> None:
    run = paper(PLAN_GATE)
    run.plan()
    Reviewing(run, "plan", None).break_glass("bob")
    later = Reviewing(run, "plan", None, reason="break-glass", holds=False, excluded=["ann", "bob"])
    finish(run, 0, 1, 2)
    later.approve("dan", "eve")
    text = fine(run).as_text()
    assert ", BYPASSED by bob, later reviewed by dan, eve (approved)\n" in text
    assert text.count("reviewed by") == 1


def test_broken_glass_without_a_later_review_is_found() -> None:
    run = paper(PLAN_GATE)
    run.plan()
    Reviewing(run, "plan", None).break_glass("bob")
    assert "no later review was asked for" in faults(run)


@pytest.mark.parametrize(("rule", "by"), [("never", "bob"), ("others", "ann")])
def test_glass_broken_by_somebody_who_may_not_is_found(rule: str, by: str) -> None:
    run = paper(f"{{gate: plan, bypass: {rule}}}")
    run.plan()
    Reviewing(run, "plan", None).break_glass(by)
    assert "does not let them break the glass" in faults(run)


def test_a_review_that_expired_into_an_approval_is_said() -> None:
    run = paper("{gate: plan, expires_s: 60, on_expiry: approve}")
    run.plan()
    review = Reviewing(run, "plan", None)
    run.record.wait(60)
    review.close("expired")
    finish(run, 0, 1, 2)
    report = fine(run)
    assert any("it expired and the rule let it pass" in line for line in report.not_proven)
    assert ", gate `plan` LET PASS BY THE RULE, NOBODY LOOKED\n" in report.as_text()
    answer = answer_text(who_approved(report, find_run(report, str(RUN)), "plan"))
    assert ": let pass by the rule, nobody looked\n" in answer


def test_a_withheld_display_leaves_unproven_what_was_displayed() -> None:
    run = paper(PLAN_GATE)
    run.plan()
    Reviewing(run, "plan", None).approve("bob", "eve")
    for one in run.record.artifacts.values():
        if one.kind == "review_manifest":
            one.state = "redacted"
    report = verified(run)
    assert report.verdict == "incomplete"
    assert any("what exactly was displayed" in line for line in report.not_proven)


# Sampling

SAMPLED = "{gate: before, workers: [beta], sample_percent: 50}"
SALT = b"s" * 32
SECRET = "5" * 64


def sample(run: PaperRun, salt: bytes = SALT, **more: Any) -> bool:
    policy = run.pool.policy.reviews[0].digest
    draw = sampling_draw(salt, str(RUN), ("before", 0, 1), policy)
    chosen = is_drawn(draw, 50)
    said = {
        "gate": "before",
        "round": 0,
        "step": 1,
        "policy": policy,
        "percent": 50,
        "draw": draw.hex(),
        "salt": SECRET,
        "chosen": chosen,
    }
    run.chain.add("review.sampled", **{**said, **more})
    return chosen


def sampled(chosen: bool, secret: str = SECRET) -> tuple[PaperRun, bytes]:
    run = paper(SAMPLED)
    run.record.system.add("sampling.salt_made", salt=secret)
    run.plan()
    run.perform(0)
    policy = run.pool.policy.reviews[0].digest
    salts = (bytes([number]) * 32 for number in range(200))
    salt = next(
        salt for salt in salts if is_drawn(sampling_draw(salt, str(RUN), ("before", 0, 1), policy), 50) == chosen
    )
    return run, salt


def test_a_step_that_was_not_drawn_needs_no_review_and_one_that_was_does() -> None:
    run, salt = sampled(chosen=False)
    sample(run, salt)
    finish(run, 1, 2)
    fine(run)
    run, salt = sampled(chosen=True)
    sample(run, salt)
    run.send(1)
    assert "the gate `before` of step 1 was passed without a review" in faults(run)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda run, salt: sample(run, salt, chosen=False), "does not follow from the number"),
        (lambda run, salt: sample(run, salt, percent=10), "no rule that draws here"),
        (lambda run, salt: sample(run, salt, policy="0" * 64), "no rule that draws here"),
        (lambda run, salt: None, "no draw is on record"),
    ],
)
def test_draws_that_were_bent_are_found(change: Callable[[PaperRun, bytes], Any], reason: str) -> None:
    run, salt = sampled(chosen=True)
    change(run, salt)
    run.send(1)
    assert reason in faults(run)


def test_draws_with_another_secret_than_the_one_on_record_are_found() -> None:
    run, salt = sampled(chosen=False, secret="6" * 64)
    sample(run, salt)
    assert "another secret" in faults(run)


@pytest.mark.parametrize(
    ("asks", "confirms", "verdict"),
    [
        (("ann", None), ("bob", None), "valid"),
        (("ann", None), ("ann", None), "invalid"),
        # Whoever lets somebody else act has a part in it.
        (("ann", None), ("bot", "ann"), "invalid"),
        (("bot", "ann"), ("ann", None), "invalid"),
        (("bot", "ann"), ("bob", "dan"), "valid"),
    ],
)
def test_a_hold_is_released_by_two_people(
    asks: tuple[str, str | None], confirms: tuple[str, str | None], verdict: str
) -> None:
    hold = str(uuid5(RUN, "hold"))
    record = Record()
    run = PaperRun(record)
    record.system.add("hold.placed", by="ann", hold=hold, matter="m", runs=[], all_runs=True, artifacts=[])
    for type_, (by, for_) in (("hold.release_asked", asks), ("hold.released", confirms)):
        record.system.add(type_, by=by, for_=for_, hold=hold, matter="m", artifacts=[])
    assert verified(run).verdict == verdict
