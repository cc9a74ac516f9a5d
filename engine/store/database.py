"""The connection pool and the one way to write: a short transaction that is repeated when the database says so.

A model call never runs inside. A write function may run more than once, so what it does must find its own earlier
result: the link can die between COMMIT and its answer, and then nobody knows whether it counted.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

import psycopg
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from engine.errors import UnavailableError

Result = TypeVar("Result")

SERVER_VERSION_MIN = 150000
WRITE_DEADLINE_S = 60.0
PAUSE_FIRST_S = 0.02
PAUSE_MAX_S = 2.0
# Serialization failure, deadlock, too many connections, shutdown, crash recovery, lock timeout, ledger head moved.
_REPEATABLE = {"40001", "40P01", "53300", "57P01", "57P02", "57P03", "55P03", "25006", "PD001"}


class Database:
    """A pool of connections to one database. Safe to share between tasks of one event loop."""

    def __init__(self, url: str, *, pool_size: int = 10) -> None:
        self.url = url
        self.engine: AsyncEngine = create_async_engine(
            url,
            pool_size=pool_size,
            max_overflow=0,
            pool_timeout=WRITE_DEADLINE_S,
            # A connection may have died in the pool (restart, failover, firewall): ask before use.
            pool_pre_ping=True,
            # Named prepared statements break behind a pooler in transaction mode, so there are none.
            connect_args={"prepare_threshold": None, "connect_timeout": 10, "application_name": "podium"},
        )

    async def close(self) -> None:
        """Closes all connections."""
        await self.engine.dispose()

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """A connection for queries; failures to connect become UnavailableError."""
        try:
            async with self.engine.connect() as connection:
                yield connection
        except (DBAPIError, psycopg.OperationalError, PoolTimeoutError) as error:
            if _is_connection_loss(error):
                raise unreachable() from None
            raise

    async def write(self, work: Callable[[Connection], Awaitable[Result]]) -> Result:
        """Runs ``work`` in a transaction and commits; repeats it, bounded, after conflicts and lost connections.

        Raises UnavailableError when the database stays away for longer than ``WRITE_DEADLINE_S``.
        """
        give_up_at = time.monotonic() + WRITE_DEADLINE_S
        pause_s = PAUSE_FIRST_S
        while True:
            try:
                return await self._write_once(work)
            except (DBAPIError, psycopg.Error, PoolTimeoutError) as error:
                if not _is_repeatable(error):
                    raise
                if time.monotonic() + pause_s > give_up_at:
                    raise unreachable() from None
            # Full jitter, so that writers who met do not meet again.
            await asyncio.sleep(random.uniform(0, pause_s))  # noqa: S311  # not a secret
            pause_s = min(pause_s * 2, PAUSE_MAX_S)

    async def _write_once(self, work: Callable[[Connection], Awaitable[Result]]) -> Result:
        async with self.engine.connect() as pooled:
            raw = cast("Connection", (await pooled.get_raw_connection()).driver_connection)
            try:
                result = await work(raw)
                await raw.commit()
            except BaseException:
                # Whatever state the link is in (a cancelled pipeline, a dead socket): only a clean one goes back.
                if not raw.closed:
                    await _rollback_or_close(raw)
                if raw.closed:
                    await pooled.invalidate()
                raise
            else:
                return result


Connection = psycopg.AsyncConnection[tuple[Any, ...]]


async def _rollback_or_close(raw: Connection) -> None:
    try:
        await raw.rollback()
    except psycopg.Error:
        await raw.close()


def unreachable() -> UnavailableError:
    """The error for a database that cannot be reached. It never quotes the driver: its text may hold row values."""
    return UnavailableError(
        "database-unreachable",
        "the database cannot be reached",
        hint="check PODIUM_DATABASE_URL and that the server is up; `podium doctor` looks closer",
    )


def _sqlstate(error: BaseException) -> str | None:
    original = error.orig if isinstance(error, DBAPIError) else error
    return getattr(original, "sqlstate", None)


def _is_connection_loss(error: BaseException) -> bool:
    if isinstance(error, PoolTimeoutError):
        return True
    state = _sqlstate(error)
    original = error.orig if isinstance(error, DBAPIError) else error
    if isinstance(original, psycopg.OperationalError | psycopg.InterfaceError) and state is None:
        return True
    return state is not None and (state.startswith(("08", "28", "3D", "57P")) or state == "53300")


def _is_repeatable(error: BaseException) -> bool:
    state = _sqlstate(error)
    if state is not None and state.startswith(("28", "3D")):
        return False
    return state in _REPEATABLE or _is_connection_loss(error)
