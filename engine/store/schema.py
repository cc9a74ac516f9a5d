"""Bringing the database's schema up to date, and refusing one that this program does not know.

Safe when many processes start at once: each migration is one transaction that holds an advisory lock of the
transaction (a session's lock would not survive a pooler) and looks at the version only after it has the lock.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
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

from engine.errors import UnavailableError
from engine.store.database import SERVER_VERSION_MIN, unreachable

# Any constant will do, as long as nobody else uses it in this database.
LOCK_KEY = 0x706F6469756D
LOCK_WAIT_S = 120.0
LOCK_TIMEOUT = "5s"
STATEMENT_TIMEOUT = "10min"

Standing = Literal["current", "behind", "ahead", "empty"]
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


def scripts() -> ScriptDirectory:
    """The migrations that this program carries."""
    import migrations  # noqa: PLC0415  # found as a resource, wherever the distribution is installed

    return ScriptDirectory(str(Path(str(migrations.__file__)).parent))


def schema_version(url: str) -> SchemaVersion:
    """Compares the database with the program; raises UnavailableError if it cannot be reached or is too old."""
    with _connect(url) as connection:
        return _version(connection)


def require_current_schema(url: str) -> None:
    """Raises UnavailableError unless the schema is exactly the one that this program knows."""
    version = schema_version(url)
    if version.standing == "ahead":
        raise _newer(version)
    if version.standing != "current":
        raise UnavailableError(
            "schema-behind",
            f"the database's schema is {version.revision or 'empty'}, this program needs {version.newest}",
            hint="run `podium db upgrade`",
        )


def upgrade_schema(url: str) -> UpgradeReport:
    """Applies the missing migrations, one transaction each; does nothing when there are none.

    Raises UnavailableError when the lock is not to be had, when another session holds a table for longer than the
    lock timeout (its process id is named), or when the schema is newer than the program.
    """
    report = UpgradeReport()
    with _one_at_a_time, _connect(url) as connection:
        while (applied := _upgrade_once(connection)) is not None:
            report.applied.append(applied)
    return report


def _upgrade_once(connection: Connection) -> str | None:
    with connection.begin():
        _take_lock(connection)
        version = _version(connection)
        if version.standing == "current":
            return None
        if version.standing == "ahead":
            raise _newer(version)
        script = _next_script(version.revision)
        connection.execute(text(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'"))
        connection.execute(text(f"SET LOCAL statement_timeout = '{STATEMENT_TIMEOUT}'"))
        context = MigrationContext.configure(connection)
        context._ensure_version_table()  # noqa: SLF001  # Alembic offers no public way outside of its own runner
        backend = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
        with _watch_blockers(connection, backend) as blockers:
            try:
                with Operations.context(context):
                    script.module.upgrade()
            except DBAPIError as error:
                if getattr(error.orig, "sqlstate", None) == "55P03":
                    raise _blocked(script, blockers) from None
                raise
        connection.execute(text("DELETE FROM alembic_version"))
        connection.execute(text("INSERT INTO alembic_version VALUES (:revision)"), {"revision": script.revision})
    # Now the migration and its version number are durable together; a crash before this line left neither.
    return script.revision


def _next_script(revision: str | None) -> Script:
    directory = scripts()
    chain = list(directory.walk_revisions("base", "heads"))
    for script in reversed(chain):
        if script.down_revision == revision:
            return script
    raise UnavailableError("schema-unknown", f"there is no migration that follows {revision}")


def _version(connection: Connection) -> SchemaVersion:
    directory = scripts()
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
        hint="update Podium to the version that upgraded the database",
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
def _watch_blockers(connection: Connection, backend: int) -> Iterator[set[int]]:
    """Collects who blocks the migration while it waits: once it has given up, the database no longer says."""
    blockers: set[int] = set()
    stop = threading.Event()

    def watch() -> None:
        with contextlib.suppress(DBAPIError, UnavailableError), _connect(_url_of(connection)) as observer:
            while not stop.wait(0.25):
                found = observer.execute(text("SELECT unnest(pg_blocking_pids(:pid))"), {"pid": backend}).scalars()
                blockers.update(found)
                observer.rollback()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield blockers
    finally:
        stop.set()
        thread.join()


def _blocked(script: Script, blockers: set[int]) -> UnavailableError:
    who = f"process {', '.join(str(pid) for pid in sorted(blockers))}" if blockers else "another session"
    return UnavailableError(
        "migration-blocked",
        f"{who} of the database holds a table that migration {script.revision} needs; nothing was changed",
        hint="end that session (SELECT pg_terminate_backend(pid)) or wait for it, then run `podium db upgrade` again",
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
        server = connection.connection.dbapi_connection.info.server_version  # type: ignore[union-attr]  # psycopg's
        if server < SERVER_VERSION_MIN:
            raise UnavailableError(
                "database-too-old",
                f"PostgreSQL {server // 10000} is too old",
                hint="Podium needs PostgreSQL 15 or newer",
            )
        yield connection
    finally:
        connection.close()
        engine.dispose()
