"""Reading what belongs to a run: the runs below it with their totals, the step it came from, its rounds.

Reads states and numbers, and of texts only plans. Must never decide what may be called.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from engine.store.artifacts import read_contents
from engine.store.ids import plan_id
from engine.store.states import RUN_LIVE

_BELOW = text("""
    WITH RECURSIVE below AS (
        SELECT id, 1 AS height FROM runs WHERE parent_run_id = :run_id
        UNION ALL
        SELECT child.id, below.height + 1 FROM runs child JOIN below ON child.parent_run_id = below.id
    )
    SELECT runs.id, parent_run_id, parent_round, parent_position, runs.state, runs.reason, execution, runs.round,
           created_at, runs.started_at, runs.ended_at,
           cost_usd, attempts_unpriced, input_tokens, output_tokens, attempts_count,
           EXISTS (SELECT FROM attempts WHERE run_id = runs.id AND attempts.state = 'sent') AS is_calling,
           count(steps.id) AS steps_count,
           count(steps.id) FILTER (WHERE steps.state IN ('succeeded', 'reused', 'skipped')) AS steps_done,
           count(steps.id) FILTER (WHERE steps.state = 'running') AS steps_running
    FROM below JOIN runs ON runs.id = below.id
    LEFT JOIN steps ON steps.run_id = runs.id
        AND steps.round = (SELECT max(last.round) FROM steps last WHERE last.run_id = runs.id)
    GROUP BY runs.id, height
    ORDER BY height, parent_round, parent_position
""")
_ROUNDS = text("""
    SELECT round, form, steps_count, accepted_at FROM plans WHERE run_id = :run_id ORDER BY round
""")
_COSTS = text("""
    WITH RECURSIVE family AS (
        SELECT id AS top_id, id FROM runs WHERE id = ANY(:run_ids)
        UNION ALL
        SELECT family.top_id, child.id FROM runs child JOIN family ON child.parent_run_id = family.id
    )
    SELECT top_id, sum(cost_usd) AS cost_usd, sum(attempts_unpriced) AS unpriced
    FROM family JOIN runs ON runs.id = family.id GROUP BY top_id
""")


@dataclass(frozen=True, slots=True)
class Totals:
    """What calls used: exact US dollars as far as they are known, tokens, and how many calls there were."""

    cost_usd: Decimal
    cost_complete: bool
    input_tokens: int
    output_tokens: int
    calls: int

    def __add__(self, other: Totals) -> Totals:
        """Both together; complete only if both are."""
        return Totals(
            self.cost_usd + other.cost_usd,
            self.cost_complete and other.cost_complete,
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.calls + other.calls,
        )


@dataclass(frozen=True, slots=True)
class ParentStep:
    """The step of another run that a run was made for."""

    run_id: UUID
    round: int
    position: int


@dataclass(frozen=True, slots=True)
class Descendant:
    """A run below another one. ``own`` are its own calls; the steps are those of its last round that has any."""

    id: UUID
    parent: ParentStep
    state: str
    reason: str | None
    execution: int
    round: int
    steps_count: int
    steps_done: int
    steps_running: int
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    own: Totals


@dataclass(frozen=True, slots=True)
class RoundSnapshot:
    """A round: its plan in canonical form, None while there is none. With no steps it kept the answer before it."""

    number: int
    form: str | None
    plan_json: bytes | None
    steps_count: int | None
    planned_at: datetime | None

    @property
    def kept(self) -> bool:
        """Whether the Conductor looked at the answer and kept it."""
        return self.planned_at is not None and self.steps_count == 0


async def read_below(connection: AsyncConnection, run_id: UUID) -> tuple[Descendant, ...]:
    """All runs below a run, from the top."""
    rows = (await connection.execute(_BELOW, {"run_id": run_id})).all()
    return tuple(
        Descendant(
            id=row.id,
            parent=ParentStep(row.parent_run_id, row.parent_round, row.parent_position),
            state=row.state,
            reason=row.reason,
            execution=row.execution,
            round=row.round,
            steps_count=row.steps_count,
            steps_done=row.steps_done,
            steps_running=row.steps_running,
            created_at=row.created_at,
            started_at=row.started_at,
            ended_at=row.ended_at,
            own=Totals(
                row.cost_usd,
                row.attempts_unpriced == 0 and not row.is_calling,
                row.input_tokens,
                row.output_tokens,
                row.attempts_count,
            ),
        )
        for row in rows
    )


async def read_rounds(connection: AsyncConnection, run_id: UUID) -> tuple[RoundSnapshot, ...]:
    """The rounds of a run in order; the last one may not be planned yet."""
    rows = (await connection.execute(_ROUNDS, {"run_id": run_id})).all()
    owners = {row.round: plan_id(run_id, row.round) for row in rows}
    contents = await read_contents(connection, owners.values(), ("plan",))
    return tuple(
        RoundSnapshot(row.round, row.form, contents.get((owners[row.round], "plan")), row.steps_count, row.accepted_at)
        for row in rows
    )


async def read_costs(connection: AsyncConnection, run_ids: Sequence[UUID]) -> dict[UUID, Decimal | None]:
    """The cost of each run with all that is below it; None while a part is unknown."""
    rows = (await connection.execute(_COSTS, {"run_ids": list(run_ids)})).all()
    return {row.top_id: row.cost_usd if row.unpriced == 0 else None for row in rows}


def parent_of(row: Any) -> ParentStep | None:
    """The step that a run (its row) was made for; None for one that somebody asked for."""
    if row.parent_run_id is None:
        return None
    return ParentStep(row.parent_run_id, row.parent_round, row.parent_position)


def children_of(below: Iterable[Descendant], run_id: UUID) -> list[Descendant]:
    """The runs directly below a run."""
    return [run for run in below if run.parent.run_id == run_id]


def with_below(run: Descendant, below: Sequence[Descendant]) -> Totals:
    """What a run and all runs below it used."""
    total = run.own
    for child in children_of(below, run.id):
        total += with_below(child, below)
    return total


def who_waits(run_id: UUID, running: int, below: Sequence[Descendant], reasons: frozenset[str]) -> Descendant | None:
    """The run below that everything waits for, if nothing of the tree goes on before its reason (of these) is gone.

    ``running`` is how many steps of the run itself are running.
    """
    live = [child for child in children_of(below, run_id) if child.state in RUN_LIVE]
    if not live or running != len(live):
        return None
    found = None
    for child in live:
        own = child if child.state == "waiting" and child.reason in reasons else None
        waits = own or who_waits(child.id, child.steps_running, below, reasons)
        if waits is None:
            return None
        found = found or waits
    return found
