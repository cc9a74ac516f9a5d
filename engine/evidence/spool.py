"""The members of a bundle on their way to the archive: packed one by one, in a temporary file, never all in memory.

The archive begins with its manifest, which lists the size and digest of every other member, so those come first here.
"""

from __future__ import annotations

import hashlib
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Self

from engine.errors import RefusedError
from engine.verifier.archive import MANIFEST, MEMBERS_MAX, TOTAL_BYTES_MAX, Packed, packed, write_archive

# What the manifest itself may need.
_ROOM: Final = 16 * 2**20


@dataclass(frozen=True, slots=True)
class _Kept:
    """A packed member in the file: where, and how it was before."""

    offset: int
    length: int
    method: int
    checksum: int
    unpacked: int
    sha256: str


class Spool:
    """A context manager; the temporary file is in ``folder`` and goes with it."""

    def __init__(self, folder: Path) -> None:
        self._file: BinaryIO = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # closed by __exit__
        self._kept: dict[str, _Kept] = {}
        self._end = 0
        self._total = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, name: str, content: bytes) -> None:
        """Adds a member. Raises RefusedError ``bundle-too-large`` and, for a name that is there already, KeyError."""
        if name in self._kept:
            raise KeyError(name)
        self._total += len(content)
        if len(self._kept) + 2 > MEMBERS_MAX or self._total > TOTAL_BYTES_MAX - _ROOM:
            raise too_large()
        try:
            member = packed(name, content)
        except ValueError:
            raise too_large() from None
        self._file.seek(self._end)
        self._file.write(member.content)
        self._kept[name] = _Kept(
            self._end,
            len(member.content),
            member.method,
            member.checksum,
            member.unpacked,
            hashlib.sha256(content).hexdigest(),
        )
        self._end += len(member.content)

    def read(self, name: str) -> bytes:
        """The bytes of a member as they were given; KeyError for an unknown name."""
        member = self._packed(name)
        return zlib.decompress(member.content, -15) if member.method else member.content

    def files(self) -> list[dict[str, Any]]:
        """The manifest's list: path, size in bytes and SHA-256 of each member, in the order of the archive."""
        return [
            {"bytes": kept.unpacked, "path": name, "sha256": kept.sha256} for name, kept in sorted(self._kept.items())
        ]

    def write(self, manifest: bytes, target: BinaryIO) -> None:
        """Writes the archive."""

        def members() -> Iterator[Packed]:
            yield packed(MANIFEST, manifest)
            for name in sorted(self._kept):
                yield self._packed(name)

        write_archive(target, members())

    def _packed(self, name: str) -> Packed:
        kept = self._kept[name]
        self._file.seek(kept.offset)
        return Packed(name, kept.method, kept.checksum, kept.unpacked, self._file.read(kept.length))


def too_large() -> RefusedError:
    """The error for more than one bundle may hold."""
    return RefusedError(
        "bundle-too-large",
        f"that is more than one bundle holds ({MEMBERS_MAX:,} files, {TOTAL_BYTES_MAX >> 30} GiB)",
        hint="export fewer runs at once, or leave outputs out with --redact",
    )
