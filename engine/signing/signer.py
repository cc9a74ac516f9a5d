"""The signer: says how large the log is and what its root is, and never says two things that contradict each other.

It believes the database nothing about the past. Before it signs it proves that the log extends the last checkpoint
that it signed, which it keeps itself; a log that was cut, restored or rewritten is refused. Which key is in use is an
entry of the tenant's own chain, so that a change of keys is itself in the log.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from engine.errors import PodiumError, RefusedError, UnavailableError
from engine.signing.folder import AuditFolder
from engine.store import log
from engine.store.database import Database
from engine.store.exchange import Connection, exchange
from engine.store.run_writer import ENGINE_ACTOR
from engine.store.system_chain import ChainWriter, lock_system
from engine.verifier import checkpoint as formats
from engine.verifier import note as notes
from engine.verifier.merkle import verify_consistency
from engine.verifier.rotation import Rotation, parse_rotation, rotation_text

# How long the key before also signs, unless whoever replaces it says otherwise.
OVERLAP_DAYS: Final = 30
RESTORED: Final = "log.restored"
_STORE: Final = """
    INSERT INTO log_checkpoints (tenant_id, size, root, note, key_id) VALUES (%s, %s, %s, %s, %s)
    ON CONFLICT (tenant_id, size) DO NOTHING
"""
_STORED_AT: Final = "SELECT signed_at FROM log_checkpoints WHERE tenant_id = %s AND size = %s"
_HINT_RESTORED: Final = (
    "if you restored a backup on purpose, say so: `podium audit checkpoint --after-restore`; "
    "otherwise somebody changed the database: keep everything, and `podium audit verify --database`"
)


@dataclass(frozen=True, slots=True)
class _Standing:
    """What the database says: the log's size, the history of keys, the newest checkpoint, and the time."""

    size: int
    keys: list[log.SignerKey]
    latest: log.Checkpoint | None
    now: datetime


@dataclass(frozen=True, slots=True)
class _Signers:
    """Who signs: the key in use and, during an overlap, the one it replaces."""

    current: Ed25519PrivateKey
    before: Ed25519PrivateKey | None


class Signer:
    """Signs the checkpoints of all tenants with the keys of one audit directory."""

    def __init__(self, folder: AuditFolder) -> None:
        self.folder = folder

    async def sign(self, database: Database, tenant_id: UUID) -> log.Checkpoint | None:
        """Signs the log as it is; the newest checkpoint if that covers it already, None for an empty log.

        Entries that wait for their leaf are not waited for: `engine.store.log.extend_log` comes first. Raises
        RefusedError ``log-shrank``, ``log-inconsistent``, ``signer-memory-missing`` or ``signer-key-unknown`` instead
        of contradicting itself, and what `AuditFolder` and the store raise.
        """
        async with self.folder.locked():
            standing = await _standing(database, tenant_id)
            if standing.size == 0:
                return None
            if not standing.keys:
                await self._begin(database, tenant_id)
                await log.extend_log(database)
                standing = await _standing(database, tenant_id)
            return await self._sign(database, tenant_id, standing)

    async def public_key(self, database: Database, tenant_id: UUID) -> str:
        """The text of the key in use, as the audit directory has it; makes the first one where there is none.

        Raises RefusedError ``signer-key-unknown`` if the log is signed with a key from elsewhere.
        """
        async with self.folder.locked():
            standing = await _standing(database, tenant_id)
            if not standing.keys:
                await self._begin(database, tenant_id)
                standing = await _standing(database, tenant_id)
            self._private(tenant_id, standing.keys[-1].key)
            return standing.keys[-1].key

    async def rotate(
        self, database: Database, tenant_id: UUID, *, actor_id: str, on_behalf_of: str | None, overlap_days: int
    ) -> log.Checkpoint:
        """Replaces the key. The checkpoint that covers the change is signed by both; it is returned.

        Also later checkpoints are signed by both, for ``overlap_days``. Raises as ``sign`` does.
        """
        async with self.folder.locked():
            standing = await _standing(database, tenant_id)
            if not standing.keys:
                await self._begin(database, tenant_id)
                standing = await _standing(database, tenant_id)
            old = standing.keys[-1]
            await log.extend_log(database)
            # The last checkpoint that the old key signs alone; a refusal comes before anything is changed.
            last = await self._sign(database, tenant_id, await _standing(database, tenant_id))
            new = Ed25519PrivateKey.generate()
            statement = _statement(tenant_id, self._private(tenant_id, old.key), new, last.size)
            # The key is on disk before anybody hears of it; one that is never heard of does no harm.
            self.folder.keep_keys(tenant_id, [*self.folder.keys(tenant_id), new])

            async def work(connection: Connection) -> None:
                writer = await lock_system(connection, tenant_id, actor_id=actor_id, on_behalf_of=on_behalf_of)
                known = await log.signer_keys(connection, tenant_id)
                stated = parse_rotation(statement)
                if known[-1].key == str(stated.new):
                    # Our first try counted, and only its answer was lost.
                    return
                if known[-1].key != old.key:
                    raise RefusedError("signer-key-replaced", "the key was replaced by somebody else meanwhile")
                writer.entry(
                    log.KEY_ROTATED,
                    old=str(stated.old),
                    new=str(stated.new),
                    size=stated.size,
                    overlap_s=overlap_days * 86_400,
                    note=statement.decode(),
                )
                await writer.commit()

            await database.write(work)
            # Now the new key is in use, whoever asks.
            await log.extend_log(database)
            return await self._sign(database, tenant_id, await _standing(database, tenant_id))

    async def accept_restored(
        self, database: Database, tenant_id: UUID, *, actor_id: str, on_behalf_of: str | None
    ) -> None:
        """Goes on from a log that does not extend the last checkpoint, because a backup was restored on purpose.

        It is recorded in the tenant's chain with the checkpoint that is given up; whoever kept one that is no longer
        part of the log will see that. Raises RefusedError ``nothing-restored`` if the log is as it was left.
        """
        async with self.folder.locked():
            standing = await _standing(database, tenant_id)
            remembered = self._remembered(tenant_id, standing)
            problem = await self._contradiction(database, tenant_id, standing, remembered)
            if problem is None:
                raise RefusedError(
                    "nothing-restored", "the log extends the last checkpoint; there is nothing to accept"
                )
            given_up = None if remembered is None else remembered.checkpoint

            async def work(connection: Connection) -> None:
                writer = await lock_system(connection, tenant_id, actor_id=actor_id, on_behalf_of=on_behalf_of)
                writer.entry(
                    RESTORED,
                    size=standing.size,
                    remembered=None if given_up is None else given_up.size,
                    root=None if given_up is None else given_up.root.hex(),
                )
                if not standing.keys or self.folder.key_named(tenant_id, standing.keys[-1].key) is None:
                    # The backup is older than the key, whose entry is gone; the key is as good as before.
                    _record_key(writer, self._newest(tenant_id))
                await writer.commit()

            await database.write(work)
            # Now it is on record; only then is the memory given up.
            if given_up is not None:
                self.folder.set_memory_aside(tenant_id, given_up.size)
            await log.extend_log(database)
            await self._sign(database, tenant_id, await _standing(database, tenant_id), trusts_database=True)

    async def _begin(self, database: Database, tenant_id: UUID) -> None:
        """Makes the first key of a log that has none, and enters it into the tenant's chain."""
        if self.folder.memory(tenant_id) is not None:
            raise _restored("log-inconsistent", "the log lacks the entry of the key that signed its checkpoints")
        keys = self.folder.keys(tenant_id)
        key = keys[-1] if keys else Ed25519PrivateKey.generate()
        if not keys:
            self.folder.keep_keys(tenant_id, [key])

        async def work(connection: Connection) -> None:
            writer = await lock_system(connection, tenant_id, actor_id=ENGINE_ACTOR)
            if not await log.signer_keys(connection, tenant_id):
                _record_key(writer, key)
            await writer.commit()

        await database.write(work)
        # Now the log says who signs it; the entry gets its leaf with the others.

    def _newest(self, tenant_id: UUID) -> Ed25519PrivateKey:
        keys = self.folder.keys(tenant_id)
        if not keys:
            raise _unknown_key(self.folder)
        return keys[-1]

    async def _sign(
        self, database: Database, tenant_id: UUID, standing: _Standing, *, trusts_database: bool = False
    ) -> log.Checkpoint:
        signers = self._signers(tenant_id, standing)
        remembered = self._remembered(tenant_id, standing)
        if not trusts_database:
            problem = await self._contradiction(database, tenant_id, standing, remembered)
            if problem is not None:
                raise problem
        if remembered is not None and remembered.checkpoint.size == standing.size:
            # Signed before, and perhaps killed before it was stored: the same note again, never a second one.
            return await _store(
                database, tenant_id, remembered.checkpoint, remembered.note, remembered.signers[0].key_id
            )
        origin = formats.origin_of(str(tenant_id))
        root = await _root(database, tenant_id, standing.size)
        text = formats.text(origin, standing.size, root)
        note = notes.sign(text, origin, signers.current)
        if signers.before is not None:
            note = notes.add_signature(note, origin, signers.before)
        self.folder.remember(tenant_id, note)
        # Now nothing that contradicts this will ever be signed here. Whoever is killed now stores it at the next turn.
        key_id = notes.verifier_of(signers.current, origin).key_id
        stored = await _store(database, tenant_id, formats.parse(text), note, key_id)
        self._drop_retired(tenant_id, standing, signers)
        return stored

    async def _contradiction(
        self, database: Database, tenant_id: UUID, standing: _Standing, remembered: formats.SignedCheckpoint | None
    ) -> PodiumError | None:
        """Why signing the log as it stands would contradict what was signed before; None if it would not."""
        if remembered is None:
            if standing.latest is None:
                return None
            return _restored(
                "signer-memory-missing",
                f"checkpoints of this log were signed, and {self.folder.path} remembers none",
            )
        before = remembered.checkpoint
        if before.size > standing.size:
            return _restored(
                "log-shrank", f"the log has {standing.size} leaves, and {before.size} were signed before: some are gone"
            )

        async def work(connection: Connection) -> bool:
            root = await log.log_root(connection, tenant_id, standing.size)
            proof = await log.consistency(connection, tenant_id, before.size, standing.size)
            return verify_consistency(before.size, before.root, standing.size, root, proof)

        if await database.write(work):
            return None
        return _restored(
            "log-inconsistent",
            f"the log does not extend the {before.size} leaves that were signed before: some were changed or replaced",
        )

    def _remembered(self, tenant_id: UUID, standing: _Standing) -> formats.SignedCheckpoint | None:
        """The last checkpoint that was signed here; its signature is checked with the log's keys and our own."""
        data = self.folder.memory(tenant_id)
        if data is None:
            return None
        origin = formats.origin_of(str(tenant_id))
        own = {notes.verifier_of(key, origin) for key in self.folder.keys(tenant_id)}
        try:
            known = {notes.parse_key(key.key) for key in standing.keys}
            return formats.open_checkpoint(data, sorted(own | known, key=str), origin=origin)
        except notes.NoteError as error:
            raise UnavailableError(
                "signer-memory-damaged",
                f"what the signer remembers in {self.folder.path} is no checkpoint of this log: {error}",
                hint="restore this folder from a copy of it",
            ) from None

    def _signers(self, tenant_id: UUID, standing: _Standing) -> _Signers:
        used = standing.keys[-1]
        current = self._private(tenant_id, used.key)
        if used.replaces is None:
            return _Signers(current, None)
        # The checkpoint that covers the change carries both signatures, however late it is made.
        covered = standing.latest is not None and used.index is not None and standing.latest.size > used.index
        if covered and standing.now > used.at + timedelta(seconds=used.overlap_s):
            return _Signers(current, None)
        return _Signers(current, self._private(tenant_id, used.replaces))

    def _private(self, tenant_id: UUID, text: str) -> Ed25519PrivateKey:
        found = self.folder.key_named(tenant_id, text)
        if found is None:
            raise _unknown_key(self.folder)
        return found

    def _drop_retired(self, tenant_id: UUID, standing: _Standing, signers: _Signers) -> None:
        """Forgets private keys that are replaced and no longer in an overlap."""
        keys = self.folder.keys(tenant_id)
        names = {key.public_key().public_bytes_raw() for key in (signers.current, signers.before) if key is not None}
        listed = {notes.parse_key(key.key).key for key in standing.keys}
        kept = [key for key in keys if (raw := key.public_key().public_bytes_raw()) in names or raw not in listed]
        if len(kept) != len(keys):
            self.folder.keep_keys(tenant_id, kept)


def _record_key(writer: ChainWriter, key: Ed25519PrivateKey) -> None:
    origin = formats.origin_of(str(writer.tenant_id))
    writer.entry(log.KEY_CREATED, key=str(notes.verifier_of(key, origin)))


def _statement(tenant_id: UUID, old: Ed25519PrivateKey, new: Ed25519PrivateKey, size: int) -> bytes:
    """The note in which both keys say that the new one takes over at this size of the log."""
    origin = formats.origin_of(str(tenant_id))
    rotation = Rotation(origin, notes.verifier_of(old, origin), notes.verifier_of(new, origin), size)
    return notes.add_signature(notes.sign(rotation_text(rotation), origin, old), origin, new)


def _unknown_key(folder: AuditFolder) -> RefusedError:
    return RefusedError(
        "signer-key-unknown",
        f"this log is signed with another key than those in {folder.path}",
        hint="one audit directory signs for a database: set PODIUM_AUDIT_DIR to that one, or restore it",
    )


def _restored(code: str, message: str) -> RefusedError:
    return RefusedError(code, message, hint=_HINT_RESTORED)


async def _standing(database: Database, tenant_id: UUID) -> _Standing:
    async def work(connection: Connection) -> _Standing:
        ((row,),) = await exchange(connection, [("SELECT clock_timestamp() AS now", ())])
        keys = await log.signer_keys(connection, tenant_id)
        latest = await log.latest_checkpoint(connection, tenant_id)
        # Last of all: keys and checkpoints are then never newer than the size.
        return _Standing(await log.log_size(connection, tenant_id), keys, latest, row["now"].astimezone(UTC))

    return await database.write(work)


async def _root(database: Database, tenant_id: UUID, size: int) -> bytes:
    return await database.write(lambda connection: log.log_root(connection, tenant_id, size))


async def _store(
    database: Database, tenant_id: UUID, checkpoint: formats.Checkpoint, note: bytes, key_id: str
) -> log.Checkpoint:
    """Stores what was signed. Whatever somebody else put in its place before is not taken for it."""

    async def work(connection: Connection) -> datetime:
        values = (tenant_id, checkpoint.size, checkpoint.root, note, key_id)
        _, ((row,)) = await exchange(connection, [(_STORE, values), (_STORED_AT, (tenant_id, checkpoint.size))])
        at: datetime = row["signed_at"]
        return at

    return log.Checkpoint(checkpoint.size, checkpoint.root, note, key_id, await database.write(work))
