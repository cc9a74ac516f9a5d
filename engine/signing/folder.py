"""The audit directory: what the signer must keep where nobody who changes the database can change it.

    audit/                  mode 700
    ├── lock                held while something is signed
    ├── signer/<tenant>     a tenant's private keys, mode 600: the one in use and those that it replaces
    └── memory/<tenant>     the last checkpoint that was signed for the tenant, as it was signed

Files are written whole and are on disk before they get their name. Must know neither the database nor the log.
"""

from __future__ import annotations

import asyncio
import base64
import fcntl
import json
import os
import stat
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final
from uuid import UUID

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from engine.errors import InputError, UnavailableError
from engine.verifier.note import verifier_of

FORMAT: Final = 1
PRIVATE: Final = 0o700
OTHERS: Final = 0o077
LOCK_WAIT_S: Final = 30.0
LOCK_PAUSE_S: Final = 0.05


class AuditFolder:
    """An audit directory. It is made when something is to be kept in it; folders above it must be there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        """The right to sign with what is in here: one at a time, whichever process.

        Makes the folder. Raises UnavailableError ``signer-busy`` when somebody else keeps it, and InputError
        ``audit-dir-unusable``.
        """
        with self._explained():
            self._open()
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            give_up_at = time.monotonic() + LOCK_WAIT_S
            while not _try_lock(descriptor):
                if time.monotonic() > give_up_at:
                    raise UnavailableError(
                        "signer-busy",
                        f"another process has been signing in {self.path} for {LOCK_WAIT_S:.0f} s",
                        hint="wait for it, or end it, and try again",
                    )
                await asyncio.sleep(LOCK_PAUSE_S)
            yield
        finally:
            # Ends the lock too.
            os.close(descriptor)

    def keys(self, tenant_id: UUID) -> list[Ed25519PrivateKey]:
        """A tenant's private keys, in the order in which they were made; none where there is no file yet.

        Raises InputError ``signer-key-open`` if others can read them, UnavailableError ``signer-key-damaged``.
        """
        path = self.path / "signer" / str(tenant_id)
        with self._explained():
            try:
                if path.stat().st_mode & OTHERS:
                    raise InputError(
                        "signer-key-open", f"other users can read {path}", hint=f"close it first: chmod 600 '{path}'"
                    )
                content = path.read_bytes()
            except FileNotFoundError:
                return []
        try:
            # A file of another format has its keys under another name.
            seeds = [base64.b64decode(seed, validate=True) for seed in json.loads(content.decode())[f"keys-{FORMAT}"]]
            return [Ed25519PrivateKey.from_private_bytes(seed) for seed in seeds]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UnavailableError(
                "signer-key-damaged",
                f"{path} holds no keys of a signer",
                hint="restore this file from a copy of the audit directory",
            ) from None

    def keep_keys(self, tenant_id: UUID, keys: Sequence[Ed25519PrivateKey]) -> None:
        """Replaces the file of private keys; on disk when this returns. Only while the folder is locked."""
        seeds = [base64.b64encode(key.private_bytes_raw()).decode() for key in keys]
        with self._explained():
            content = json.dumps({f"keys-{FORMAT}": seeds}, indent=1).encode() + b"\n"
            self._write(self.path / "signer" / str(tenant_id), content)

    def key_named(self, tenant_id: UUID, text: str) -> Ed25519PrivateKey | None:
        """The private key of a tenant's public one (``name+id+base64``), if it is here."""
        name = text.partition("+")[0]
        return next((key for key in self.keys(tenant_id) if str(verifier_of(key, name)) == text), None)

    def memory(self, tenant_id: UUID) -> bytes | None:
        """The note of the last checkpoint that was signed for a tenant; None before the first."""
        with self._explained():
            try:
                return (self.path / "memory" / str(tenant_id)).read_bytes()
            except FileNotFoundError:
                return None

    def remember(self, tenant_id: UUID, note: bytes) -> None:
        """Keeps a note as the last one; on disk when this returns. Only while the folder is locked."""
        with self._explained():
            self._write(self.path / "memory" / str(tenant_id), note)

    def set_memory_aside(self, tenant_id: UUID, size: int) -> None:
        """Forgets the last checkpoint; its file stays under another name. Only while the folder is locked."""
        with self._explained():
            path = self.path / "memory" / str(tenant_id)
            aside = path.with_name(f"{tenant_id}.before-restore-{size}-{time.time_ns()}")
            path.rename(aside)
            _sync(path.parent)

    def _open(self) -> None:
        for folder in (self.path, self.path / "signer", self.path / "memory"):
            folder.mkdir(mode=PRIVATE, exist_ok=True)
        status = self.path.stat()
        if status.st_uid != os.geteuid() or status.st_mode & OTHERS or not stat.S_ISDIR(status.st_mode):
            raise InputError(
                "audit-dir-open",
                f"{self.path} is not only yours: whoever enters it can sign in your name",
                hint=f"give it to the user that signs and close it: chmod 700 '{self.path}'",
            )

    def _write(self, path: Path, content: bytes) -> None:
        self._open()
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as target:
                target.write(content)
                target.flush()
                os.fsync(target.fileno())
            Path(name).replace(path)
            _sync(path.parent)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(
                "audit-dir-unusable",
                f"{self.path} cannot be used: {(error.strerror or 'unknown error').lower()}",
                hint="set PODIUM_AUDIT_DIR to a folder of yours outside of the database's backups",
            ) from None


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
