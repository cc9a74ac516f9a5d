"""Reading reviews for people and programs: lists, one review with what was said, statistics for oversight.

Only looks. What a reviewer is shown is made by `engine.store.review_display`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from engine.store.artifacts import read_contents
from engine.store.database import Database
from engine.store.lineage import FAMILY
from engine.store.review_rows import READ_ROWS, ReviewFacts
from engine.store.reviews import READ_AUTHORS, READ_ENTRIES, READ_PERSONS, review_book

# Approvals as they are on record, never more than were asked for; `_lines` counts again for a review that is open.
_LINE: Final = """
    SELECT reviews.*, clock_timestamp() AS read_at,
           least(approvals, (
               SELECT count(*) FROM review_decisions WHERE review_id = reviews.id AND decision = 'approve'
           )) AS approved,
           ARRAY(SELECT person FROM review_decisions WHERE review_id = reviews.id ORDER BY decided_at, id) AS decided_by
    FROM reviews
"""
# What a review book is made of (`engine.store.reviews`), without the lock of a transaction that writes.
_BOOK: Final = [text(sql.replace("%s", ":run_id")) for sql in (READ_ENTRIES, READ_AUTHORS, READ_PERSONS, READ_ROWS)]
_LIST = text(
    f"{_LINE} WHERE tenant_id = :tenant_id AND (state = 'open' OR :all) ORDER BY requested_at, id LIMIT :limit"
)
_OF_RUN = text(f"{_LINE} WHERE run_id = :run_id ORDER BY seq")
_ONE = text(f"{_LINE} WHERE id = :id")
# Runs with the newest reviews, and all that wait because the two differ.
_LOOKED_AT = text("""
    (SELECT run_id FROM reviews WHERE tenant_id = :tenant_id
     GROUP BY run_id ORDER BY max(requested_at) DESC LIMIT :limit)
    UNION
    SELECT id FROM runs WHERE tenant_id = :tenant_id AND state = 'waiting' AND reason = 'review-contradicted'
    ORDER BY run_id
""")
_FACTS: Final = [
    text("SELECT body FROM ledger_entries WHERE run_id = :run_id AND type LIKE 'review.%' ORDER BY seq"),
    text(READ_ROWS.replace("%s", ":run_id")),
]
_FIND = text(
    "SELECT id FROM reviews WHERE tenant_id = :tenant_id AND starts_with(id::text, :prefix) ORDER BY id LIMIT 2"
)
_OPEN_BELOW: Final = f"""{FAMILY}
    SELECT reviews.id FROM family JOIN reviews ON reviews.run_id = family.id
    WHERE reviews.state = 'open' ORDER BY family.height, reviews.run_id, reviews.seq
"""  # noqa: S608  # a constant
_DECISIONS = text("SELECT * FROM review_decisions WHERE review_id = :id ORDER BY decided_at, id")
_OPENINGS = text("SELECT person, actor_id, opened_at FROM review_openings WHERE review_id = :id ORDER BY opened_at")
_COMMENTS = text("""
    SELECT at, body FROM ledger_entries
    WHERE run_id = :run_id AND type = 'review.commented' AND position(convert_to(:id, 'UTF8') IN body) > 0 ORDER BY seq
""")
# Dwell time is from the first look to the decision; whoever never looked has none.
_STATS = text("""
    SELECT decided.person, reviews.gate,
           count(*) AS decisions,
           count(*) FILTER (WHERE decided.decision = 'approve') AS approved,
           count(*) FILTER (WHERE decided.decision = 'reject') AS rejected,
           count(*) FILTER (WHERE decided.decision = 'bypass') AS bypassed,
           count(opened.opened_at) FILTER (WHERE opened.opened_at <= decided.decided_at) AS opened,
           percentile_cont(0.5) WITHIN GROUP (ORDER BY extract(epoch FROM decided.decided_at - opened.opened_at))
               FILTER (WHERE opened.opened_at <= decided.decided_at) AS dwell_median_s,
           min(extract(epoch FROM decided.decided_at - opened.opened_at))
               FILTER (WHERE opened.opened_at <= decided.decided_at) AS dwell_min_s,
           percentile_cont(0.5) WITHIN GROUP (ORDER BY extract(epoch FROM decided.decided_at - reviews.requested_at))
               AS waited_median_s
    FROM review_decisions decided
    JOIN reviews ON reviews.id = decided.review_id
    LEFT JOIN review_openings opened ON opened.review_id = decided.review_id AND opened.person = decided.person
    WHERE reviews.tenant_id = :tenant_id
    GROUP BY decided.person, reviews.gate
    ORDER BY decided.person, reviews.gate
""")
_STATES = text("""
    SELECT gate, state, count(*) AS reviews,
           percentile_cont(0.5) WITHIN GROUP (ORDER BY extract(epoch FROM closed_at - requested_at)) AS open_median_s
    FROM reviews WHERE tenant_id = :tenant_id GROUP BY gate, state ORDER BY gate, state
""")


@dataclass(frozen=True, slots=True)
class ReviewLine:
    """A review in a list. ``step`` is the position; ``approved`` of ``approvals`` people have approved so far."""

    id: UUID
    run_id: UUID
    gate: str
    round: int
    step: int | None
    state: str
    reason: str
    holds: bool
    level: int
    approved: int
    approvals: int
    decided_by: tuple[str, ...]
    four_eyes: bool
    reviewers: tuple[str, ...]
    excluded: tuple[str, ...]
    bypass: str
    sent_back: bool
    requested_at: datetime
    expires_at: datetime | None
    on_expiry: str | None
    closed_at: datetime | None
    read_at: datetime
    meaning: str | None
    attempt_id: UUID | None
    subject: bytes
    plan: bytes
    policy: bytes
    shown: bytes


@dataclass(frozen=True, slots=True)
class DecisionSnapshot:
    """What one person decided, what it means and why; None for a text that is erased or was not given."""

    id: UUID
    decision: str
    meaning: str
    meaning_text: str | None
    reason: str | None
    person: str
    actor_id: str
    on_behalf_of: str | None
    at: datetime


@dataclass(frozen=True, slots=True)
class CommentSnapshot:
    """What somebody said without deciding."""

    person: str
    at: datetime
    text: str | None


@dataclass(frozen=True, slots=True)
class OpeningSnapshot:
    """Who had it displayed first when."""

    person: str
    at: datetime


@dataclass(frozen=True, slots=True)
class ReviewSnapshot:
    """Everything about a review but what it displays."""

    line: ReviewLine
    decisions: tuple[DecisionSnapshot, ...]
    comments: tuple[CommentSnapshot, ...]
    openings: tuple[OpeningSnapshot, ...]


async def list_reviews(
    database: Database, tenant_id: UUID, *, all_states: bool = False, limit: int = 100
) -> tuple[ReviewLine, ...]:
    """Reviews that wait for somebody, oldest first; with ``all_states`` those that are closed, too."""
    values = {"tenant_id": tenant_id, "all": all_states, "limit": limit}

    async def read(connection: AsyncConnection) -> tuple[ReviewLine, ...]:
        return await _lines(connection, (await connection.execute(_LIST, values)).all())

    return await database.query(read)


async def reviews_of_run(connection: AsyncConnection, run_id: UUID) -> tuple[ReviewLine, ...]:
    """All reviews of a run, in the order in which they were asked for."""
    return await _lines(connection, (await connection.execute(_OF_RUN, {"run_id": run_id})).all())


async def find_reviews(database: Database, tenant_id: UUID, prefix: str) -> list[UUID]:
    """Reviews whose id begins with ``prefix`` (lower-case hexadecimal and hyphens), at most two."""

    async def read(connection: AsyncConnection) -> list[UUID]:
        return list((await connection.scalars(_FIND, {"tenant_id": tenant_id, "prefix": prefix})).all())

    return await database.query(read)


async def contradicted_reviews(database: Database, tenant_id: UUID, runs_max: int) -> dict[UUID, str]:
    """By run, of which review the tables say something else than the ledger, and what; one review of each run.

    Looks at the runs with the newest reviews, at most so many, and at those that wait because of it.
    """

    async def read(connection: AsyncConnection) -> dict[UUID, str]:
        # One moment for both sides.
        await connection.execution_options(isolation_level="REPEATABLE READ")
        found: dict[UUID, str] = {}
        values = {"tenant_id": tenant_id, "limit": runs_max}
        for run_id in (await connection.scalars(_LOOKED_AT, values)).all():
            entries, stored = [
                [dict(row) for row in (await connection.execute(query, {"run_id": run_id})).mappings()]
                for query in _FACTS
            ]
            facts = ReviewFacts()
            for entry in entries:
                facts.add(json.loads(bytes(entry["body"])))
            for review, words in facts.differences(stored).items():
                found.setdefault(run_id, f"review {review} {words}")
        return found

    return await database.query(read)


async def open_reviews(database: Database, run_id: UUID) -> list[UUID]:
    """The reviews of a run and of all runs below it that wait for somebody, from the top."""
    (rows,) = await database.fetch((_OPEN_BELOW, (run_id,)))
    return [row["id"] for row in rows]


async def read_review(database: Database, review_id: UUID) -> ReviewSnapshot | None:
    """One review with what people decided and said; None if there is no such review."""
    return await database.query(lambda connection: _read(connection, review_id))


async def _read(connection: AsyncConnection, review_id: UUID) -> ReviewSnapshot | None:
    await connection.execution_options(isolation_level="REPEATABLE READ")
    lines = await _lines(connection, (await connection.execute(_ONE, {"id": review_id})).all())
    if not lines:
        return None
    (line,) = lines
    decisions = (await connection.execute(_DECISIONS, {"id": review_id})).all()
    openings = (await connection.execute(_OPENINGS, {"id": review_id})).all()
    entries = (await connection.execute(_COMMENTS, {"run_id": line.run_id, "id": str(review_id)})).all()
    comments = [json.loads(bytes(entry.body))["data"] for entry in entries]
    owners = [decision.id for decision in decisions] + [UUID(comment["order"]) for comment in comments]
    contents = await read_contents(connection, owners, ("reason", "meaning", "comment")) if owners else {}

    def said(owner: UUID, kind: str) -> str | None:
        content = contents.get((owner, kind))
        return None if content is None else content.decode("utf-8", "replace")

    return ReviewSnapshot(
        line,
        tuple(
            DecisionSnapshot(
                id=decision.id,
                decision=decision.decision,
                meaning=decision.meaning,
                meaning_text=said(decision.id, "meaning"),
                reason=said(decision.id, "reason"),
                person=decision.person,
                actor_id=decision.actor_id,
                on_behalf_of=decision.on_behalf_of,
                at=decision.decided_at,
            )
            for decision in decisions
        ),
        tuple(
            CommentSnapshot(comment["person"], entry.at, said(UUID(comment["order"]), "comment"))
            for comment, entry in zip(comments, entries, strict=True)
        ),
        tuple(OpeningSnapshot(opening.person, opening.opened_at) for opening in openings),
    )


async def _lines(connection: AsyncConnection, rows: Sequence[Any]) -> tuple[ReviewLine, ...]:
    """Lines with the approvals that count today: the ledger is only read for open reviews that have any."""
    partly = [row for row in rows if row.state == "open" and row.approved]
    counted: dict[str, int] = {}
    for run_id in {row.run_id for row in partly}:
        entries, authors, persons, stored = [
            [dict(row) for row in (await connection.execute(query, {"run_id": run_id})).mappings()] for query in _BOOK
        ]
        book = review_book([entries, authors, (), persons, stored])
        counted |= {own: book.approvals(record) for own, record in book.records.items()}
    approved = {row.id: min(counted.get(str(row.id), 0), row.approvals) for row in partly}
    return tuple(_line(row, approved.get(row.id, row.approved)) for row in rows)


def _line(row: Any, approved: int) -> ReviewLine:
    return ReviewLine(
        id=row.id,
        run_id=row.run_id,
        gate=row.gate,
        round=row.round,
        step=row.position,
        state=row.state,
        reason=row.reason,
        holds=row.holds,
        level=row.level,
        approved=approved,
        approvals=row.approvals,
        decided_by=tuple(row.decided_by),
        four_eyes=row.four_eyes,
        reviewers=tuple(row.reviewers),
        excluded=tuple(row.excluded),
        bypass=row.bypass,
        sent_back=row.sent_back,
        requested_at=row.requested_at,
        expires_at=row.expires_at,
        on_expiry=row.on_expiry,
        closed_at=row.closed_at,
        read_at=row.read_at,
        meaning=json.loads(bytes(row.rule))["meaning"],
        attempt_id=row.attempt_id,
        subject=bytes(row.subject),
        plan=bytes(row.plan),
        policy=bytes(row.policy),
        shown=bytes(row.shown),
    )


@dataclass(frozen=True, slots=True)
class ReviewerStats:
    """How one person reviews at one gate. Times in seconds; ``opened`` is how often they looked before deciding."""

    person: str
    gate: str
    decisions: int
    approved: int
    rejected: int
    bypassed: int
    opened: int
    dwell_median_s: float | None
    dwell_min_s: float | None
    waited_median_s: float | None


@dataclass(frozen=True, slots=True)
class GateStats:
    """How many reviews of a gate stand in a state, and how long those that are closed were open (median)."""

    gate: str
    state: str
    reviews: int
    open_median_s: float | None


async def review_stats(database: Database, tenant_id: UUID) -> tuple[Sequence[ReviewerStats], Sequence[GateStats]]:
    """How carefully people review: by person and gate, and what became of the reviews of each gate."""

    async def read(connection: AsyncConnection) -> tuple[list[ReviewerStats], list[GateStats]]:
        await connection.execution_options(isolation_level="REPEATABLE READ")
        people = (await connection.execute(_STATS, {"tenant_id": tenant_id})).all()
        gates = (await connection.execute(_STATES, {"tenant_id": tenant_id})).all()
        return (
            [ReviewerStats(**_floats(row, "dwell_median_s", "dwell_min_s", "waited_median_s")) for row in people],
            [GateStats(**_floats(row, "open_median_s")) for row in gates],
        )

    return await database.query(read)


def _floats(row: Any, *names: str) -> dict[str, Any]:
    values: dict[str, Any] = dict(row._mapping)  # noqa: SLF001  # SQLAlchemy's public way to a mapping
    return values | {name: None if values[name] is None else float(values[name]) for name in names}
