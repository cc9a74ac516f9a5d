"""Outputs that reviewers sent back, with what they said: part of the prompt of the next attempt."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from engine.store.artifacts import read_contents
from engine.store.database import Database
from engine.store.ids import artifact_id

_READ = text("""
    SELECT reviews.attempt_id, decided.id AS decision_id
    FROM reviews JOIN review_decisions decided ON decided.review_id = reviews.id AND decided.decision = 'reject'
    WHERE reviews.run_id = :run_id AND reviews.round = :round AND reviews.position = :position AND reviews.sent_back
    ORDER BY reviews.seq
""")


@dataclass(frozen=True, slots=True)
class SentBack:
    """An output that a reviewer did not accept, and the comment; each with the id of its artifact."""

    answer_id: UUID
    answer: str
    comment_id: UUID
    comment: str


async def read_sent_back(database: Database, run_id: UUID, round_number: int, position: int) -> tuple[SentBack, ...]:
    """What reviewers sent back of a step, in order; what is erased by now is left out."""

    async def read(connection: AsyncConnection) -> tuple[SentBack, ...]:
        place = {"run_id": run_id, "round": round_number, "position": position}
        rows = (await connection.execute(_READ, place)).all()
        owners = {owner for row in rows for owner in (row.attempt_id, row.decision_id)}
        contents = await read_contents(connection, owners, ("output", "reason"))
        found = []
        for row in rows:
            answer, comment = contents.get((row.attempt_id, "output")), contents.get((row.decision_id, "reason"))
            if answer is not None and comment is not None:
                ids = artifact_id(row.attempt_id, "output"), artifact_id(row.decision_id, "reason")
                found.append(SentBack(ids[0], answer.decode(), ids[1], comment.decode()))
        return tuple(found)

    return await database.query(read)
