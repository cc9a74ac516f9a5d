"""Settling: the end of a run that its last step's Close did not write, and the notes that a run waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from engine.store import queries
from engine.store.attempts import ReviewSight
from engine.store.children import LOCK_UNBEGUN, end_unbegun
from engine.store.database import Database
from engine.store.exchange import Connection, Row
from engine.store.gates import REVIEW, REVIEW_MISSING
from engine.store.review_requests import close_review, note_draws
from engine.store.reviews import GateCheck, book_queries, review_book
from engine.store.run_writer import AttemptResult, lock_run
from engine.store.states import RUN_ENDED, STEP_HAS_OUTPUT, STEP_LIVE, RunState, StepState
from engine.store.waiting import OPERATOR

ANSWER_MISSING = "answer-missing"
_READ_HOLDING = "SELECT id FROM reviews WHERE run_id = %s AND holds AND state = 'open' ORDER BY seq FOR NO KEY UPDATE"


@dataclass(frozen=True, slots=True)
class Settlement:
    """How a run is to end: its state, our code for the reason, and what becomes of attempts still open."""

    run_id: UUID
    execution: int
    state: RunState
    code: str | None
    # Where the pool has rules for reviews: a run succeeds only with an answer that they let through.
    review: ReviewSight | None = None


@dataclass(frozen=True, slots=True)
class Settled:
    """The state that the run is in now; another one than asked for if it had ended before."""

    state: RunState
    code: str | None


async def settle_run(database: Database, settlement: Settlement) -> Settled:
    """Ends a run: closes open attempts as unknown, live steps as cancelled, then the run. Idempotent.

    A settlement by an execution that is no longer the run's changes nothing. A run succeeds only with its answer on
    record, reviewed where the pool asks for that: whoever says so without gets ``failed`` with ``answer-missing`` or
    ``review-missing``.
    """

    async def work(connection: Connection) -> Settled | None:
        # Children are locked before the budgets, as their own transactions do.
        writer, (attempts, steps, unbegun, reviews, *book) = await lock_run(
            connection,
            settlement.run_id,
            (queries.READ_OPEN_ATTEMPTS, (settlement.run_id,)),
            (queries.READ_ALL_STEPS, (settlement.run_id,)),
            (LOCK_UNBEGUN, (settlement.run_id,)),
            (_READ_HOLDING, (settlement.run_id,)),
            *(() if settlement.review is None else book_queries(settlement.run_id)),
        )
        run = writer.run
        if run["state"] in RUN_ENDED or run["execution"] != settlement.execution:
            return Settled(run["state"], run["reason"])
        writer.mark_seen(settlement.execution)
        state, code = settlement.state, settlement.code
        if state == "succeeded" and not _is_answered(steps):
            state, code = "failed", ANSWER_MISSING
        if state == "succeeded" and settlement.review is not None:
            sight = settlement.review
            check = GateCheck(run, sight.gates, review_book(book), sight.displays)
            verdict = check.answer(steps[-1])
            # An answer that a later round keeps is drawn for here and nowhere else.
            note_draws(writer, check.book, check.draws, sight.gates.salt)
            if verdict.kind != "passed":
                # Whoever asks for the end of a run is not believed that people have looked at its answer.
                state, code = "failed", (verdict.code if verdict.kind == "failed" else None) or REVIEW_MISSING
        if state == "succeeded" and run["state"] == "created":
            # Resumed when every step was done, so nothing was called. It begins first: a row moves once a transaction.
            writer.set_run_state("running")
            await writer.commit()
            return None
        for attempt in attempts:
            # Nobody will report on it any more; if somebody does, it is recorded as superseded.
            writer.close_attempt(attempt, AttemptResult("unknown", "outcome-lost"), [])
        for step in steps:
            if step["state"] in STEP_LIVE:
                writer.set_step_state(step, "cancelled", code or f"run-{state}")
        for review in reviews:
            # Nobody needs to decide any more; an output that waited is kept, and a resume asks again.
            close_review(writer, str(review["id"]), "withdrawn")
        writer.set_run_state(state, code)
        await writer.commit(*await end_unbegun(connection, writer, unbegun))
        # Now the run has ended, whatever becomes of its workflow, and so have children that it had not started yet.
        return Settled(state, code)

    while (settled := await database.write(work)) is None:
        pass
    return settled


async def note_waiting(
    database: Database,
    run_id: UUID,
    round_number: int,
    position: int | None,
    code: str,
    *,
    execution: int | None = None,
) -> None:
    """Shows that a step (or, with None, the planning) waits, and for what; a run that has ended stays as it is.

    A note by another execution than the run's changes nothing, nor does one about a step that waits for an operator or
    for a review: only the answer may end that.
    """

    async def work(connection: Connection) -> None:
        reads = [(queries.READ_PLAN, (run_id, round_number)), (queries.READ_STEPS, (run_id, round_number))]
        writer, (plans, steps) = await lock_run(connection, run_id, *reads)
        run = writer.run
        if run["state"] in RUN_ENDED or execution not in {None, run["execution"]}:
            return
        if position is None:
            # A later round has no row yet before its first planning call.
            if plans[0]["accepted_at"] is not None if plans else round_number != run["round"] + 1:
                return
        else:
            own = next((step for step in steps if step["position"] == position), None)
            if own is None or own["state"] not in STEP_LIVE or own["reason"] in {OPERATOR, REVIEW}:
                # A late note: the step has ended meanwhile and waits for nothing, or for somebody else.
                return
            waiting: StepState = "waiting"
            writer.set_step_state(own, waiting, code)
        others_run = any(step["state"] == "running" and step["position"] != position for step in steps)
        if not others_run:
            writer.set_run_state("waiting", code)
        await writer.commit()

    await database.write(work)


def _is_answered(steps: Sequence[Row]) -> bool:
    """Whether the last step of the last round that has steps has its output; the rows are in that order."""
    return bool(steps) and steps[-1]["state"] in STEP_HAS_OUTPUT
