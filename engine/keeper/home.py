"""The home: the folder in which the embedded default keeps everything. Must never change what it did not make.

home/               mode 700, ours
├── version         format number; whoever reads a newer one stops
├── lock            held by the keeper (flock), holds its process id
├── run/            sockets; elsewhere when the path is too long for a socket (`run-path` says where)
├── postgres/  temporal/  logs/
├── audit/          key and memory of the signer, anchors (see `engine.signing`)
├── keys/           of stored texts; a backup of postgres/ must not hold it (see `engine.keystore`)
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from engine.errors import InputError, PodiumError, UnavailableError

FORMAT: Final = 1
DEFAULT_FOLDER: Final = ".podium"
# A socket's path has at most 107 bytes (103 on macOS); the longest name of ours in this folder takes 17.
RUN_PATH_BYTES_MAX: Final = 85
# Not $TMPDIR, which may be as deep as the home, and not $XDG_RUNTIME_DIR, which goes when the user logs out while a
# detached keeper goes on.
SHORT_FOLDER: Final = Path("/tmp")  # noqa: S108 - the folder made here is checked for owner, mode and kind
# Of a format number; whatever is longer is none.
DIGITS_MAX: Final = 20
FREE_BYTES_MIN: Final = 1024 * 1024
PRIVATE: Final = 0o700
OTHERS: Final = 0o077


@dataclass(frozen=True)
class Home:
    """An opened home; `root` is absolute and free of symbolic links, `run_dir` is short enough for sockets."""

    root: Path
    run_dir: Path

    @property
    def postgres_dir(self) -> Path:
        """The database server's folder."""
        return self.root / "postgres"

    @property
    def temporal_dir(self) -> Path:
        """The Temporal server's folder."""
        return self.root / "temporal"

    @property
    def logs_dir(self) -> Path:
        """Logs of all servers, each bounded in size."""
        return self.root / "logs"

    @property
    def lock_path(self) -> Path:
        """The keeper's lock."""
        return self.root / "lock"

    @property
    def socket_path(self) -> Path:
        """The keeper's socket."""
        return self.run_dir / "keeper.sock"

    @property
    def version_path(self) -> Path:
        """The home's format number."""
        return self.root / "version"


def open_home(path: Path | None = None) -> Home:
    """Open the home at `path` (default: `PODIUM_HOME`, else `./.podium`); make it where there is none.

    Missing folders above it are made with the user's normal permissions, the home itself with mode 700. Raises
    `InputError` for a place that cannot be a home (codes `home-not-a-folder`, `home-not-empty`, `home-not-yours`,
    `home-open-to-others`, `home-not-writable`) and `UnavailableError` for `disk-full`, `home-newer` and
    `home-damaged`.
    """
    wanted = path or Path(os.environ.get("PODIUM_HOME") or DEFAULT_FOLDER)
    with explained(wanted):
        root = Path(os.path.realpath(wanted.expanduser()))
        if not root.exists():
            root.parent.mkdir(parents=True, exist_ok=True)
            root.mkdir(mode=PRIVATE, exist_ok=True)
        _check_folder(root)
        _check_version(root)
        for name in ("postgres", "temporal", "logs"):
            (root / name).mkdir(mode=PRIVATE, exist_ok=True)
        return Home(root=root, run_dir=_run_folder(root))


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn the operating system's errors about a home into ours; one line and a hint, no traceback."""
    try:
        yield
    except OSError as error:
        raise explain(error, path) from None


def explain(error: OSError, path: Path) -> PodiumError:
    """What an `OSError` about the home at `path` means for a user."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return UnavailableError("disk-full", f"no space left for {path}", hint="free some space, then try again")
    if error.errno in {errno.ENOTDIR, errno.EEXIST}:
        return InputError(
            "home-not-a-folder", f"{path} is not a folder", hint="set PODIUM_HOME to a folder, or to a new name"
        )
    return InputError(
        "home-not-writable",
        f"{path} cannot be used: {(error.strerror or 'unknown error').lower()}",
        hint="set PODIUM_HOME to a folder that you may write",
    )


def disk_is_full(path: Path) -> bool:
    """Whether next to nothing can be written at `path`; a server that failed there may not even have logged why."""
    return free_bytes(path) < FREE_BYTES_MIN


def free_bytes(folder: Path) -> int:
    """What may still be written at `folder`. Raises OSError."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _check_folder(root: Path) -> None:
    status = root.stat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "not a folder")
    if status.st_uid != os.geteuid():
        raise InputError(
            "home-not-yours",
            f"{root} belongs to another user",
            hint="run podium as the owner, or set PODIUM_HOME to another folder",
        )
    # A folder that is no home of ours is refused as that: nobody shall be told to close /tmp to others.
    if status.st_mode & OTHERS and ((root / "version").exists() or not any(root.iterdir())):
        raise InputError(
            "home-open-to-others", f"other users can enter {root}", hint=f"close it first: chmod 700 '{root}'"
        )


def _check_version(root: Path) -> None:
    path = root / "version"
    text = _read_version(path)
    if text is None:
        entries = [entry.name for entry in root.iterdir() if not entry.name.startswith(".version-")]
        text = _read_version(path)
        if text is None and entries:
            # A folder with something in it, but not by us, is a mistake: PODIUM_HOME=$HOME would fill somebody's home.
            raise InputError(
                "home-not-empty",
                f"{root} has other files in it and is no home of Podium",
                hint="set PODIUM_HOME to an empty folder, or to a new name",
            )
        if text is None:
            write_private(path, f"{FORMAT}\n")
            return
        # Else another command made the home between our two looks.
    if not (text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX) or int(text) < FORMAT:
        raise damaged(path, f"it holds no format number, a home that this Podium made has {FORMAT} there")
    if int(text) > FORMAT:
        raise UnavailableError(
            "home-newer",
            f"{root} was made by a newer Podium (format {text[:20]!r}, this one knows {FORMAT})",
            hint="update Podium, or set PODIUM_HOME to another folder",
        )


def damaged(file: Path, reason: str) -> UnavailableError:
    """The error for a file of a home that holds something else than we ever write there."""
    return UnavailableError(
        "home-damaged",
        f"{file} is damaged: {reason}",
        hint="restore this file from a copy of the home, or set PODIUM_HOME to a new folder",
    )


def _read_version(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except FileNotFoundError:
        return None


def write_private(path: Path, text: str) -> None:
    """Write a file of mode 600 whole or not at all, whatever happens in between."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as target:
            target.write(text)
            target.flush()
            os.fsync(target.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _run_folder(root: Path) -> Path:
    inside = root / "run"
    if len(os.fsencode(inside)) <= RUN_PATH_BYTES_MAX:
        inside.mkdir(mode=PRIVATE, exist_ok=True)
        return inside
    note = root / "run-path"
    mark = hashlib.sha256(os.fsencode(root)).hexdigest()[:16]
    usual = SHORT_FOLDER / f"podium-{os.geteuid()}-{mark}"
    try:
        # Whatever stands there, only a name of ours is taken.
        remembered = Path(note.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        remembered = usual
    # A home that was moved or copied must not share sockets with the one that it came from.
    known = remembered if remembered.name.startswith(usual.name) and remembered.parent == SHORT_FOLDER else usual
    # A name that somebody else took is left to them; a random one cannot be taken in advance.
    for candidate in (known, usual.with_name(f"{usual.name}-{secrets.token_hex(8)}")):
        if _make_own(candidate):
            if candidate != remembered or not note.exists():
                write_private(note, str(candidate))
            return candidate
    raise UnavailableError(
        "no-socket-folder",
        f"no private folder for sockets could be made in {SHORT_FOLDER}",
        hint="set PODIUM_HOME to a shorter path",
    )


def leave_run_folder(home: Home) -> None:
    """Remove the folder of the sockets if it lies outside the home and is empty. Call it while you hold the lock."""
    if home.run_dir.parent == SHORT_FOLDER:
        with suppress(OSError):
            home.run_dir.rmdir()


def _make_own(folder: Path) -> bool:
    try:
        folder.mkdir(mode=PRIVATE)
    except FileExistsError:
        status = folder.lstat()  # lstat: a link laid here by somebody else is not ours
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & OTHERS
    return True


class HomeLock:
    """The right to run the servers of a home. It ends with `release` or with the process, whichever comes first."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    def release(self) -> None:
        """Give it up; doing so twice is no mistake."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


def lock_home(home: Home) -> HomeLock | None:
    """Take the home's lock without waiting; None when another process holds it.

    The descriptor is closed on exec, so servers that we start do not keep the lock after our death. The file holds the
    process id of the holder, for people; the lock itself is the kernel's.
    """
    return _lock_file(home.lock_path)


def _lock_file(path: Path) -> HomeLock | None:
    with explained(path.parent):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write_pid(descriptor)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        return HomeLock(descriptor)


def _write_pid(descriptor: int) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
    except OSError as error:
        # The lock is held without it: a full disk must not keep a keeper from being stopped.
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
