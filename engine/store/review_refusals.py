"""Why somebody may not decide a review now. Pure words and comparisons; the database refuses the same on its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Protocol
from uuid import UUID

from engine.errors import InputError, RefusedError
from engine.ledger.reviews import Decision, ReviewRecord
from engine.store.attempts import counted_attempts
from engine.store.exchange import Row
from engine.store.orders import Order, moment, refuse_cancelling
from engine.store.reviews import ReviewBook

_SAID = {
    "approved": "approved",
    "rejected": "rejected",
    "expired": "closed because nobody decided in time",
    "stale": "closed because what it was about had changed",
    "withdrawn": "withdrawn with the end of its run",
    "bypassed": "bypassed",
}


@dataclass(frozen=True, slots=True)
class ReviewRows:
    """A review with all that a decision about it looks at."""

    run: Row
    review: Row
    reviews: Sequence[Row]
    decisions: Sequence[Row]
    steps: Sequence[Row]
    attempts: Sequence[Row]
    book: ReviewBook

    @property
    def open_reviews(self) -> list[Row]:
        """The run's reviews that are still to be decided."""
        return [row for row in self.reviews if row["state"] == "open"]

    @property
    def approvals(self) -> int:
        """How many people's approvals count today, as a gate counts them: by whose account it is by now."""
        return self.book.approvals(self.record)

    def approvals_with(self, decision: Decision) -> int:
        """The same with one more decision."""
        return self.book.approvals(replace(self.record, decisions=[*self.record.decisions, decision]))

    @property
    def record(self) -> ReviewRecord:
        """The review by its entries."""
        return self.book.records[str(self.review["id"])]

    @property
    def step(self) -> Row | None:
        """The step that it is about."""
        place = (self.review["round"], self.review["position"])
        return next((row for row in self.steps if (row["round"], row["position"]) == place), None)

    def person_of(self, account: str) -> str:
        """Whose account it is."""
        return self.book.persons.get(account, account)


class Wish(Protocol):
    """What a decision asks for, as far as it can be refused."""

    @property
    def kind(self) -> str:
        """Approve, reject or bypass."""

    @property
    def shown(self) -> bytes | None:
        """What the review displays now; None if it cannot be displayed."""

    @property
    def send_back(self) -> bool:
        """Whether the step is to be done again."""

    @property
    def attempts_max(self) -> int | None:
        """How often the step's worker may try."""


def refuse_decision(rows: ReviewRows, order: Order, wish: Wish, now: datetime) -> None:
    """Raises the first reason against a decision; returns if there is none."""
    review = rows.review
    own: UUID = review["id"]
    if str(own) in rows.book.contradicted:
        raise RefusedError(
            "review-contradicted",
            f"review {own} {rows.book.contradicted[str(own)]}: nobody can decide it",
            hint="`podium audit verify --database` says what else differs; `podium cancel` ends the run",
        )
    if review["state"] != "open":
        at = "" if review["closed_at"] is None else f" at {moment(review['closed_at'])}"
        raise RefusedError(
            "review-closed",
            f"review {own} was {_SAID[review['state']]}{at}",
            hint=f"podium review show {own}",
        )
    if review["holds"]:
        refuse_cancelling(rows.run)
    if review["expires_at"] is not None and review["expires_at"] <= now:
        raise RefusedError(
            "review-expired",
            f"review {own} expired at {moment(review['expires_at'])}",
            hint=f"podium show {rows.run['id']}",
        )
    _refuse_person(rows, order, wish)
    _refuse_stale(rows, wish)
    if wish.kind in {"reject", "bypass"} and not order.reason:
        raise InputError("reason-missing", f"a {wish.kind} needs a reason", hint="say why with --reason TEXT")
    if wish.send_back:
        _refuse_send_back(rows, wish)


def _refuse_person(rows: ReviewRows, order: Order, wish: Wish) -> None:
    review = rows.review
    breaks_glass = wish.kind == "bypass"
    if breaks_glass and review["bypass"] == "never":
        raise RefusedError(
            "bypass-not-allowed",
            f"the pool does not let anybody bypass review {review['id']}",
            hint=f"podium review approve {review['id']}, by somebody who may",
        )
    free = breaks_glass and review["bypass"] == "anyone"
    accounts = [order.actor_id, *([] if order.on_behalf_of is None else [order.on_behalf_of])]
    people = {rows.person_of(account) for account in accounts}
    authors = {rows.person_of(account) for account in (*rows.book.authors, *review["excluded"])}
    if review["four_eyes"] and not free and (own := people & authors):
        raise RefusedError(
            "review-own",
            f"{_whose(rows, accounts, min(own))}{_why_own(rows, min(own))}, and nobody reviews their own",
            hint="somebody else has to decide; PODIUM_ACTOR says who you are",
        )
    before = {
        rows.person_of(account): row
        for row in rows.decisions
        for account in (row["actor_id"], row["on_behalf_of"])
        if account is not None
    }
    if again := people & before.keys():
        person = min(again)
        at = moment(before[person]["decided_at"])
        raise RefusedError(
            "review-decided",
            f"{_whose(rows, accounts, person)}{person} has decided review {review['id']} already, at {at}",
            hint="each approval has to come from another person",
        )
    asked = set(review["reviewers"])
    if asked and not free and asked.isdisjoint({order.actor_id, rows.person_of(order.actor_id)}):
        raise RefusedError(
            "review-not-asked",
            f"{order.actor_id} is not among the reviewers of review {review['id']}",
            hint=f"it is for {', '.join(sorted(asked))}",
        )


def _whose(rows: ReviewRows, accounts: Sequence[str], person: str) -> str:
    """`b.miller is an account of bob: `, or nothing for somebody who acts by the name of the person."""
    used = [account for account in accounts if rows.person_of(account) == person]
    return "" if person in used else f"{used[0]} is an account of {person}: "


def _why_own(rows: ReviewRows, person: str) -> str:
    """What makes the run somebody's own: the first that applies."""
    run = rows.run

    def is_one_of(accounts: Iterable[str | None]) -> bool:
        return any(account is not None and rows.person_of(account) == person for account in accounts)

    if is_one_of([run["actor_id"]]):
        return f"{person} submitted run {run['id']}"
    if is_one_of([run["on_behalf_of"]]):
        return f"run {run['id']} was submitted on behalf of {person}"
    if is_one_of(rows.book.authors):
        return f"{person} planned or edited run {run['id']}, or submitted a run that it comes from"
    if rows.review["reason"] == "break-glass":
        return f"{person} bypassed the review of run {run['id']} that this one makes up for"
    return f"{person} had a hand in run {run['id']} when review {rows.review['id']} was asked for"


def _refuse_stale(rows: ReviewRows, wish: Wish) -> None:
    review, step = rows.review, rows.step
    changed = None
    if wish.shown is None:
        changed = "a text that it displays is not stored any more"
    elif wish.shown != bytes(review["shown"]):
        changed = "what it displays is not what it was asked for"
    elif review["holds"] and review["gate"] in {"plan", "before"} and review["execution"] != rows.run["execution"]:
        changed = "the run has been resumed since"
    elif review["holds"] and review["attempt_id"] is not None and not _is_present(review, step):
        changed = "the step has another output by now"
    if changed is not None:
        raise RefusedError(
            "review-stale",
            f"review {review['id']} is stale: {changed}",
            hint=f"podium show {rows.run['id']}; where a review is still needed, a new one is asked for",
        )


def _is_present(review: Row, step: Row | None) -> bool:
    return step is not None and review["attempt_id"] in {step["candidate_attempt_id"], step["accepted_attempt_id"]}


def _refuse_send_back(rows: ReviewRows, wish: Wish) -> None:
    review, step = rows.review, rows.step
    why = None
    if review["gate"] == "plan":
        raise RefusedError(
            "send-back-impossible",
            f"review {review['id']} is about a plan, and a plan cannot be sent back",
            hint=f"podium review reject {review['id']} --reason TEXT; then `podium fork` makes a run with another plan",
        )
    if review["gate"] not in {"after", "answer"} or not review["holds"]:
        why = "only an output that the run waits with can be sent back"
    elif step is None or step["candidate_attempt_id"] is None:
        why = "the output is accepted already"
    elif str(step["candidate_attempt_id"]) not in rows.book.outputs:
        why = "another run made the output"
    elif wish.attempts_max is not None and _tries(rows, step) >= wish.attempts_max:
        why = f"its worker has used all its {wish.attempts_max} attempts"
    if why is not None:
        raise RefusedError(
            "send-back-impossible",
            f"step {review['position']} of run {rows.run['id']} cannot be sent back: {why}",
            hint=f"podium review reject {review['id']} without --send-back; `podium fork` edits a plan",
        )


def _tries(rows: ReviewRows, step: Mapping[str, Any]) -> int:
    place = (step["round"], step["position"])
    own = [row for row in rows.attempts if (row["round"], row["position"]) == place]
    return counted_attempts(own, rows.run["execution"], step)
