"""The crash suite in its short form; `make crash` is the long one. See tests/support/crash.

PODIUM_CRASH_SEED repeats the kills of a run that failed: its seed is in the report.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import pytest

from tests.support.crash.books import Books
from tests.support.crash.endpoint import Request
from tests.support.crash.invariants import find_faults
from tests.support.crash.shapes import SHAPES
from tests.support.crash.suite import CrashTest, Verdict, bugs, crash

KILLS = 9
Altered = tuple[Books, Sequence[Request]]


@pytest.fixture(scope="module")
def verdict() -> Verdict:
    seed = int(os.environ.get("PODIUM_CRASH_SEED") or random.randrange(10**6))
    return asyncio.run(crash(CrashTest(seed=seed, kills=KILLS, runs=len(SHAPES), workers=2, settle_s=90)))


def test_workers_temporal_and_postgres_are_killed_and_every_promise_holds(verdict: Verdict) -> None:
    assert not verdict.faults, verdict.report
    # A run for each shape, and those that orders make of them.
    assert len(verdict.submitted) == len(SHAPES) + sum(shape.becomes is not None for shape in SHAPES)
    assert {shape.name for shape in verdict.submitted.values()} >= {"reviewed", "resumed after a bad key", "fork"}


def _any_run(books: Books, state: str = "succeeded") -> UUID:
    return next(run_id for run_id, run in books.runs.items() if run["state"] == state and books.steps[run_id])


def _run(books: Books, requests: Sequence[Request], **changes: Any) -> Altered:
    run_id = _any_run(books)
    return replace(books, runs={**books.runs, run_id: {**books.runs[run_id], **changes}}), requests


def _attempt(books: Books, requests: Sequence[Request], **changes: Any) -> Altered:
    run_id = _any_run(books)
    at = next(at for at, one in enumerate(books.attempts[run_id]) if one["accepted"])
    own = list(books.attempts[run_id])
    own[at] = {**own[at], **changes}
    return replace(books, attempts={**books.attempts, run_id: own}), requests


def _accepted(books: Books) -> dict[str, Any]:
    return next(one for one in books.attempts[_any_run(books)] if one["accepted"] and one["position"] is not None)


def _late_call(books: Books, requests: Sequence[Request]) -> Altered:
    accepted = _accepted(books)
    late = accepted["ended_at"].timestamp() + 0.1
    own = str(accepted["id"])
    return books, [replace(one, started_at=late) if one.attempt_id == own else one for one in requests]


def _torn_chain(books: Books, requests: Sequence[Request]) -> Altered:
    run_id = _any_run(books)
    bodies = list(books.bodies[run_id])
    del bodies[1]
    return replace(books, bodies={**books.bodies, run_id: bodies}), requests


def _second_output(books: Books, requests: Sequence[Request]) -> Altered:
    accepted = _accepted(books)
    run_id = accepted["run_id"]
    return replace(
        books, attempts={**books.attempts, run_id: [*books.attempts[run_id], {**accepted, "id": uuid4()}]}
    ), requests


def _budget(books: Books, requests: Sequence[Request], **changes: Any) -> Altered:
    return replace(books, budgets=[{**books.budgets[0], **changes}]), requests


def _orphan(books: Books, requests: Sequence[Request]) -> Altered:
    """A child whose parent had ended before the child's first call."""
    child = next(run for run in books.runs.values() if run["parent_run_id"] is not None and books.attempts[run["id"]])
    first = min(one["sent_at"] for one in books.attempts[child["id"]])
    parent = {**books.runs[child["parent_run_id"]], "ended_at": first}
    return replace(books, runs={**books.runs, parent["id"]: parent}), requests


def _of_shape(books: Books, name: str) -> UUID:
    """A run that shows what is peculiar to a shape."""
    fits: dict[str, Callable[[UUID, dict[str, Any]], bool]] = {
        "reviewed": lambda run_id, _: bool(books.reviews.get(run_id)),
        "resumed": lambda _, run: bool(run["execution"] > 1),
        "fork": lambda _, run: run["source_run_id"] is not None,
    }
    return next(run_id for run_id, run in books.runs.items() if fits[name](run_id, run))


def _review(books: Books, requests: Sequence[Request], **changes: Any) -> Altered:
    run_id = _of_shape(books, "reviewed")
    first, *others = books.reviews[run_id]
    return replace(books, reviews={**books.reviews, run_id: [{**first, **changes}, *others]}), requests


def _asked_twice(books: Books, requests: Sequence[Request]) -> Altered:
    run_id = _of_shape(books, "reviewed")
    own = books.reviews[run_id]
    return replace(books, reviews={**books.reviews, run_id: [*own, {**own[0], "id": uuid4()}]}), requests


def _decided_twice(books: Books, requests: Sequence[Request]) -> Altered:
    run_id = _of_shape(books, "reviewed")
    own = books.decisions[run_id]
    return replace(books, decisions={**books.decisions, run_id: [*own, {**own[0], "id": uuid4()}]}), requests


def _own_decision(books: Books, requests: Sequence[Request]) -> Altered:
    run_id = _of_shape(books, "reviewed")
    first, *others = books.decisions[run_id]
    own = {**first, "actor_id": books.runs[run_id]["actor_id"]}
    return replace(books, decisions={**books.decisions, run_id: [own, *others]}), requests


def _executed_again(books: Books, requests: Sequence[Request]) -> Altered:
    run_id = _of_shape(books, "resumed")
    run = {**books.runs[run_id], "execution": 3}
    return replace(books, runs={**books.runs, run_id: run}), requests


def _reused_step(books: Books, requests: Sequence[Request], **changes: Any) -> Altered:
    run_id = _of_shape(books, "fork")
    first, *others = books.steps[run_id]
    return replace(books, steps={**books.steps, run_id: [{**first, **changes}, *others]}), requests


def _reused_step_called(books: Books, requests: Sequence[Request]) -> Altered:
    run_id = _of_shape(books, "fork")
    called = {**books.attempts[run_id][0], "position": 0}
    return replace(books, attempts={**books.attempts, run_id: [*books.attempts[run_id], called]}), requests


ALTERATIONS: dict[str, tuple[Callable[[Books, Sequence[Request]], Altered], str]] = {
    "a run that goes on": (lambda *all_: _run(*all_, state="running"), "has not ended"),
    "another end": (lambda *all_: _run(*all_, state="failed"), "without a reason"),
    "a total": (lambda *all_: _run(*all_, cost_usd=Decimal("0.0000000001")), "cost_usd is"),
    "the sum of the totals": (lambda *all_: _run(*all_, cost_usd=Decimal("0.0000000001")), "the runs' totals make"),
    "an open attempt": (lambda *all_: _attempt(*all_, state="sent"), "still open"),
    "a cost": (lambda *all_: _attempt(*all_, cost_usd=Decimal("0.0000000001")), "the endpoint has it as answered"),
    "a cost that is lost": (lambda *all_: _attempt(*all_, cost_usd=None), "the endpoint has it as answered"),
    "no accepted output": (lambda *all_: _attempt(*all_, accepted=False), "without an accepted output"),
    "a second output": (_second_output, "2 accepted outputs"),
    "a call after acceptance": (_late_call, "after its output was accepted"),
    "a request twice": (lambda books, requests: (books, [*requests, requests[0]]), "2 requests came with the id"),
    "a request of nobody": (
        lambda books, requests: (books, [*requests, replace(requests[0], attempt_id=str(uuid4()))]),
        "the record knows nothing",
    ),
    "a request too few": (lambda books, requests: (books, []), "the endpoint never saw it"),
    "a torn chain": (_torn_chain, "ledger: "),
    "a reservation": (lambda *all_: _budget(*all_, usd_reserved=Decimal(1)), "still reserved"),
    "a budget's sum": (lambda *all_: _budget(*all_, usd_spent=Decimal(1)), "the calls of the tree make"),
    "a budget's calls": (lambda *all_: _budget(*all_, calls_spent=77), "the budget counts"),
    "a child without its parent": (_orphan, "after the end of"),
    "an open review": (lambda *all_: _review(*all_, state="open"), "still open"),
    "a review that was passed by": (lambda *all_: _review(*all_, state="stale"), "and the run went on"),
    "a review of another output": (lambda *all_: _review(*all_, attempt_id=uuid4()), "another output"),
    "a review that was asked twice": (_asked_twice, "2 reviews are about"),
    "a review that was decided twice": (_decided_twice, "wants 1 approvals and has"),
    "a decision that is not in the ledger": (_decided_twice, "the ledger has 0 review.decided"),
    "an own decision": (_own_decision, "by whose run it is"),
    "a resume too many": (_executed_again, "should have 2 executions and has 3"),
    "a reused output of nobody": (lambda *all_: _reused_step(*all_, accepted_attempt_id=uuid4()), "has not accepted"),
    "a step that was not reused": (lambda *all_: _reused_step(*all_, state="succeeded"), "it should [0, 1]"),
    "a reused step that was called": (_reused_step_called, "is reused and was called"),
}


@pytest.mark.parametrize(("alter", "expected"), ALTERATIONS.values(), ids=ALTERATIONS)
def test_a_broken_promise_is_found(
    verdict: Verdict, alter: Callable[[Books, Sequence[Request]], Altered], expected: str
) -> None:
    books, requests = alter(verdict.books, verdict.requests)
    found = find_faults(books, requests, verdict.submitted)
    assert any(expected in fault.text for fault in found), found


def test_a_run_that_nobody_asked_for_and_one_that_is_missing_are_found(verdict: Verdict) -> None:
    known = dict(verdict.submitted)
    lost = known.popitem()[1]
    found = find_faults(verdict.books, verdict.requests, {**known, uuid4(): lost})
    assert {"nobody asked for" in fault.text for fault in found} == {True, False}
    assert any("is not on record" in fault.text for fault in found)


def test_a_bug_in_a_workers_log_is_found() -> None:
    assert bugs("x\nERROR activities.guard an activity failed with a bug\ny") == [
        "ERROR activities.guard an activity failed with a bug"
    ]
