"""The key store of files: one small file a run, in folders that only their owner can enter.

    keys/
    ├── store.json           format, and the id that databases remember
    ├── lock                 held while a secret is destroyed or the journal grows
    ├── pending/<run>        keys of a run that may not be on record yet
    ├── runs/<xx>/<run>      keys of a run on record; xx are the last two digits of its id
    └── erasures.jsonl       the journal

Each file is written whole and on disk before it gets its name. Overwriting a destroyed secret is done too, but not
relied upon: a disk may keep what was overwritten, so encrypt the disk under it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from uuid import UUID, uuid4

from engine.errors import InputError, UnavailableError
from engine.keystore.interface import ErasureRecord, Journal
from engine.keystore.keyring import missing
from engine.keystore.keys import KEY_BYTES, RunKeys, new_keys

FORMAT: Final = 1
PRIVATE_FOLDER: Final = 0o700
PRIVATE_FILE: Final = 0o600
OTHERS: Final = 0o077


class FileKeyStore:
    """Keys in a folder. Made when it is first used; safe for several processes, also over a shared file system."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._pending = root / "pending"
        self._runs = root / "runs"
        self._journal = root / "erasures.jsonl"
        self._id: UUID | None = None

    @property
    def place(self) -> str:
        """The folder."""
        return str(self._root)

    def identity(self) -> UUID:
        """Reads the store's id; makes the store where there is none."""
        if self._id is None:
            with self._explained():
                self._id = self._open()
        return self._id

    def create(self, run_id: UUID) -> RunKeys:
        """See `KeyStore`: two files on disk, so once a run, never once a step."""
        self.identity()
        with self._explained():
            known = self._read(run_id)
            if known is not None:
                with contextlib.suppress(FileNotFoundError):
                    # Somebody is about to use it, so it is no orphan yet.
                    os.utime(self._pending / str(run_id))
                return known
            keys = new_keys(run_id)
            try:
                _write_new(self._pending / str(run_id), _encoded(keys))
            except FileExistsError:
                return self._read(run_id) or keys
        return keys

    def settle(self, keys: RunKeys) -> None:
        """See `KeyStore`. A rename that a power cut undoes is found again under the old name."""
        with self._explained():
            target = self._path(keys.run_id)
            target.parent.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
            try:
                (self._pending / str(keys.run_id)).rename(target)
            except FileNotFoundError:
                if not target.exists():
                    # The sweep took it for an orphan in the moment before it was used.
                    with contextlib.suppress(FileExistsError):
                        _write_new(target, _encoded(keys))

    def read(self, run_id: UUID) -> RunKeys | None:
        """See `KeyStore`."""
        self.identity()
        with self._explained():
            return self._read(run_id)

    def rotate(self, run_id: UUID, epoch: int, keep: Mapping[UUID, int]) -> RunKeys:
        """See `KeyStore`: the new file takes the old one's name, then the old one's bytes are overwritten."""
        self.identity()
        with self._explained(), self._locked():
            keys = self._read(run_id)
            if keys is None:
                raise missing(run_id)
            if keys.epoch > epoch:
                return keys
            self.settle(keys)
            following = keys.without_others(keep)
            target = self._path(run_id)
            self._drop_drafts(run_id)
            descriptor = os.open(target, os.O_RDWR)
            try:
                _replace(target, _encoded(following))
                # Now no reader finds the old secret any more, and neither does anybody after a power cut.
                size = os.fstat(descriptor).st_size
                os.pwrite(descriptor, bytes(size), 0)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            return following

    def orphans(self, older_than_s: float) -> Iterator[UUID]:
        """See `KeyStore`."""
        self.identity()
        with self._explained():
            for path in sorted(self._pending.iterdir()):
                with contextlib.suppress(FileNotFoundError, ValueError):
                    if time.time() - path.stat().st_mtime > older_than_s:
                        yield UUID(path.name)

    def drop_orphan(self, run_id: UUID) -> None:
        """See `KeyStore`."""
        with self._explained():
            (self._pending / str(run_id)).unlink(missing_ok=True)

    def journal_end(self) -> int:
        """See `KeyStore`; a position is a number of bytes."""
        self.identity()
        with self._explained():
            try:
                return self._journal.stat().st_size
            except FileNotFoundError:
                return 0

    def read_journal(self, start: int) -> Journal:
        """See `KeyStore`. A last line without its end is one that a crash cut off; it counts as not written."""
        self.identity()
        with self._explained():
            try:
                with self._journal.open("rb") as source:
                    source.seek(start)
                    text = source.read()
            except FileNotFoundError:
                return Journal((), 0)
        whole = text[: text.rfind(b"\n") + 1]
        try:
            records = [_record(json.loads(line)) for line in whole.splitlines()]
        except (ValueError, KeyError, TypeError):
            raise UnavailableError(
                "journal-damaged",
                f"the journal of erasures in {self._root} cannot be read",
                hint="restore erasures.jsonl from the key store's backup",
            ) from None
        return Journal(records, start + len(whole))

    def append_journal(self, record: ErasureRecord) -> None:
        """See `KeyStore`."""
        self.identity()
        line = json.dumps(_document(record), separators=(",", ":"), sort_keys=True).encode() + b"\n"
        with self._explained(), self._locked():
            is_new = not self._journal.exists()
            descriptor = os.open(self._journal, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
            try:
                # Behind the last whole line: a crash may have left a piece.
                end = self.read_journal(0).end if not is_new else 0
                os.ftruncate(descriptor, end)
                os.pwrite(descriptor, line, end)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if is_new:
                _sync_folder(self._root)

    def _open(self) -> UUID:
        if not self._root.exists():
            self._root.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        for folder in (self._pending, self._runs):
            folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
            _refuse_open(folder)
        path = self._root / "store.json"
        if not path.exists():
            with contextlib.suppress(FileExistsError):
                _write_new(path, json.dumps({"format": FORMAT, "id": str(uuid4())}).encode() + b"\n")
        try:
            document = json.loads(path.read_bytes())
            if document["format"] != FORMAT:
                raise UnavailableError(
                    "key-store-newer",
                    f"the key store {self._root} has another format than this Podium knows",
                    hint="use the version of Podium that made it",
                )
            return UUID(document["id"])
        except (ValueError, KeyError, TypeError):
            raise self._damaged(path) from None

    def _read(self, run_id: UUID) -> RunKeys | None:
        # Once more where it was first looked for: it may have been moved from one to the other in between.
        for path in (self._path(run_id), self._pending / str(run_id), self._path(run_id)):
            with contextlib.suppress(FileNotFoundError):
                try:
                    return self._decoded(path, run_id)
                except UnavailableError:
                    # A file that was replaced while it was read is overwritten; its successor has the name by now.
                    return self._decoded(path, run_id)
        return None

    def _decoded(self, path: Path, run_id: UUID) -> RunKeys:
        try:
            document = json.loads(path.read_bytes())
            secret = bytes.fromhex(document["secret"])
            kept = {UUID(name): bytes.fromhex(key) for name, key in document["kept"].items()}
            whole = all(len(key) == KEY_BYTES for key in (secret, *kept.values()))
            if document["format"] != FORMAT or document["run"] != str(run_id) or not whole:
                raise self._damaged(path)
            return RunKeys(run_id, int(document["epoch"]), secret, MappingProxyType(kept))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise self._damaged(path) from None

    def _drop_drafts(self, run_id: UUID) -> None:
        """Removes what a crash left of this run's files under other names: it may hold keys that are to go."""
        for folder in (self._pending, self._path(run_id).parent):
            for draft in folder.glob(f".{run_id}.*"):
                draft.unlink(missing_ok=True)

    def _damaged(self, path: Path) -> UnavailableError:
        return UnavailableError(
            "key-damaged", f"{path} is no file of a key store", hint="restore it from the key store's own backup"
        )

    def _path(self, run_id: UUID) -> Path:
        return self._runs / run_id.hex[-2:] / str(run_id)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT}:
                raise UnavailableError(
                    "disk-full", f"no space left for the key store {self._root}", hint="free some space there"
                ) from None
            raise UnavailableError(
                "key-store-unavailable",
                f"the key store {self._root} cannot be used: {(error.strerror or 'unknown error').lower()}",
                hint="see to the folder that PODIUM_KEY_STORE names; what waits for it goes on by itself",
            ) from None


def _encoded(keys: RunKeys) -> bytes:
    kept = {str(artifact): key.hex() for artifact, key in keys.kept.items()}
    fields = {"format": FORMAT, "run": str(keys.run_id), "epoch": keys.epoch, "secret": keys.secret.hex(), "kept": kept}
    return json.dumps(fields).encode() + b"\n"


def _document(record: ErasureRecord) -> dict[str, Any]:
    return {
        "erasure": str(record.erasure_id),
        "run": str(record.run_id),
        "epoch": record.epoch,
        "artifacts": [str(artifact) for artifact in record.artifacts],
        "fields": dict(record.fields),
        "basis": [dict(row) for row in record.basis],
    }


def _record(document: Mapping[str, Any]) -> ErasureRecord:
    return ErasureRecord(
        UUID(document["erasure"]),
        UUID(document["run"]),
        int(document["epoch"]),
        tuple(UUID(artifact) for artifact in document["artifacts"]),
        dict(document["fields"]),
        document["basis"],
    )


def _refuse_open(folder: Path) -> None:
    status = folder.stat()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & OTHERS:
        raise InputError(
            "key-store-open-to-others",
            f"other users can enter {folder}, or it belongs to one",
            hint=f"make it private: chmod 700 '{folder}', or give PODIUM_KEY_STORE another folder",
        )


def _write_new(path: Path, content: bytes) -> None:
    """Writes a file that is not there yet, whole or not at all, on disk; raises FileExistsError if it is there."""
    draft = _write_draft(path, content)
    try:
        # A link, not a rename: it takes nobody else's place.
        os.link(draft, path)
    finally:
        draft.unlink()
    _sync_folder(path.parent)


def _replace(path: Path, content: bytes) -> None:
    draft = _write_draft(path, content)
    try:
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _write_draft(path: Path, content: bytes) -> Path:
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE_FILE)
    try:
        os.write(descriptor, content)
        os.fsync(descriptor)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    return draft


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
