"""The servers of one home, started side by side and kept alive. Knows nothing of clients."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from engine.errors import UnavailableError
from engine.keeper import space
from engine.keeper.home import Home
from engine.keeper.postgres import PostgresServer
from engine.keeper.temporal import TemporalServer
from engine.store.schema import upgrade_schema

RESTARTS_MAX = 5
RESTARTS_WINDOW_S = 60.0
SPACE_PAUSE_S = 2.0
_log = logging.getLogger(__name__)


class Servers:
    """PostgreSQL and Temporal of a home. ``start`` them, then let ``watch`` run: it restarts what dies."""

    def __init__(self, home: Home, *, temporal_port: int | None = None) -> None:
        self._home = home
        self.postgres = PostgresServer(home)
        self.temporal = TemporalServer(home, port=temporal_port)

    async def start(self, on_status: Callable[[str], None]) -> None:
        """Starts both and brings the schema up to date; when one fails the other is stopped again."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._start_postgres(on_status))
                group.create_task(self._start_temporal(on_status))
        except BaseExceptionGroup as errors:
            await self.stop()
            raise errors.exceptions[0] from None

    async def _start_postgres(self, on_status: Callable[[str], None]) -> None:
        on_status("starting PostgreSQL")
        await self.postgres.start()
        on_status("checking the schema")
        await asyncio.to_thread(upgrade_schema, self.postgres.migration_url)

    async def _start_temporal(self, on_status: Callable[[str], None]) -> None:
        on_status("starting Temporal")
        await self.temporal.start()

    async def watch(self) -> None:
        """Restarts a server that dies. Raises UnavailableError when one dies again and again.

        One that dies for want of space is started as soon as there is some.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(_keep_alive("PostgreSQL", self.postgres, self._home))
            group.create_task(_keep_alive("Temporal", self.temporal, self._home))

    async def stop(self) -> None:
        """Stops both, Temporal first: what it still wants to write must not meet a database that is gone."""
        await self.temporal.stop()
        await self.postgres.stop()


async def _keep_alive(name: str, server: PostgresServer | TemporalServer, home: Home) -> None:
    deaths: deque[float] = deque(maxlen=RESTARTS_MAX)
    while True:
        code = await server.wait()
        now = time.monotonic()
        deaths.append(now)
        if space.shortage(home.root) is not None:
            deaths.clear()
            await asyncio.sleep(SPACE_PAUSE_S)
        if len(deaths) == RESTARTS_MAX and now - deaths[0] < RESTARTS_WINDOW_S:
            raise UnavailableError(
                "server-dies",
                f"the embedded {name} has died {RESTARTS_MAX} times within {RESTARTS_WINDOW_S:.0f} s",
                hint=f"its log is {server.log_path}",
            )
        _log.warning("%s ended with code %d; it is started again", name, code)
        await _start_with_space(server)


async def _start_with_space(server: PostgresServer | TemporalServer) -> None:
    while True:
        try:
            await server.start()
        except UnavailableError as error:
            if error.code != "disk-full":
                raise
            await asyncio.sleep(SPACE_PAUSE_S)
        else:
            return
