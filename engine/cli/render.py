"""How people see plans and runs: words, money, times, the graph of a plan, the tables. Must never read or decide.

Text by people and models goes through `inert` and never through markup.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
from collections.abc import Sequence
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Final

from engine.cli import terminal
from engine.cli.contract import decimal_text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

STYLES: Final[dict[str, str]] = {
    "created": "dim",
    "pending": "dim",
    "planning": "cyan",
    "running": "cyan",
    "sent": "cyan",
    "waiting": "yellow",
    "succeeded": "green",
    "reused": "green",
    "failed": "red",
    "refused": "red",
    "unknown": "magenta",
    "superseded": "magenta",
    "skipped": "dim",
    "cancelled": "yellow",
}
PREVIEW_CHARS: Final = 72
# Wide enough that no line of a pipe or a file is ever wrapped.
PIPE_COLUMNS: Final = 4096


def console(*, to_error: bool = False) -> Console:
    """A console for one of the streams; plain and never wrapped when it is not a terminal or NO_COLOR is set."""
    from rich.console import Console

    is_terminal = terminal.err_is_terminal() if to_error else terminal.out_is_terminal()
    return Console(
        stderr=to_error,
        force_terminal=is_terminal and not terminal.no_color(),
        no_color=None if is_terminal and not terminal.no_color() else True,
        width=None if is_terminal else PIPE_COLUMNS,
        highlight=False,
        markup=False,
        emoji=False,
    )


def show(*parts: RenderableType, to_error: bool = False) -> None:
    """Writes to standard output (or error): styled on a terminal, plain in a pipe."""
    from rich.text import Text

    target = console(to_error=to_error)
    buffer = io.StringIO()
    target.file = buffer
    for part in parts:
        target.print(part, soft_wrap=isinstance(part, str | Text))
    lines = [line.rstrip() for line in buffer.getvalue().splitlines()]
    write = terminal.err if to_error else terminal.out
    write("\n".join(lines))


def aligned(header: Sequence[str], rows: Sequence[Sequence[str | Text]], width: int | None) -> list[Text]:
    """A line a row, columns under each other; what is wider than `width` is cut at the line's end, never wrapped.

    Unlike a table, which takes from every column until none can be read.
    """
    from rich.text import Text

    cells = [[Text(name, "dim") for name in header]]
    cells += [[cell.copy() if isinstance(cell, Text) else Text(cell) for cell in row] for row in rows]
    wide = [max(row[column].cell_len for row in cells) for column in range(len(header))]
    lines = []
    for row in cells:
        for cell, wanted in zip(row, wide, strict=True):
            cell.pad_right(wanted - cell.cell_len)
        line = Text("  ").join(row)
        line.rstrip()
        if width is not None:
            line.truncate(width, overflow="ellipsis")
        lines.append(line)
    return lines


def columns() -> int | None:
    """How wide standard output is; None if it is no terminal, where nothing needs to be cut."""
    return shutil.get_terminal_size().columns if terminal.out_is_terminal() else None


def counted(count: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def preview(text: str | None, chars: int = PREVIEW_CHARS) -> str:
    """The text in one line of at most `chars` characters."""
    if text is None:
        return ""
    line = terminal.inert(" ".join(text[: chars * 4].split()))
    return line if len(line) <= chars else line[: chars - 1] + "…"


def money(value: Decimal | None, *, complete: bool = True) -> str:
    """US dollars for people: `$0.0012`, `$0`, `unknown`, or `$0.0012 + unknown` for a sum of which a part is."""
    if value is None or (not complete and value == 0):
        return "unknown"
    return f"${decimal_text(value)}" + ("" if complete else " + unknown")


def tokens(count: int | None) -> str:
    """A number of tokens; a dash if unknown."""
    return "-" if count is None else f"{count:,}"


def duration(seconds: float | None) -> str:
    """`0.4 s`, `12.3 s`, `3 min 05 s`; a dash if there is none."""
    if seconds is None:
        return "-"
    if seconds < 60:  # noqa: PLR2004  # a minute
        return f"{max(seconds, 0.0):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"  # noqa: PLR2004  # minutes


def between(start: datetime | None, end: datetime | None) -> float | None:
    """Seconds from one time to another; None if one is missing."""
    return None if start is None or end is None else (end - start).total_seconds()


def local_time(value: datetime) -> str:
    """A time of the user's own zone, which is named, to the second."""
    return value.astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def short_time(value: datetime) -> str:
    """A time of the user's own zone, which is named, to the minute and without the year."""
    return value.astimezone().strftime("%m-%d %H:%M %Z")


def positions(access: Sequence[int]) -> str:
    """`0, 1, 3`, or a dash for none."""
    return ", ".join(str(position) for position in access) or "-"


def state_words(state: str, reason: str | None) -> str:
    """`waiting (secret-missing)`, or the state alone."""
    return f"{state} ({reason})" if reason else state


def lanes(reads: Sequence[Sequence[int]]) -> list[str]:
    """The graph of a plan, one line a step: a step's lane runs down from its mark to the last step that reads it.

    ○
    │ ○
    └─┴─○
    """
    last_reader = {source: reader for reader, sources in enumerate(reads) for source in sources}
    drawn = []
    for position, sources in enumerate(reads):
        cells = []
        first = min(sources, default=position)
        for lane in range(position):
            alive_below = last_reader.get(lane, lane) > position
            crossed = lane > first
            if lane in sources:
                cells.append(_joint(crossed=crossed, alive_below=alive_below))
            elif last_reader.get(lane, lane) > position:
                cells.append("│")
            else:
                cells.append("─" if crossed else " ")
        line = ""
        for lane, cell in enumerate(cells):
            line += cell + ("─" if lane >= first else " ")
        drawn.append(line + "○")
    return drawn if can_draw() else [line.translate(_ASCII) for line in drawn]


def _joint(*, crossed: bool, alive_below: bool) -> str:
    if crossed:
        return "┼" if alive_below else "┴"
    return "├" if alive_below else "└"


_ASCII: Final = str.maketrans({"○": "o", "│": "|", "─": "-", "├": "+", "└": "`", "┼": "+", "┴": "'"})


def can_draw() -> bool:
    """Whether standard output takes more than ASCII."""
    encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower()
    return "utf" in encoding and os.environ.get("TERM") != "dumb"
