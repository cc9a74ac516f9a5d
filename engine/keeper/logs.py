"""A server's log file that stays small. Must never hold up the server that writes it.

The server writes through its own descriptor, not through a pipe of ours: so it keeps its log after our death and never
waits for us. The price is that the file is bounded by copying its end away and truncating it: a line written between
the two is lost.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

BYTES_MAX: Final = 8 * 1024 * 1024


@dataclass(frozen=True)
class LogFile:
    """One log file of at most about `bytes_max` bytes, with one predecessor (`.1`) of the same size."""

    path: Path
    bytes_max: int = BYTES_MAX

    def open(self) -> int:
        """Open it for appending (mode 600) and return the descriptor, which the caller closes."""
        self.trim()
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def size(self) -> int:
        """Bytes now in the file; 0 where there is none."""
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return 0

    def trim(self) -> bool:
        """Move the last `bytes_max` bytes to `.1` and empty the file, if it is over its size. Say whether it was."""
        if self.size() <= self.bytes_max:
            return False
        older = self.path.with_name(self.path.name + ".1")
        descriptor = os.open(older, os.O_WRONLY | os.O_TRUNC | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as target:
            target.write(self.tail(bytes_max=self.bytes_max).encode())
        os.truncate(self.path, 0)
        return True

    def tail(self, *, since: int = 0, bytes_max: int = 4096) -> str:
        """The end of the file, from byte `since` on, at most `bytes_max` bytes; undecodable bytes are replaced."""
        try:
            with self.path.open("rb") as source:
                end = source.seek(0, os.SEEK_END)
                source.seek(max(since if since <= end else 0, end - bytes_max))
                return source.read(bytes_max).decode(errors="replace")
        except FileNotFoundError:
            return ""
