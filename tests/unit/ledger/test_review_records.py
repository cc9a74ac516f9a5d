"""What counts as an approval, from a ledger's entries alone."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.ledger.reviews import counted_approvals, is_drawn, lets_through, read_reviews, sampling_draw

REVIEW, A, B = str(uuid4()), "a" * 64, "b" * 64


def requested(**changes: Any) -> dict[str, Any]:
    data = {
        "review": REVIEW, "gate": "answer", "round": 0, "step": 0, "holds": True, "subject": A, "shown": B,
        "approvals": 2, "four_eyes": True, "excluded": ["alice"], "reviewers": [], "on_expiry": None,
    }  # fmt: skip
    return {"type": "review.requested", "actor": "podium-engine", "on_behalf_of": "alice", "data": {**data, **changes}}


def decided(who: str, on_behalf_of: str | None = None, **changes: Any) -> dict[str, Any]:
    data = {"review": REVIEW, "decision": "approve", "person": who, "subject": A, "shown": B}
    return {"type": "review.decided", "actor": who, "on_behalf_of": on_behalf_of, "data": {**data, **changes}}


def closed(state: str = "approved", **changes: Any) -> dict[str, Any]:
    return {
        "type": "review.closed", "actor": "bob", "on_behalf_of": None,
        "data": {"review": REVIEW, "state": state, "sent_back": False, **changes},
    }  # fmt: skip


def passes(*entries: dict[str, Any], persons: dict[str, str] | None = None, authors: tuple[str, ...] = ()) -> bool:
    review = read_reviews(entries)[REVIEW]
    return lets_through(review, persons or {}, authors)


def test_two_people_let_it_through_once_it_is_closed() -> None:
    both = (requested(), decided("bob"), decided("carol"))
    assert not passes(*both)
    assert passes(*both, closed())


@pytest.mark.parametrize(
    ("second", "persons", "authors"),
    [
        (decided("bob"), {}, ()),
        (decided("bob-2"), {"bob-2": "bob"}, ()),
        (decided("alice"), {}, ()),
        (decided("al"), {"al": "alice"}, ()),
        (decided("al"), {"al": "P", "alice": "P"}, ()),
        (decided("carol", "alice"), {}, ()),
        (decided("carol", "bob"), {}, ()),
        (decided("carol"), {}, ("carol",)),
        (decided("carol", subject=B), {}, ()),
        (decided("carol", shown=A), {}, ()),
        (decided("carol", decision="reject"), {}, ()),
    ],
)
def test_what_does_not_count_as_the_second_approval(
    second: dict[str, Any], persons: dict[str, str], authors: tuple[str, ...]
) -> None:
    assert not passes(requested(), decided("bob"), second, closed(), persons=persons, authors=authors)


def test_whoever_had_a_part_in_one_approval_gives_no_second_one_in_any_order() -> None:
    for both in ((decided("carol", "bob"), decided("bob")), (decided("bob"), decided("carol", "bob"))):
        assert not passes(requested(), *both, closed())
        # Also where it shows only later whose account it is.
        assert not passes(requested(), decided("carol", "b2"), decided("bob"), closed(), persons={"b2": "bob"})


def test_without_four_eyes_ones_own_counts_and_still_only_once() -> None:
    own = (requested(four_eyes=False, approvals=1), decided("alice"), closed())
    assert passes(*own)
    assert not passes(requested(four_eyes=False), decided("alice"), decided("alice"), closed())


def test_only_those_who_are_asked_count_by_account_or_person() -> None:
    request = requested(approvals=1, reviewers=["bob"])
    assert passes(request, decided("bob"), closed())
    assert passes(request, decided("b2"), closed(), persons={"b2": "bob"})
    assert not passes(request, decided("carol"), closed())


def test_an_expired_review_lets_through_only_where_the_rule_says_so() -> None:
    assert passes(requested(on_expiry="approve"), closed("expired"))
    assert not passes(requested(on_expiry="reject"), closed("expired"))
    for state in ("rejected", "stale", "withdrawn"):
        assert not passes(requested(), decided("bob"), decided("carol"), closed(state))


def test_an_entry_about_an_unknown_review_is_nothing() -> None:
    assert read_reviews([decided("bob"), closed()]) == {}


@given(st.lists(st.sampled_from(["alice", "al", "bob", "b2", "carol"]), max_size=8))
def test_never_more_approvals_count_than_there_are_people(names: list[str]) -> None:
    persons = {"al": "alice", "b2": "bob"}
    review = read_reviews([requested(), *(decided(name) for name in names)])[REVIEW]
    assert counted_approvals(review, persons, ()) == {persons.get(name, name) for name in names} - {"alice"}


def test_a_sample_is_as_large_as_it_says() -> None:
    draws = [sampling_draw(b"s" * 32, str(number), ("after", 0, 0), "p") for number in range(2000)]
    assert 120 < sum(is_drawn(draw, 10) for draw in draws) < 280
    assert all(is_drawn(draw, 100) for draw in draws)
    assert len(set(draws)) == len(draws)
    assert sampling_draw(b"t" * 32, "0", ("after", 0, 0), "p") != draws[0]
