"""Reading runs for people and programs: everything about one run, and a page of runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from sqlalchemy import Executable, Text, cast, func, select
from sqlalchemy import text as sql_text
from sqlalchemy.ext.asyncio import AsyncConnection

from engine.store.artifacts import Contents, read_contents, read_tasks
from engine.store.budgets import READ_BUDGET, BudgetSnapshot, budget_snapshot
from engine.store.database import Database
from engine.store.ids import plan_id, step_id
from engine.store.review_views import ReviewLine, reviews_of_run
from engine.store.tables import Attempt, PoolSnapshot, Run, Step
from engine.store.trees import (
    Descendant,
    ParentStep,
    RoundSnapshot,
    Totals,
    children_of,
    parent_of,
    read_below,
    read_costs,
    read_rounds,
)
from engine.store.waiting import WAIT_ENTRIES, waiting_since

PREVIEW_CHARS = 120
PREVIEW_BYTES = PREVIEW_CHARS * 4
ERASED_PREVIEW = "(erased)"
_BUDGET = sql_text(READ_BUDGET.replace("%s", ":run_id"))
_WAITS = sql_text(WAIT_ENTRIES)


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
    round: int = 0
    provider_request_id: str | None = None
    provider_model: str | None = None


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
    # Since when it waits, if it does.
    waiting_since: datetime | None = None
    # Its output was there and was erased.
    output_erased: bool = False


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """Everything about a run. ``plan_json`` is the canonical plan of the present round; notes are the parser's.

    ``source_run_id`` is the run that a fork was made from.
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
    source_run_id: UUID | None = None
    # What it may still use: its own budget, or the one that it shares with the run above it.
    budget: BudgetSnapshot | None = None
    waiting_since: datetime | None = None
    # The step of another run that it was made for, all runs below it, and its rounds.
    parent: ParentStep | None = None
    below: tuple[Descendant, ...] = ()
    rounds: tuple[RoundSnapshot, ...] = ()
    reviews: tuple[ReviewLine, ...] = ()
    # The kinds of texts that were there and were erased: task, subtask, output, plan and the like.
    erased: frozenset[str] = frozenset()

    @property
    def answer_erased(self) -> bool:
        """Whether the run had an answer, which was erased."""
        return self.state == "succeeded" and bool(self.steps) and self.steps[-1].output_erased

    @property
    def totals(self) -> Totals:
        """What the run and all runs below it used."""
        calls = len(self.planning) + sum(len(step.attempts) for step in self.steps)
        total = Totals(self.cost_usd, self.cost_complete, self.input_tokens, self.output_tokens, calls)
        for run in self.below:
            total += run.own
        return total

    def child_of(self, step: StepSnapshot) -> Descendant | None:
        """The run that one of its steps was delegated to."""
        place = ParentStep(self.id, step.round, step.position)
        return next((run for run in self.below if run.parent == place), None)


@dataclass(frozen=True, slots=True)
class RunLine:
    """A run in a list; its cost is with all runs below it."""

    id: UUID
    state: str
    reason: str | None
    task_preview: str | None
    pool: str
    created_at: datetime
    cost_usd: Decimal | None
    parent: ParentStep | None = None


async def read_run(database: Database, run_id: UUID) -> RunSnapshot | None:
    """Reads a run in one snapshot of the database; None if there is no such run."""
    return await database.query(lambda connection: _read_run(connection, run_id))


async def _read_run(connection: AsyncConnection, run_id: UUID) -> RunSnapshot | None:
    # One snapshot for all queries, so that the parts agree with each other.
    await connection.execution_options(isolation_level="REPEATABLE READ")
    row = (
        await connection.execute(
            select(Run.__table__, PoolSnapshot.name.label("pool"), func.clock_timestamp().label("read_at"))
            .join(PoolSnapshot, PoolSnapshot.digest == Run.pool_digest)
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
    below = await read_below(connection, run_id)
    contents = await _contents(connection, run_id, _round_shown(row, steps), steps, attempts)
    run = _assemble(row, steps, attempts, contents)
    rounds = await read_rounds(connection, run_id)
    return await _with_waits_and_budget(
        connection,
        replace(
            run,
            parent=parent_of(row),
            children=tuple(child.id for child in children_of(below, run_id)),
            below=below,
            rounds=rounds,
            reviews=await reviews_of_run(connection, run_id),
            plan_form=next((one.form for one in rounds if one.number == _round_shown(row, steps)), None),
        ),
    )


async def _with_waits_and_budget(connection: AsyncConnection, run: RunSnapshot) -> RunSnapshot:
    """The snapshot with what it may still use, and since when it and its steps wait."""
    budget = (await connection.execute(_BUDGET, {"run_id": run.id})).mappings().one_or_none()
    if budget is not None:
        run = replace(run, budget=budget_snapshot(dict(budget)))
    waiting = [(step.round, step.position) for step in run.steps if step.state == "waiting"]
    if not waiting and run.state != "waiting":
        return run
    entries = (await connection.execute(_WAITS, {"run_id": run.id})).all()
    since = waiting_since(entries, waiting)
    return replace(
        run,
        steps=tuple(
            replace(step, waiting_since=since.get((step.round, step.position))) if step.state == "waiting" else step
            for step in run.steps
        ),
        waiting_since=since.get(None) if run.state == "waiting" else None,
    )


async def _contents(
    connection: AsyncConnection, run_id: UUID, round_number: int, steps: Sequence[Any], attempts: Sequence[Any]
) -> Contents:
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
    contents: Contents,
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
            output_erased=(step.accepted_attempt_id, "output") in contents.erased,
            started_at=step.started_at,
            ended_at=step.ended_at,
            attempts=tuple(
                own for row_, own in snapshots if (row_.round, row_.position) == (step.round, step.position)
            ),
        )
        for step in steps
    )
    plan = plan_id(run.id, _round_shown(run, steps))
    remarks = json.loads(contents.get((plan, "plan_remarks"), b'{"notes": [], "errors": []}'))
    planning = [own for row_, own in snapshots if row_.position is None]
    invalid = _last_invalid(planning, contents)
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
        # A later round that kept the answer has no steps of its own.
        answer=step_snapshots[-1].output if step_snapshots and run.state == "succeeded" else None,
        plan_json=contents.get((plan, "plan")),
        plan_form=None,
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
        children=(),
        source_run_id=run.source_run_id,
        erased=frozenset(kind for _, kind in contents.erased),
    )


def _round_shown(run: Any, steps: Sequence[Any]) -> int:
    """The last round that has steps; before there are any, the round that is being planned."""
    return steps[-1].round if steps else int(run.round)


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
        round=row.round,
        provider_request_id=row.provider_request_id,
        provider_model=row.provider_model,
    )


async def list_runs(
    database: Database, tenant_id: UUID, *, limit: int, states: Sequence[str] = (), children: bool = False
) -> tuple[RunLine, ...]:
    """The newest runs first, those below others only with ``children``.

    ``cost_usd`` is None while a part of it is unknown.
    """
    query = (
        select(
            Run.id,
            Run.state,
            Run.reason,
            Run.created_at,
            Run.parent_run_id,
            Run.parent_round,
            Run.parent_position,
            PoolSnapshot.name.label("pool"),
        )
        .join(PoolSnapshot, PoolSnapshot.digest == Run.pool_digest)
        .where(Run.tenant_id == tenant_id)
        .order_by(Run.created_at.desc(), Run.id.desc())
        .limit(limit)
    )
    if states:
        query = query.where(Run.state.in_(states))
    if not children:
        query = query.where(Run.parent_run_id.is_(None))

    async def read(
        connection: AsyncConnection,
    ) -> tuple[Sequence[Any], dict[UUID, Decimal | None], dict[UUID, str | None]]:
        found = await _all(connection, query)
        ids = [row.id for row in found]
        tasks = await read_tasks(connection, ids, PREVIEW_BYTES)
        costs = await read_costs(connection, ids)
        return found, costs, {run_id: _preview(text) for run_id, text in tasks.items()}

    rows, costs, previews = await database.query(read)
    return tuple(
        RunLine(
            id=row.id,
            state=row.state,
            reason=row.reason,
            task_preview=previews.get(row.id),
            pool=row.pool,
            created_at=row.created_at,
            cost_usd=costs.get(row.id),
            parent=parent_of(row),
        )
        for row in rows
    )


async def find_runs(database: Database, tenant_id: UUID, prefix: str, *, limit: int = 2) -> tuple[UUID, ...]:
    """Runs whose id begins with ``prefix`` (lower-case hexadecimal and hyphens)."""
    query = select(Run.id).where(Run.tenant_id == tenant_id, cast(Run.id, Text).startswith(prefix)).limit(limit)
    return tuple(row[0] for row in await database.query(lambda connection: _all(connection, query)))


async def _all(connection: AsyncConnection, query: Executable) -> Sequence[Any]:
    rows: Sequence[Any] = (await connection.execute(query)).all()
    return rows


def _preview(content: bytes | None) -> str | None:
    if content is None:
        return ERASED_PREVIEW
    text = " ".join(bytes(content).decode("utf-8", "ignore").split())
    return text if len(text) <= PREVIEW_CHARS else text[: PREVIEW_CHARS - 1] + "…"
