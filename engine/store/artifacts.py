"""Artifacts: the only module that writes and reads stored text (task, subtasks, outputs, plan text, reasoning).

Everything confidential passes through here, so that it can be encrypted and erased in one place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    contents: dict[tuple[UUID, str], bytes] = {}
    for owner_id, kind, content in await connection.execute(query):
        key = (owner_id, kind)
        contents[key] = contents.get(key, b"") + content
    return contents
