"""A small file system of its own for one folder, so that a full disk is a real one. Only for root."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Final, Self

PIECE_BYTES: Final = 1024 * 1024
LEAST_BYTES: Final = 4096


def can_mount() -> bool:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    probe = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


class SmallDisk:
    """A folder with a disk of its own. Leaving the context unmounts it, whoever still uses it."""

    def __init__(self, folder: Path, size_mb: int) -> None:
        self._folder = folder
        self._filler = folder / "filler"
        folder.mkdir(mode=0o700)
        command = ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m,mode=700", "none", str(folder)]
        subprocess.run(command, check=True)

    def fill(self) -> None:
        """Leaves not a single byte."""
        with self._filler.open("wb", buffering=0) as file:
            for size in (PIECE_BYTES, LEAST_BYTES):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    continue

    def free(self) -> None:
        """Takes away what filled it."""
        self._filler.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        subprocess.run(["umount", "--lazy", str(self._folder)], check=True)
