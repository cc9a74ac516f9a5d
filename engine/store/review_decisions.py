"""What a person decides in a review: approve, reject (perhaps sending the step back), or break the glass.

One transaction and one ledger entry before anything is sent to Temporal, which is only woken; the step's Open then
looks at the ledger. The database refuses a decision by somebody who may not decide, whatever is asked of it here. Must
never decide about anything but what was displayed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal
from uuid import UUID

from engine.errors import InputError
from engine.ledger.reviews import Decision
from engine.store import queries
from engine.store.artifacts import ArtifactDraft
from engine.store.database import Database
from engine.store.exchange import Connection, Row
from engine.store.gates import REVIEW_REJECTED, GateRule, ReviewReason
from engine.store.orders import Order, Ordered, lock_for_order
from engine.store.review_display import Display
from engine.store.review_moves import give_up, let_go_on, send_back
from engine.store.review_refusals import ReviewRows, refuse_decision
from engine.store.review_requests import Asking, ask, close_review
from engine.store.reviews import Wanted, book_queries, review_book
from engine.store.run_writer import RunWriter

DecisionKind = Literal["approve", "reject", "bypass"]

LOCK_REVIEWS: Final = "SELECT * FROM reviews WHERE run_id = %s ORDER BY seq FOR NO KEY UPDATE"
_READ_DECISIONS: Final = "SELECT * FROM review_decisions WHERE review_id = %s ORDER BY decided_at"
_READ_CHECKPOINT: Final = """
    SELECT max(size) AS size FROM log_checkpoints WHERE tenant_id = (SELECT tenant_id FROM runs WHERE id = %s)
"""
_READ_ATTEMPTS: Final = """
    SELECT execution, number, error_code, round, position FROM attempts WHERE run_id = %s AND position IS NOT NULL
"""
_READ_NOW: Final = "SELECT clock_timestamp() AS now"
_INSERT: Final = """
    INSERT INTO review_decisions
        (id, review_id, decision, meaning, actor_id, on_behalf_of, person, subject, shown, decided_at)
    VALUES (%(id)s, %(review_id)s, %(decision)s, %(meaning)s, %(actor_id)s, %(on_behalf_of)s, %(person)s,
            %(subject)s, %(shown)s, %(now)s)
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What somebody decides. ``shown`` is what the review displays now; the reason and who decides are in the order.

    ``meaning`` is a code, ``meaning_text`` what it says. ``later`` displays the review that a bypass forces;
    ``attempts_max`` is how often the step's worker may try.
    """

    review_id: UUID
    kind: DecisionKind
    meaning: str
    meaning_text: str
    shown: bytes | None
    send_back: bool = False
    later: Display | None = None
    attempts_max: int | None = None


@dataclass(frozen=True, slots=True)
class Decided:
    """What came of a decision: the run and the review after it, and how many approvals it has of how many."""

    ordered: Ordered
    review_state: str
    approvals: int
    approvals_needed: int


async def decide(database: Database, order: Order, verdict: Verdict) -> Decided:
    """Writes a decision down, and if that ends the review, what follows for the run.

    Raises RefusedError ``review-closed``, ``review-expired``, ``review-stale``, ``review-own``, ``review-decided``,
    ``review-not-asked``, ``run-cancelling``, ``send-back-impossible``, ``bypass-not-allowed``, and InputError
    ``review-unknown``, ``reason-missing``; nothing was changed then.
    """

    async def work(connection: Connection) -> Decided:
        writer, before, rest = await lock_for_order(
            connection,
            order,
            (LOCK_REVIEWS, (order.run_id,)),
            (_READ_DECISIONS, (verdict.review_id,)),
            (queries.READ_ALL_STEPS, (order.run_id,)),
            (_READ_ATTEMPTS, (order.run_id,)),
            (_READ_CHECKPOINT, (order.run_id,)),
            *book_queries(order.run_id),
            (_READ_NOW, ()),
        )
        reviews, decisions, steps, attempts, checkpoint, *book_rows, [clock] = rest
        book = review_book(book_rows)
        # Behind the lock on persons: whoever checks the entry finds exactly the links that were counted by.
        writer.now = clock["now"]
        review = next((row for row in reviews if row["id"] == verdict.review_id), None)
        if review is None:
            raise InputError(
                "review-unknown", f"there is no review {verdict.review_id}", hint="`podium review list` shows them"
            )
        rows = ReviewRows(writer.run, review, reviews, decisions, steps, attempts, book)
        if before is not None:
            return _result(writer, rows, review["state"], at=None)
        refuse_decision(rows, order, verdict, writer.now)
        _write(writer, rows, order, verdict, checkpoint[0]["size"])
        state = _follow(writer, rows, order, verdict)
        if review["holds"]:
            writer.statement(queries.SET_WAKE, (writer.now, order.run_id))
        await writer.commit()
        # Now the decision stands, whatever becomes of the wake-up.
        return _result(writer, rows, state, at=writer.now, approvals=_approvals(rows, order, verdict))

    return await database.write(work)


def _write(writer: RunWriter, rows: ReviewRows, order: Order, verdict: Verdict, checkpoint: int | None) -> None:
    """Adds the decision's row and entry; what it says and why are artifacts that the entry commits to."""
    review = rows.review
    person = rows.person_of(order.actor_id)
    assert verdict.shown is not None
    values = {
        "id": order.id,
        "review_id": review["id"],
        "decision": verdict.kind,
        "meaning": verdict.meaning,
        "actor_id": order.actor_id,
        "on_behalf_of": order.on_behalf_of,
        "person": person,
        "subject": review["subject"],
        "shown": verdict.shown,
        "now": writer.now,
    }
    writer.statement(_INSERT, values)
    drafts = [ArtifactDraft(order.id, "meaning", verdict.meaning_text.encode())]
    if order.reason is not None:
        drafts.append(ArtifactDraft(order.id, "reason", order.reason.encode()))
    said: dict[str, Any] = {"review": str(review["id"]), "order": str(order.id), "person": person}
    if verdict.kind == "bypass":
        writer.entry("review.bypassed", **said, artifacts=writer.artifacts(drafts))
        return
    writer.entry(
        "review.decided",
        **said,
        decision=verdict.kind,
        meaning=verdict.meaning,
        subject=bytes(review["subject"]).hex(),
        shown=verdict.shown.hex(),
        checkpoint=checkpoint,
        artifacts=writer.artifacts(drafts),
    )


def _follow(writer: RunWriter, rows: ReviewRows, order: Order, verdict: Verdict) -> str:
    """Adds what follows from the decision; returns the review's state then."""
    review, others = rows.review, [row for row in rows.open_reviews if row["id"] != rows.review["id"]]
    own = str(review["id"])
    if verdict.kind == "bypass":
        _bypass(writer, rows, order, verdict)
        let_go_on(writer, review, rows.steps, others)
        return "bypassed"
    if verdict.kind == "approve":
        if _approvals(rows, order, verdict) < review["approvals"]:
            return "open"
        close_review(writer, own, "approved")
        if review["holds"]:
            let_go_on(writer, review, rows.steps, others)
        return "approved"
    close_review(writer, own, "rejected", sent_back=verdict.send_back)
    if not review["holds"]:
        return "rejected"
    if verdict.send_back:
        for other in others:
            # They were about the output that is gone.
            if other["holds"] and (other["round"], other["position"]) == (review["round"], review["position"]):
                close_review(writer, str(other["id"]), "stale")
        send_back(writer, review, rows.steps)
    else:
        operator = GateRule(bytes(review["rule"])).said["on_reject"] == "wait"
        give_up(writer, review, rows.steps, REVIEW_REJECTED, operator=operator)
    return "rejected"


def _approvals(rows: ReviewRows, order: Order, verdict: Verdict) -> int:
    """How many approvals count once this decision is on record."""
    if verdict.kind != "approve":
        return rows.approvals
    assert verdict.shown is not None
    person, subject = rows.person_of(order.actor_id), bytes(rows.review["subject"]).hex()
    return rows.approvals_with(
        Decision("approve", order.actor_id, order.on_behalf_of, person, subject, verdict.shown.hex())
    )


def _bypass(writer: RunWriter, rows: ReviewRows, order: Order, verdict: Verdict) -> None:
    """Adds that the glass was broken, and the review that has to follow, which whoever did it may not decide."""
    review = rows.review
    writer.statement("UPDATE reviews SET state = 'bypassed', closed_at = %s WHERE id = %s", (writer.now, review["id"]))
    assert verdict.later is not None
    later = wanted_of(review, reason="break-glass", holds=False)
    broke = frozenset({order.actor_id, order.on_behalf_of or order.actor_id})
    ask(writer, rows.book, Asking(later, verdict.later, review["level"], broke))


def wanted_of(review: Row, *, reason: ReviewReason | None = None, holds: bool | None = None) -> Wanted:
    """What a review on record is about, as it would be asked for again."""
    return Wanted(
        gate=review["gate"],
        round=review["round"],
        position=review["position"],
        rule=GateRule(bytes(review["rule"])),
        reason=reason or review["reason"],
        subject=bytes(review["subject"]).hex(),
        plan=bytes(review["plan"]).hex(),
        execution=review["execution"],
        attempt_id=review["attempt_id"],
        basis=None if review["basis"] is None else json.loads(bytes(review["basis"])),
        holds=review["holds"] if holds is None else holds,
    )


def _result(
    writer: RunWriter, rows: ReviewRows, state: str, *, at: datetime | None, approvals: int | None = None
) -> Decided:
    run = writer.run
    ordered = Ordered(run["state"], run["reason"], at, changed=True)
    have = rows.approvals if approvals is None else approvals
    return Decided(ordered, state, have, rows.review["approvals"])


async def read_wanted(database: Database, review_id: UUID) -> Wanted:
    """What the review that follows a broken glass would be about. Raises InputError ``review-unknown``."""
    (rows,) = await database.fetch(("SELECT * FROM reviews WHERE id = %s", (review_id,)))
    if not rows:
        raise InputError("review-unknown", f"there is no review {review_id}", hint="podium review list")
    return wanted_of(rows[0], reason="break-glass", holds=False)
