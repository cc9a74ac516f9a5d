"""A server of Temporal's protocol that answers every question with its version: for servers that cannot be had here.

Speaks just enough HTTP/2 and gRPC (RFC 9113, and gRPC's own document on HTTP/2): every request gets the same message.
"""

from __future__ import annotations

import asyncio
import struct
import threading
from types import TracebackType
from typing import Final, Self

from temporalio.api.workflowservice.v1 import GetSystemInfoResponse

PREFACE_BYTES: Final = 24
DATA, HEADERS, SETTINGS, PING = 0, 1, 4, 6
ACK, END_STREAM, END_HEADERS = 1, 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """One frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header(name: bytes, value: bytes) -> bytes:
    """One header as HPACK's literal that is not remembered."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


class OldTemporal:
    """Listens on a port of loopback, in a thread of its own, for as long as the context lasts."""

    def __init__(self, version: str) -> None:
        message = GetSystemInfoResponse(server_version=version).SerializeToString()
        self._answer = b"\x00" + struct.pack(">I", len(message)) + message
        self.address = ""

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = "{}:{}".format(*self._server.sockets[0].getsockname())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readexactly(PREFACE_BYTES)
            writer.write(frame(SETTINGS, 0, 0, b""))
            while True:
                head = await reader.readexactly(9)
                kind, flags, stream = struct.unpack(">BBI", head[3:])
                payload = await reader.readexactly(int.from_bytes(head[:3]))
                if kind in {SETTINGS, PING} and not flags & ACK:
                    writer.write(frame(kind, ACK, 0, payload if kind == PING else b""))
                elif kind in {DATA, HEADERS} and flags & END_STREAM:
                    # 0x88 is `:status: 200` of HPACK's own table.
                    start = b"\x88" + header(b"content-type", b"application/grpc")
                    writer.write(frame(HEADERS, END_HEADERS, stream, start) + frame(DATA, 0, stream, self._answer))
                    end = header(b"grpc-status", b"0")
                    writer.write(frame(HEADERS, END_HEADERS | END_STREAM, stream, end))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            # The client went away, or this server does.
            pass
        finally:
            writer.close()

    async def _stop(self) -> None:
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def __enter__(self) -> Self:
        # Made here: in a test that is a coroutine, another loop runs in this thread.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
