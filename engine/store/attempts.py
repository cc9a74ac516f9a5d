"""Open: the transaction before a model call, after which it is durable that a call may happen.

It decides whether anything is called at all. May be repeated with the same attempt id and then finds its first result.
See `engine.store.closing` for Close.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any, Literal
from uuid import UUID

from engine.errors import BugError
from engine.store import queries
from engine.store.artifacts import ArtifactDraft
from engine.store.budgets import Need, reservation, shortfall
from engine.store.candidates import accept_candidate
from engine.store.database import Database
from engine.store.exchange import Connection, Row, exchange
from engine.store.gates import NO_GATES, REVIEW, REVIEW_UNSHOWABLE, Gates
from engine.store.ids import plan_id
from engine.store.review_requests import note_draws
from engine.store.reviews import BOOK_QUERIES, GateCheck, Wanted, book_queries, review_book
from engine.store.run_writer import AttemptResult, RunWriter, cost_of, lock_run, said_usd, usd
from engine.store.states import RUN_ENDED, STEP_HAS_OUTPUT, STEP_LIVE
from engine.store.waiting import BUDGET, OPERATOR, show_held

# Tries that ended through no fault of the model or the step do not count against attempts_max.
PLAN_INVALID = "plan-invalid"
# What ends a child whose parent, or a run above that, is about to fail.
PARENT_FAILED = "parent-failed"
# What every step that has not begun, or tries again, is told while its run is about to fail.
RUN_FAILING = "run-failing"
SECRET_MISSING = "secret-missing"  # noqa: S105  # a code, not a secret
UNCOUNTED_CODES = frozenset({"worker-shutdown", PLAN_INVALID})
_DONE = frozenset({*STEP_HAS_OUTPUT, "skipped"})

Verdict = Literal["call", "done", "held", "cancelled", "failed", "superseded", "retry", "moved"]


@dataclass(frozen=True, slots=True, order=True)
class Fence:
    """Which try holds the right to a step: compared in this order. ``attempt`` is Temporal's number, from 1."""

    execution: int
    dispatch: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Place:
    """A step of a run, or (``position`` None) the planning of a round."""

    run_id: UUID
    round: int
    position: int | None


@dataclass(frozen=True, slots=True)
class Substitute:
    """The worker that takes a failed step over: its name, the model's name and the pool's queue."""

    worker: str
    model: str
    queue: str


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """What becomes of a step that failed for good: a substitute takes over, or it waits, or it fails."""

    substitute: Substitute | None = None
    wait: bool = False


FAIL = FailurePolicy()


@dataclass(frozen=True, slots=True)
class ReviewSight:
    """What Open must know to ask for reviews, where the pool has rules for any.

    ``displays`` are commitments to what the run's reviews would show today, by review; None where a text is missing.
    ``sent_back`` is how often reviewers had sent the step back when its prompt was rendered; ``ends_run`` is the
    workflow's wish, for an output that is accepted now.
    """

    gates: Gates = NO_GATES
    displays: Mapping[UUID, bytes | None] = field(default_factory=dict)
    sent_back: int = 0
    ends_run: bool = False
    # A review that is missing cannot be asked for, because a text that it would show is damaged or gone.
    unshowable: bool = False


@dataclass(frozen=True, slots=True)
class Opening:
    """What Open needs. ``manifest`` renders the prompt again; ``prompt_commitment`` is its salted HMAC (32 bytes).

    ``invalid_plans_max`` is for planning only: how many invalid plans of one execution end it.
    """

    place: Place
    fence: Fence
    attempt_id: UUID
    worker: str
    model: str
    manifest: ArtifactDraft
    prompt_commitment: bytes
    attempts_max: int
    process_id: UUID | None = None
    reserve_usd: Decimal | None = None
    reserve_tokens: int | None = None
    invalid_plans_max: int | None = None
    on_failure: FailurePolicy = FAIL
    # The worker's key is not in this process: nothing can be called, and the step waits for it.
    secret_missing: bool = False
    # Every artifact that the prompt is made of: what the model is shown, and nothing else.
    shown: Sequence[UUID] = ()
    review: ReviewSight | None = None


@dataclass(frozen=True, slots=True)
class Ruling:
    """What a transaction decided. With ``done``, the accepted attempt and its numbers; with ``failed``, the code."""

    verdict: Verdict
    code: str | None = None
    attempt_id: UUID | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    cost_usd: Decimal | None = None
    run_ended: bool = False
    # Reviews that have to be asked for before anything can go on, and whether approvals still have to be checked.
    missing: tuple[Wanted, ...] = ()
    unchecked: bool = False
    # With ``done`` by a Close: what is left of the round, and whether another step's report will tell it as well.
    left: tuple[int, ...] | None = None
    told_again: bool = False


async def open_attempt(database: Database, opening: Opening) -> Ruling:
    """Decides whether the model is called, and makes it durable first. Only the verdict ``call`` calls."""

    async def work(connection: Connection) -> Ruling:
        place = opening.place
        writer, (owners, attempts, ancestors, *reviewed) = await lock_run(
            connection,
            place.run_id,
            read_owner(place),
            (queries.READ_ATTEMPTS, (place.run_id, place.round, place.position)),
            (queries.READ_ANCESTORS, (place.run_id,)),
            *(() if opening.review is None else review_queries(place)),
        )
        owner = owners[0] if owners else await _new_round(connection, writer, place)
        ruling = _refusal(writer, owner, attempts, ancestors, opening)
        if opening.review is not None and (ruling is None or ruling.verdict == "done"):
            ruling = review_ruling(writer, owner, reviewed, opening.review, own=attempts) or ruling
        elif ruling is None and (waited := accept_candidate(writer, owner, attempts, reused=True)) is not None:
            ruling = Ruling("done", attempt_id=waited)
        if ruling is None:
            if not owners:
                _begin_round(writer, place)
            ruling = _open(writer, owner, attempts, opening)
        if ruling.verdict == "held":
            # That it was asked is a sign of life: it does not wait for a worker.
            writer.mark_seen(opening.fence.execution)
            await show_held(connection, writer, (place.round, place.position), ruling.code)
        await writer.commit()
        # With the verdict "call" it is durable from here on that a call may happen.
        return ruling

    return await database.write(work)


async def _new_round(connection: Connection, writer: RunWriter, place: Place) -> dict[str, Any]:
    """The plan row of a later round as it will be; its first planning call brings it with it.

    What Temporal asks for is not believed: the round before must have been answered, and the run may have this round.
    """
    if place.position is not None or place.round != writer.run["round"] + 1:
        raise BugError("step-unknown", "there is no such step or round in this run")
    (steps,) = await exchange(connection, [(queries.READ_STEPS, (place.run_id, place.round - 1))])
    is_answered = bool(steps) and steps[-1]["state"] in STEP_HAS_OUTPUT
    if place.round >= writer.run["rounds_max"] or not is_answered or any(step["state"] in STEP_LIVE for step in steps):
        raise BugError("round-unexpected", "a round was planned that this run does not have")
    fence = {"fence_execution": 0, "fence_dispatch": 0, "fence_attempt": 0}
    return {"run_id": place.run_id, "round": place.round, "accepted_at": None, **fence}


def _begin_round(writer: RunWriter, place: Place) -> None:
    writer.statement(queries.INSERT_PLAN_ROW, (plan_id(place.run_id, place.round), place.run_id, place.round))
    writer.statement(queries.SET_ROUND, (place.round, place.run_id))


def _refusal(  # noqa: PLR0911  # one return for each reason
    writer: RunWriter,
    owner: dict[str, Any],
    attempts: Sequence[dict[str, Any]],
    ancestors: Sequence[dict[str, Any]],
    opening: Opening,
) -> Ruling | None:
    """Why nothing may be called, or None. What is already paid is found first."""
    if opening.fence.execution != writer.run["execution"]:
        return Ruling("superseded", "execution-superseded")
    accepted = next((attempt for attempt in attempts if attempt["accepted"]), None)
    if accepted is not None or owner.get("state") in STEP_HAS_OUTPUT or owner.get("accepted_at") is not None:
        return done_before(owner, accepted)
    if owner.get("state") == "skipped":
        # Nothing to call and nothing to wait for; no other step is shown an output of it.
        return Ruling("done", "skipped")
    if owner.get("worker", opening.worker) != opening.worker:
        # Somebody else has taken the step over since its inputs were read.
        return Ruling("moved")
    if opening.review is not None and owner["sent_back"] != opening.review.sent_back:
        # A reviewer has sent it back since its inputs were read, and the prompt lacks what was said.
        return Ruling("moved")
    mine = next((attempt for attempt in attempts if attempt["id"] == opening.attempt_id), None)
    if mine is not None:
        if bytes(mine["prompt_commitment"]) != opening.prompt_commitment:
            # Not this Open, repeated: Temporal handed the same try out twice (a reset, a restored backup). The other
            # one may be calling. The next try has a number of its own.
            return Ruling("retry", "attempt-taken")
        # Open was repeated after its COMMIT was lost: the call may go on only if nobody took over since.
        return Ruling("call") if mine["state"] == "sent" else Ruling("superseded", "attempt-superseded")
    if opening.fence <= fence_held(owner):
        return Ruling("superseded", "fence-lost")
    _close_dead(writer, attempts)
    return standing_order(writer, owner, ancestors)


def _close_dead(writer: RunWriter, attempts: Sequence[dict[str, Any]]) -> None:
    """Closes what a dead worker left open, whatever follows: the call may have happened and may have been billed."""
    for attempt in attempts:
        if attempt["state"] == "sent":
            writer.close_attempt(attempt, AttemptResult("unknown", "outcome-lost"), [])
            attempt.update(state="unknown", error_code="outcome-lost", cost_usd=cost_of(attempt, None))


def standing_order(  # noqa: PLR0911  # one return for each reason
    writer: RunWriter, owner: dict[str, Any], ancestors: Sequence[dict[str, Any]]
) -> Ruling | None:
    """Why an order, a deadline or a wait lets nothing begin, or None. ``owner`` is the step or the round's plan."""
    chain = (writer.run, *ancestors)
    if any(run["state"] in RUN_ENDED for run in chain):
        return Ruling("cancelled", "run-ended")
    if any(run["cancel_requested_at"] is not None for run in chain):
        return Ruling("cancelled", "cancelled")
    if any(run["failing"] for run in ancestors):
        return Ruling("cancelled", PARENT_FAILED)
    if owner.get("state") == "failed":
        return Ruling("failed", owner["reason"])
    if writer.failing:
        # Another step has failed for good: nothing new is called, also not another try.
        return Ruling("failed", RUN_FAILING)
    if any(_passed(run["deadline_at"], writer.now) for run in chain):
        if owner.get("state") in STEP_LIVE:
            writer.set_step_state(owner, "failed", "deadline-exceeded")
        return Ruling("failed", "deadline-exceeded")
    if any(run["paused_at"] is not None for run in chain):
        return Ruling("held", "paused")
    if owner.get("state") == "waiting" and owner["reason"] == OPERATOR:
        return Ruling("held", OPERATOR)
    return None


def review_queries(place: Place) -> tuple[tuple[str, Any], ...]:
    """What ``review_ruling`` reads behind the run's lock."""
    return *book_queries(place.run_id), (queries.READ_STEPS, (place.run_id, place.round))


def review_ruling(
    writer: RunWriter,
    step: dict[str, Any],
    answers: Sequence[Sequence[Row]],
    sight: ReviewSight,
    *,
    own: Sequence[Mapping[str, Any]] = (),
    reused: bool = True,
) -> Ruling | None:
    """Why reviews let a step not go on, or None. An output that has passed them all is accepted here.

    ``own`` are the step's attempts; an output of none of them is taken over from another run, or (not ``reused``)
    from the run that the step was delegated to.
    """
    if step["state"] == "skipped":
        return None
    steps = answers[BOOK_QUERIES]
    check = GateCheck(writer.run, sight.gates, review_book(answers[:BOOK_QUERIES]), sight.displays)
    verdict = check.step(step, steps)
    note_draws(writer, check.book, check.draws, sight.gates.salt)
    hopeless = bool(verdict.missing) and sight.unshowable
    if verdict.kind == "failed" or hopeless:
        code = REVIEW_UNSHOWABLE if hopeless else verdict.code
        if step["state"] in STEP_LIVE:
            writer.set_step_state(step, "failed", code)
        return Ruling("failed", code)
    if verdict.kind == "held":
        code = verdict.code or REVIEW
        if step["state"] in STEP_LIVE and not verdict.unchecked:
            writer.set_step_state(step, "waiting", code)
        return Ruling("held", code, missing=verdict.missing, unchecked=verdict.unchecked)
    # A run that was resumed begins first, in a transaction of its own, and ends by being settled.
    began = writer.run["state"] != "created"
    candidate = accept_candidate(writer, step, own, reused=reused)
    if candidate is None:
        return None
    others = [row for row in steps if row["position"] != step["position"] and row["state"] not in _DONE]
    is_last = step["position"] == steps[-1]["position"]
    ends = sight.ends_run and (is_last or not sight.gates.has("answer")) and may_end(writer, step["round"], others)
    ends = ends and began
    if ends:
        writer.set_run_state("succeeded")
    elif writer.run["state"] == "waiting":
        writer.set_run_state("running")
    return Ruling("done", attempt_id=candidate, run_ended=ends)


def may_end(writer: RunWriter, round_number: int, others: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the output of a step may end the run: no other step is left, and no other round may follow."""
    return not others and writer.run["state"] not in RUN_ENDED and round_number + 1 >= writer.run["rounds_max"]


def _open(writer: RunWriter, owner: dict[str, Any], attempts: Sequence[dict[str, Any]], opening: Opening) -> Ruling:
    place, fence = opening.place, opening.fence
    if opening.secret_missing:
        if place.position is not None:
            writer.set_step_state(owner, "waiting", SECRET_MISSING)
        return Ruling("held", SECRET_MISSING)
    if opening.invalid_plans_max is not None and invalid_plans(attempts, fence.execution) >= opening.invalid_plans_max:
        # The worker died after it had written down the last of them and before it could report it.
        return Ruling("failed", PLAN_INVALID)
    if counted_attempts(attempts, fence.execution, owner) >= opening.attempts_max:
        return fail_step(writer, owner, place, opening.on_failure, "attempts-exhausted", number=len(attempts))
    need = Need(usd(opening.reserve_usd), opening.reserve_tokens)
    if writer.budgets:
        short = shortfall(writer.budgets, need)
        if short is not None:
            return _hold_for_budget(writer, owner, place, short)
        writer.statement(*reservation(writer.budgets, need))
    number = len(attempts) + 1
    writer.statement(
        queries.INSERT_ATTEMPT,
        {
            "id": opening.attempt_id,
            "tenant_id": writer.tenant_id,
            "run_id": place.run_id,
            "round": place.round,
            "position": place.position,
            "number": number,
            "execution": fence.execution,
            "dispatch": fence.dispatch,
            "temporal_attempt": fence.attempt,
            "worker": opening.worker,
            "model": opening.model,
            "process_id": opening.process_id,
            "prompt_commitment": opening.prompt_commitment,
            "reserved_usd": usd(opening.reserve_usd),
            "reserved_tokens": opening.reserve_tokens,
            "now": writer.now,
        },
    )
    writer.add_to_totals(attempts_count=1)
    writer.mark_seen(fence.execution)
    writer.set_run_state("planning" if place.position is None else "running")
    moved = _take_over(writer, owner, place, fence)
    writer.entry(
        "attempt.sent",
        attempt=str(opening.attempt_id),
        round=place.round,
        step=place.position,
        number=number,
        worker=opening.worker,
        model=opening.model,
        fence=[fence.execution, fence.dispatch, fence.attempt],
        prompt=opening.prompt_commitment.hex(),
        shown=[str(artifact) for artifact in opening.shown],
        reserved=None if not writer.budgets else {"usd": said_usd(need.usd), "tokens": need.tokens},
        artifacts=writer.artifacts([opening.manifest]),
        moved=moved,
    )
    return Ruling("call")


def _hold_for_budget(writer: RunWriter, owner: dict[str, Any], place: Place, unit: str) -> Ruling:
    """Shows that the next call could break a budget; whoever raises it, or a call that ends cheaper, lets it go on."""
    code = f"{BUDGET}-{unit}"
    if place.position is not None:
        writer.set_step_state(owner, "waiting", code)
    return Ruling("held", code)


def fail_step(
    writer: RunWriter, step: dict[str, Any], place: Place, policy: FailurePolicy, code: str, *, number: int
) -> Ruling:
    """Ends a step that failed for good by its pool's policy, outside of an attempt's own entry."""
    if place.position is None:
        return Ruling("failed", code)
    if policy.substitute is not None:
        substitute(writer, step, policy.substitute, number=number)
        return Ruling("moved", code)
    if policy.wait:
        writer.set_step_state(step, "waiting", OPERATOR)
        return Ruling("held", OPERATOR)
    writer.set_step_state(step, "failed", code)
    return Ruling("failed", code)


def substitute(writer: RunWriter, step: Mapping[str, Any], by: Substitute, *, number: int) -> None:
    """Gives a step to another worker. ``number`` is the last attempt that does not count against it."""
    values = {"worker": by.worker, "model": by.model, "queue": by.queue, "attempts_base": number}
    where = {"run_id": writer.run_id, "round": step["round"], "position": step["position"]}
    writer.statement(queries.SUBSTITUTE_STEP, {**values, **where})
    writer.entry(
        "step.substituted",
        round=step["round"],
        step=step["position"],
        worker=by.worker,
        model=by.model,
        old_worker=step["worker"],
        attempts_base=number,
        moved={"state": "pending", "reason": None, "old": step["state"]},
    )


def _take_over(writer: RunWriter, owner: dict[str, Any], place: Place, fence: Fence) -> dict[str, Any] | None:
    """Writes the newest try of a step or of a round's planning; returns how the step moved, for the entry."""
    numbers = (fence.execution, fence.dispatch, fence.attempt)
    if place.position is None:
        writer.statement(queries.SET_PLAN_FENCE, (*numbers, place.run_id, place.round))
        return None
    writer.statement(queries.TAKE_STEP, (*numbers, writer.now, place.run_id, place.round, place.position))
    if owner["state"] == "running" and owner["reason"] is None:
        return None
    return {"state": "running", "reason": None, "old": owner["state"]}


def counted_attempts(attempts: Sequence[dict[str, Any]], execution: int, owner: Mapping[str, Any]) -> int:
    """How many tries of an execution count against ``attempts_max``. ``owner`` is the step or the round's plan."""
    base = owner.get("attempts_base", 0)
    return sum(
        attempt["execution"] == execution and attempt["number"] > base and attempt["error_code"] not in UNCOUNTED_CODES
        for attempt in attempts
    )


def invalid_plans(attempts: Sequence[dict[str, Any]], execution: int) -> int:
    """How many texts of an execution were no valid plan."""
    return sum(attempt["execution"] == execution and attempt["error_code"] == PLAN_INVALID for attempt in attempts)


def read_owner(place: Place) -> tuple[Any, tuple[Any, ...]]:
    """The query for what an attempt belongs to: the step, or the plan of a round."""
    if place.position is None:
        return queries.READ_PLAN, (place.run_id, place.round)
    return queries.READ_STEP, (place.run_id, place.round, place.position)


def only_row(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The one row; raises BugError where there is none."""
    if len(rows) != 1:
        raise BugError("step-unknown", "there is no such step or round in this run")
    return rows[0]


def fence_held(owner: dict[str, Any]) -> Fence:
    """The newest try that was opened for a step or a round's plan."""
    return Fence(owner["fence_execution"], owner["fence_dispatch"], owner["fence_attempt"])


def fence_of(attempt: dict[str, Any]) -> Fence:
    """The try that an attempt was."""
    return Fence(attempt["execution"], attempt["dispatch"], attempt["temporal_attempt"])


def done_before(owner: dict[str, Any], accepted: dict[str, Any] | None) -> Ruling:
    """The verdict for what is paid already, with its numbers if the attempt is this run's own."""
    if accepted is None:
        return Ruling("done", attempt_id=owner["accepted_attempt_id"])
    return Ruling(
        "done",
        attempt_id=accepted["id"],
        input_tokens=accepted["input_tokens"],
        output_tokens=accepted["output_tokens"],
        cost_usd=usd(accepted["cost_usd"]),
    )


def _passed(deadline: datetime | None, now: datetime) -> bool:
    return deadline is not None and deadline <= now
