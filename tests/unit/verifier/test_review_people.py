"""Who may decide, by whose accounts they are: links dated at will, authors of every kind, broken glass, samples."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import uuid5

import pytest

from engine.verifier.report import Report
from engine.verifier.verify import verify_bundle
from tests.support.bundles import RUN, PaperRun, Record, pool_of
from tests.support.paper_reviews import Reviewing, accept, finish, paper, propose
from tests.support.verdicts import faults, verified

ONE = "{gate: plan}"
AFTER = "{gate: after, workers: [beta]}"
HOUR_S, DAY_S = 3_600, 86_400
LATER_REVIEW: dict[str, Any] = {"reason": "break-glass", "holds": False}


def planned(rule: str = ONE, **more: Any) -> PaperRun:
    run = paper(rule)
    run.plan(**more)
    return run


def link(run: PaperRun, account: str = "ann-2", person: str = "ann", *, ahead_s: int = 0) -> None:
    """Links an account; the entry is dated so many seconds ahead of the time at which it is written."""
    record, now = run.record, run.record.now
    record.now = lambda: now() + timedelta(seconds=ahead_s)  # type: ignore[method-assign]  # the forger
    record.system.add("person.linked", by="root", actor=account, person=person)
    record.now = now  # type: ignore[method-assign]  # honest again


def approved_by(run: PaperRun, *people: str) -> PaperRun:
    run.plan()
    Reviewing(run, "plan", None).approve(*people)
    finish(run, 0, 1, 2)
    return run


def export(run: PaperRun, entries: int = 1) -> None:
    """The run's chain says how long the tenant's own one was when it was exported."""
    head = {"entries": entries, "head": run.record.system.hash(entries)}
    said = {"export": str(uuid5(RUN, "export")), "runs": [str(RUN)], "redacted": []}
    run.chain.add("run.exported", by="aud", **said, system=head)


# Links and their times


def test_a_link_dated_after_everything_is_no_link_of_this_bundle() -> None:
    run = paper(ONE)
    link(run, ahead_s=70 * 365 * DAY_S)
    assert "later than the bundle that holds it" in faults(approved_by(run, "ann-2"))


@pytest.mark.parametrize("after", ["system", "export", "checkpoint", "creation"])
def test_a_link_dated_long_after_what_was_written_behind_it_is_found(after: str) -> None:
    run = paper(ONE)
    link(run, ahead_s=DAY_S + HOUR_S)
    if after == "system":
        run.record.system.add("sampling.salt_made", salt="5" * 64)
    run.record.sign()
    if after == "creation":
        run = PaperRun(run.record, run.pool, run=uuid5(RUN, "younger"), checkpoint=len(run.record.leaves))
        run.whole()
        assert "which was written after it" in faults(run)
        return
    run.plan()
    size = run.record.checkpoints[-1][0] if after == "checkpoint" else 0
    Reviewing(run, "plan", None).decide("eve", checkpoint=size).close()
    finish(run, 0, 1, 2)
    if after == "export":
        export(run)
    assert "which was written after it" in faults(run)


def test_a_link_counts_from_what_was_written_behind_it_on() -> None:
    """The link states a time an hour too late; the decision names a checkpoint that covers it."""
    run = paper(ONE)
    link(run, ahead_s=HOUR_S)
    run.record.sign()
    run.plan()
    Reviewing(run, "plan", None).decide("ann-2", person="ann", checkpoint=run.record.checkpoints[-1][0])
    assert "ann decided on a run of their own" in faults(run)
    run = paper(ONE)
    link(run, ahead_s=HOUR_S)
    link(run, "x", "y")
    run.plan()
    Reviewing(run, "plan", None).decide("ann-2", person="ann")
    assert "ann decided on a run of their own" in faults(run)


def undecided(report: Report) -> bool:
    assert report.findings.faults == []
    assert (report.exit_code == 3) is report.findings.undecided
    return any("that enough people who may do so approved" in line for line in report.not_proven)


def test_where_the_log_has_a_link_first_and_the_times_have_it_last_nothing_is_proven() -> None:
    run = paper(ONE)
    link(run, ahead_s=HOUR_S)
    report = verified(approved_by(run, "ann-2"))
    assert (undecided(report), report.exit_code) == (True, 3)


def test_a_link_that_was_made_later_leaves_earlier_approvals_alone() -> None:
    for people in (("ann-2",), ("eve",)):
        run = approved_by(paper(ONE), *people)
        link(run)
        report = verified(run)
        assert (undecided(report), report.exit_code) == (False, 0)


def test_a_look_afterwards_by_an_account_in_doubt_is_not_proven_either() -> None:
    run = paper(AFTER)
    link(run, ahead_s=HOUR_S)
    run.plan()
    run.perform(0)
    own = propose(run, 1)
    Reviewing(run, "after", 1).approve("bob")
    accept(run, 1, own)
    finish(run, 2)
    Reviewing(run, "after", 1, reason="order", policy=None, holds=False).approve("ann-2")
    report = verified(run)
    assert (undecided(report), report.exit_code) == (True, 3)


def test_an_approval_in_doubt_that_nothing_relied_on_does_not_matter() -> None:
    """The engine saw the link and asked again."""
    run = paper(ONE)
    link(run, ahead_s=HOUR_S)
    run.plan()
    Reviewing(run, "plan", None).approve("ann-2").close("stale")
    Reviewing(run, "plan", None).approve("bob")
    finish(run, 0, 1, 2)
    report = verified(run)
    assert (undecided(report), report.exit_code) == (False, 0)


def test_a_link_in_doubt_does_not_matter_where_enough_others_approved() -> None:
    run = paper("{gate: plan, approvals: 2}")
    link(run, "joe-2", "joe", ahead_s=HOUR_S)
    report = verified(approved_by(run, "joe-2", "eve"))
    assert (undecided(report), report.exit_code) == (False, 0)


def test_glass_broken_by_an_account_in_doubt_is_not_proven_to_be_broken_by_another() -> None:
    run = paper(ONE)
    link(run, ahead_s=HOUR_S)
    run.plan()
    Reviewing(run, "plan", None).break_glass("ann-2")
    Reviewing(run, "plan", None, excluded=["ann", "ann-2"], **LATER_REVIEW)
    finish(run, 0, 1, 2)
    report = verified(run)
    assert (report.findings.faults, report.exit_code) == ([], 3)
    assert any("that somebody who may do so broke the glass" in line for line in report.not_proven)


def test_a_link_dated_before_what_it_makes_an_approval_is_not_proven_to_have_been_there() -> None:
    """Somebody's account became that of a person who is asked, by an entry that came later and states an earlier time."""
    rule = "{gate: plan, reviewers: [boss]}"
    for when in ("before", "after"):
        run = paper(rule)
        run.plan()
        if when == "before":
            link(run, "mallory", "boss")
        review = Reviewing(run, "plan", None)
        at = run.record.last()
        review.decide("mallory", person="boss").close()
        run.perform(0)
        if when == "after":
            link(run, "mallory", "boss", ahead_s=int((at - run.record.last()).total_seconds()) - 1)
        finish(run, 1, 2)
        report = verified(run)
        assert (undecided(report), report.exit_code) == ((True, 3) if when == "after" else (False, 0))


def test_a_link_dated_long_before_what_was_written_in_front_of_it_is_found() -> None:
    run = paper(ONE)
    run.record.system.add("sampling.salt_made", salt="5" * 64)
    link(run, ahead_s=-DAY_S - HOUR_S)
    assert "an entry that was written before it" in faults(approved_by(run, "eve"))


def test_whoever_had_a_part_in_one_approval_has_none_in_another() -> None:
    """Dan approved for cy, and cy-2 for herself: when her accounts are linked, one of the two approvals is left."""
    for is_linked in (False, True):
        run = paper("{gate: plan, approvals: 2}")
        run.plan()
        review = Reviewing(run, "plan", None)
        review.decide("dan", for_="cy").decide("cy-2").close()
        run.perform(0)
        if is_linked:
            link(run, "cy-2", "cy")
        finish(run, 1, 2)
        found = str(verified(run).findings.faults)
        assert ("with approvals that did not count any more" in found) is is_linked


def test_people_are_linked_to_and_accounts_are_not() -> None:
    run = paper(ONE)
    link(run, "ann-2", "ann")
    link(run, "ann", "boss")
    assert "never to another account" in faults(approved_by(run, "eve"))


@pytest.mark.parametrize("type_", ["review.opened", "review.commented"])
def test_a_look_while_the_link_is_being_made_is_no_fault(type_: str) -> None:
    """The engine dates a look before it reads whose account it is."""
    run = planned()
    review = Reviewing(run, "plan", None)
    more: dict[str, Any] = {"shown": review.shown} if type_ == "review.opened" else {"artifacts": []}
    run.chain.add(type_, by="eve-2", review=str(review.id), person="eve", **more)
    link(run, "eve-2", "eve")
    review.approve("bob")
    finish(run, 0, 1, 2)
    assert verified(run).findings.faults == []


# Whose run it is


def answered(run: PaperRun, by: str) -> None:
    """An operator gives step 2 to another worker."""
    run.close(2, run.send(2), None, moved={"state": "waiting", "reason": "operator", "old": "running"})
    run.states[2] = "pending"
    moved = {"state": "pending", "reason": None, "old": "waiting"}
    run.chain.add(
        "operator.answered", by=by, order=str(uuid5(RUN, "retry")), answer="retry", round=0, step=2, worker="gamma",
        model="gamma-1", old_worker="alpha", attempts_base=1, artifacts=[], moved=moved,
    )  # fmt: skip
    run.steps[2] = ("gamma", *run.steps[2][1:])


def test_who_edits_a_run_does_not_count_among_its_approvers_any_more() -> None:
    for editor in ("zed", "eve"):
        run = planned()
        Reviewing(run, "plan", None).approve("eve")
        run.perform(0)
        run.perform(1)
        answered(run, editor)
        finish(run, 2)
        if editor == "eve":
            assert "with approvals that did not count any more" in faults(run)
        else:
            assert verified(run).findings.faults == []


def test_who_edited_a_run_since_the_request_does_not_decide() -> None:
    run = planned(AFTER)
    run.perform(0)
    own = propose(run, 1)
    review = Reviewing(run, "after", 1)
    run.chain.add("run.repinned", by="eve", order=str(uuid5(RUN, "pin")), old=run.digest, new=run.digest)
    review.decide("eve")
    accept(run, 1, own)
    assert "eve decided on a run of their own" in faults(run)


@pytest.mark.parametrize(("origin", "own"), [("file", True), ("fork", True), ("conductor", False)])
def test_who_planned_what_a_fork_comes_from_does_not_review_it(origin: str, own: bool) -> None:
    record = Record()
    source = PaperRun(record, pool_of(), run=uuid5(RUN, "source"), origin=origin)
    source.whole()
    add = record.chain(RUN).add
    said = {"run": str(source.id), "round": 0, "task_edited": False, "edited": [], "reused": []}

    def created(type_: str, **data: Any) -> str:
        return add(type_, **({**data, "by": "flo"} if type_ == "run.created" else data))

    record.chain(RUN).add = created  # type: ignore[method-assign]  # ann made the source, flo the fork
    run = PaperRun(record, pool_of(f"{{reviews: [{ONE}]}}"), origin="fork", source=said)
    run.plan(by="flo")
    Reviewing(run, "plan", None, excluded=["flo"]).approve("ann")
    finish(run, 0, 1, 2)
    found = str(verified(run).findings.faults)
    assert [words in found for words in ("ann decided on a run of their own", "does not exclude everybody")] == [
        own
    ] * 2


def test_who_submitted_the_run_above_does_not_review_the_one_below() -> None:
    record = Record()
    above = PaperRun(record, pool_of(), run=uuid5(RUN, "above"))
    above.whole()
    add = record.chain(RUN).add

    def created(type_: str, **data: Any) -> str:
        return add(type_, **({**data, "by": "flo"} if type_ == "run.created" else data))

    record.chain(RUN).add = created  # type: ignore[method-assign]  # ann made the one above, flo the one below
    place = {"parent": str(above.id), "parent_round": 0, "parent_step": 0, "depth": 1}
    run = PaperRun(record, pool_of(f"{{reviews: [{ONE}]}}"), **place)
    run.plan(by="flo")
    Reviewing(run, "plan", None, excluded=["flo"]).decide("ann")
    found = faults(run)
    assert all(words in found for words in ("ann decided on a run of their own", "does not exclude everybody"))


# Breaking the glass


@pytest.mark.parametrize(
    ("rule", "by"),
    [
        ("{gate: plan, reviewers: [bob]}", "zed"),
        ("{gate: plan, reviewers: [bob, joe]}", "ann"),
    ],
)
def test_glass_is_broken_by_those_who_are_asked(rule: str, by: str) -> None:
    run = planned(rule)
    Reviewing(run, "plan", None).break_glass(by)
    assert "does not let them break the glass" in faults(run)


def test_glass_is_broken_by_anyone_where_the_rule_says_so_and_by_authors_without_four_eyes() -> None:
    for rule in ("{gate: plan, bypass: anyone, reviewers: [bob]}", "{gate: plan, four_eyes: false}"):
        run = planned(rule)
        Reviewing(run, "plan", None).break_glass("ann")
        Reviewing(run, "plan", None, **LATER_REVIEW)
        finish(run, 0, 1, 2)
        assert verified(run).findings.faults == []


def test_glass_is_not_broken_by_somebody_who_has_decided_nor_after_the_expiry() -> None:
    run = planned("{gate: plan, approvals: 2}")
    Reviewing(run, "plan", None).decide("eve").break_glass("eve")
    assert "eve decided before" in faults(run)
    run = planned("{gate: plan, expires_s: 60}")
    review = Reviewing(run, "plan", None)
    run.record.wait(60)
    review.break_glass("eve")
    assert "came when the review had expired" in faults(run)


def test_who_broke_the_glass_elsewhere_may_review_this() -> None:
    """Reviews before different steps have the same subject, the plan's entry, and are two matters all the same."""
    run = paper("{gate: before, workers: [alpha, beta]}")
    run.plan()
    for position, by in ((0, "zed"), (1, "amy")):
        Reviewing(run, "before", position).break_glass(by)
        later = Reviewing(run, "before", position, excluded=["ann", by], **LATER_REVIEW)
        later.approve("zed" if by == "amy" else "bob")
        run.perform(position)
    Reviewing(run, "before", 2).approve("bob")
    finish(run, 2)
    assert verified(run).findings.faults == []


def test_broken_glass_is_followed_by_a_review_of_the_same_step() -> None:
    run = paper("{gate: before, workers: [alpha, beta]}")
    run.plan()
    Reviewing(run, "before", 0).break_glass("zed")
    Reviewing(run, "before", 1).break_glass("zed")
    Reviewing(run, "before", 1, excluded=["ann", "zed"], **LATER_REVIEW)
    found = faults(run)
    assert found.count("no later review was asked for") == 1


# When there is nothing to decide any more


def test_a_decision_while_the_run_is_being_cancelled_is_found() -> None:
    run = planned()
    review = Reviewing(run, "plan", None)
    run.chain.add("run.cancel_requested", by="ann", order=str(uuid5(RUN, "cancel")), artifacts=[])
    review.decide("eve")
    assert "when the run was being cancelled" in faults(run)


def test_a_decision_about_an_execution_that_is_over_is_found() -> None:
    run = planned()
    review = Reviewing(run, "plan", None)
    run.move("running")
    run.end("failed")
    run.chain.add("run.resumed", by="ann", execution=2, order=str(uuid5(RUN, "resume")), deadline=None, artifacts=[])
    review.decide("eve")
    assert "when the run had been resumed" in faults(run)


# Samples


def drawing(secret: str | None = "5" * 64) -> PaperRun:
    run = paper("{gate: plan, sample_percent: 50}")
    if secret is not None:
        run.record.system.add("sampling.salt_made", salt=secret)
    run.plan()
    return run


def draw(run: PaperRun, number: str = "f" * 64, **more: Any) -> None:
    rule = run.pool.policy.reviews[0].digest
    said = {"gate": "plan", "round": 0, "step": None, "policy": rule, "percent": 50, "draw": number, "salt": "5" * 64}
    run.chain.add("review.sampled", **{**said, "chosen": False, **more})


def test_what_passed_because_it_was_not_drawn_is_not_proven_without_the_secret() -> None:
    run = drawing()
    draw(run)
    finish(run, 0, 1, 2)
    report = verified(run)
    assert (report.findings.faults, report.exit_code) == ([], 0)
    assert any("which its secret drew" in line for line in report.not_proven)


def test_one_place_is_drawn_once_and_one_number_for_one_place() -> None:
    run = drawing()
    draw(run)
    draw(run)
    assert "it was drawn twice" in faults(run)
    run = drawing()
    draw(run)
    draw(run, round=1)
    assert "the same number was drawn for something else" in faults(run)


def test_a_secret_that_nobody_made_is_found_or_not_proven() -> None:
    run = drawing(None)
    draw(run)
    finish(run, 0, 1, 2)
    assert "another secret than the one that was made" in faults(run)
    # With other runs' entries left out, the tenant's own chain may be among what is not there.
    run = drawing(None)
    PaperRun(run.record, run.pool, run=uuid5(RUN, "other"))
    draw(run)
    finish(run, 0, 1, 2)
    run.record.sign()
    report = verify_bundle(run.record.bundle([RUN]), [run.record.verifier])
    assert (report.findings.faults, report.exit_code) == ([], 3)
    assert any("was made before" in line for line in report.not_proven)


def test_the_secret_is_made_once() -> None:
    run = drawing()
    run.record.system.add("sampling.salt_made", salt="6" * 64)
    assert "is made once" in faults(run)
