"""Reading what an activity needs before it opens an attempt. Everything read here is immutable once it is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import select

from engine.errors import BugError
from engine.store.artifacts import READ_STEP_TEXTS, joined, read_contents
from engine.store.database import Database
from engine.store.ids import artifact_id, plan_id
from engine.store.sealing import opened, text_erased
from engine.store.sent_back import SentBack, read_sent_back
from engine.store.tables import Attempt, Plan, PoolSnapshot, Run, Step

_READ_STEPS = """
    SELECT steps.id, steps.round, steps.position, steps.worker, steps.planned_worker, steps.reads, steps.reads_all,
           steps.state, steps.accepted_attempt_id, steps.sent_back, runs.tenant_id, runs.pool_digest
    FROM steps JOIN runs ON runs.id = steps.run_id
    WHERE steps.run_id = %(run_id)s AND steps.round IN (%(round)s, %(round)s - 1)
    ORDER BY steps.position
"""


@dataclass(frozen=True, slots=True)
class Part:
    """A stored text with the id of its artifact."""

    artifact_id: UUID
    text: str


@dataclass(frozen=True, slots=True)
class VisibleStep:
    """An earlier step that a worker may read: its position, what it was asked, what it answered.

    ``earlier_round`` is set for a step of the round before, which "all" opens in a later round.
    """

    position: int
    subtask: Part
    output: Part
    earlier_round: int | None = None


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the prompt of a step is made of."""

    tenant_id: UUID
    pool_digest: str
    worker: str
    step_id: UUID
    is_last: bool
    task: Part
    subtask: Part
    visible: tuple[VisibleStep, ...]
    # The plan's worker, where a substitute has taken its place.
    planned_worker: str | None = None
    # How often reviewers have sent the step back, and what they said, oldest first.
    sent_back_count: int = 0
    sent_back: tuple[SentBack, ...] = ()


@dataclass(frozen=True, slots=True)
class FailedPlanning:
    """An earlier planning call whose text was not a valid plan."""

    attempt_id: UUID
    plan_text: Part
    remarks: Part


@dataclass(frozen=True, slots=True)
class FinishedRound:
    """The round before: its plan in canonical form, and the answer that came of it."""

    plan: Part
    answer: Part


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """What the prompt of a planning call is made of; ``failed`` in order of the calls."""

    tenant_id: UUID
    pool_digest: str
    plan_id: UUID
    planned: bool
    task: Part
    failed: tuple[FailedPlanning, ...]
    depth: int = 0
    previous: FinishedRound | None = None


@dataclass(frozen=True, slots=True)
class Assignment:
    """Who has a step, by which pool. ``planned_worker`` is the plan's worker, where a substitute took its place."""

    pool_digest: str
    worker: str
    planned_worker: str | None
    tenant_id: UUID


async def read_assignment(database: Database, run_id: UUID, round_number: int, position: int) -> Assignment:
    """Who has a step now, without any text; raises BugError if the step does not exist."""
    (found,) = await database.fetch((_READ_STEPS, {"run_id": run_id, "round": round_number}))
    for row in found:
        if (row["round"], row["position"]) == (round_number, position):
            return Assignment(row["pool_digest"], row["worker"], row["planned_worker"], row["tenant_id"])
    raise BugError("step-unknown", "there is no such step in this run")


async def read_step_inputs(database: Database, run_id: UUID, round_number: int, position: int) -> StepInputs:
    """Reads a step's inputs.

    Raises BugError if the step does not exist or an output that it needs is missing, RefusedError ``text-erased`` for
    one that somebody had erased.
    """
    found, texts = await database.fetch(
        (_READ_STEPS, {"run_id": run_id, "round": round_number}),
        (READ_STEP_TEXTS, {"run_id": run_id, "round": round_number, "position": position}),
    )
    rows = [row for row in found if row["round"] == round_number]
    if not 0 <= position < len(rows):
        raise BugError("step-unknown", "there is no such step in this run")
    own = rows[position]
    earlier = [row for row in found if row["round"] != round_number] if own["reads_all"] else []
    sources = [row for row in (*earlier, *(rows[source] for source in own["reads"])) if row["state"] != "skipped"]
    contents = joined(await opened(database.keys, texts))

    def part(owner: UUID | None, kind: str) -> Part:
        content = None if owner is None else contents.get((owner, kind))
        if owner is not None and (owner, kind) in contents.erased:
            raise text_erased(kind, run_id)
        if owner is None or content is None:
            raise BugError("input-missing", f"the {kind} that step {position} needs is not stored")
        return Part(artifact_id(owner, kind), content.decode())

    return StepInputs(
        tenant_id=own["tenant_id"],
        pool_digest=own["pool_digest"],
        worker=own["worker"],
        planned_worker=own["planned_worker"],
        step_id=own["id"],
        is_last=position == len(rows) - 1,
        task=part(run_id, "task"),
        subtask=part(own["id"], "subtask"),
        visible=tuple(
            VisibleStep(
                row["position"],
                part(row["id"], "subtask"),
                part(row["accepted_attempt_id"], "output"),
                None if row["round"] == round_number else row["round"],
            )
            for row in sources
        ),
        sent_back_count=own["sent_back"],
        sent_back=await read_sent_back(database, run_id, round_number, position) if own["sent_back"] else (),
    )


async def read_plan_inputs(database: Database, run_id: UUID, round_number: int) -> PlanInputs:
    """Reads what a planning call needs, with the earlier calls of this round that gave no valid plan."""
    async with database.read() as connection:
        run = (
            await connection.execute(
                select(Run.tenant_id, Run.pool_digest, Run.depth, Plan.accepted_at)
                # A later round has no row before its first planning call is opened.
                .outerjoin(Plan, (Plan.run_id == Run.id) & (Plan.round == round_number))
                .where(Run.id == run_id)
            )
        ).one_or_none()
        if run is None:
            raise BugError("run-unknown", "there is no such run or round")
        failed: Sequence[UUID] = (
            await connection.scalars(
                select(Attempt.id)
                .where(
                    Attempt.run_id == run_id,
                    Attempt.round == round_number,
                    Attempt.position.is_(None),
                    Attempt.error_code == "plan-invalid",
                )
                .order_by(Attempt.number)
            )
        ).all()
        answered = None
        if round_number > 0:
            answered = await connection.scalar(
                select(Step.accepted_attempt_id)
                .where(Step.run_id == run_id, Step.round == round_number - 1)
                .order_by(Step.position.desc())
                .limit(1)
            )
            if answered is None:
                raise BugError("input-missing", f"round {round_number - 1} has no answer")
        before = [] if answered is None else [plan_id(run_id, round_number - 1), answered]
        kinds = ("task", "plan_text", "plan_remarks", "plan", "output")
        contents = await read_contents(connection, [run_id, *failed, *before], kinds)

    def part(owner: UUID, kind: str) -> Part:
        if (owner, kind) in contents.erased:
            raise text_erased(kind, run_id)
        return Part(artifact_id(owner, kind), contents[owner, kind].decode("utf-8", "replace"))

    return PlanInputs(
        tenant_id=run.tenant_id,
        pool_digest=run.pool_digest,
        plan_id=plan_id(run_id, round_number),
        planned=run.accepted_at is not None,
        task=part(run_id, "task"),
        failed=tuple(
            FailedPlanning(attempt, part(attempt, "plan_text"), part(attempt, "plan_remarks")) for attempt in failed
        ),
        depth=run.depth,
        previous=None if answered is None else FinishedRound(part(before[0], "plan"), part(answered, "output")),
    )


@dataclass(frozen=True, slots=True)
class StoredStep:
    """A step as the workflow needs it."""

    position: int
    worker: str
    queue: str
    reads: tuple[int, ...]
    state: str


async def read_steps(database: Database, run_id: UUID, round_number: int) -> tuple[StoredStep, ...]:
    """The steps of a round's plan in order; empty if there is no plan yet."""
    async with database.read() as connection:
        rows = await connection.execute(
            select(Step.position, Step.worker, Step.queue, Step.reads, Step.state)
            .where(Step.run_id == run_id, Step.round == round_number)
            .order_by(Step.position)
        )
        return tuple(StoredStep(row.position, row.worker, row.queue, tuple(row.reads), row.state) for row in rows)


async def read_pinned(database: Database, run_id: UUID) -> tuple[UUID, str]:
    """The tenant of a run and the digest of its pool."""
    (rows,) = await database.fetch(("SELECT tenant_id, pool_digest FROM runs WHERE id = %s", (run_id,)))
    if not rows:
        raise BugError("run-unknown", "there is no such run")
    return rows[0]["tenant_id"], rows[0]["pool_digest"]


async def read_pool_document(database: Database, digest: str) -> bytes:
    """The canonical document of a pinned pool."""
    async with database.read() as connection:
        document = await connection.scalar(select(PoolSnapshot.document).where(PoolSnapshot.digest == digest))
    if document is None:
        raise BugError("pool-unknown", "the pool that this run is pinned to is not stored")
    return bytes(document)
