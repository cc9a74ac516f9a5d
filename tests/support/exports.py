"""Evidence bundles of real runs: made, opened, taken apart and put together again by an attacker."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from engine.evidence.export import Exported, ExportRequest, export_bundle
from engine.evidence.redaction import read_rules
from engine.store.database import Database
from engine.store.exchange import Connection, exchange
from engine.store.log import extend_log, log_root, log_size
from engine.store.tables import DEFAULT_TENANT
from engine.verifier import checkpoint, note
from engine.verifier.archive import MANIFEST, open_archive, pack
from engine.verifier.canonical import canonical
from engine.verifier.checkpoint import origin_of
from engine.verifier.report import Report
from engine.verifier.verify import verify_bundle

TENANT = UUID(DEFAULT_TENANT)
_INSERT = """
    INSERT INTO log_checkpoints (tenant_id, size, root, note, key_id) VALUES (%s, %s, %s, %s, %s)
    ON CONFLICT DO NOTHING
"""


class TestSigner:
    """Brings the log up to date and signs it, with a key of its own."""

    __test__ = False  # the name begins with Test, but it is none

    def __init__(self, database: Database) -> None:
        self._database = database
        self.key = Ed25519PrivateKey.generate()
        self.name = origin_of(DEFAULT_TENANT)

    @property
    def trust(self) -> tuple[note.Verifier, ...]:
        return (note.verifier_of(self.key, self.name),)

    async def seal(self) -> None:
        await extend_log(self._database)

        async def work(connection: Connection) -> None:
            size = await log_size(connection, TENANT)
            root = await log_root(connection, TENANT, size)
            signed = note.sign(checkpoint.text(self.name, size, root), self.name, self.key)
            await exchange(connection, [(_INSERT, (TENANT, size, root, signed, self.trust[0].key_id))])

        await self._database.write(work)


def verified(data: bytes | Path, signer: TestSigner, saved: bytes | None = None) -> Report:
    """What the verifier says."""
    return verify_bundle(data.read_bytes() if isinstance(data, Path) else data, signer.trust, saved)


async def unsealed() -> None:
    """Leaves the log as it is."""


async def exported(
    database: Database,
    target: Path,
    *runs: UUID,
    redact: Sequence[str] = (),
    seal: Callable[[], Awaitable[None]] = unsealed,
    **options: Any,
) -> Exported:
    """A bundle of these runs."""
    return await export_bundle(
        database,
        ExportRequest(
            tenant=TENANT,
            runs=runs,
            target=target,
            actor_id="auditor",
            on_behalf_of=None,
            seal=seal,
            rules=read_rules(redact),
            **options,
        ),
    )


def members(path: Path) -> dict[str, bytes]:
    """All members of a bundle."""
    archive = open_archive(path.read_bytes())
    return {name: archive.read(name) for name in archive.names}


def entries(found: Mapping[str, bytes], run: UUID | str) -> list[dict[str, Any]]:
    """The entries of a chain."""
    return [json.loads(line) for line in found[f"runs/{run}/entries.jsonl"].splitlines()]


def artifacts(found: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """The rows of artifacts.json."""
    rows: list[dict[str, Any]] = json.loads(found["artifacts.json"])["artifacts"]
    return rows


def repacked(found: dict[str, bytes], target: Path) -> Path:
    """A bundle of these members as a careful attacker writes it: with a manifest and an archive that fit them."""
    try:
        manifest = json.loads(found[MANIFEST])
        manifest["files"] = [
            {"bytes": len(content), "path": name, "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in sorted(found.items())
            if name != MANIFEST
        ]
        for head in manifest["runs"]:
            lines = found[f"runs/{head['run']}/entries.jsonl"].removesuffix(b"\n").split(b"\n")
            head["entries"], head["head"] = len(lines), hashlib.sha256(lines[-1]).hexdigest()
        found = {**found, MANIFEST: canonical(manifest)}
    finally:
        target.write_bytes(pack(found))
    return target
