"""Reviews in words, in the record and on the page: an end is told by what it did, not by its bare state."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.cli.review_render import state_words
from engine.evidence.page_run import _review
from engine.evidence.page_view import PageView
from engine.evidence.story import RunStory, run_story

LET_PASS = "let pass by the rule, nobody looked"
CREATED = ("run.created", {"origin": "file", "pool": "0" * 64})
Entry = tuple[str, dict[str, Any]]


def asked(review: str = "r1", **more: Any) -> Entry:
    data = {"review": review, "gate": "after", "round": 0, "step": 1, "approvals": 1, "four_eyes": False}
    return "review.requested", {**data, "reason": "policy", "reviewers": [], "on_expiry": None, **more}


def decided(decision: str, person: str = "bob") -> Entry:
    return "review.decided", {"review": "r1", "decision": decision, "meaning": "m", "person": person}


def closed(state: str, *, sent_back: bool = False) -> Entry:
    return "review.closed", {"review": "r1", "state": state, "sent_back": sent_back, "moved": None}


def told(*entries: Entry, together: int = 1) -> RunStory:
    """The story of these entries; the last ``together`` are of one transaction, so they have one time."""
    bodies = []
    for seq, (type_, data) in enumerate((CREATED, *entries), start=1):
        second = min(seq, len(entries) + 2 - together)
        at = datetime(2026, 12, 1, 12, 0, second, tzinfo=UTC).isoformat()
        entry = {"run": "r", "seq": seq, "at": at, "type": type_, "actor": "bob", "on_behalf_of": None, "data": data}
        bodies.append(json.dumps(entry).encode())
    return run_story(bodies)


def texts(story: RunStory) -> list[str]:
    return [line.text for line in story.lines[1:]]


def page(story: RunStory) -> str:
    return _review(cast("PageView", None), story.reviews["r1"])


def test_a_review_that_the_rule_let_pass() -> None:
    story = told(asked(on_expiry="approve"), closed("expired"))
    assert texts(story)[-1] == f"review r1: {LET_PASS}"
    assert page(story).count(LET_PASS) == 2
    for on_expiry in ("reject", "escalate"):
        assert texts(told(asked(on_expiry=on_expiry), closed("expired")))[-1] == "review r1: expired"
    seen = told(asked(on_expiry="approve"), ("review.opened", {"review": "r1", "person": "bob"}), closed("expired"))
    assert texts(seen)[-1] == "review r1: let pass by the rule, not enough people decided"


def test_a_rejection_that_sent_the_step_back() -> None:
    running = ("run.changed", {"state": "running", "reason": None})
    story = told(asked(), decided("reject"), closed("rejected", sent_back=True), running, together=3)
    assert texts(story)[1:] == [
        "review r1: sent back by bob, meaning m",
        "review r1: sent back",
        "as review r1 is sent back: the run is now running",
    ]
    assert "reject" not in page(story)
    assert page(story).count("sent back") == 3
    ended = told(asked(), decided("reject"), closed("rejected"), running)
    assert texts(ended)[1:] == [
        "review r1: rejected by bob, meaning m",
        "review r1: rejected",
        "the run is now running",
    ]
    assert "sent back" not in page(ended)


def test_why_and_whom_a_review_asks() -> None:
    broke = ("review.bypassed", {"review": "r1", "person": "carol"})
    story = told(asked(), broke, asked("r2", reason="break-glass", reviewers=["bob", "eve"]), together=2)
    wanted = "1 approval, by bob, eve, after the fact, because carol broke the glass"
    assert texts(story)[-1] == f"review of step 1 (after) requested: {wanted}"
    assert texts(story)[0] == "review of step 1 (after) requested: 1 approval"


@pytest.mark.parametrize(("opened_by", "marked"), [(None, True), ("eve", True), ("bob", False)])
def test_an_approval_of_what_was_not_displayed_is_marked_on_the_page(opened_by: str | None, marked: bool) -> None:
    opened = [] if opened_by is None else [("review.opened", {"review": "r1", "person": opened_by})]
    assert ("not displayed to them before" in page(told(asked(), *opened, decided("approve")))) == marked


def test_looking_afterwards_does_not_count() -> None:
    late = told(asked(), decided("approve"), ("review.opened", {"review": "r1", "person": "bob"}))
    assert "not displayed to them before" in page(late)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"state": "expired", "on_expiry": "approve"}, LET_PASS),
        ({"state": "expired", "on_expiry": "reject"}, "expired"),
        ({"state": "rejected", "sent_back": True}, "sent back"),
        ({"state": "rejected"}, "rejected"),
        ({"state": "open", "holds": False}, "open (after the fact)"),
        ({"state": "open"}, "open"),
    ],
)
def test_the_state_in_a_list(line: dict[str, Any], words: str) -> None:
    usual = {"holds": True, "sent_back": False, "on_expiry": None, "decided_by": ()}
    assert state_words(cast("Any", SimpleNamespace(**{**usual, **line}))) == words
