"""Rows of a large query, a few thousand at a time, and streams of them that are read side by side in one order."""

from __future__ import annotations

from collections import deque
from contextlib import AsyncExitStack
from itertools import count
from typing import Any, Final
from uuid import UUID

from psycopg.rows import dict_row

from engine.store.exchange import Connection, Row

FETCH_ROWS: Final = 2000
_serial = count(1)


class Rows:
    """The rows of a server-side cursor, with a look ahead."""

    def __init__(self, cursor: Any) -> None:
        self._cursor = cursor
        self._ahead: deque[Row] = deque()
        self._ended = False

    async def peek(self) -> Row | None:
        """The next row without taking it; None behind the last."""
        if not self._ahead and not self._ended:
            self._ahead.extend(await self._cursor.fetchmany(FETCH_ROWS))
            self._ended = not self._ahead
        return self._ahead[0] if self._ahead else None

    async def next(self) -> Row | None:
        """Takes the next row; None behind the last."""
        row = await self.peek()
        if row is not None:
            self._ahead.popleft()
        return row

    async def of_run(self, run_id: UUID | None) -> tuple[list[Row], list[Row]]:
        """Takes the rows of a run and those before them, of a stream that is ordered by ``run_id``.

        Returns (those of the run, those of runs before it); with None, all that are left are before it.
        """
        own: list[Row] = []
        before: list[Row] = []
        while (row := await self.peek()) is not None and (run_id is None or row["run_id"] <= run_id):
            (own if row["run_id"] == run_id else before).append(row)
            await self.next()
        return own, before


async def open_rows(stack: AsyncExitStack, connection: Connection, query: str, *params: Any) -> Rows:
    """Opens a cursor in the connection's transaction; the stack closes it."""
    cursor = connection.cursor(f"rows_{next(_serial)}", row_factory=dict_row)
    await stack.enter_async_context(cursor)
    await cursor.execute(query.encode(), params, binary=True)
    return Rows(cursor)
