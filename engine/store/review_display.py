"""What a reviewer is shown: built from artifacts by a manifest, and committed to, so that it can be shown again.

A decision binds the commitment over exactly these bytes. Whoever relies on one renders them anew: if a text was changed
since, the commitment does not fit any more. Reads text only through `engine.store.artifacts`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from engine.errors import RefusedError
from engine.ledger.commitment import commitment, new_salt
from engine.ledger.reviews import REVIEW_DOMAIN
from engine.store.artifacts import JSON, ArtifactDraft, read_contents
from engine.store.database import Database
from engine.store.ids import artifact_id

MANIFEST_KIND: Final = "review_manifest"
_READ_RELIED_ON = text(
    "SELECT id FROM reviews WHERE run_id = :run_id AND state NOT IN ('rejected', 'stale', 'withdrawn')"
)


@dataclass(frozen=True, slots=True)
class DisplayPart:
    """A text that is shown: what it is (task, plan, subtask, input, output), of which step, and where it is stored."""

    role: str
    step: int | None
    owner_id: UUID
    kind: str

    def said(self) -> dict[str, Any]:
        """The part as the manifest names it."""
        artifact = artifact_id(self.owner_id, self.kind)
        return {
            "role": self.role, "step": self.step, "owner": str(self.owner_id), "kind": self.kind,
            "artifact": str(artifact),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class ShownPart:
    """A part with its text."""

    role: str
    step: int | None
    artifact_id: UUID
    text: str


@dataclass(frozen=True, slots=True)
class Display:
    """What is shown. ``facts`` are names and numbers (gate, step, worker, pool); ``shown`` commits to all of it."""

    review_id: UUID
    facts: Mapping[str, Any]
    parts: tuple[ShownPart, ...]
    shown: bytes
    manifest: bytes

    def draft(self) -> ArtifactDraft:
        """The manifest, about to be stored; it holds the salt of the commitment and no text."""
        return ArtifactDraft(self.review_id, MANIFEST_KIND, self.manifest, role="manifest", media_type=JSON)


async def make_display(
    database: Database, review_id: UUID, facts: Mapping[str, Any], parts: Sequence[DisplayPart]
) -> Display | None:
    """Builds what is to be shown of a new review; None if one of the texts is damaged or not stored (any more)."""
    manifest = {**facts, "version": 1, "salt": new_salt().hex(), "parts": [part.said() for part in parts]}
    wanted = {(part.owner_id, part.kind) for part in parts}
    try:
        contents = await database.query(lambda connection: _contents(connection, wanted))
    except RefusedError:
        return None
    return _rendered(review_id, manifest, contents)


async def read_displays(database: Database, run_id: UUID) -> dict[UUID, Display | None]:
    """What would be shown today of every review of a run that somebody may rely on; None where a text is missing."""

    async def read(connection: AsyncConnection) -> dict[UUID, Display | None]:
        ids = list((await connection.scalars(_READ_RELIED_ON, {"run_id": run_id})).all())
        try:
            return await _displays(connection, ids)
        except RefusedError:
            return {own: await _one_by_one(connection, own) for own in ids}

    return await database.query(read)


async def _one_by_one(connection: AsyncConnection, review_id: UUID) -> Display | None:
    """A review's display, where a text of some review is damaged; None if it is one of this one."""
    try:
        return (await _displays(connection, [review_id]))[review_id]
    except RefusedError:
        return None


async def read_display(database: Database, review_id: UUID) -> Display | None:
    """What would be shown of one review; None where a text is missing."""
    found = await database.query(lambda connection: _displays(connection, [review_id]))
    return found[review_id]


async def display_erased(database: Database, review_id: UUID) -> bool:
    """Whether something that this review displays was erased; its manifest goes with every text that it names."""
    statement = text("SELECT EXISTS (SELECT FROM artifacts WHERE id = :id AND erasure_id IS NOT NULL)")
    where = {"id": artifact_id(review_id, MANIFEST_KIND)}
    return bool(await database.query(lambda connection: connection.scalar(statement, where)))


async def _displays(connection: AsyncConnection, ids: Sequence[UUID]) -> dict[UUID, Display | None]:
    manifests = await read_contents(connection, ids, (MANIFEST_KIND,)) if ids else {}
    documents = {owner: json.loads(content) for (owner, _), content in manifests.items()}
    wanted = {(UUID(part["owner"]), part["kind"]) for document in documents.values() for part in document["parts"]}
    contents = await _contents(connection, wanted)
    return {own: _rendered(own, documents[own], contents) if own in documents else None for own in ids}


async def _contents(connection: AsyncConnection, wanted: Iterable[tuple[UUID, str]]) -> dict[tuple[UUID, str], bytes]:
    pairs = list(wanted)
    if not pairs:
        return {}
    return await read_contents(connection, {owner for owner, _ in pairs}, sorted({kind for _, kind in pairs}))


def _rendered(
    review_id: UUID, manifest: Mapping[str, Any], contents: Mapping[tuple[UUID, str], bytes]
) -> Display | None:
    parts = []
    for part in manifest["parts"]:
        content = contents.get((UUID(part["owner"]), part["kind"]))
        if content is None:
            return None
        parts.append({**part, "text": content.decode("utf-8", "replace")})
    facts = {key: value for key, value in manifest.items() if key not in {"salt", "parts"}}
    # Keys are ASCII and there are no floats, so this is RFC 8785.
    shown = json.dumps({**facts, "parts": parts}, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return Display(
        review_id=review_id,
        facts=facts,
        parts=tuple(ShownPart(one["role"], one["step"], UUID(one["artifact"]), one["text"]) for one in parts),
        shown=commitment(bytes.fromhex(manifest["salt"]), REVIEW_DOMAIN, str(review_id), shown.encode()),
        manifest=json.dumps(dict(manifest), sort_keys=True, separators=(",", ":")).encode(),
    )
