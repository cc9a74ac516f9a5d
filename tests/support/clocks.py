"""Another clock for a program: libfaketime in front of the system's, the monotonic clock left alone as in real life."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_FOUND: Final = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
WHY_NOT: Final = None if _FOUND else "there is no libfaketime here (Debian's package faketime has it)"


def clock(shift_s: int) -> dict[str, str]:
    """Variables that set a program's clock this many seconds ahead (or, below zero, behind)."""
    return {**_variables(), "FAKETIME": f"{shift_s:+d}"}


def movable_clock(file: Path) -> dict[str, str]:
    """Variables for a clock that `move_clock` can set while the program runs."""
    move_clock(file, 0)
    return {**_variables(), "FAKETIME_TIMESTAMP_FILE": str(file), "FAKETIME_NO_CACHE": "1"}


def move_clock(file: Path, shift_s: int) -> None:
    """Sets the clock so far ahead of (or behind) the true one, as a time server or an operator does."""
    fresh = file.with_suffix(".new")
    fresh.write_text(f"{shift_s:+d}\n")
    fresh.rename(file)


def _variables() -> dict[str, str]:
    # Older and newer name of the same setting.
    names = ("DONT_FAKE_MONOTONIC", "FAKETIME_DONT_FAKE_MONOTONIC", "FAKETIME_DONT_RESET")
    return {"LD_PRELOAD": str(_FOUND[0]), **dict.fromkeys(names, "1")}
