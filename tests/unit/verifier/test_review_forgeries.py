"""Reviews forged by somebody who holds the signing key: requests weaker than the rule, people who are none, shopping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.store.ids import artifact_id
from engine.verifier.chains import Entry
from engine.verifier.faults import Findings
from engine.verifier.log import Log
from engine.verifier.persons import ENGINE, read_persons
from tests.support.bundles import PaperRun
from tests.support.paper_reviews import Reviewing, accept, finish, paper, propose
from tests.support.verdicts import faults, verified

ONE = "{gate: plan, approvals: 1}"
ASKS_THE_BOSS = (
    "{gate: plan, approvals: 2, expires_s: 60, on_expiry: escalate, escalate: {approvals: 1, reviewers: [boss]}}"
)
SOON = "2026-11-30T12:00:04.000000Z"
LATER = "2026-11-30T13:00:00.000000Z"


def planned(rule: str = ONE, **more: Any) -> PaperRun:
    run = paper(rule)
    run.plan(**more)
    return run


def without(run: PaperRun, *names: str, **instead: Any) -> Callable[..., Any]:
    """Makes the run's requests lack fields, or have others; returns what writes entries honestly."""
    add = run.chain.add

    def forge(type_: str, **data: Any) -> Any:
        if type_ == "review.requested":
            data = {name: value for name, value in {**data, **instead}.items() if name not in names}
        return add(type_, **data)

    run.chain.add = forge  # type: ignore[method-assign]  # the forger
    return add


@pytest.mark.parametrize("reason", ["order", "break-glass", "whatever"])
@pytest.mark.parametrize(
    ("weaker", "said"),
    [
        ({"approvals": 0}, "at least one approval"),
        ({"approvals": 1}, "does not ask for what the pool's rule wants"),
        ({"four_eyes": False}, "does not ask for what the pool's rule wants"),
    ],
)
def test_a_request_that_names_a_rule_asks_for_what_it_wants(reason: str, weaker: dict[str, Any], said: str) -> None:
    run = planned("{gate: plan, approvals: 2}")
    Reviewing(run, "plan", None, reason=reason, **weaker)
    assert said in faults(run)


@pytest.mark.parametrize("reason", ["order", "break-glass"])
def test_a_gate_is_passed_by_what_the_rule_asked_for_only(reason: str) -> None:
    run = planned()
    Reviewing(run, "plan", None, reason=reason).approve("eve")
    finish(run, 0, 1, 2)
    assert "the gate `plan` of round 0 was passed without a review" in faults(run)


def test_a_request_says_who_is_asked() -> None:
    run = planned("{gate: plan, approvals: 1, reviewers: [carl]}")
    without(run, "reviewers")
    Reviewing(run, "plan", None).approve("nobody-asked")
    assert "does not say who is asked" in faults(run)


def test_others_are_asked_only_after_an_expiry() -> None:
    later: dict[str, Any] = {"level": 1, "approvals": 1, "reviewers": ["boss"]}
    run = planned(ASKS_THE_BOSS)
    Reviewing(run, "plan", None, **later)
    assert "only when a review by those before them has expired" in faults(run)
    run = planned(ASKS_THE_BOSS)
    review = Reviewing(run, "plan", None)
    run.record.wait(60)
    review.close("expired")
    Reviewing(run, "plan", None, **later).approve("boss")
    finish(run, 0, 1, 2)
    assert verified(run).findings.faults == []


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"expires_at": "2000-01-01T00:00:00.000000Z", "on_expiry": "approve"}, "expired before it was asked for"),
        ({"on_expiry": "approve"}, "if and only if"),
        ({"expires_at": LATER}, "if and only if"),
        ({"expires_at": LATER, "on_expiry": "escalate"}, "names nobody who would be asked next"),
    ],
)
def test_an_expiry_that_no_rule_could_set_is_found(more: dict[str, Any], said: str) -> None:
    run = planned()
    Reviewing(run, "plan", None, **more)
    assert said in faults(run)


def test_a_decision_after_the_expiry_is_found() -> None:
    run = planned()
    review = Reviewing(run, "plan", None, expires_at=SOON, on_expiry="reject")
    for _ in range(3):
        run.chain.add("review.commented", by="eve", review=str(review.id), person="eve", artifacts=[])
    review.decide("eve")
    assert "came when the review had expired" in faults(run)


def test_a_rejection_cannot_be_put_into_another_execution() -> None:
    run = planned()
    Reviewing(run, "plan", None, execution=2).decide("bob", "reject")
    assert "another execution" in faults(run)


@pytest.mark.parametrize("state", ["rejected", "stale"])
@pytest.mark.parametrize("basis", [None, {"worker": "another"}])
def test_what_was_rejected_is_not_asked_again_until_somebody_approves(state: str, basis: Any) -> None:
    run = planned()
    Reviewing(run, "plan", None, basis=basis).decide("bob", "reject").close(state)
    Reviewing(run, "plan", None).approve("eve")
    finish(run, 0, 1, 2)
    assert "although somebody had rejected what passed it" in faults(run)


def test_nobody_decides_on_a_plan_of_their_own() -> None:
    run = planned(by="ben")
    Reviewing(run, "plan", None).approve("ben")
    assert "ben decided on a run of their own" in faults(run)


def test_the_engine_is_not_a_person() -> None:
    run = planned()
    review = Reviewing(run, "plan", None)
    add = run.chain.add
    run.chain.add = lambda type_, **data: add(type_, on_behalf_of=None, **data)  # type: ignore[method-assign]  # the forger
    review.decide(ENGINE)
    assert "the engine is not a person" in faults(run)


@pytest.mark.parametrize("type_", ["review.opened", "review.commented"])
def test_people_look_and_speak_under_their_own_names(type_: str) -> None:
    run = planned()
    review = Reviewing(run, "plan", None)
    more: dict[str, Any] = {"shown": review.shown} if type_ == "review.opened" else {"artifacts": []}
    run.chain.add(type_, by="ann", review=str(review.id), person="eve", **more)
    assert "the account 'ann' does not belong to 'eve'" in faults(run)


def test_links_lead_on_to_one_person() -> None:
    run = paper(ONE)
    run.record.system.add("person.linked", by="root", actor="ann-2", person="ann")
    run.record.system.add("person.linked", by="root", actor="ann", person="boss")
    run.plan()
    Reviewing(run, "plan", None).decide("ann-2", person="ann")
    assert "decided on a run of their own" in faults(run)


def test_where_log_and_times_disagree_a_link_may_have_been_there() -> None:
    """Entries get their places in the log in batches, so neither the place nor the time decides alone."""
    tenant, run = "t", "r"
    link = _entry(tenant, "person.linked", "2026-11-30T12:00:05.000000Z", actor="ann-2", person="ann")
    decision = _entry(run, "review.decided", "2026-11-30T12:00:00.000000Z")
    for places, person in (((3, 7), "ann"), ((7, 3), "ann-2")):
        log = Log(indexes={tenant: [places[0]], run: [places[1]]})
        persons = read_persons([link], Findings(), log)
        assert persons.person("ann-2", decision) == "ann-2"
        assert persons.person("ann-2", decision, "most") == person
    assert read_persons([link], Findings()).person("ann-2", decision) == "ann-2"


def _entry(chain: str, type_: str, at: str, **data: Any) -> Entry:
    return Entry(chain, 1, type_, at, "root", None, data, "", b"")


@pytest.mark.parametrize("instead", [{"shown": None}, {"artifacts": []}])
def test_a_request_commits_to_what_is_displayed(instead: dict[str, Any]) -> None:
    run = planned()
    without(run, **instead)
    review = Reviewing(run, "plan", None)
    if "artifacts" in instead:
        run.record.artifacts.pop(artifact_id(review.id, "review_manifest"))
    assert "does not commit to what is displayed" in faults(run)


def test_a_request_says_which_output_is_reviewed() -> None:
    run = paper("{gate: answer, approvals: 1}")
    run.plan()
    run.perform(0)
    run.perform(1)
    own = propose(run, 2)
    add = without(run, "attempt")
    review = Reviewing(run, "answer", 2)
    run.chain.add = add  # type: ignore[method-assign]  # honest again
    review.approve("eve")
    accept(run, 2, own)
    assert "does not say which output" in faults(run)


def broken(by: str, later: str, **more: Any) -> PaperRun:
    """The plan's glass is broken by one, and the later review decided by another one."""
    run = planned("{gate: plan, approvals: 1}")
    Reviewing(run, "plan", None).break_glass(by)
    after = Reviewing(run, "plan", None, reason="break-glass", holds=False, **more)
    if later:
        after.decide(later)
    after.close()
    finish(run, 0, 1, 2)
    return run


def test_the_review_after_broken_glass_is_one() -> None:
    assert "at least one approval" in faults(broken("zed", "", approvals=0))
    assert "zed decided on a run of their own" in faults(broken("zed", "zed"))
    assert verified(broken("zed", "eve", excluded=["ann", "zed"])).findings.faults == []
