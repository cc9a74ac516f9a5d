"""A link between a program and the PostgreSQL server that can be cut at chosen moments: it forwards bytes, or stops.

async with Link(database_url) as link:
    database = Database(link.url)
    link.cut_next("after-commit")
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Literal, Self
from urllib.parse import parse_qs, quote, urlsplit

# Before the server reads the word COMMIT; after it has committed and before its answer passes.
Cut = Literal["before-commit", "after-commit"]
CHUNK_BYTES = 65536
# What the protocol writes for the statement (Parse or Query) and for its completion (CommandComplete).
STATEMENT = b"COMMIT\0"
COMPLETION = b"COMMIT\0"


class Link:
    """A socket that leads to the server of an address; ``url`` is the address through it."""

    def __init__(self, url: str) -> None:
        query = parse_qs(urlsplit(url).query)
        port = query["port"][0]
        self._server_path = f"{query['host'][0]}/.s.PGSQL.{port}"
        self._folder = tempfile.mkdtemp(prefix="podium-link-")
        self._path = str(Path(self._folder) / f".s.PGSQL.{port}")
        self.url = url.replace(f"host={quote(query['host'][0], safe='')}", f"host={quote(self._folder, safe='')}")
        assert self.url != url
        self.cuts = 0
        self.connections = 0
        self._next: list[Cut] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    def cut_next(self, *cuts: Cut) -> None:
        """Cuts the link at the next transactions that commit, one after the other."""
        self._next += cuts

    async def hang_up(self) -> None:
        """Cuts every connection there is, as a restart or a firewall does to idle ones."""
        for writer in list(self._writers):
            writer.transport.abort()
        # The ends of the sockets are seen by the loop only after a turn.
        await asyncio.sleep(0.05)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._accept, self._path)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        await self.hang_up()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        server_reader, server_writer = await asyncio.open_unix_connection(self._server_path)
        writers = (writer, server_writer)
        self._writers.update(writers)
        there = asyncio.create_task(self._forward(reader, server_writer, writers, "before-commit", STATEMENT))
        back = asyncio.create_task(self._forward(server_reader, writer, writers, "after-commit", COMPLETION))
        self._tasks.update((there, back))

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        both: tuple[asyncio.StreamWriter, asyncio.StreamWriter],
        cut: Cut,
        word: bytes,
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(CHUNK_BYTES):
                if self._next and self._next[0] == cut and word in data:
                    self._next.pop(0)
                    self.cuts += 1
                    if cut == "before-commit":
                        # What stands before the word has arrived: the server has begun the work.
                        writer.write(data[: data.index(word)])
                        await writer.drain()
                    break
                writer.write(data)
                await writer.drain()
        for one in both:
            one.close()
            self._writers.discard(one)
