"""Forks on record: reading the run that one is made from, and writing which of its outputs are taken over.

A reused step points to the attempt of the run that paid for it; a fork of a fork copies that pointer. Must never write
anything about the source.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from engine.errors import RefusedError
from engine.plan import Access, Form
from engine.store import queries
from engine.store.artifacts import Contents, read_contents
from engine.store.budgets import NO_LIMITS, Limits
from engine.store.database import Database
from engine.store.exchange import Connection, exchange
from engine.store.run_writer import RunWriter, usd
from engine.store.sealing import text_erased
from engine.store.states import STEP_HAS_OUTPUT

# The last round whose plan has steps: a later one may still be planned, or may have kept the answer.
_READ_RUN = text("""
    SELECT runs.id, runs.state, pool_snapshots.document, plans.round, plans.form,
           usd_limit, tokens_limit, calls_limit
    FROM runs
    JOIN pool_snapshots ON pool_snapshots.digest = runs.pool_digest
    LEFT JOIN budgets ON budgets.run_id = runs.id
    LEFT JOIN LATERAL (
        SELECT round, form FROM plans
        WHERE run_id = runs.id AND steps_count > 0
        ORDER BY round DESC LIMIT 1
    ) plans ON true
    WHERE runs.id = :run_id
""")
_READ_STEPS = text("""
    SELECT id, position, worker, model, reads, reads_all, state, reason, accepted_attempt_id
    FROM steps
    WHERE run_id = :run_id AND round = :round
    ORDER BY position
""")
# What a reused step shows is the model that made its output; the pool of the fork may name another one by now.
_KEEP_MODEL = "UPDATE steps SET model = %s WHERE run_id = %s AND round = 0 AND position = %s"
# While a fork is written, no erasure of what it takes over can begin; one that has begun is seen.
_LOCK_SOURCES = """
    SELECT id FROM runs
    WHERE id = %(source)s OR id IN (SELECT run_id FROM attempts WHERE id = ANY(%(attempts)s))
    ORDER BY id FOR SHARE
"""
_READ_ERASED = """
    SELECT kind FROM artifacts
    WHERE erasure_id IS NOT NULL AND ((owner_id = %(task_of)s AND kind = 'task')
                                      OR (owner_id IN (SELECT id FROM steps WHERE run_id = %(source)s
                                                       AND round = %(round)s AND NOT position = ANY(%(given)s))
                                          AND kind = 'subtask')
                                      OR (owner_id = ANY(%(attempts)s) AND kind = 'output')) LIMIT 1
"""


@dataclass(frozen=True, slots=True)
class SourceStep:
    """A step of the source. ``attempt_id`` and ``output`` are those of its accepted attempt, whichever run made it."""

    id: UUID
    position: int
    worker: str
    model: str
    subtask: str
    access: Access
    state: str
    reason: str | None
    attempt_id: UUID | None
    output: str | None


@dataclass(frozen=True, slots=True)
class ForkSource:
    """The run to be forked: its task, its pinned pool, its limits, and the steps of its last round that has any."""

    run_id: UUID
    state: str
    round: int
    form: Form
    task: str
    pool_document: bytes
    steps: tuple[SourceStep, ...]
    limits: Limits = NO_LIMITS


@dataclass(frozen=True, slots=True)
class ReusedStep:
    """A step whose output the fork takes over: the source's step, the attempt that made it, and that one's model."""

    position: int
    source_step_id: UUID
    attempt_id: UUID
    model: str


@dataclass(frozen=True, slots=True)
class ForkDraft:
    """What a fork is made of, beside its plan. ``edited`` holds the names of what was edited, by position."""

    source_run_id: UUID
    source_round: int
    task_edited: bool
    edited: Mapping[int, Sequence[str]]
    reused: Sequence[ReusedStep]
    # Positions that an operator had left out and that stay so, with the reason on record.
    left_out: Mapping[int, str | None]
    # Positions whose reused outputs people may have to review first.
    reviewed: frozenset[int] = frozenset()


async def read_fork_source(
    database: Database, run_id: UUID, *, own_task: bool = False, own_subtasks: Collection[int] = ()
) -> ForkSource | None:
    """The source in one snapshot of the database; None if there is no such run.

    ``own_task`` and ``own_subtasks`` (positions): the fork brings its own, so an erased one is not needed, and empty.

    Raises RefusedError: ``plan-missing`` for a run without an accepted plan, ``text-erased`` if its task or a subtask
    was erased. An output that was erased counts as not there.
    """
    return await database.query(
        lambda connection: _read(connection, run_id, own_task=own_task, own_subtasks=own_subtasks)
    )


async def _read(
    connection: AsyncConnection, run_id: UUID, *, own_task: bool, own_subtasks: Collection[int]
) -> ForkSource | None:
    await connection.execution_options(isolation_level="REPEATABLE READ")
    run = (await connection.execute(_READ_RUN, {"run_id": run_id})).mappings().one_or_none()
    if run is None:
        return None
    if run["round"] is None:
        raise RefusedError(
            "plan-missing",
            f"run {run_id} has no plan that could be forked",
            hint="`podium run` begins anew; a run that is still planning can be forked once it has its plan",
        )
    place = {"run_id": run_id, "round": run["round"]}
    steps = (await connection.execute(_READ_STEPS, place)).mappings().all()
    owners = {run_id, *(step["id"] for step in steps), *(step["accepted_attempt_id"] for step in steps)} - {None}
    contents = await read_contents(connection, owners, ("task", "subtask", "output"))
    needless = {(run_id, "task")} if own_task else set()
    needless |= {(step["id"], "subtask") for step in steps if step["position"] in own_subtasks}
    contents.update(dict.fromkeys(needless & contents.erased, b""))
    return ForkSource(
        run_id=run_id,
        state=run["state"],
        round=run["round"],
        form=run["form"],
        task=_text(contents, run_id, run_id, "task"),
        pool_document=bytes(run["document"]),
        steps=tuple(_step(step, run_id, contents) for step in steps),
        limits=Limits(usd(run["usd_limit"]), run["tokens_limit"], run["calls_limit"]),
    )


def _step(row: RowMapping, run_id: UUID, contents: Contents) -> SourceStep:
    attempt = row["accepted_attempt_id"] if row["state"] in STEP_HAS_OUTPUT else None
    output = None if attempt is None else contents.get((attempt, "output"))
    return SourceStep(
        id=row["id"],
        position=row["position"],
        worker=row["worker"],
        model=row["model"],
        subtask=_text(contents, run_id, row["id"], "subtask"),
        access="all" if row["reads_all"] else tuple(row["reads"]),
        state=row["state"],
        reason=row["reason"],
        attempt_id=None if output is None else attempt,
        output=None if output is None else output.decode(),
    )


def _text(contents: Contents, run_id: UUID, owner: UUID, kind: str) -> str:
    content = contents.get((owner, kind))
    if content is None:
        if (owner, kind) in contents.erased:
            raise text_erased(kind, run_id)
        raise RefusedError("text-missing", f"a {kind} of this run is not stored", hint="begin a new run")
    return content.decode()


def fork_fields(draft: ForkDraft) -> dict[str, Any]:
    """What the entry ``run.created`` says of the source: identifiers, positions and the names of edited fields."""
    return {
        "run": str(draft.source_run_id),
        "round": draft.source_round,
        "task_edited": draft.task_edited,
        "edited": [{"step": position, "fields": list(fields)} for position, fields in sorted(draft.edited.items())],
        "reused": [
            {
                "step": step.position,
                "source_step": str(step.source_step_id),
                "attempt": str(step.attempt_id),
                "model": step.model,
            }
            for step in draft.reused
        ],
    }


async def hold_sources(connection: Connection, draft: ForkDraft) -> None:
    """Keeps what a fork takes over from being erased until its transaction ends.

    Raises RefusedError ``text-erased`` if it was erased since it was read.
    """
    where = {
        "source": draft.source_run_id,
        "round": draft.source_round,
        # What the fork brings along itself is not taken over.
        "task_of": None if draft.task_edited else draft.source_run_id,
        "given": [position for position, fields in draft.edited.items() if "subtask" in fields],
        "attempts": [step.attempt_id for step in draft.reused],
    }
    _, erased = await exchange(connection, [(_LOCK_SOURCES, where), (_READ_ERASED, where)])
    if erased:
        raise text_erased(erased[0]["kind"], draft.source_run_id)


def write_reused(writer: RunWriter, draft: ForkDraft) -> None:
    """Moves the steps of a plan that this transaction wrote: to their output in another run, or to left out."""
    for step in draft.reused:
        if step.position in draft.reviewed:
            place = {"run_id": writer.run_id, "round": 0, "position": step.position}
            writer.statement(queries.SET_CANDIDATE, {"candidate": step.attempt_id, **place})
        else:
            writer.set_step_state(_pending(step.position), "reused", accepted=step.attempt_id)
        writer.statement(_KEEP_MODEL, (step.model, writer.run_id, step.position))
    for position, reason in draft.left_out.items():
        writer.set_step_state(_pending(position), "skipped", reason)


def _pending(position: int) -> dict[str, Any]:
    return {"round": 0, "position": position, "state": "pending", "reason": None}
