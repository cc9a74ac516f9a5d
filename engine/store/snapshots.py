"""Reading runs for people and programs: everything about one run, and a page of runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from sqlalchemy import Select, Text, cast, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from engine.store.artifacts import read_contents
from engine.store.database import Database
from engine.store.ids import plan_id, step_id
from engine.store.tables import Artifact, Attempt, Plan, PoolSnapshot, Run, Step

PREVIEW_CHARS = 120


@dataclass(frozen=True, slots=True)
class AttemptSnapshot:
    """One call as it stands on record. Costs are exact decimals in US dollars, None when unknown."""

    id: UUID
    number: int
    state: str
    error_code: str | None
    worker: str
    model: str
    accepted: bool
    notes: tuple[str, ...]
    finish_reason: str | None
    provider_status: int | None
    started_at: datetime
    ended_at: datetime | None
    input_tokens: int | None
    output_tokens: int | None
    cost_usd: Decimal | None
    first_token_ms: int | None
    duration_ms: int | None
    message: str | None


@dataclass(frozen=True, slots=True)
class StepSnapshot:
    """A step with its attempts. ``output`` is the accepted answer."""

    position: int
    round: int
    worker: str
    model: str
    state: str
    reason: str | None
    access: tuple[int, ...]
    access_all: bool
    subtask: str | None
    output: str | None
    started_at: datetime | None
    ended_at: datetime | None
    attempts: tuple[AttemptSnapshot, ...]


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """Everything about a run. ``plan_json`` is the canonical plan of the present round; notes are the parser's.

    ``plan_text`` is the newest text of a planning call that was no valid plan, ``plan_errors`` what is wrong with it.
    """

    id: UUID
    state: str
    reason: str | None
    execution: int
    round: int
    origin: str
    pool: str
    pool_digest: str
    actor_id: str
    task: str | None
    answer: str | None
    plan_json: bytes | None
    plan_form: str | None
    notes: tuple[dict[str, Any], ...]
    planning: tuple[AttemptSnapshot, ...]
    plan_errors: tuple[dict[str, Any], ...]
    plan_text: str | None
    cost_usd: Decimal
    cost_complete: bool
    input_tokens: int
    output_tokens: int
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    read_at: datetime
    steps: tuple[StepSnapshot, ...]
    children: tuple[UUID, ...]


@dataclass(frozen=True, slots=True)
class RunLine:
    """A run in a list."""

    id: UUID
    state: str
    reason: str | None
    task_preview: str | None
    pool: str
    created_at: datetime
    cost_usd: Decimal | None


async def read_run(database: Database, run_id: UUID) -> RunSnapshot | None:
    """Reads a run in one snapshot of the database; None if there is no such run."""
    return await database.query(lambda connection: _read_run(connection, run_id))


async def _read_run(connection: AsyncConnection, run_id: UUID) -> RunSnapshot | None:
    # One snapshot for all queries, so that the parts agree with each other.
    await connection.execution_options(isolation_level="REPEATABLE READ")
    row = (
        await connection.execute(
            select(Run.__table__, PoolSnapshot.name.label("pool"), Plan.form, func.clock_timestamp().label("read_at"))
            .join(PoolSnapshot, PoolSnapshot.digest == Run.pool_digest)
            .outerjoin(Plan, (Plan.run_id == Run.id) & (Plan.round == Run.round))
            .where(Run.id == run_id)
        )
    ).one_or_none()
    if row is None:
        return None
    steps = (
        await connection.execute(
            select(Step.__table__).where(Step.run_id == run_id).order_by(Step.round, Step.position)
        )
    ).all()
    attempts = (
        await connection.execute(
            select(Attempt.__table__).where(Attempt.run_id == run_id).order_by(Attempt.round, Attempt.number)
        )
    ).all()
    children = (await connection.scalars(select(Run.id).where(Run.parent_run_id == run_id).order_by(Run.id))).all()
    contents = await _contents(connection, run_id, row.round, steps, attempts)
    return _assemble(row, steps, attempts, children, contents)


async def _contents(
    connection: AsyncConnection, run_id: UUID, round_number: int, steps: Sequence[Any], attempts: Sequence[Any]
) -> dict[tuple[UUID, str], bytes]:
    owners = {run_id, plan_id(run_id, round_number)}
    owners.update(step_id(run_id, step.round, step.position) for step in steps)
    owners.update(step.accepted_attempt_id for step in steps if step.accepted_attempt_id is not None)
    owners.update(attempt.id for attempt in attempts)
    kinds = ("task", "plan", "plan_remarks", "plan_text", "subtask", "output", "provider_message")
    return await read_contents(connection, owners, kinds)


def _assemble(
    row: Any,
    steps: Sequence[Any],
    attempts: Sequence[Any],
    children: Sequence[UUID],
    contents: dict[tuple[UUID, str], bytes],
) -> RunSnapshot:
    run = row

    def text(owner: UUID | None, kind: str) -> str | None:
        content = None if owner is None else contents.get((owner, kind))
        return None if content is None else content.decode("utf-8", "replace")

    snapshots = [(attempt, _attempt(attempt, text(attempt.id, "provider_message"))) for attempt in attempts]
    step_snapshots = tuple(
        StepSnapshot(
            position=step.position,
            round=step.round,
            worker=step.worker,
            model=step.model,
            state=step.state,
            reason=step.reason,
            access=tuple(step.reads),
            access_all=step.reads_all,
            subtask=text(step_id(run.id, step.round, step.position), "subtask"),
            output=text(step.accepted_attempt_id, "output"),
            started_at=step.started_at,
            ended_at=step.ended_at,
            attempts=tuple(
                own for row_, own in snapshots if (row_.round, row_.position) == (step.round, step.position)
            ),
        )
        for step in steps
    )
    plan = plan_id(run.id, run.round)
    remarks = json.loads(contents.get((plan, "plan_remarks"), b'{"notes": [], "errors": []}'))
    planning = [own for row_, own in snapshots if row_.position is None]
    invalid = _last_invalid(planning, contents)
    current = [step for step in step_snapshots if step.round == run.round]
    return RunSnapshot(
        id=run.id,
        state=run.state,
        reason=run.reason,
        execution=run.execution,
        round=run.round,
        origin=run.origin,
        pool=row.pool,
        pool_digest=run.pool_digest,
        actor_id=run.actor_id,
        task=text(run.id, "task"),
        answer=current[-1].output if current and run.state == "succeeded" else None,
        plan_json=contents.get((plan, "plan")),
        plan_form=row.form,
        notes=tuple(remarks["notes"]),
        planning=tuple(planning),
        plan_errors=() if invalid is None else tuple(json.loads(contents[invalid, "plan_remarks"])["errors"]),
        plan_text=text(invalid, "plan_text"),
        cost_usd=run.cost_usd,
        cost_complete=run.attempts_unpriced == 0 and all(own.state != "sent" for _, own in snapshots),
        input_tokens=run.input_tokens,
        output_tokens=run.output_tokens,
        created_at=run.created_at,
        started_at=run.started_at,
        ended_at=run.ended_at,
        read_at=row.read_at,
        steps=step_snapshots,
        children=tuple(children),
    )


def _last_invalid(planning: Sequence[AttemptSnapshot], contents: dict[tuple[UUID, str], bytes]) -> UUID | None:
    """The newest planning call whose text was not a valid plan."""
    return next((own.id for own in reversed(planning) if (own.id, "plan_remarks") in contents), None)


def _attempt(row: Any, message: str | None) -> AttemptSnapshot:
    return AttemptSnapshot(
        id=row.id,
        number=row.number,
        state=row.state,
        error_code=row.error_code,
        worker=row.worker,
        model=row.model,
        accepted=row.accepted,
        notes=tuple(row.notes),
        finish_reason=row.finish_reason,
        provider_status=row.provider_status,
        started_at=row.sent_at,
        ended_at=row.ended_at,
        input_tokens=row.input_tokens,
        output_tokens=row.output_tokens,
        cost_usd=row.cost_usd,
        first_token_ms=row.first_token_ms,
        duration_ms=row.duration_ms,
        message=message,
    )


async def list_runs(
    database: Database, tenant_id: UUID, *, limit: int, states: Sequence[str] = ()
) -> tuple[RunLine, ...]:
    """The newest runs first. ``cost_usd`` is None while a part of it is unknown."""
    preview = func.substring(Artifact.content, 1, PREVIEW_CHARS * 4)
    query = (
        select(
            Run.id,
            Run.state,
            Run.reason,
            Run.created_at,
            Run.cost_usd,
            Run.attempts_unpriced,
            PoolSnapshot.name.label("pool"),
            preview.label("preview"),
        )
        .join(PoolSnapshot, PoolSnapshot.digest == Run.pool_digest)
        .outerjoin(Artifact, (Artifact.owner_id == Run.id) & (Artifact.kind == "task") & (Artifact.ordinal == 0))
        .where(Run.tenant_id == tenant_id)
        .order_by(Run.created_at.desc(), Run.id.desc())
        .limit(limit)
    )
    if states:
        query = query.where(Run.state.in_(states))
    rows = await database.query(lambda connection: _all(connection, query))
    return tuple(
        RunLine(
            id=row.id,
            state=row.state,
            reason=row.reason,
            task_preview=_preview(row.preview),
            pool=row.pool,
            created_at=row.created_at,
            cost_usd=row.cost_usd if row.attempts_unpriced == 0 else None,
        )
        for row in rows
    )


async def find_runs(database: Database, tenant_id: UUID, prefix: str, *, limit: int = 2) -> tuple[UUID, ...]:
    """Runs whose id begins with ``prefix`` (lower-case hexadecimal and hyphens)."""
    query = select(Run.id).where(Run.tenant_id == tenant_id, cast(Run.id, Text).startswith(prefix)).limit(limit)
    return tuple(row[0] for row in await database.query(lambda connection: _all(connection, query)))


async def _all(connection: AsyncConnection, query: Select[Any]) -> Sequence[Any]:
    rows: Sequence[Any] = (await connection.execute(query)).all()
    return rows


def _preview(content: bytes | None) -> str | None:
    if content is None:
        return None
    text = " ".join(bytes(content).decode("utf-8", "ignore").split())
    return text if len(text) <= PREVIEW_CHARS else text[: PREVIEW_CHARS - 1] + "…"
