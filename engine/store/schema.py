"""Bringing the database's schema up to date or back, and refusing one that this program does not know.

Safe when many processes start at once: each migration is one transaction that holds an advisory lock of the
transaction (a session's lock would not survive a pooler) and looks at the version only after it has the lock.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psycopg
from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import Script, ScriptDirectory
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from engine.errors import InputError, RefusedError, UnavailableError
from engine.store.database import SERVER_VERSION_MIN, unreachable
from engine.store.roles import apply_grants, become_owner, grants_in_force

# Any constant will do, as long as nobody else uses it in this database.
LOCK_KEY = 0x706F6469756D
LOCK_WAIT_S = 120.0
# While a migration waits for a table, everybody who reads that table waits behind it. So it waits for moments only,
# lets the readers through in between, and gives up after some tries.
LOCK_TIMEOUT_MS = 150
LOCK_PAUSE_S = 0.4
LOCK_TRIES_MAX = 12
WATCH_PAUSE_S = 0.02
STATEMENT_TIMEOUT = "10min"
_NOT_TO_BE_HAD = "55P03"
_NOT_ALLOWED = "42501"

Standing = Literal["current", "behind", "ahead", "empty"]
# One migration in its transaction: takes the set of blockers to fill, returns the revision, None if nothing is left.
_Migrate = Callable[[set[int]], str | None]
# Alembic's operations are a proxy of the whole process, so two threads must not migrate at once.
_one_at_a_time = threading.Lock()


@dataclass(frozen=True, slots=True)
class SchemaVersion:
    """Where the database stands: its revision (None if empty), the program's newest, and how they compare."""

    revision: str | None
    newest: str
    standing: Standing


@dataclass(slots=True)
class UpgradeReport:
    """What an upgrade did: the revisions that it applied, in order."""

    applied: list[str] = field(default_factory=list)


@dataclass(slots=True)
class DowngradeReport:
    """What a downgrade did: the revisions that it took back, newest first."""

    reverted: list[str] = field(default_factory=list)


def scripts() -> ScriptDirectory:
    """The migrations that this program carries."""
    import migrations  # noqa: PLC0415  # found as a resource, wherever the distribution is installed

    return ScriptDirectory(str(Path(str(migrations.__file__)).parent))


def refuse_old_server(server_version: int) -> None:
    """Raises UnavailableError for a PostgreSQL that is too old; the number is libpq's, 150004 for 15.4."""
    if server_version < SERVER_VERSION_MIN:
        raise UnavailableError(
            "database-too-old",
            f"PostgreSQL {server_version // 10000} is too old",
            hint=f"Podium needs PostgreSQL {SERVER_VERSION_MIN // 10000} or newer",
        )


def schema_version(url: str, directory: ScriptDirectory | None = None) -> SchemaVersion:
    """Compares the database with the program's migrations, or those in ``directory``.

    Raises UnavailableError if the database cannot be reached or is too old.
    """
    with _connect(url) as connection:
        return _version(connection, directory or scripts())


def require_current_schema(url: str, directory: ScriptDirectory | None = None) -> None:
    """Raises UnavailableError unless the schema is exactly the one that this program knows."""
    version = schema_version(url, directory)
    if version.standing == "ahead":
        raise _newer(version)
    if version.standing != "current":
        raise UnavailableError(
            "schema-behind",
            f"the database's schema is {version.revision or 'empty'}, this program needs {version.newest}",
            hint="run `podium db upgrade`",
        )


def upgrade_schema(url: str, directory: ScriptDirectory | None = None) -> UpgradeReport:
    """Applies the missing migrations (of ``directory``, if given), one transaction each; none missing is no error.

    Raises UnavailableError when the lock is not to be had, when another session keeps a table from the migration (its
    process id is named), when the role may not do it, or when the schema is newer than the program.
    """
    report = UpgradeReport()
    chosen = directory or scripts()
    with _one_at_a_time, _connect(url) as connection:
        while (applied := _patiently(lambda blockers: _upgrade_once(connection, chosen, blockers))) is not None:
            report.applied.append(applied)
    return report


def downgrade_schema(url: str, target: str, directory: ScriptDirectory | None = None) -> DowngradeReport:
    """Takes back the migrations after the revision ``target``, newest first, one transaction each.

    For going back to the version of the program that knows ``target`` and nothing newer. Stop all workers before.
    Raises InputError for a revision that is none, RefusedError ``downgrade-refused`` when the database holds what the
    older schema cannot express (the migrations before that one stay taken back), and UnavailableError as an upgrade.
    """
    report = DowngradeReport()
    chosen = directory or scripts()
    known = {script.revision for script in chosen.walk_revisions()}
    if target not in known:
        raise InputError(
            "revision-unknown", f"there is no schema {target!r}", hint=f"there are {', '.join(sorted(known))}"
        )
    with _one_at_a_time, _connect(url) as connection:
        while (
            reverted := _patiently(lambda blockers: _downgrade_once(connection, chosen, target, blockers))
        ) is not None:
            report.reverted.append(reverted)
    return report


def _patiently(migrate: _Migrate) -> str | None:
    blockers: set[int] = set()
    for tries_left in reversed(range(LOCK_TRIES_MAX)):
        try:
            return migrate(blockers)
        except DBAPIError as error:
            state = getattr(error.orig, "sqlstate", None)
            if state == _NOT_ALLOWED:
                raise _not_allowed() from None
            if state != _NOT_TO_BE_HAD:
                raise
            if tries_left == 0:
                raise _blocked(blockers) from None
        # The transaction is rolled back: nothing was changed, and whoever waited behind us goes on now.
        time.sleep(LOCK_PAUSE_S)
    raise AssertionError("the last try returns or raises")


def _upgrade_once(connection: Connection, directory: ScriptDirectory, blockers: set[int]) -> str | None:
    with connection.begin():
        _take_lock(connection)
        owns = become_owner(connection)
        version = _version(connection, directory)
        if version.standing == "current":
            if owns and not grants_in_force(connection):
                # The roles came after the schema.
                apply_grants(connection)
            return None
        if version.standing == "ahead":
            raise _newer(version)
        script = _next_script(version.revision, directory)
        with _operations(connection, blockers):
            script.module.upgrade()
        _write_version(connection, script.revision)
        if owns:
            apply_grants(connection)
    # Now the migration and its version number are durable together; a crash before this line left neither.
    return script.revision


def _downgrade_once(connection: Connection, directory: ScriptDirectory, target: str, blockers: set[int]) -> str | None:
    with connection.begin():
        _take_lock(connection)
        become_owner(connection)
        version = _version(connection, directory)
        if version.standing == "ahead":
            raise _newer(version)
        newer = [script.revision for script in directory.iterate_revisions(version.revision or target, target)]
        if not newer:
            return None
        script = directory.get_revision(newer[0])
        with _operations(connection, blockers):
            try:
                getattr(script.module, "downgrade", _nothing_leads_back)()
            except (NotImplementedError, RuntimeError) as refusal:
                raise _irreversible(script.revision, str(refusal)) from None
        _write_version(connection, str(script.down_revision))
    # Now the schema and its version number are those of the version before, together.
    return str(script.revision)


@contextlib.contextmanager
def _operations(connection: Connection, blockers: set[int]) -> Iterator[None]:
    """What a migration needs around it in its transaction: short waits for locks, Alembic's operations, an observer."""
    connection.execute(text(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_MS}ms'"))
    connection.execute(text(f"SET LOCAL statement_timeout = '{STATEMENT_TIMEOUT}'"))
    context = MigrationContext.configure(connection)
    context._ensure_version_table()  # noqa: SLF001  # Alembic offers no public way outside of its own runner
    backend = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
    with _watch_blockers(connection, backend, blockers), Operations.context(context):
        yield


def _write_version(connection: Connection, revision: str) -> None:
    connection.execute(text("DELETE FROM alembic_version"))
    connection.execute(text("INSERT INTO alembic_version VALUES (:revision)"), {"revision": revision})


def _next_script(revision: str | None, directory: ScriptDirectory) -> Script:
    for script in directory.walk_revisions("base", "heads"):
        if script.down_revision == revision:
            return script
    raise UnavailableError("schema-unknown", f"there is no migration that follows {revision}")


def _version(connection: Connection, directory: ScriptDirectory) -> SchemaVersion:
    newest = directory.get_current_head()
    assert newest is not None
    found = connection.execute(text("SELECT to_regclass('alembic_version') IS NOT NULL")).scalar_one()
    revision: str | None = None
    if found:
        revision = connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()
    known = {script.revision for script in directory.walk_revisions()}
    if revision is None:
        return SchemaVersion(None, newest, "empty")
    if revision == newest:
        return SchemaVersion(revision, newest, "current")
    return SchemaVersion(revision, newest, "behind" if revision in known else "ahead")


def _newer(version: SchemaVersion) -> UnavailableError:
    return UnavailableError(
        "schema-newer",
        f"the database's schema ({version.revision}) is newer than this program (which knows {version.newest})",
        hint=f"use the version that upgraded the database; it can also go back: `podium db downgrade {version.newest}`",
    )


def _nothing_leads_back() -> None:
    raise NotImplementedError


def _irreversible(revision: str, reason: str) -> RefusedError:
    return RefusedError(
        "downgrade-refused",
        f"migration {revision} is not taken back: {reason or 'records would be lost'}",
        hint="go on with the version that knows this schema",
    )


def _take_lock(connection: Connection) -> None:
    give_up_at = time.monotonic() + LOCK_WAIT_S
    while not connection.execute(text("SELECT pg_try_advisory_xact_lock(:key)"), {"key": LOCK_KEY}).scalar_one():
        if time.monotonic() > give_up_at:
            raise UnavailableError(
                "migration-locked",
                f"another process has been migrating this database for more than {LOCK_WAIT_S:.0f} s",
                hint="wait for it, or end it, and try again",
            )
        time.sleep(0.2)


@contextlib.contextmanager
def _watch_blockers(connection: Connection, backend: int, blockers: set[int]) -> Iterator[None]:
    """Adds to ``blockers`` who blocks the migration while it waits: afterwards the database no longer says."""
    stop = threading.Event()

    def watch() -> None:
        with contextlib.suppress(DBAPIError, UnavailableError), _connect(_url_of(connection)) as observer:
            while not stop.wait(WATCH_PAUSE_S):
                found = observer.execute(text("SELECT unnest(pg_blocking_pids(:pid))"), {"pid": backend}).scalars()
                blockers.update(found)
                observer.rollback()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _blocked(blockers: set[int]) -> UnavailableError:
    who = f"process {', '.join(str(pid) for pid in sorted(blockers))}" if blockers else "another session"
    return UnavailableError(
        "migration-blocked",
        f"{who} of the database holds what the next migration needs; nothing was changed",
        hint="end that session (SELECT pg_terminate_backend(pid)) or wait for it, then run `podium db upgrade` again",
    )


def _not_allowed() -> UnavailableError:
    return UnavailableError(
        "migration-not-allowed",
        "the database does not let this role change the schema; nothing was changed",
        hint="upgrade as the owner of the database, or GRANT CREATE ON SCHEMA public to the role",
    )


def _url_of(connection: Connection) -> str:
    return connection.engine.url.render_as_string(hide_password=False)


@contextlib.contextmanager
def _connect(url: str) -> Iterator[Connection]:
    engine = create_engine(url, poolclass=NullPool, connect_args={"prepare_threshold": None, "connect_timeout": 10})
    try:
        connection = engine.connect()
    except DBAPIError as error:
        if isinstance(error.orig, psycopg.OperationalError):
            raise unreachable() from None
        raise
    try:
        refuse_old_server(connection.connection.dbapi_connection.info.server_version)  # type: ignore[union-attr]  # psycopg's
        yield connection
    finally:
        connection.close()
        engine.dispose()
