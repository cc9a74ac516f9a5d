"""The connection pool and the one way to write: a short transaction that is repeated when the database says so.

A model call never runs inside. A write function may run more than once, so what it does must find its own earlier
result: the link can die between COMMIT and its answer, and then nobody knows whether it counted.
"""

from __future__ import annotations

import asyncio
import logging
import random
import select
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError, InvalidatePoolError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from engine.errors import UnavailableError
from engine.keystore import Keyring
from engine.store.exchange import Connection, Params, Row, allow_preparing, exchange
from engine.store.sealing import seal_with

Result = TypeVar("Result")

SERVER_VERSION_MIN = 150000
WRITE_DEADLINE_S = 60.0
# A server that has never answered is hardly about to: a wrong address, password or name is said soon. (The driver gives
# no SQLSTATE for a connection that did not come about, and its words are in the server's language.)
FIRST_CONTACT_DEADLINE_S = 5.0
# Whoever wants to write tries again more often than that; if nobody does, nothing is known any more.
FULL_FOR_S = 10.0
PAUSE_FIRST_S = 0.02
PAUSE_MAX_S = 2.0
# Serialization failure, deadlock, lock timeout, read-only after a failover, ended while idle in a transaction or for
# the length of one (our own event loop stood still), ledger head moved.
_CONFLICTS = {"40001", "40P01", "55P03", "25006", "25P03", "25P04", "PD001"}
# A prepared statement whose table has changed, that is gone, or that somebody else prepared: not used again by then.
_STALE = {"0A000", "26000", "42P05"}
_REPEATABLE = _CONFLICTS | _STALE
# A table or a column that is not there: the schema was changed under us, or the statement is wrong.
_MISFIT = {"42P01", "42703"}
# Connection, operator intervention (restart, crash recovery, idle sessions), resources (connections, memory, disk).
_AWAY_CLASSES = ("08", "57P", "53")
_DISK_FULL = "53100"
# A link that a firewall or a dead host has cut says nothing; without these, libpq waits for hours. The first is in ms.
_KEEPALIVE = {"tcp_user_timeout": 30_000, "keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}
_log = logging.getLogger(__name__)


class Database:
    """A pool of connections to one database. Safe to share between tasks of one event loop.

    With ``keys`` the texts of new runs are sealed; without, they are kept in the clear and sealed ones cannot be read.
    """

    def __init__(self, url: str, *, pool_size: int = 10, keys: Keyring | None = None) -> None:
        self.url = url
        self.keys = keys
        self._was_reached = False
        self._full_at: float | None = None
        # Whether a pooler stands between us and the server; None before the first connection.
        self.is_pooled: bool | None = None
        self._unwanted: set[asyncio.Task[Connection]] = set()
        self.engine: AsyncEngine = create_async_engine(
            url,
            pool_size=pool_size,
            max_overflow=0,
            pool_timeout=WRITE_DEADLINE_S,
            # The locks are written for it: a statement behind a lock must see what was committed while it waited.
            # Whatever default the server or the role has.
            isolation_level="READ COMMITTED",
            # Named prepared statements break behind a pooler in transaction mode, so SQLAlchemy's queries use none;
            # `exchange` uses some, where `_prepare_session` finds that no pooler stands between.
            connect_args={
                "prepare_threshold": None,
                "connect_timeout": 10,
                "application_name": "podium",
                "async_creator_fn": self._connect,
                **_KEEPALIVE,
            },
        )
        event.listen(self.engine.sync_engine, "connect", self._prepare_session)
        event.listen(self.engine.sync_engine, "checkout", _refuse_dead)

    @property
    def is_full(self) -> bool:
        """Whether writes fail just now because the server has no space left."""
        return self._full_at is not None and time.monotonic() - self._full_at < FULL_FOR_S

    async def close(self) -> None:
        """Closes all connections."""
        await self.engine.dispose()
        await asyncio.gather(*self._unwanted, return_exceptions=True)

    async def _connect(self, *args: Any, **options: Any) -> Connection:
        """Connects; when it is cancelled meanwhile, the connection is made all the same and then closed.

        psycopg would leave the socket open, and the server would wait for the password for a minute.
        """
        making = asyncio.create_task(psycopg.AsyncConnection.connect(*args, **options))
        try:
            made = await asyncio.shield(making)
        except asyncio.CancelledError:
            self._unwanted.add(making)
            making.add_done_callback(self._close_unwanted)
            raise
        self._was_reached = True
        return made

    def _prepare_session(self, connection: Any, _record: object) -> None:
        """Makes times come back in UTC and readable, whatever the server, the role or the environment says.

        Finds out, in the same round trip, whether a pooler stands between; on a direct socket statements are prepared.
        """
        connection.autocommit = True
        cursor = connection.cursor()
        cursor.execute(
            "SELECT pg_backend_pid(), set_config('timezone', 'UTC', false), set_config('datestyle', 'ISO', false)"
        )
        (backend_pid, *_) = cursor.fetchone()
        cursor.close()
        connection.autocommit = False
        raw = connection.driver_connection
        seal_with(raw, self.keys)
        self.is_pooled = is_pooled(raw, backend_pid)
        # Over TCP something unknown may stand between all the same, and there is no gain worth the doubt.
        if not self.is_pooled and raw.info.host.startswith("/"):
            allow_preparing(raw)

    def _close_unwanted(self, making: asyncio.Task[Connection]) -> None:
        self._unwanted.discard(making)
        if not making.cancelled() and making.exception() is None:
            # libpq's own way to close is not a coroutine, which a callback could not wait for.
            making.result().pgconn.finish()

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """A connection for queries; failures to connect become UnavailableError."""
        try:
            async with self.engine.connect() as connection:
                yield connection
        except (DBAPIError, psycopg.Error, PoolTimeoutError) as error:
            if _is_away(error):
                raise _away(error) from None
            await self._refuse_misfit(error)
            raise

    async def fetch(self, *statements: tuple[str, Params]) -> list[list[Row]]:
        """The rows of each query, all read in one round trip; repeated and failing like ``query``."""

        async def work(pooled: AsyncConnection) -> list[list[Row]]:
            raw = await _raw(pooled)
            try:
                return await exchange(raw, statements)
            except BaseException:
                await _discard(pooled, raw)
                raise

        return await self.query(work)

    async def query(self, work: Callable[[AsyncConnection], Awaitable[Result]]) -> Result:
        """What ``work`` reads. Done once more if the connection died under it: the server may be back by now."""
        try:
            async with self.read() as connection:
                return await work(connection)
        except UnavailableError:
            if not self._was_reached:
                raise
        except psycopg.Error as error:
            if error.sqlstate not in _STALE:
                raise
        async with self.read() as connection:
            return await work(connection)

    async def write(self, work: Callable[[Connection], Awaitable[Result]]) -> Result:
        """Runs ``work`` in a transaction and commits; repeats it, bounded, after conflicts and lost connections.

        Raises UnavailableError when the database stays away (``database-unreachable``) or without space
        (``disk-full``) for longer than ``WRITE_DEADLINE_S``, or does not answer within ``FIRST_CONTACT_DEADLINE_S`` in
        the first place.
        """
        started_at = time.monotonic()
        pause_s = PAUSE_FIRST_S
        while True:
            try:
                result = await self._write_once(work)
            except (DBAPIError, psycopg.Error, PoolTimeoutError) as error:
                if not (_sqlstate(error) in _REPEATABLE or _is_away(error)):
                    await self._refuse_misfit(error)
                    raise
                self._note_space(full=_sqlstate(error) == _DISK_FULL)
                deadline_s = WRITE_DEADLINE_S if self._was_reached else FIRST_CONTACT_DEADLINE_S
                if time.monotonic() + pause_s > started_at + deadline_s:
                    raise _away(error) from None
            else:
                self._note_space(full=False)
                return result
            # Full jitter, so that writers who met do not meet again.
            await asyncio.sleep(random.uniform(0, pause_s))  # noqa: S311  # not a secret
            pause_s = min(pause_s * 2, PAUSE_MAX_S)

    async def _refuse_misfit(self, error: BaseException) -> None:
        """Raises UnavailableError if the schema is no longer the one that this program knows; else it is our bug.

        A worker whose schema was taken away must not fail runs: they wait for one that fits.
        """
        if _sqlstate(error) not in _MISFIT:
            return
        from engine.store.schema import schema_version  # noqa: PLC0415  # it needs this module, and Alembic is slow

        if (await asyncio.to_thread(schema_version, self.url)).standing != "current":
            _log.warning("schema-mismatch: the database's schema was changed under this program")
            raise UnavailableError(
                "schema-mismatch",
                "the database's schema was changed and no longer fits this program",
                hint="`podium doctor` names both versions; use the program that knows this schema",
            ) from None

    def _note_space(self, *, full: bool) -> None:
        if full and not self.is_full:
            _log.warning("disk-full: the database has no space left; what could not be written is tried again")
        self._full_at = time.monotonic() if full else None

    async def _write_once(self, work: Callable[[Connection], Awaitable[Result]]) -> Result:
        async with self.engine.connect() as pooled:
            raw = await _raw(pooled)
            try:
                result = await work(raw)
                await raw.commit()
            except Exception:
                if not await _rolled_back(raw):
                    await _discard(pooled, raw)
                raise
            except BaseException:
                # Cancelled in the middle of an exchange: the state of the link is not worth finding out.
                await _discard(pooled, raw)
                raise
            else:
                return result


async def _raw(pooled: AsyncConnection) -> Connection:
    return cast("Connection", (await pooled.get_raw_connection()).driver_connection)


async def _rolled_back(raw: Connection) -> bool:
    """Rolls back; whether the pool may hand the connection on."""
    if raw.pgconn.transaction_status == TransactionStatus.ACTIVE:
        return False
    try:
        await raw.rollback()
    except psycopg.Error:
        return False
    return True


async def _discard(pooled: AsyncConnection, raw: Connection) -> None:
    """Closes a connection in an unknown state; the pool makes another one. The server rolls back what was open."""
    await raw.close()
    await pooled.invalidate()


def is_pooled(raw: Connection, backend_pid: int) -> bool:
    """Whether a pooler (PgBouncer and its like) stands between; ``backend_pid`` is what the server says of itself.

    A pooler that shares sessions must hand out ids of its own: by its id a query is cancelled, wherever it runs.
    """
    return raw.info.backend_pid != backend_pid


def _refuse_dead(connection: Any, _record: object, _proxy: object) -> None:
    """Replaces the pool if the server has hung up on this connection: a question to the socket, no round trip.

    An idle server says nothing, so a socket with something to read is one with a farewell.
    """
    raw = connection.driver_connection
    if raw.closed:
        raise InvalidatePoolError
    socket = select.poll()
    socket.register(raw.fileno(), select.POLLIN)
    if socket.poll(0):
        raise InvalidatePoolError


def unreachable() -> UnavailableError:
    """The error for a database that cannot be reached. It never quotes the driver: its text may hold row values."""
    return UnavailableError(
        "database-unreachable",
        "the database cannot be reached",
        hint="check PODIUM_DATABASE_URL and that the server is up; `podium doctor` looks closer",
    )


def _away(error: BaseException) -> UnavailableError:
    if _sqlstate(error) == _DISK_FULL:
        return UnavailableError(
            "disk-full", "the database has no space left", hint="free some space on the disk of the database"
        )
    return unreachable()


def _sqlstate(error: BaseException) -> str | None:
    original = error.orig if isinstance(error, DBAPIError) else error
    return getattr(original, "sqlstate", None)


def _is_away(error: BaseException) -> bool:
    """Whether the server could not be reached, went away, or had no room; it may be back in a moment."""
    if isinstance(error, PoolTimeoutError):
        return True
    state = _sqlstate(error)
    if state is not None:
        return state.startswith(_AWAY_CLASSES)
    original = error.orig if isinstance(error, DBAPIError) else error
    return isinstance(original, psycopg.OperationalError | psycopg.InterfaceError)
