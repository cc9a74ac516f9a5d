"""Recursion on record: a step that is delegated to a run of its own, and how it takes over that run's answer.

Both transactions may be repeated. The lock order is the parent's row, then the child's; a child's own transactions lock
only its own row, so the two never wait for each other in a circle.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from uuid import UUID

from engine.contracts import child_run_id
from engine.errors import BugError, UnavailableError
from engine.ledger.entry import GENESIS, timestamp
from engine.store import queries
from engine.store.artifacts import JSON, TEXT, ArtifactDraft
from engine.store.attempts import (
    FAIL,
    PARENT_FAILED,
    FailurePolicy,
    Fence,
    Place,
    ReviewSight,
    Ruling,
    Verdict,
    fail_step,
    fence_held,
    may_end,
    only_row,
    read_owner,
    review_queries,
    review_ruling,
    standing_order,
)
from engine.store.candidates import accept_candidate
from engine.store.closing import has_answer_gate, propose, waits_for_review
from engine.store.database import Database
from engine.store.drafts import StepRoute
from engine.store.exchange import Connection, Row, exchange
from engine.store.gates import REVIEW
from engine.store.ids import plan_id
from engine.store.resuming import reopen, route_step, unfinished_steps
from engine.store.reviews import Wanted
from engine.store.run_writer import ENGINE_ACTOR, RunWriter, lock_run, new_run_writer
from engine.store.states import RUN_ENDED, STEP_HAS_OUTPUT, STEP_LIVE
from engine.store.waiting import OPERATOR, show_held, show_waiting

DEPTH_EXCEEDED = "depth-exceeded"
TASK_TOO_LARGE = "task-too-large"
CHILD_FAILED = "child-failed"
CHILD_CANCELLED = "child-cancelled"
DEADLINE = "deadline-exceeded"
PARENT_ENDED = "parent-ended"

_INSERT_CHILD = """
    INSERT INTO runs (id, tenant_id, actor_id, on_behalf_of, state, origin, pool_digest, deadline_at, depth, rounds_max,
                      parent_run_id, parent_round, parent_position, key_epoch)
    VALUES (%(id)s, %(tenant_id)s, %(actor_id)s, %(on_behalf_of)s, 'created', 'conductor', %(pool_digest)s,
            %(deadline_at)s, %(depth)s, %(rounds_max)s, %(parent_run_id)s, %(round)s, %(position)s, %(key_epoch)s)
"""
_LOCK_CHILD = "SELECT * FROM runs WHERE id = %s FOR NO KEY UPDATE"
# Children that have not shown a sign of life since they were created or opened again.
LOCK_UNBEGUN = """
    SELECT * FROM runs WHERE parent_run_id = %s AND state = 'created' AND execution_seen < execution
    ORDER BY id FOR NO KEY UPDATE
"""
# The answer of a run is the last step of its last round that has steps.
_READ_ANSWER = """
    SELECT accepted_attempt_id FROM steps
    WHERE run_id = %s ORDER BY round DESC, position DESC LIMIT 1
"""


@dataclass(frozen=True, slots=True)
class ChildOpening:
    """A step that is to be delegated. ``task`` is its rendered prompt; None if that is larger than a task may be.

    ``routes`` and ``planned_workers`` are for a child that is opened again, as for a run that is resumed.
    """

    place: Place
    execution: int
    worker: str
    task: str | None
    depth_max: int
    on_failure: FailurePolicy
    routes: Mapping[str, StepRoute] = field(default_factory=dict)
    planned_workers: bool = False
    dispatch: int = 0
    # From what the task is rendered: its manifest, and every artifact that it quotes.
    manifest: bytes | None = None
    shown: Sequence[UUID] = ()
    review: ReviewSight | None = None


@dataclass(frozen=True, slots=True)
class ChildRuling:
    """What may be done about a delegated step; with ``begun`` the child's present execution is to be started."""

    verdict: Literal["begun"] | Verdict
    code: str | None = None
    child_id: UUID | None = None
    missing: tuple[Wanted, ...] = ()
    unchecked: bool = False
    run_ended: bool = False


async def begin_child(database: Database, opening: ChildOpening) -> ChildRuling:
    """Creates the run that a step is delegated to, or opens it again if it had failed or been cancelled.

    What is paid is found first: a child that has succeeded is only asked for its answer.
    """
    place = opening.place
    position = _position(place)
    child_id = child_run_id(place.run_id, round=place.round, position=position)
    # On disk before the child can be; not while the parent is locked. Those of a child that is there stay as they are.
    keys = None if database.keys is None else await database.keys.create(child_id)

    async def work(connection: Connection) -> ChildRuling:
        # Locked before the budgets, as the child's own transactions do.
        writer, (owners, ancestors, children, attempts, *reviewed) = await lock_run(
            connection,
            place.run_id,
            read_owner(place),
            (queries.READ_ANCESTORS, (place.run_id,)),
            (_LOCK_CHILD, (child_id,)),
            (queries.READ_ATTEMPTS, (place.run_id, place.round, position)),
            *(() if opening.review is None else review_queries(place)),
        )
        step = only_row(owners)
        refused = _refusal(writer, step, ancestors, opening, number=len(attempts))
        ruled = None
        if opening.review is not None and (refused is None or refused.verdict == "done"):
            ruled = review_ruling(writer, step, reviewed, opening.review, own=attempts, reused=not children)
        elif opening.review is None and refused is None:
            waited = accept_candidate(writer, step, attempts, reused=not children)
            ruled = None if waited is None else Ruling("done", attempt_id=waited)
        refused = refused if ruled is None else _as_child_ruling(ruled)
        if refused is not None:
            if refused.verdict == "held":
                writer.mark_seen(opening.execution)
                await show_held(connection, writer, (place.round, place.position), refused.code)
            await writer.commit()
            return refused
        writer.mark_seen(opening.execution)
        # Only another dispatch opens an ended child again. A late or repeated one does not: what ended it stands.
        fence = Fence(opening.execution, opening.dispatch, 0)
        is_newer = fence > replace(fence_held(step), attempt=0)
        if children and (children[0]["state"] not in {"failed", "cancelled"} or not is_newer):
            child_writer, execution = None, children[0]["execution"]
        elif children:
            child_writer, execution = await _reopen(connection, writer, children[0], opening)
        else:
            child_writer, execution = _create(writer, child_id, opening, position, 0 if keys is None else keys.epoch), 1
        if is_newer:
            numbers = (fence.execution, fence.dispatch, fence.attempt)
            writer.statement(queries.SET_STEP_FENCE, (*numbers, place.run_id, place.round, position))
        writer.set_step_state(step, "running")
        writer.set_run_state("running")
        writer.entry(
            "child.begun",
            round=place.round,
            step=position,
            child=str(child_id),
            child_execution=execution,
            **({} if children else _task_source(writer, opening, child_id)),
        )
        await writer.commit(*([] if child_writer is None else [child_writer]))
        # Now the child exists; whoever repeats this finds it.
        return ChildRuling("begun", child_id=child_id)

    ruling = await database.write(work)
    if database.keys is not None and ruling.verdict == "begun":
        with contextlib.suppress(UnavailableError):
            await database.keys.settle(child_id)
    return ruling


def _as_child_ruling(ruling: Ruling) -> ChildRuling:
    return ChildRuling(
        ruling.verdict,
        ruling.code,
        missing=ruling.missing,
        unchecked=ruling.unchecked,
        run_ended=ruling.run_ended,
    )


def _position(place: Place) -> int:
    if place.position is None:
        raise BugError("step-unknown", "only a step can be delegated")
    return place.position


def _refusal(
    writer: RunWriter, step: Row, ancestors: Sequence[Row], opening: ChildOpening, *, number: int
) -> ChildRuling | None:
    place = opening.place
    if opening.execution != writer.run["execution"]:
        return ChildRuling("superseded", "execution-superseded")
    if step["state"] in STEP_HAS_OUTPUT or step["state"] == "skipped":
        return ChildRuling("done")
    if step["worker"] != opening.worker:
        return ChildRuling("moved")
    order = standing_order(writer, step, ancestors)
    if order is not None:
        return ChildRuling(order.verdict, order.code)
    code = None
    if writer.run["depth"] + 1 > opening.depth_max:
        code = DEPTH_EXCEEDED
    elif opening.task is None:
        code = TASK_TOO_LARGE
    if code is None:
        return None
    failed = fail_step(writer, step, place, opening.on_failure, code, number=number)
    return ChildRuling(failed.verdict, failed.code)


def _create(writer: RunWriter, child_id: UUID, opening: ChildOpening, position: int, key_epoch: int) -> RunWriter:
    """Adds the statements that create the child; everything that a run may have only shrinks on the way down."""
    run, place = writer.run, opening.place
    on_behalf_of = writer.on_behalf_of
    child = new_run_writer(
        writer.connection,
        child_id,
        tenant_id=writer.tenant_id,
        actor_id=ENGINE_ACTOR,
        on_behalf_of=on_behalf_of,
        now=writer.now,
        key_epoch=key_epoch,
    )
    child.statement(
        _INSERT_CHILD,
        {
            "id": child_id,
            "tenant_id": writer.tenant_id,
            "actor_id": ENGINE_ACTOR,
            "on_behalf_of": on_behalf_of,
            "pool_digest": run["pool_digest"],
            "deadline_at": run["deadline_at"],
            "depth": run["depth"] + 1,
            "rounds_max": max(run["rounds_max"] - 1, 1),
            "parent_run_id": writer.run_id,
            "round": place.round,
            "position": position,
            "key_epoch": key_epoch,
        },
    )
    child.statement(queries.INSERT_HEAD, (child_id, GENESIS))
    child.statement(queries.INSERT_PLAN_ROW, (plan_id(child_id, 0), child_id, 0))
    task = ArtifactDraft(child_id, "task", (opening.task or "").encode(), role="task", media_type=TEXT)
    child.entry(
        "run.created",
        origin="conductor",
        pool=run["pool_digest"],
        execution=1,
        deadline=None if run["deadline_at"] is None else timestamp(run["deadline_at"]),
        rounds_max=max(run["rounds_max"] - 1, 1),
        depth=run["depth"] + 1,
        parent=str(writer.run_id),
        parent_round=place.round,
        parent_step=position,
        artifacts=child.artifacts([task]),
    )
    return child


def _task_source(writer: RunWriter, opening: ChildOpening, child_id: UUID) -> dict[str, Any]:
    """What the entry says of where the child's task comes from, so that what its models are shown can be followed."""
    drafts = []
    if opening.manifest is not None:
        drafts = [ArtifactDraft(child_id, "prompt_manifest", opening.manifest, role="manifest", media_type=JSON)]
    return {"shown": [str(artifact) for artifact in opening.shown], "artifacts": writer.artifacts(drafts)}


async def _reopen(
    connection: Connection, writer: RunWriter, found: Row, opening: ChildOpening
) -> tuple[RunWriter, int]:
    """Adds the statements that give an ended child a new execution, as a resume does for a run of its own."""
    child_id = found["id"]
    child = await _child_writer(connection, writer, found)
    (steps,) = await exchange(connection, [(queries.READ_ALL_STEPS, (child_id,))])
    execution = found["execution"] + 1
    old, new = found["pool_digest"], writer.run["pool_digest"]
    child.entry("run.resumed", execution=execution, parent_execution=writer.run["execution"])
    if old != new:
        child.entry("run.repinned", old=old, new=new)
    planned = opening.planned_workers
    routed = [route_step(step, opening.routes, planned=planned) for step in unfinished_steps(steps)]
    reopen(child, routed, execution=execution, deadline_at=writer.run["deadline_at"], pool_digest=new)
    return child, execution


async def _child_writer(connection: Connection, writer: RunWriter, found: Row) -> RunWriter:
    """A writer for a child that exists and whose row is locked."""
    (heads,) = await exchange(connection, [(queries.READ_HEAD, {"run_id": found["id"]})])
    child = new_run_writer(
        connection,
        found["id"],
        tenant_id=writer.tenant_id,
        actor_id=ENGINE_ACTOR,
        on_behalf_of=writer.on_behalf_of,
        now=writer.now,
    )
    child.run, child.seq, child.head = found, heads[0]["seq"], heads[0]["hash"]
    return child


async def end_unbegun(connection: Connection, writer: RunWriter, rows: Sequence[Row]) -> list[RunWriter]:
    """Writers that end the children (rows of LOCK_UNBEGUN) which a run that ends leaves behind before they began.

    Nothing of them was called. Should such a workflow start after all, Open refuses it.
    """
    children = []
    for row in rows:
        child = await _child_writer(connection, writer, row)
        (steps,) = await exchange(connection, [(queries.READ_ALL_STEPS, (row["id"],))])
        for step in steps:
            if step["state"] in STEP_LIVE:
                child.set_step_state(step, "cancelled", PARENT_ENDED)
        child.set_run_state("cancelled", PARENT_ENDED)
        children.append(child)
    return children


@dataclass(frozen=True, slots=True)
class ChildClosing:
    """A delegated step whose child's execution has ended, as far as the workflow knows."""

    place: Place
    execution: int
    ends_run: bool
    on_failure: FailurePolicy
    review: ReviewSight | None = None


async def finish_child(database: Database, closing: ChildClosing) -> Ruling:
    """Takes over what became of the child: its answer is the step's output.

    Verdicts: ``done``, ``failed``, ``held``, ``moved``, ``cancelled``, ``superseded``; ``retry`` while the child has
    not ended on record.
    """
    place = closing.place
    child_id = child_run_id(place.run_id, round=place.round, position=_position(place))

    async def work(connection: Connection) -> Ruling:
        writer, (owners, unfinished, children, answers, attempts, ancestors, *reviewed) = await lock_run(
            connection,
            place.run_id,
            read_owner(place),
            (queries.READ_UNFINISHED, (place.run_id, place.round)),
            (queries.READ_RUN, (child_id,)),
            (_READ_ANSWER, (child_id,)),
            (queries.READ_ATTEMPTS, (place.run_id, place.round, place.position)),
            (queries.READ_ANCESTORS, (place.run_id,)),
            *(() if closing.review is None else review_queries(place)),
        )
        step, child = only_row(owners), only_row(children)
        if step["state"] in STEP_HAS_OUTPUT:
            return Ruling("done", attempt_id=step["accepted_attempt_id"], run_ended=writer.run["state"] == "succeeded")
        before = _ruled_before(step)
        if before is not None:
            return before
        if closing.execution != writer.run["execution"] or step["state"] not in STEP_LIVE:
            return Ruling("superseded", "execution-superseded")
        if child["state"] not in RUN_ENDED:
            return Ruling("retry", "child-not-ended")
        others = [row for row in unfinished if row["position"] != place.position]
        answer = answers[0]["accepted_attempt_id"] if answers else None
        is_reviewed = child["state"] == "succeeded" and waits_for_review(writer, step, reviewed, closing.review)
        ended = _Ended(step, child, answer, others, len(attempts), is_reviewed=is_reviewed)
        is_cancelled = any(run["cancel_requested_at"] is not None for run in (writer.run, *ancestors))
        ruling = _take_over(writer, ended, closing, is_cancelled=is_cancelled)
        await writer.commit()
        # Now the step has its output, or has failed, by the record of its child.
        return ruling

    return await database.write(work)


def _ruled_before(step: Row) -> Ruling | None:
    """What this transaction decided the first time, if it is repeated because its COMMIT got no answer."""
    if step["state"] == "failed":
        return Ruling("failed", step["reason"])
    if step["state"] == "pending":
        # While the child runs, so does the step: a substitute has it now.
        return Ruling("moved")
    if step["state"] == "waiting" and step["reason"] in {OPERATOR, REVIEW}:
        return Ruling("held", step["reason"])
    return Ruling("done", "skipped") if step["state"] == "skipped" else None


@dataclass(frozen=True, slots=True)
class _Ended:
    """What was read: the step, its child and that one's answer, the other unfinished steps, how often it was tried."""

    step: Row
    child: Row
    answer: UUID | None
    others: Sequence[Row]
    attempts_count: int
    # Its answer has to wait for people.
    is_reviewed: bool = False


def _take_over(writer: RunWriter, ended: _Ended, closing: ChildClosing, *, is_cancelled: bool) -> Ruling:
    step, child, others = ended.step, ended.child, ended.others
    said: dict[str, Any] = {"child": str(child["id"]), "child_state": child["state"], "child_reason": child["reason"]}
    said["answer"] = str(ended.answer) if child["state"] == "succeeded" else None
    writer.entry("child.ended", round=step["round"], step=step["position"], **said)
    if ended.is_reviewed and ended.answer is not None:
        writer.set_step_state(step, "waiting", REVIEW)
        propose(writer, step, others, ended.answer)
        return Ruling("held", REVIEW)
    if child["state"] == "succeeded":
        writer.set_step_state(step, "succeeded", accepted=ended.answer)
        ends = closing.ends_run and not has_answer_gate(closing.review) and may_end(writer, step["round"], others)
        if ends:
            writer.set_run_state("succeeded")
        else:
            show_waiting(writer, others)
        return Ruling("done", attempt_id=ended.answer, run_ended=ends)
    if is_cancelled:
        return Ruling("cancelled", "cancelled")
    if child["reason"] == PARENT_FAILED or any(row["state"] == "failed" for row in others):
        # It had to end because this run is about to; nobody takes the step over.
        return Ruling("cancelled", PARENT_FAILED)
    code = CHILD_CANCELLED if child["state"] == "cancelled" else CHILD_FAILED
    policy = closing.on_failure
    if child["reason"] == DEADLINE:
        # The deadline is the whole tree's: no substitute and no operator has any time left.
        code, policy = DEADLINE, FAIL
    ruling = fail_step(writer, step, closing.place, policy, code, number=ended.attempts_count)
    if ruling.verdict == "held":
        show_waiting(writer, [*others, {**step, "state": "waiting", "reason": ruling.code}])
    return ruling
