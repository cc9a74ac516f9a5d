"""Close: the transaction after a model call, which makes durable what came of it.

May be repeated with the same attempt id and then finds its first result. An attempt that lost its fence is recorded
and never accepted. See `engine.store.attempts` for Open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from engine.errors import BugError
from engine.store import queries
from engine.store.artifacts import ArtifactDraft
from engine.store.attempts import (
    FAIL,
    FailurePolicy,
    Place,
    ReviewSight,
    Ruling,
    counted_attempts,
    done_before,
    fence_held,
    fence_of,
    may_end,
    only_row,
    read_owner,
    review_queries,
    substitute,
)
from engine.store.database import Database
from engine.store.exchange import Connection, Row
from engine.store.gates import REVIEW
from engine.store.review_requests import note_draws
from engine.store.reviews import BOOK_QUERIES, GateCheck, review_book
from engine.store.run_writer import AttemptResult, RunWriter, cost_of, lock_run, storable, usd
from engine.store.states import STEP_LIVE
from engine.store.waiting import OPERATOR, show_waiting


@dataclass(frozen=True, slots=True)
class Closing:
    """What Close needs. ``retry`` says whether a failure is worth another try; ``ends_run`` is the workflow's wish."""

    place: Place
    attempt_id: UUID
    result: AttemptResult
    drafts: Sequence[ArtifactDraft] = ()
    retry: bool = False
    attempts_max: int = 1
    ends_run: bool = False
    on_failure: FailurePolicy = FAIL
    # Where the pool has rules for reviews.
    review: ReviewSight | None = None


async def close_step_attempt(database: Database, closing: Closing) -> Ruling:
    """Records how a step's attempt ended and accepts its output if it still holds the fence.

    Verdicts: ``done`` (accepted now or before), ``retry``, ``failed``, ``cancelled``, ``superseded``.
    """

    async def work(connection: Connection) -> Ruling:
        place = closing.place
        writer, (owners, attempts, unfinished, *reviewed) = await lock_run(
            connection,
            place.run_id,
            read_owner(place),
            (queries.READ_ATTEMPTS, (place.run_id, place.round, place.position)),
            (queries.READ_UNFINISHED, (place.run_id, place.round)),
            *(() if closing.review is None else review_queries(place)),
        )
        step = only_row(owners)
        attempt = find_attempt(attempts, closing.attempt_id)
        others = [row for row in unfinished if row["position"] != place.position]
        if already_closed(attempt, closing):
            return _recorded(writer, step, attempt, others)
        if not holds_fence(step, attempt) or step["state"] not in STEP_LIVE:
            supersede(writer, attempt, closing)
            await writer.commit()
            return Ruling("superseded", "fence-lost")
        is_reviewed = waits_for_review(writer, step, reviewed, closing.review)
        ruling = _close_step(writer, _Closed(step, attempt, attempts, others, is_reviewed), closing)
        await writer.commit()
        # Now it is durable what came of the call; whoever repeats this finds it.
        return ruling

    return await database.write(work)


@dataclass(frozen=True, slots=True)
class _Closed:
    """The rows that a Close is about: the step, the attempt, all attempts of the step, the other unfinished steps.

    ``is_reviewed`` says that an output has to wait for people before it is accepted.
    """

    step: dict[str, Any]
    attempt: dict[str, Any]
    attempts: Sequence[dict[str, Any]]
    others: Sequence[dict[str, Any]]
    is_reviewed: bool = False


def waits_for_review(writer: RunWriter, step: Row, answers: Sequence[Sequence[Row]], sight: ReviewSight | None) -> bool:
    """Whether the output that a step is about to have has to wait for people; notes what was drawn for a sample.

    ``answers`` are those to ``review_queries``.
    """
    if sight is None:
        return False
    check = GateCheck(writer.run, sight.gates, review_book(answers[:BOOK_QUERIES]), sight.displays)
    is_last = step["position"] == answers[BOOK_QUERIES][-1]["position"]
    wanted = check.wants_output_review(step, is_last=is_last)
    note_draws(writer, check.book, check.draws, sight.gates.salt)
    return wanted


def propose(writer: RunWriter, step: Row, others: Sequence[Row], attempt_id: UUID) -> None:
    """Adds that an output waits for people: nobody may use it, and it is not accepted, before they have decided."""
    place = {"run_id": writer.run_id, "round": step["round"], "position": step["position"]}
    writer.statement(queries.SET_CANDIDATE, {"candidate": attempt_id, **place})
    show_waiting(writer, [*others, {**step, "state": "waiting", "reason": REVIEW}])


def _close_step(  # noqa: PLR0911  # one return for each outcome
    writer: RunWriter, rows: _Closed, closing: Closing
) -> Ruling:
    step, attempt, attempts, others = rows.step, rows.attempt, rows.attempts, rows.others
    succeeded = closing.result.state == "succeeded"
    result = storable(replace(closing.result, accepted=succeeded and not rows.is_reviewed))
    ruling = Ruling(
        "failed",
        result.error_code,
        attempt_id=closing.attempt_id,
        input_tokens=result.input_tokens,
        output_tokens=result.output_tokens,
        cost_usd=cost_of(attempt, result.cost_usd),
    )
    committed = writer.artifacts(closing.drafts)
    if succeeded and rows.is_reviewed:
        writer.close_attempt(attempt, result, committed, step=step, step_state="waiting", step_reason=REVIEW)
        propose(writer, step, others, closing.attempt_id)
        return replace(ruling, verdict="held", code=REVIEW)
    if succeeded:
        writer.close_attempt(attempt, result, committed, step=step, step_state="succeeded")
        # The workflow only wishes; that no other step is left is for the record to say.
        ends = closing.ends_run and not has_answer_gate(closing.review) and may_end(writer, step["round"], others)
        if ends:
            writer.set_run_state("succeeded")
        else:
            show_waiting(writer, others)
        return _done(replace(ruling, run_ended=ends), others)
    if result.state == "cancelled":
        writer.close_attempt(attempt, result, committed)
        return replace(ruling, verdict="cancelled")
    closed = [
        {**other, "error_code": result.error_code} if other["id"] == closing.attempt_id else other for other in attempts
    ]
    if closing.retry and counted_attempts(closed, attempt["execution"], step) < closing.attempts_max:
        writer.close_attempt(attempt, result, committed)
        return replace(ruling, verdict="retry")
    policy = closing.on_failure
    if policy.substitute is not None:
        writer.close_attempt(attempt, result, committed)
        substitute(writer, step, policy.substitute, number=len(attempts))
        return replace(ruling, verdict="moved")
    if policy.wait:
        writer.close_attempt(attempt, result, committed, step=step, step_state="waiting", step_reason=OPERATOR)
        show_waiting(writer, [*others, {**step, "state": "waiting", "reason": OPERATOR}])
        return replace(ruling, verdict="held", code=OPERATOR)
    writer.close_attempt(attempt, result, committed, step=step, step_state="failed", step_reason=result.error_code)
    return ruling


def _done(ruling: Ruling, others: Sequence[Row]) -> Ruling:
    """That the output is accepted, and what is left of the round without it."""
    left = tuple(sorted(row["position"] for row in others))
    return replace(ruling, verdict="done", left=left, told_again=unblocks_nothing(others))


def unblocks_nothing(others: Sequence[Row]) -> bool:
    """Whether nothing can begin now that could not before, while a call is under way whose end will say so.

    ``others`` are the unfinished steps of the round but for the one that has just ended. One that waits may wait for
    what this call had reserved.
    """
    left = {row["position"] for row in others}
    blocked = all(
        row["state"] == "running" or (row["state"] == "pending" and not left.isdisjoint(row["reads"])) for row in others
    )
    return blocked and any(row["state"] == "running" for row in others)


def has_answer_gate(sight: ReviewSight | None) -> bool:
    """Whether the run's answer is reviewed; then only the step that gives it, or the run's settling, ends the run."""
    return sight is not None and sight.gates.has("answer")


def _recorded(  # noqa: PLR0911  # one return for each outcome
    writer: RunWriter, step: dict[str, Any], attempt: dict[str, Any], others: Sequence[Row]
) -> Ruling:
    """The first result of a Close that was repeated because its COMMIT got no answer."""
    if attempt["accepted"]:
        return _done(replace(done_before(step, attempt), run_ended=writer.run["state"] == "succeeded"), others)
    if attempt["state"] == "superseded" or fence_of(attempt) != fence_held(step):
        return Ruling("superseded", "fence-lost")
    if step["worker"] != attempt["worker"]:
        return Ruling("moved", attempt["error_code"])
    if step["state"] == "waiting" and step["reason"] == OPERATOR:
        return Ruling("held", OPERATOR)
    if attempt["state"] == "succeeded":
        # Not accepted: it waits for people, or they have decided meanwhile. Open finds out.
        return Ruling("held", REVIEW)
    ruling = Ruling(
        "retry",
        attempt["error_code"],
        attempt_id=attempt["id"],
        input_tokens=attempt["input_tokens"],
        output_tokens=attempt["output_tokens"],
        cost_usd=usd(attempt["cost_usd"]),
    )
    if attempt["state"] == "cancelled":
        return replace(ruling, verdict="cancelled")
    return replace(ruling, verdict="failed") if step["state"] == "failed" else ruling


def find_attempt(attempts: Sequence[dict[str, Any]], attempt_id: UUID) -> dict[str, Any]:
    """The attempt's row; raises BugError if Open never wrote it."""
    for attempt in attempts:
        if attempt["id"] == attempt_id:
            return attempt
    raise BugError("attempt-unknown", "an attempt was closed that had not been opened")


def already_closed(attempt: dict[str, Any], closing: Closing) -> bool:
    """Whether this Close has had its say before.

    An attempt that was given up as unknown has not reported yet, unless the report is that nothing is known.
    """
    if attempt["state"] == "unknown":
        return closing.result.state == "unknown"
    return bool(attempt["state"] != "sent")


def holds_fence(owner: dict[str, Any], attempt: dict[str, Any]) -> bool:
    """Whether no newer try of this step or plan has been opened, and this one was not given up."""
    return attempt["state"] == "sent" and fence_of(attempt) == fence_held(owner)


def supersede(writer: RunWriter, attempt: dict[str, Any], closing: Closing) -> None:
    """Records a late zombie: its output is kept, its cost is counted, nothing of it is accepted."""
    result = storable(closing.result)
    late = replace(result, state="superseded", error_code=result.error_code or "fence-lost", accepted=False)
    writer.close_attempt(attempt, late, writer.artifacts(closing.drafts))
