"""Making an evidence bundle: what goes in, in which order, and the file in the end. The form is that of docs/bundle.md.

The export is recorded first, then the log is brought up to date and signed, then everything is read in one snapshot and
cut at the signed checkpoint, so that what the bundle holds is covered by it. Must never write anything about a text.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final
from uuid import UUID, uuid4

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from engine.errors import InputError, RefusedError
from engine.evidence.log_members import history_member, proof_member
from engine.evidence.page import bundle_page
from engine.evidence.record import append_exported, outline, read_bodies, read_pools, read_texts
from engine.evidence.redaction import Collected, Committed, Rule, artifact_of
from engine.evidence.selection import Selection, select_runs
from engine.evidence.spool import Spool
from engine.ledger.entry import timestamp
from engine.store.artifacts import StoredArtifact
from engine.store.database import Database
from engine.store.exchange import Connection
from engine.store.log import Checkpoint, checkpoints, leaf_indexes, raw_connection
from engine.verifier.canonical import canonical

FORMAT: Final = "podium-bundle/1"
_NO_HEAD: Final = "0" * 64


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """What is to be exported, for whom, and where to. ``seal`` brings the log up to date and signs a checkpoint."""

    tenant: UUID
    runs: Sequence[UUID]
    target: Path
    actor_id: str
    on_behalf_of: str | None
    seal: Callable[[], Awaitable[None]]
    rules: Sequence[Rule] = ()
    with_sources: bool = False
    # Reasons and the like in the tenant's own chain may be about other runs.
    with_tenant: bool = False
    # Sizes of checkpoints that an auditor kept: the bundle proves consistency from each.
    since: Sequence[int] = ()
    id: UUID = field(default_factory=uuid4)


@dataclass(frozen=True, slots=True)
class Exported:
    """What came of it. ``unanchored`` counts entries that no signed checkpoint covers."""

    id: UUID
    path: Path
    byte_count: int
    sha256: str
    runs: Selection
    entries: int
    artifacts: Mapping[str, int]
    size: int | None
    unanchored: int
    # Texts of the tenant's own chain that are withheld because nobody asked for them.
    tenant_withheld: int = 0
    # No signed checkpoint covers anything of any run.
    unsigned: bool = False


async def export_bundle(database: Database, request: ExportRequest) -> Exported:
    """Writes the bundle; what stands at ``target`` is replaced only when the new file is complete.

    Raises InputError ``folder-missing``, ``redaction-unknown``, ``checkpoint-unknown``, RefusedError
    ``bundle-too-large``, and what reading texts raises.
    """
    folder = request.target.absolute().parent
    if not folder.is_dir():
        raise InputError("folder-missing", f"there is no folder {folder}", hint="make it, or name another with -o")
    selection = await database.query(
        lambda connection: select_runs(connection, request.runs, with_sources=request.with_sources)
    )
    numbers = {
        run: await append_exported(
            database,
            run,
            tenant=request.tenant,
            actor_id=request.actor_id,
            on_behalf_of=request.on_behalf_of,
            export=request.id,
            asked=request.runs,
            redacted=[str(rule) for rule in request.rules],
        )
        for run in selection.runs
    }
    await request.seal()
    with Spool(folder) as spool:
        async with database.read() as connection:
            # One snapshot for all queries, so that the parts agree with each other.
            await connection.execution_options(isolation_level="REPEATABLE READ")
            raw = await raw_connection(connection)
            bundle = _Assembly(connection, raw, request, selection, exported_at=numbers, spool=spool)
            await bundle.assemble()
        manifest = bundle.manifest()
        written = _write(spool, manifest, request.target)
    return bundle.exported(*written)


def _write(spool: Spool, manifest: bytes, target: Path) -> tuple[int, str]:
    """Writes the archive beside its place and moves it there; returns its size in bytes and its SHA-256."""
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with unfinished.open("xb") as file:
            spool.write(manifest, file)
        with unfinished.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = unfinished.stat().st_size
        unfinished.replace(target)
    except OSError as error:
        raise RefusedError(
            "bundle-not-written", f"{target} cannot be written: {error.strerror}", hint="name another file with -o"
        ) from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            unfinished.unlink()
    return size, digest


class _Assembly:
    """One bundle in the making: reads from the snapshot, adds to the spool."""

    def __init__(
        self,
        connection: AsyncConnection,
        raw: Connection,
        request: ExportRequest,
        selection: Selection,
        *,
        exported_at: Mapping[UUID, int],
        spool: Spool,
    ) -> None:
        self._connection = connection
        self._raw = raw
        self._request = request
        self._selection = selection
        # The number of the entry, in each run's chain, that says that it was exported.
        self._exported_at = exported_at
        self._spool = spool
        self._collected = Collected()
        self._heads: dict[str, dict[str, Any]] = {}
        self._leaves: dict[str, list[int]] = {}
        self._checkpoint: Checkpoint | None = None
        self._counts = {"disclosed": 0, "redacted": 0, "erased": 0}
        self._tenant_withheld = 0
        self._created_at = ""

    async def assemble(self) -> None:
        """Adds every member but the manifest."""
        connection, request = self._connection, self._request
        now: datetime = (await connection.execute(select(func.clock_timestamp()))).scalar_one()
        self._created_at = timestamp(now.astimezone(UTC))
        signed = await checkpoints(self._raw, request.tenant)
        self._checkpoint = signed[-1] if signed else None
        for run in self._selection.runs:
            await self._add_chain(run, f"runs/{run}/entries.jsonl")
        await self._add_chain(request.tenant, "system/entries.jsonl")
        await self._add_pools()
        await self._add_artifacts()
        await self._add_log(signed)
        self._spool.add("index.html", bundle_page(self._spool, self.described()))

    async def _add_chain(self, chain: UUID, member: str) -> None:
        """Adds the entries of a chain, its export included; what came later only as far as the checkpoint covers it."""
        name, limit = str(chain), None
        if self._checkpoint is not None:
            places = await leaf_indexes(self._raw, chain)
            leaves = [place for _, place in sorted(places.items()) if place < self._checkpoint.size]
            self._leaves[name] = leaves
            limit = max(len(leaves), self._exported_at.get(chain, 0))
            if chain == self._request.tenant and not self._is_covered():
                # Nobody signed for this export, so nothing of this chain is held back either.
                limit = None
        bodies = await read_bodies(self._connection, chain, limit)
        if not bodies and chain == self._request.tenant:
            self._leaves.pop(name, None)
            return
        self._spool.add(member, b"".join(body + b"\n" for body in bodies))
        head = hashlib.sha256(bodies[-1]).hexdigest() if bodies else _NO_HEAD
        self._heads[name] = {"entries": len(bodies), "head": head}
        for body in bodies:
            self._collected.take(json.loads(body))

    def _is_covered(self) -> bool:
        """Whether the checkpoint covers every run up to its export."""
        return all(number <= len(self._leaves[str(run)]) for run, number in self._exported_at.items())

    async def _add_pools(self) -> None:
        pools = await read_pools(self._connection, sorted(self._collected.pools))
        for digest, document in sorted(pools.items()):
            self._spool.add(f"pools/{digest}.json", document)

    async def _add_artifacts(self) -> None:
        """Adds the list of all artifacts that entries commit to, and the contents of those that are disclosed."""
        collected = self._collected
        withheld = collected.redacted(self._request.rules, disclosed_only=self._disclosed_only())
        rows: list[dict[str, Any]] = []
        by_run: dict[str, list[Committed]] = {}
        for committed in collected.artifacts.values():
            by_run.setdefault(committed.run, []).append(committed)
        for run in sorted(by_run):
            stored = await outline(self._connection, UUID(run))
            wanted = []
            for committed in by_run[run]:
                kept = stored.get(committed.id)
                if committed.id in withheld or kept is None or committed.id in collected.erased:
                    state = "erased" if committed.id in collected.erased or kept is None else "redacted"
                    rows.append(_row(committed, kept, state))
                else:
                    wanted.append(kept)
            said = {committed.id: committed for committed in by_run[run]}
            wanted.sort(key=lambda kept: str(kept.id))
            texts = read_texts(self._connection, UUID(run), wanted)
            rows.extend([self._add_text(said[str(text.id)], text) async for text in texts])
        tenant = str(self._request.tenant)
        for row in rows:
            self._counts[row["state"]] += 1
            if not self._request.with_tenant and (row["run"], row["state"]) == (tenant, "redacted"):
                self._tenant_withheld += 1
        rows.sort(key=lambda row: row["artifact"])
        self._spool.add("artifacts.json", canonical({"artifacts": rows}))

    def _add_text(self, committed: Committed, text: StoredArtifact) -> dict[str, Any]:
        if text.content is None or text.salt is None:
            return _row(committed, text, "erased")
        self._spool.add(f"artifacts/{committed.id}", text.content)
        return _row(committed, text, "disclosed", salt=text.salt.hex())

    def _disclosed_only(self) -> dict[str, set[str]]:
        """Chains that are not here for their texts, with those that may be disclosed all the same.

        Of a run that is here for its outputs only: what the runs asked for were shown of it, or took over. Of the
        tenant's own chain nothing, unless it was asked for.
        """
        shown = self._collected.shown
        seen = set().union(*(shown.get(str(run), set()) for run in self._selection.family))
        only = {str(run): seen for run in self._selection.taken_from}
        return only if self._request.with_tenant else {**only, str(self._request.tenant): set()}

    async def _add_log(self, signed: Sequence[Checkpoint]) -> None:
        current = self._checkpoint
        if current is None:
            return
        known = {one.size for one in signed}
        if missing := set(self._request.since) - known:
            raise InputError(
                "checkpoint-unknown",
                f"the log has no checkpoint of size {min(missing)}",
                hint="a checkpoint that was once signed and is gone now is a finding: keep it, and verify against it",
            )
        tenant = self._request.tenant
        named = (self._collected.checkpoints & known) | set(self._request.since)
        self._spool.add("log/checkpoint", current.note)
        self._spool.add("log/proof.json", await proof_member(self._raw, tenant, self._leaves, current))
        history = await history_member(self._raw, tenant, signed, current, named)
        self._spool.add("log/history.json", history)
        self._spool.add(
            "log/keys.json", canonical({"rotations": [{"note": note} for note in self._collected.rotations]})
        )

    def described(self) -> dict[str, Any]:
        """The manifest without its list of files."""
        tenant = str(self._request.tenant)
        current = self._checkpoint
        return {
            "created_at": self._created_at,
            "export": str(self._request.id),
            "format": FORMAT,
            "log": None if current is None else {"root": current.root.hex(), "size": current.size},
            "producer": f"podium {_version()}",
            "runs": [{**self._heads[str(run)], "run": str(run)} for run in self._selection.runs],
            "system": self._heads.get(tenant),
            "tenant": tenant,
        }

    def manifest(self) -> bytes:
        """The manifest over all members."""
        return canonical({**self.described(), "files": self._spool.files()})

    def exported(self, byte_count: int, sha256: str) -> Exported:
        """What is told of it."""
        entries = sum(head["entries"] for head in self._heads.values())
        return Exported(
            id=self._request.id,
            path=self._request.target,
            byte_count=byte_count,
            sha256=sha256,
            runs=self._selection,
            entries=entries,
            artifacts=dict(self._counts),
            size=None if self._checkpoint is None else self._checkpoint.size,
            unanchored=entries - sum(map(len, self._leaves.values())),
            tenant_withheld=self._tenant_withheld,
            unsigned=not any(self._leaves.get(str(run)) for run in self._selection.runs),
        )


def _row(committed: Committed, kept: StoredArtifact | None, state: str, *, salt: str | None = None) -> dict[str, Any]:
    """A row of ``artifacts.json``."""
    # Where the row is gone, its owner follows from its id and the ids that its entry names.
    owner = str(kept.owner_id) if kept is not None else _owner(committed)
    return {
        "artifact": committed.id,
        "bytes": committed.size,
        "commitment": committed.commitment,
        "kind": committed.kind,
        "media_type": "application/octet-stream" if kept is None else kept.media_type,
        "ordinal": 0 if kept is None else kept.ordinal,
        "owner": owner,
        "role": "text" if kept is None else kept.role,
        "run": committed.run,
        "salt": salt,
        "state": state,
    }


def _owner(committed: Committed) -> str:
    for owner in committed.owners:
        if artifact_of(owner, committed.kind) == committed.id:
            return owner
    return committed.run


def _version() -> str:
    try:
        return version("podium")
    except PackageNotFoundError:
        return "unknown"
