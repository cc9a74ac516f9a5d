"""Files that a command writes: checked before anything is done, so that nothing is half done for want of a file."""

from __future__ import annotations

import os
from pathlib import Path

from engine.errors import InputError


def checked_target(path: Path | None) -> None:
    """Raises InputError `file-unwritable` unless the file can be made, or replaced, where it is named."""
    if path is None:
        return
    if path.name == "" or (path.exists() and not path.is_file()):
        # A device or a pipe would be replaced by a file.
        raise unwritable(path, "not a file")
    folder = path.parent
    if not folder.is_dir():
        raise unwritable(path, "there is no such folder")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise unwritable(path, "permission denied")


def unwritable(path: Path, why: str) -> InputError:
    """The error for a file that cannot be written."""
    return InputError(
        "file-unwritable",
        f"{str(path)!r} cannot be written: {why}",
        hint="name a file in a folder that exists and that you may write to",
    )
