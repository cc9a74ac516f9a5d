"""Artifacts: the only module that writes and reads stored text (task, subtasks, outputs, plan text, reasoning).

Everything confidential passes through here, so that it can be encrypted and erased in one place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from engine.ledger.commitment import ARTIFACT_DOMAIN, commitment, new_salt
from engine.store.ids import artifact_id
from engine.store.tables import Artifact

TEXT = "text/plain;charset=utf-8"
JSON = "application/json"

INSERT = """
    INSERT INTO artifacts
        (id, tenant_id, run_id, owner_id, kind, ordinal, role, media_type, content, salt, byte_count)
    VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
"""

# All that the prompt of a step is made of: the task, its own subtask, subtask and output of each step it may read.
READ_STEP_TEXTS = """
    WITH own AS (
        SELECT id, reads, reads_all FROM steps
        WHERE run_id = %(run_id)s AND round = %(round)s AND position = %(position)s
    ), seen AS (
        SELECT steps.id, steps.accepted_attempt_id FROM steps, own
        WHERE steps.run_id = %(run_id)s AND (
            (steps.round = %(round)s AND steps.position = ANY(own.reads))
            OR (steps.round = %(round)s - 1 AND own.reads_all)
        )
    ), wanted (owner_id, kind) AS (
        SELECT %(run_id)s::uuid, 'task'
        UNION ALL SELECT id, 'subtask' FROM own
        UNION ALL SELECT id, 'subtask' FROM seen
        UNION ALL SELECT accepted_attempt_id, 'output' FROM seen
    )
    SELECT owner_id, kind, content FROM artifacts JOIN wanted USING (owner_id, kind)
    ORDER BY owner_id, kind, ordinal
"""


@dataclass(frozen=True, slots=True)
class ArtifactDraft:
    """Bytes about to be stored. ``kind`` says what they are: task, subtask, plan_text, plan, output, reasoning.

    ``owner_id`` is the run, plan, step or attempt that the bytes belong to. The salt is made with the draft.
    """

    owner_id: UUID
    kind: str
    content: bytes
    role: str = "text"
    media_type: str = TEXT
    ordinal: int = 0
    salt: bytes = field(default_factory=new_salt, repr=False)

    @property
    def id(self) -> UUID:
        """Derived from owner, kind and ordinal."""
        return artifact_id(self.owner_id, self.kind, self.ordinal)

    @property
    def path(self) -> str:
        """What the commitment binds the bytes to."""
        return f"{self.owner_id}/{self.kind}/{self.ordinal}"

    def committed(self) -> dict[str, Any]:
        """What the ledger says of it: id, kind, size in bytes and the salted commitment, in hex."""
        return {
            "artifact": str(self.id),
            "kind": self.kind,
            "bytes": len(self.content),
            "commitment": commitment(self.salt, ARTIFACT_DOMAIN, self.path, self.content).hex(),
        }

    def row(self, tenant_id: UUID, run_id: UUID) -> tuple[Any, ...]:
        """Parameters for ``INSERT``."""
        return (
            self.id,
            tenant_id,
            run_id,
            self.owner_id,
            self.kind,
            self.ordinal,
            self.role,
            self.media_type,
            self.content,
            self.salt,
            len(self.content),
        )


def text_draft(owner_id: UUID, kind: str, text: str) -> ArtifactDraft:
    """A draft of clean text; raises UnicodeEncodeError for text that did not pass the text boundary."""
    return ArtifactDraft(owner_id, kind, text.encode())


async def read_contents(
    connection: AsyncConnection, owner_ids: Iterable[UUID], kinds: Sequence[str]
) -> dict[tuple[UUID, str], bytes]:
    """The bytes by (owner, kind), the parts of each joined in order; what is not there is missing from the result."""
    query = (
        select(Artifact.owner_id, Artifact.kind, Artifact.content)
        .where(Artifact.owner_id.in_(list(owner_ids)), Artifact.kind.in_(list(kinds)))
        .order_by(Artifact.owner_id, Artifact.kind, Artifact.ordinal)
    )
    return joined(row._asdict() for row in await connection.execute(query))


def joined(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[UUID, str], bytes]:
    """Rows of owner, kind and content, in order, as bytes by (owner, kind)."""
    contents: dict[tuple[UUID, str], bytes] = {}
    for row in rows:
        key = (row["owner_id"], row["kind"])
        contents[key] = contents.get(key, b"") + row["content"]
    return contents
