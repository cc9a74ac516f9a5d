"""Server-sent events from raw bytes, with a bound on one event. Source: WHATWG HTML, section 9.2.

Does no I/O. Only the `data` and `event` fields are kept; comments and other fields are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from worker_pools.adapters.base import OUTPUT_BYTES_MAX, CallFailed

# An event may hold the largest answer whole, each byte escaped as \u00xx.
EVENT_BYTES_MAX = 6 * OUTPUT_BYTES_MAX + 65_536


BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BEGINNINGS = (b"data:", b"event:", b"id:", b"retry:", b":")


def is_event_stream(start: bytes | bytearray) -> bool | None:
    """Whether a body that begins so is a stream of events; None where more bytes are needed to tell."""
    text = bytes(start[:64]).removeprefix(BYTE_ORDER_MARK).lstrip()
    if text.startswith(_BEGINNINGS):
        return True
    undecided = any(beginning.startswith(text) for beginning in _BEGINNINGS)
    return None if undecided and len(start) < 64 else False  # noqa: PLR2004  # as many bytes as are looked at


@dataclass(frozen=True)
class Event:
    """One event: its name ("" if it has none) and its data lines joined."""

    name: str
    data: bytes


class SseDecoder:
    """Feed it bytes as they arrive; it gives the events that became complete."""

    def __init__(self, *, event_bytes_max: int = EVENT_BYTES_MAX) -> None:
        self._event_bytes_max = event_bytes_max
        self._tail = bytearray()
        self._searched = 0
        self._data: list[bytes] = []
        self._name = ""
        self._size = 0

    def feed(self, received: bytes) -> Iterator[Event]:
        """The events completed by these bytes. Raises CallFailed `output-too-large` above the bound."""
        self._tail += received
        start = 0
        while (end := self._tail.find(b"\n", max(start, self._searched))) >= 0:
            line = bytes(self._tail[start:end]).removesuffix(b"\r")
            start = end + 1
            event = self._take_line(line)
            if event is not None:
                yield event
        del self._tail[:start]
        self._searched = len(self._tail)
        if self._size + len(self._tail) > self._event_bytes_max:
            raise CallFailed("output-too-large", sent=True)

    def flush(self) -> Iterator[Event]:
        """The last event of a stream that ended without the blank line (some servers forget it)."""
        rest, self._tail = bytes(self._tail), bytearray()
        self._searched = 0
        for line in (rest, b""):
            event = self._take_line(line)
            if event is not None:
                yield event

    def _take_line(self, line: bytes) -> Event | None:
        if line:
            name, _, value = line.removeprefix(BYTE_ORDER_MARK).partition(b":")
            value = value.removeprefix(b" ")
            if name == b"data":
                self._data.append(value)
                self._size += len(value)
            elif name == b"event":
                self._name = value.decode("utf-8", "replace")
            return None
        event = Event(self._name, b"\n".join(self._data)) if self._data else None
        self._data, self._name, self._size = [], "", 0
        return event
