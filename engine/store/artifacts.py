"""Artifacts: the only module that writes and reads stored text (task, subtasks, outputs, plan text, reasoning).

Everything confidential passes through here, so that it is sealed in one place (see `engine.store.sealing`) and can be
erased in one place (see `engine.store.erasing`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from sqlalchemy import Select, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from engine.errors import RefusedError, UnavailableError
from engine.keystore import RunKeys
from engine.keystore.keys import SealedPlace, seal
from engine.ledger.commitment import ARTIFACT_DOMAIN, commitment, new_salt
from engine.store.exchange import Connection, Row, exchange
from engine.store.ids import artifact_id
from engine.store.sealing import keyring_of, keyring_of_pooled, opened
from engine.store.tables import Artifact, Run

TEXT = "text/plain;charset=utf-8"
JSON = "application/json"
# Tasks up to that size are read together.
_TASKS_TOGETHER_BYTES = 65_536

INSERT = """
    INSERT INTO artifacts
        (id, tenant_id, run_id, owner_id, kind, ordinal, role, media_type, content, salt, byte_count, key_epoch)
    VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
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
    SELECT artifacts.id, artifacts.run_id, owner_id, kind, ordinal, content, salt, artifacts.key_epoch,
           runs.key_epoch AS run_epoch
    FROM artifacts JOIN wanted USING (owner_id, kind) JOIN runs ON runs.id = artifacts.run_id
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

    def row(self, tenant_id: UUID, run_id: UUID, keys: RunKeys | None) -> tuple[Any, ...]:
        """Parameters for ``INSERT``; sealed with the run's keys, where it has some, and then the salt is inside."""
        content, salt, epoch = self.content, self.salt, 0
        if keys is not None:
            epoch = keys.epoch
            place = SealedPlace(run_id, self.id, self.owner_id, self.kind, self.ordinal, epoch)
            key = keys.key_of(self.id, epoch)
            assert key is not None
            content = seal(key, place, self.salt, self.content)
        return (
            self.id,
            tenant_id,
            run_id,
            self.owner_id,
            self.kind,
            self.ordinal,
            self.role,
            self.media_type,
            content,
            None if keys is not None else salt,
            len(self.content),
            epoch,
        )


def text_draft(owner_id: UUID, kind: str, text: str) -> ArtifactDraft:
    """A draft of clean text; raises UnicodeEncodeError for text that did not pass the text boundary."""
    return ArtifactDraft(owner_id, kind, text.encode())


class Contents(dict[tuple[UUID, str], bytes]):
    """Bytes by (owner, kind). What is erased is missing, and named in ``erased``."""

    def __init__(self) -> None:
        super().__init__()
        self.erased: set[tuple[UUID, str]] = set()


# What opening a text needs beside its content; the run's epoch says whether remembered keys are still good.
_SEALED = (
    Artifact.id,
    Artifact.run_id,
    Artifact.owner_id,
    Artifact.kind,
    Artifact.ordinal,
    Artifact.content,
    Artifact.salt,
    Artifact.key_epoch,
    func.coalesce(Run.key_epoch, Artifact.key_epoch).label("run_epoch"),
)


async def read_contents(connection: AsyncConnection, owner_ids: Iterable[UUID], kinds: Sequence[str]) -> Contents:
    """The bytes by (owner, kind), the parts of each joined in order; what is not there is missing from the result.

    Raises UnavailableError ``text-key-missing`` and its like, RefusedError ``text-damaged``.
    """
    query = (
        _query(_SEALED)
        .where(Artifact.owner_id.in_(list(owner_ids)), Artifact.kind.in_(list(kinds)))
        .order_by(Artifact.owner_id, Artifact.kind, Artifact.ordinal)
    )
    return joined(await _opened(connection, query))


_READ_CONTENTS = """
    SELECT artifacts.id, artifacts.run_id, owner_id, kind, ordinal, content, salt, artifacts.key_epoch,
           coalesce(runs.key_epoch, artifacts.key_epoch) AS run_epoch
    FROM artifacts LEFT JOIN runs ON runs.id = artifacts.run_id
    WHERE owner_id = ANY(%s) AND kind = ANY(%s)
    ORDER BY owner_id, kind, ordinal
"""

_READ_DRAFTS = """
    SELECT artifacts.id, artifacts.run_id, owner_id, kind, ordinal, role, media_type, content, salt,
           artifacts.key_epoch, coalesce(runs.key_epoch, artifacts.key_epoch) AS run_epoch
    FROM artifacts LEFT JOIN runs ON runs.id = artifacts.run_id
    WHERE owner_id = %s
    ORDER BY kind, ordinal
"""


async def read_contents_within(connection: Connection, owner_ids: Iterable[UUID], kinds: Sequence[str]) -> Contents:
    """The same as `read_contents` inside a write's transaction."""
    (rows,) = await exchange(connection, [(_READ_CONTENTS, (list(owner_ids), list(kinds)))])
    return joined(await opened(keyring_of(connection), rows))


async def read_tasks(connection: AsyncConnection, run_ids: Sequence[UUID], bytes_max: int) -> dict[UUID, bytes | None]:
    """The beginnings of runs' tasks, cut to ``bytes_max``; None for one that was erased.

    A run whose keys are missing is missing here too: a list of many runs is not to fail for one of them. Sealed bytes
    are opened whole, so large tasks are read one after the other.
    """
    wanted = (Artifact.owner_id.in_(run_ids), Artifact.kind == "task", Artifact.ordinal == 0)
    large = Artifact.byte_count > _TASKS_TOGETHER_BYTES
    queries = [_query(_SEALED).where(*wanted, ~large)]
    alone = (await connection.scalars(select(Artifact.id).where(*wanted, large))).all()
    queries += [_query(_SEALED).where(Artifact.id == artifact) for artifact in alone]
    keyring = await keyring_of_pooled(connection)
    found: dict[UUID, bytes | None] = {}
    for query in queries:
        for row in await connection.execute(query):
            with suppress(UnavailableError, RefusedError):
                (own,) = await opened(keyring, [row._asdict()])
                found[row.run_id] = None if own["content"] is None else own["content"][:bytes_max]
    return found


def _query(columns: Iterable[Any]) -> Select[Any]:
    # Texts of a tenant's own chain belong to no run.
    found: Select[Any] = select(*columns).outerjoin(Run, Run.id == Artifact.run_id)
    return found


async def _opened(connection: AsyncConnection, query: Select[Any]) -> list[Row]:
    rows = [row._asdict() for row in await connection.execute(query)]
    return await opened(await keyring_of_pooled(connection), rows)


@dataclass(frozen=True, slots=True)
class StoredArtifact:
    """An artifact of a run as it is stored. ``content`` and ``salt`` are None where they are erased, or not asked for.

    ``byte_count`` is the size of the content in bytes, also of one that is not here.
    """

    id: UUID
    run_id: UUID
    owner_id: UUID
    kind: str
    ordinal: int
    role: str
    media_type: str
    byte_count: int
    erased: bool = False
    content: bytes | None = field(default=None, repr=False)
    salt: bytes | None = field(default=None, repr=False)

    @property
    def path(self) -> str:
        """What the commitment binds the content to."""
        return f"{self.owner_id}/{self.kind}/{self.ordinal}"


_OUTLINE = (
    Artifact.id,
    Artifact.run_id,
    Artifact.owner_id,
    Artifact.kind,
    Artifact.ordinal,
    Artifact.role,
    Artifact.media_type,
    Artifact.byte_count,
    Artifact.erased_at.is_not(None).label("erased"),
)


async def list_run_artifacts(connection: AsyncConnection, run_id: UUID) -> list[StoredArtifact]:
    """All artifacts of a run, ordered by id, without their content and salts: for whoever reads them one by one."""
    query = select(*_OUTLINE).where(Artifact.run_id == run_id).order_by(Artifact.id)
    return [StoredArtifact(**row._asdict()) for row in await connection.execute(query)]


async def read_run_artifacts(
    connection: AsyncConnection, run_id: UUID, artifact_ids: Collection[UUID] | None = None
) -> list[StoredArtifact]:
    """A run's artifacts with content and salts, ordered by id; all of them, or those of ``artifact_ids``.

    What is stored of them stays in memory, so the caller asks for as many as it can hold. Raises what `read_contents`
    does.
    """
    columns = {column.key: column for column in (*_OUTLINE, *_SEALED)}
    query = _query(columns.values()).where(Artifact.run_id == run_id).order_by(Artifact.id)
    if artifact_ids is not None:
        query = query.where(Artifact.id.in_(list(artifact_ids)))
    names = StoredArtifact.__dataclass_fields__
    rows = await _opened(connection, query)
    return [StoredArtifact(**{name: row[name] for name in names}) for row in rows]


def joined(rows: Iterable[Mapping[str, Any]]) -> Contents:
    """Opened rows of owner, kind and content, in order, as bytes by (owner, kind)."""
    contents = Contents()
    for row in rows:
        key = (row["owner_id"], row["kind"])
        if row["content"] is None:
            contents.erased.add(key)
        else:
            contents[key] = contents.get(key, b"") + row["content"]
    for key in contents.erased:
        contents.pop(key, None)
    return contents


async def read_drafts_within(connection: Connection, owner_id: UUID) -> list[ArtifactDraft]:
    """What an owner's artifacts were made of, as they were given to be stored; what is erased is missing."""
    (rows,) = await exchange(connection, [(_READ_DRAFTS, (owner_id,))])
    found = await opened(keyring_of(connection), rows)
    parts = ("owner_id", "kind", "content", "role", "media_type", "ordinal", "salt")
    return [ArtifactDraft(*(row[part] for part in parts)) for row in found if row["content"] is not None]
