"""Real servers for tests: one throw-away PostgreSQL and Temporal, from the code that users run.

Synchronous on purpose, so that fixtures of any scope can use it: the servers live on an event loop in a thread of
their own (the thread must live as long as they do, see `engine.keeper.process`). Each pytest process starts its own
pair; nothing is shared, so nothing has to be agreed upon between xdist workers, and a killed worker takes its servers
with it. Typical use, once for the whole suite:

    @pytest.fixture(scope="session")
    def servers():
        with TestServers() as servers:
            yield servers
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar
from urllib.parse import urlsplit
from uuid import uuid4

import psycopg
from psycopg import sql

from engine.keeper.home import HomeLock, lock_home, open_home
from engine.keeper.postgres import PostgresServer
from engine.keeper.temporal import TemporalServer
from engine.store.roles import MIGRATOR, OWNER

# Roles that only test servers have: one that may do anything, as an attacker or administrator of the server, and one
# that owns its databases, as on a server of one's own where there is one role. The migrator's password is known, too.
SUPERUSER: Final = "test_superuser"
SINGLE: Final = "test_single"
PASSWORD: Final = "test"  # the socket's folder is private
EXTRA_SETUP: Final = (
    f"CREATE ROLE {SUPERUSER} SUPERUSER LOGIN PASSWORD '{PASSWORD}';",
    f"CREATE ROLE {SINGLE} LOGIN PASSWORD '{PASSWORD}';",
    f"ALTER ROLE {MIGRATOR} PASSWORD '{PASSWORD}';",
)
# A test's database need not survive a power cut, and fsync is most of what cloning one costs.
FAST_SETTINGS: Final = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}

T = TypeVar("T")


class TestServers:
    """A PostgreSQL and a Temporal server in a temporary home; each starts when it is first asked for."""

    __test__ = False  # the name begins with Test, but it is none

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="podium-test-", ignore_cleanup_errors=True)
        self.home = open_home(Path(self._folder.name) / "home")
        self._lock: HomeLock | None = lock_home(self.home)
        self.postgres = PostgresServer(self.home, settings=FAST_SETTINGS, extra_setup=EXTRA_SETUP)
        self.temporal = TemporalServer(self.home)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-servers", daemon=True)
        self._thread.start()
        self._starting = threading.Lock()

    @property
    def postgres_admin_url(self) -> str:
        """SQLAlchemy address of the database `podium` for a superuser, which only test servers have."""
        self._start(self.postgres)
        return superuser_url(self.postgres.url)

    @property
    def temporal_address(self) -> str:
        """`host:port` of Temporal; the namespace is `default`."""
        self._start(self.temporal)
        return self.temporal.address

    def new_database(self, template: str | None = None, *, roles: bool = False) -> str:
        """Make a database and return its address. `template` is the address of one to clone, with its roles.

        Without a template it is empty, and the address is that of its owner, as on a server with one role. With
        `roles` the owner is the owner role, and the address that of the application's role, as in the embedded
        default; `migrator_url` gives the one that migrations need.

        Nobody may be connected to the template: dispose of the engine that filled it first.
        """
        name = f"test_{uuid4().hex}"
        roles = roles or (template is not None and urlsplit(template).username != SINGLE)
        statement = sql.SQL("CREATE DATABASE {} OWNER {}").format(
            sql.Identifier(name), sql.Identifier(OWNER if roles else SINGLE)
        )
        if template is not None:
            # FILE_COPY clones files instead of logging every page: the fastest way without fsync.
            statement += sql.SQL(" TEMPLATE {} STRATEGY FILE_COPY").format(sql.Identifier(database_name(template)))
        self._execute(statement)
        url = self.postgres.url_of(name)
        return url if roles else _as_role(url, SINGLE)

    def drop_database(self, url: str) -> None:
        """Drop a database that `new_database` made, and end whatever is still connected to it."""
        self._execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(database_name(url))))

    def stop(self) -> None:
        """Stop both servers and delete everything; doing so twice is no mistake."""
        if self._loop.is_closed():
            return
        try:
            self._run(self._stop_both())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            if self._lock is not None:
                self._lock.release()
            # Outside the home when that lies deep.
            shutil.rmtree(self.home.run_dir, ignore_errors=True)
            self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _start(self, server: PostgresServer | TemporalServer) -> None:
        with self._starting:
            if server.pid is None:
                self._run(server.start())

    async def _stop_both(self) -> None:
        await asyncio.gather(self.postgres.stop(fast_s=0.0), self.temporal.stop(graceful_s=0.0))
        # What looks after the servers' logs ends with them, a moment later.
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        if rest:
            await asyncio.wait(rest, timeout=2.0)

    def _execute(self, statement: sql.SQL | sql.Composed) -> None:
        address = self.postgres_admin_url.replace("postgresql+psycopg://", "postgresql://")
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute(statement)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def superuser_url(url: str) -> str:
    """The same database for a superuser: an administrator, or an attacker who got that far."""
    return _as_role(url, SUPERUSER)


def migrator_url(url: str) -> str:
    """The same database for migrations, where it was made with `roles`."""
    return _as_role(url, MIGRATOR)


def _as_role(url: str, role: str) -> str:
    parts = urlsplit(url)
    return url.replace(f"{parts.username}:{parts.password}@", f"{role}:{PASSWORD}@", 1)


def database_name(url: str) -> str:
    """The database that an address (or a bare name) means."""
    return urlsplit(url).path.lstrip("/") if "://" in url else url
