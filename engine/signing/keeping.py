"""What has to be done again and again for a log: leaves for waiting entries, fresh checkpoints, anchors."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from uuid import UUID

from engine.errors import PodiumError
from engine.settings import Settings
from engine.signing.anchors import Anchor, FileAnchor, TimestampAnchor
from engine.signing.folder import AuditFolder
from engine.signing.signer import Signer
from engine.store import log
from engine.store.database import Database

# While entries are added, a checkpoint is never older than this, and never follows the one before sooner.
SIGN_EVERY_S: Final = 5.0
# Only the newest checkpoint is anchored, at most this often.
ANCHOR_EVERY_S: Final = 60.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AuditSettings:
    """Where this process signs and anchors; without a folder it only gives entries their leaves."""

    audit_dir: Path | None = None
    anchor_dir: Path | None = None
    tsa_url: str | None = None

    @classmethod
    def of(cls, settings: Settings) -> AuditSettings:
        """What the environment says."""
        return cls(settings.audit_dir, settings.anchor_dir, settings.tsa_url)


@dataclass(slots=True)
class _Signed:
    """What this process knows of a tenant's checkpoints; monotonic seconds."""

    at: float = float("-inf")
    size: int = -1
    latest: log.Checkpoint | None = None
    anchored_at: float = float("-inf")
    anchored_size: int = -1
    refused: str | None = None


@dataclass(slots=True)
class LogKeeper:
    """Keeps the log of one database. ``turn`` is called often; ``seal`` does everything at once for one tenant."""

    database: Database
    signer: Signer | None
    anchors: Sequence[Anchor] = ()
    sign_every_s: float = SIGN_EVERY_S
    anchor_every_s: float = ANCHOR_EVERY_S
    clock: Callable[[], float] = time.monotonic
    _signed: dict[UUID, _Signed] = field(default_factory=dict)
    _looked: bool = False

    async def turn(self) -> bool:
        """Does what is due; returns whether anything was, so that the next turn may come soon.

        A tenant whose log the signer refuses does not keep the others from theirs: it is logged, once a reason.
        Raises what the store raises.
        """
        added = await log.extend_log(self.database)
        if self.signer is None:
            return bool(added)
        if not self._looked:
            # What an earlier process left unsigned.
            added |= dict.fromkeys(await log.tenants(self.database), 0)
            self._looked = True
        for tenant_id in added:
            self._signed.setdefault(tenant_id, _Signed()).size = -1
        busy = False
        for tenant_id, state in self._signed.items():
            busy = await self._keep(tenant_id, state) or busy
        return bool(added) or busy

    async def seal(self, tenant_id: UUID) -> log.Checkpoint | None:
        """Gives every entry its leaf, signs and anchors now. None for a log without entries.

        Raises what `Signer.sign` and the anchors do; without a signer the newest checkpoint is returned as it is.
        """
        await log.extend_log(self.database)
        if self.signer is None:
            return await self.database.write(lambda connection: log.latest_checkpoint(connection, tenant_id))
        checkpoint = await self.signer.sign(self.database, tenant_id)
        if checkpoint is not None:
            for anchor in self.anchors:
                await anchor.put(tenant_id, checkpoint)
        return checkpoint

    async def _keep(self, tenant_id: UUID, state: _Signed) -> bool:
        """Signs and anchors what is due; whether something is still to be done."""
        now = self.clock()
        if state.size < 0:
            if now - state.at < self.sign_every_s:
                return True
            state.at = now
            await self._sign(tenant_id, state)
        due = state.latest is not None and state.latest.size > state.anchored_size and bool(self.anchors)
        if due and now - state.anchored_at >= self.anchor_every_s:
            state.anchored_at = now
            await self._anchor(tenant_id, state)
        return state.size < 0

    async def _sign(self, tenant_id: UUID, state: _Signed) -> None:
        assert self.signer is not None
        try:
            state.latest = await self.signer.sign(self.database, tenant_id)
        except PodiumError as error:
            if error.code != state.refused:
                _log.error("%s: no checkpoint is signed: %s", error.code, error.message)
            state.refused = error.code
        else:
            state.refused = None
            state.size = 0 if state.latest is None else state.latest.size

    async def _anchor(self, tenant_id: UUID, state: _Signed) -> None:
        assert state.latest is not None
        try:
            for anchor in self.anchors:
                await anchor.put(tenant_id, state.latest)
        except PodiumError as error:
            _log.warning("%s: %s; it is tried again", error.code, error.message)
        else:
            state.anchored_size = state.latest.size


def log_keeper(database: Database, settings: AuditSettings) -> LogKeeper:
    """The keeper of a database's log with the signer and the anchors that the settings name."""
    if settings.audit_dir is None:
        return LogKeeper(database, None)
    anchors: list[Anchor] = []
    folder = settings.anchor_dir or settings.audit_dir / "anchors"
    anchors.append(FileAnchor(folder))
    if settings.tsa_url is not None:
        anchors.append(TimestampAnchor(folder, settings.tsa_url))
    return LogKeeper(database, Signer(AuditFolder(settings.audit_dir)), anchors)
