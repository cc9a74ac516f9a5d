"""Looking at a run again and again while it goes on: two small queries, and notifications for what is not stored.

Reads states only, never text. For everything about a run, once, see `engine.store.snapshots`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import psycopg
from psycopg import sql
from sqlalchemy import text

from engine.store.database import Database, is_pooled
from engine.store.gates import REVIEW
from engine.store.review_views import ReviewLine, reviews_of_run
from engine.store.states import RUN_LIVE
from engine.store.trees import Descendant, read_below
from engine.store.waiting import WAIT_ENTRIES, waiting_since

_RUN = text("""
    SELECT runs.state, runs.reason, runs.round, runs.execution, runs.created_at, runs.ended_at,
           clock_timestamp() AS read_at, pool_snapshots.name AS pool, plans.steps_count,
           planning.attempts, planning.state AS attempt_state, planning.error_code, planning.sent_at,
           EXISTS (SELECT 1 FROM attempts WHERE attempts.run_id = runs.id) AS called
    FROM runs
    JOIN pool_snapshots ON pool_snapshots.digest = runs.pool_digest
    LEFT JOIN plans ON plans.run_id = runs.id AND plans.round = runs.round
    LEFT JOIN LATERAL (
        SELECT count(*) OVER () AS attempts, state, error_code, sent_at FROM attempts
        WHERE run_id = runs.id AND round = runs.round AND position IS NULL
        ORDER BY number DESC LIMIT 1
    ) planning ON true
    WHERE runs.id = :run_id
""")
_STEPS = text("""
    SELECT steps.round, steps.position, steps.worker, steps.state, steps.reason, steps.reads, steps.started_at,
           steps.ended_at, coalesce(tries.attempts, 0) AS attempts, tries.state AS attempt_state, tries.error_code
    FROM steps
    LEFT JOIN LATERAL (
        SELECT count(*) OVER () AS attempts, state, error_code FROM attempts
        WHERE run_id = steps.run_id AND round = steps.round AND position = steps.position
        ORDER BY number DESC LIMIT 1
    ) tries ON true
    WHERE steps.run_id = :run_id AND steps.round = :round
    ORDER BY steps.position
""")
_WAITS = text(WAIT_ENTRIES)
_LIVE_POOLS = text("""
    SELECT document FROM pool_snapshots
    WHERE digest IN (SELECT pool_digest FROM runs WHERE state = ANY(:states))
""")


@dataclass(frozen=True, slots=True)
class StepProgress:
    """A step as it stands: its state, how often it was tried, and what became of the newest try."""

    round: int
    position: int
    worker: str
    state: str
    reason: str | None
    reads: tuple[int, ...]
    started_at: datetime | None
    ended_at: datetime | None
    attempts: int
    attempt_state: str | None
    error_code: str | None
    # Since when it waits, if it does.
    waiting_since: datetime | None = None


@dataclass(frozen=True, slots=True)
class PlanningProgress:
    """The planning calls of the present round: how many, and what became of the newest."""

    attempts: int
    state: str
    error_code: str | None
    sent_at: datetime


@dataclass(frozen=True, slots=True)
class RunProgress:
    """A run as it stands. ``read_at`` is the database's time; ``called`` says whether any model was called yet."""

    id: UUID
    state: str
    reason: str | None
    round: int
    execution: int
    pool: str
    created_at: datetime
    ended_at: datetime | None
    read_at: datetime
    called: bool
    planning: PlanningProgress | None
    steps: tuple[StepProgress, ...]
    # The runs below it, from the top.
    below: tuple[Descendant, ...] = ()
    # Reviews, looked up only while something waits for one.
    reviews: tuple[ReviewLine, ...] = ()


async def read_progress(database: Database, run_id: UUID) -> RunProgress | None:
    """How far a run is; None if there is no such run."""
    async with database.read() as connection:
        run = (await connection.execute(_RUN, {"run_id": run_id})).one_or_none()
        if run is None:
            return None
        steps = (await connection.execute(_STEPS, {"run_id": run_id, "round": run.round})).all()
        waiting = [(step.round, step.position) for step in steps if step.state == "waiting"]
        entries = (await connection.execute(_WAITS, {"run_id": run_id})).all() if waiting else ()
        below = await read_below(connection, run_id)
        asked = REVIEW in {run.reason, *(step.reason for step in steps)}
        reviews = await reviews_of_run(connection, run_id) if asked else ()
    since = waiting_since(entries, waiting)
    planning = None
    if run.attempts:
        planning = PlanningProgress(run.attempts, run.attempt_state, run.error_code, run.sent_at)
    return RunProgress(
        id=run_id,
        state=run.state,
        reason=run.reason,
        round=run.round,
        execution=run.execution,
        pool=run.pool,
        created_at=run.created_at,
        ended_at=run.ended_at,
        read_at=run.read_at,
        called=run.called,
        planning=planning,
        steps=tuple(
            StepProgress(
                round=step.round,
                position=step.position,
                worker=step.worker,
                state=step.state,
                reason=step.reason,
                reads=tuple(step.reads),
                started_at=step.started_at,
                ended_at=step.ended_at,
                attempts=step.attempts,
                attempt_state=step.attempt_state,
                error_code=step.error_code,
                waiting_since=since.get((step.round, step.position)),
            )
            for step in steps
        ),
        below=below,
        reviews=reviews,
    )


async def live_pool_documents(database: Database) -> tuple[bytes, ...]:
    """The pinned pools of all runs that have not ended, each once."""
    async with database.read() as connection:
        return tuple((await connection.scalars(_LIVE_POOLS, {"states": list(RUN_LIVE)})).all())


async def listen(database: Database, channel: str) -> AsyncGenerator[str, None]:
    """The payloads of a channel's notifications, until closed; ends when the connection is lost.

    Has a connection of its own, because one that listens must not go back to the pool. Behind a pooler that connection
    is nobody's own, so nothing is ever heard: another client would be told instead.
    """
    url = database.url.replace("postgresql+psycopg://", "postgresql://", 1)
    try:
        async with await psycopg.AsyncConnection.connect(url, autocommit=True, connect_timeout=10) as connection:
            (backend_pid,) = await (await connection.execute("SELECT pg_backend_pid()")).fetchone() or (0,)
            if not is_pooled(connection, backend_pid):
                await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
                async for notification in connection.notifies():
                    yield notification.payload
                return
    except psycopg.OperationalError:
        return
    await asyncio.Event().wait()
