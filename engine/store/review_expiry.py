"""Reviews that nobody decided in time, by the database's clock: what the rule says follows, and nothing else.

Done by any worker, which looks every two seconds, and by its reconciler; so late a deadline may be acted on. What is
read is the index of open reviews with a deadline, which costs next to nothing where there are none, and no row is
locked before one is due. Must never approve: where a rule lets an expired review through, the record says that nobody
looked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import UUID, uuid4

from engine.store import queries
from engine.store.database import Database
from engine.store.exchange import Connection, Row
from engine.store.gates import REVIEW_EXPIRED, GateRule
from engine.store.review_decisions import LOCK_REVIEWS, wanted_of
from engine.store.review_moves import give_up, let_go_on
from engine.store.review_requests import Asking, ask, close_review, display_of
from engine.store.reviews import book_queries, review_book
from engine.store.run_writer import lock_run

# A subquery, since the time itself changes from row to row: only a value that stands can be looked up in an index.
READ_DUE: Final = """
    SELECT * FROM reviews WHERE state = 'open' AND expires_at <= (SELECT clock_timestamp())
    ORDER BY expires_at LIMIT 100
"""


async def expire_reviews(database: Database) -> Sequence[UUID]:
    """Ends every review whose time is over; returns the runs that were changed, whose workflows are to be woken."""
    (due,) = await database.fetch((READ_DUE, ()))
    return [row["run_id"] for row in due if await _expire(database, row)]


async def _expire(database: Database, due: Row) -> bool:
    run_id, review_id = due["run_id"], due["id"]
    # For the case that others are asked now; what is displayed is read before the run is locked.
    escalates = due["on_expiry"] == "escalate"
    display = await display_of(database, run_id, wanted_of(due), uuid4()) if escalates else None

    async def work(connection: Connection) -> bool:
        writer, (reviews, steps, *book) = await lock_run(
            connection,
            run_id,
            (LOCK_REVIEWS, (run_id,)),
            (queries.READ_ALL_STEPS, (run_id,)),
            *book_queries(run_id),
        )
        review = next(row for row in reviews if row["id"] == review_id)
        if review["state"] != "open" or review["expires_at"] > writer.now:
            return False
        others = [row for row in reviews if row["state"] == "open" and row["id"] != review_id]
        close_review(writer, str(review_id), "expired")
        if escalates and display is not None:
            ask(writer, review_book(book), Asking(wanted_of(review), display, review["level"] + 1))
        elif review["on_expiry"] == "approve":
            let_go_on(writer, review, steps, others)
        else:
            operator = GateRule(bytes(review["rule"])).said["on_reject"] == "wait"
            give_up(writer, review, steps, REVIEW_EXPIRED, operator=operator)
        writer.statement(queries.SET_WAKE, (writer.now, run_id))
        await writer.commit()
        # Now the deadline counts, whatever becomes of the wake-up.
        return True

    return await database.write(work)
