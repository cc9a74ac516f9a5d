"""What people do in a review without deciding it: look, comment, ask for one of what is done.

Each is one transaction with one ledger entry. Must never let anything go on or hold anything up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import UUID

from engine.errors import InputError, RefusedError
from engine.store import queries
from engine.store.artifacts import ArtifactDraft
from engine.store.database import Database
from engine.store.exchange import Connection, Row
from engine.store.gates import GateRule
from engine.store.orders import Order, lock_for_order
from engine.store.review_display import Display
from engine.store.review_requests import Asking, ask
from engine.store.reviews import Wanted, book_queries, review_book

_READ_REVIEW: Final = "SELECT * FROM reviews WHERE run_id = %s AND id = %s"
_READ_OPENINGS: Final = "SELECT person FROM review_openings WHERE review_id = %s"
_OPEN: Final = """
    INSERT INTO review_openings (review_id, person, actor_id, opened_at) VALUES (%s, %s, %s, %s) ON CONFLICT DO NOTHING
"""


async def note_opening(database: Database, order: Order, display: Display) -> bool:
    """Notes that somebody had a review displayed, the first time only; returns whether it was the first time."""

    async def work(connection: Connection) -> bool:
        writer, _, (found, opened, *book) = await lock_for_order(
            connection,
            order,
            (_READ_REVIEW, (order.run_id, display.review_id)),
            (_READ_OPENINGS, (display.review_id,)),
            *book_queries(order.run_id),
        )
        person = review_book(book).persons.get(order.actor_id, order.actor_id)
        if not found or any(row["person"] == person for row in opened):
            return False
        writer.statement(_OPEN, (display.review_id, person, order.actor_id, writer.now))
        writer.entry("review.opened", review=str(display.review_id), person=person, shown=display.shown.hex())
        await writer.commit()
        return True

    return await database.write(work)


async def comment(database: Database, order: Order, review_id: UUID) -> None:
    """Puts what somebody says (the order's reason) beside a review. Raises InputError ``review-unknown``."""

    async def work(connection: Connection) -> None:
        writer, known, (found, *book) = await lock_for_order(
            connection, order, (_READ_REVIEW, (order.run_id, review_id)), *book_queries(order.run_id)
        )
        if known:
            return
        if not found:
            raise InputError("review-unknown", f"there is no review {review_id}", hint="podium review list")
        person = review_book(book).persons.get(order.actor_id, order.actor_id)
        draft = ArtifactDraft(order.id, "comment", (order.reason or "").encode())
        artifacts = writer.artifacts([draft])
        writer.entry("review.commented", review=str(review_id), person=person, order=str(order.id), artifacts=artifacts)
        await writer.commit()

    await database.write(work)


async def request_after_the_fact(database: Database, order: Order, wanted: Wanted, display: Display) -> None:
    """Asks for a review of what is done, which holds nothing up. Raises RefusedError ``review-open`` if one is."""

    async def work(connection: Connection) -> None:
        writer, _, (reviews, *answers) = await lock_for_order(
            connection,
            order,
            ("SELECT id, gate, round, position, state FROM reviews WHERE run_id = %s", (order.run_id,)),
            *book_queries(order.run_id),
        )
        if any(row["id"] == display.review_id for row in reviews):
            # This very request, repeated because its COMMIT got no answer.
            return
        place = (wanted.gate, wanted.round, wanted.position)
        same = [row for row in reviews if (row["gate"], row["round"], row["position"]) == place]
        if waiting := [row for row in same if row["state"] == "open"]:
            raise RefusedError(
                "review-open",
                f"review {waiting[0]['id']} of the same is open",
                hint=f"podium review show {waiting[0]['id']}",
            )
        ask(writer, review_book(answers), Asking(wanted, display))
        await writer.commit()

    await database.write(work)


async def wanted_after_the_fact(
    database: Database, run_id: UUID, round_number: int | None, position: int | None, rule: GateRule
) -> Wanted:
    """What a review of a step's accepted output, or (None) of the run's answer, would be about.

    Raises InputError ``step-unknown``, RefusedError ``output-missing``.
    """
    *answers, runs, steps = await database.fetch(
        *book_queries(run_id), (queries.READ_RUN, (run_id,)), (queries.READ_ALL_STEPS, (run_id,))
    )
    step = _step(run_id, steps, round_number, position)
    attempt = step["accepted_attempt_id"]
    if attempt is None:
        raise RefusedError(
            "output-missing",
            f"step {step['position']} of run {run_id} has no accepted output: it is {step['state']}",
            hint=f"podium show {run_id}",
        )
    book = review_book(answers)
    return Wanted(
        gate="answer" if position is None else "after",
        round=step["round"],
        position=step["position"],
        rule=rule,
        reason="order",
        subject=book.output_entry(step, attempt),
        plan=book.plans[step["round"]][1],
        execution=runs[0]["execution"],
        attempt_id=attempt,
        holds=False,
    )


def _step(run_id: UUID, steps: Sequence[Row], round_number: int | None, position: int | None) -> Row:
    if not steps:
        raise RefusedError("output-missing", f"run {run_id} has no plan yet", hint=f"podium show {run_id}")
    wanted = steps[-1]["round"] if round_number is None else round_number
    found = [row for row in steps if row["round"] == wanted]
    own = found[-1:] if position is None else [row for row in found if row["position"] == position]
    if not own:
        raise InputError("step-unknown", f"run {run_id} has no such step or round", hint=f"podium show {run_id}")
    return own[0]
