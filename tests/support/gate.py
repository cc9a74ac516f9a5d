"""A link between a worker and PostgreSQL that stops at chosen commits: it holds them before or after the server's work.

Unlike `link`, which cuts, a gate can hold: whoever wants the worker to die at exactly this moment kills it meanwhile.
It listens on loopback, where Podium prepares no statements, so every packet names what it does.

async with Gate(database_url) as gate:
    stop = gate.stop_at(run_id, "open", "before-commit")     # or cut=True: the link dies there instead
    await stop.reached.wait()
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Literal, Self
from urllib.parse import parse_qs, unquote, urlsplit
from uuid import UUID

Moment = Literal["before-commit", "after-commit"]
Write = Literal["open", "close", "begin", "finish", "round"]
CHUNK_BYTES: Final = 65536
COMMIT: Final = b"COMMIT\0"
# What the two transactions around a call contain, and no other does.
MARKS: Final[dict[Write, bytes]] = {
    "open": b"INSERT INTO attempts",
    "close": b"UPDATE attempts SET\n",
    # A step's own run is created; its answer is taken over; a later round is opened. Begin also does what finish does,
    # and a run brings its first round with it, so these two are told apart by what begin alone does.
    "begin": b"INSERT INTO runs",
    "finish": b"accepted_attempt_id = coalesce(",
    "round": b"INSERT INTO plans",
}


@dataclass(slots=True)
class Stop:
    """A place to stop at, once. ``reached`` is set when the commit is held, or the link cut."""

    run_id: UUID
    write: Write
    moment: Moment
    cut: bool
    reached: asyncio.Event = field(default_factory=asyncio.Event)

    def fits(self, transaction: bytes) -> bool:
        """Whether the bytes of a transaction are the ones meant."""
        spellings = (str(self.run_id).encode(), self.run_id.hex.encode(), self.run_id.bytes)
        if self.write in {"finish", "round"} and MARKS["begin"] in transaction:
            return False
        return MARKS[self.write] in transaction and any(one in transaction for one in spellings)


class Gate:
    """Listens on loopback and leads to the server of an address; ``url`` is the address through it."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        query = parse_qs(parts.query)
        self._server_path = f"{unquote(query['host'][0])}/.s.PGSQL.{query['port'][0]}"
        self._parts = parts
        self._stops: list[Stop] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        """The address for whoever shall come through the gate."""
        assert self._server is not None
        port = self._server.sockets[0].getsockname()[1]
        credentials = self._parts.netloc.rpartition("@")[0]
        return f"{self._parts.scheme}://{credentials}@127.0.0.1:{port}{self._parts.path}"

    def stop_at(self, run_id: UUID, write: Write, moment: Moment, *, cut: bool = False) -> Stop:
        """Holds (or cuts) the link at the next such commit of a run."""
        stop = Stop(run_id, write, moment, cut)
        self._stops.append(stop)
        return stop

    def hang_up(self) -> None:
        """Cuts every connection there is; what was held never arrives."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.hang_up()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_unix_connection(self._server_path)
        self._writers.update((writer, server_writer))
        held: asyncio.Queue[Stop] = asyncio.Queue()
        there = asyncio.create_task(self._there(reader, server_writer, held))
        back = asyncio.create_task(self._back(server_reader, writer, held))
        self._tasks.update((there, back))

        def end_both(_: asyncio.Task[None]) -> None:
            # A half-open link would be something else than a broken one.
            for one in (writer, server_writer):
                one.close()
                self._writers.discard(one)

        there.add_done_callback(end_both)
        back.add_done_callback(end_both)

    async def _there(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, held: asyncio.Queue[Stop]
    ) -> None:
        transaction = b""
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(CHUNK_BYTES):
                transaction += data
                stop = next((one for one in self._stops if one.fits(transaction)), None)
                if COMMIT in transaction and stop is not None:
                    self._stops.remove(stop)
                    if stop.moment == "before-commit":
                        await _stay(stop)
                        return
                    held.put_nowait(stop)
                if COMMIT in transaction:
                    transaction = b""
                writer.write(data)
                await writer.drain()

    async def _back(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, held: asyncio.Queue[Stop]
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(CHUNK_BYTES):
                if not held.empty() and COMMIT in data:
                    await _stay(held.get_nowait())
                    return
                writer.write(data)
                await writer.drain()


async def _stay(stop: Stop) -> None:
    """Cuts by returning, holds by waiting for the gate's own end."""
    stop.reached.set()
    if not stop.cut:
        await asyncio.Event().wait()
