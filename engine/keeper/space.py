"""Whether the disks of a home have room for its servers. Only looks: a write could take the last of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from engine.errors import UnavailableError
from engine.keeper import account
from engine.keeper.home import free_bytes

# PostgreSQL takes its log in pieces of 16 MB; with less than two of them left it may stop at any moment.
SHORT_BYTES: Final = 32 * 1024 * 1024
HINT: Final = "free some space"


def shortage(root: Path) -> UnavailableError | None:
    """`disk-full` for a home whose servers cannot count on writing; None where there is room or no home."""
    for folder in _folders(root):
        with suppress(OSError):
            free = free_bytes(folder)
            if free < SHORT_BYTES:
                return full(folder, free)
    return None


def full(folder: Path, free: int | None = None) -> UnavailableError:
    """The error `disk-full`; without `free` because writing fails, whatever the disk says (a quota)."""
    found = "a write failed for want of space" if free is None else f"{free // 2**20} MB left"
    return UnavailableError("disk-full", f"no space left for {folder} ({found})", hint=HINT)


def _folders(root: Path) -> Iterator[Path]:
    yield root
    base = account.base_of(root / "postgres")
    if base is not None:
        yield base
