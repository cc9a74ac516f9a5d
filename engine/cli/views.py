"""The two faces of progress, both on standard error: a table that redraws itself, or a line for each change."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from engine.cli import terminal
from engine.cli.follow import View, elapsed
from engine.cli.render import STYLES, between, console, counted, duration, positions, preview, state_words, tokens
from engine.cli.tree import progress_lines
from engine.cli.waits import hint_lines, wait_lines

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from engine.store.watching import RunProgress, StepProgress

REDRAWS_PER_S: Final = 8.0


class FirstCall:
    """Says once, if wanted, how long after the command's start the first model call was seen."""

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted

    def seen(self, progress: RunProgress) -> None:
        """Says it as soon as a model was called."""
        if self._wanted and progress.called:
            self._wanted = False
            terminal.err(f"first call after {time.monotonic() - terminal.STARTED_S:.1f} s")


class SilentView:
    """Shows nothing but the time of the first call."""

    def __init__(self, first_call: FirstCall) -> None:
        self._first_call = first_call

    def update(self, progress: RunProgress) -> None:
        """Only looks for the first call."""
        self._first_call.seen(progress)

    def pieces(self, round_number: int, place: str, count: int) -> None:
        """Nothing."""


class PlainView:
    """One line for each change of a state, for pipes and logs."""

    def __init__(self, first_call: FirstCall) -> None:
        self._first_call = first_call
        self._said: dict[tuple[int, str], str] = {}

    def update(self, progress: RunProgress) -> None:
        """Says what differs from the last time, in the order in which it came about."""
        run = f"run {state_words(progress.state, progress.reason)}"
        if progress.state in {"created", "planning"}:
            self._say(progress, "run", run)
        planning = progress.planning
        if planning is not None:
            failed = f" ({planning.error_code})" if planning.error_code else ""
            self._say(progress, "plan", f"{_round(progress)}planning call {planning.attempts} {planning.state}{failed}")
            self._first_call.seen(progress)
        if progress.steps and (progress.round, "steps") not in self._said:
            self._say(progress, "steps", f"{_round(progress)}plan of {counted(len(progress.steps), 'step')}")
        if progress.state == "running":
            self._say(progress, "run", run)
        for step in progress.steps:
            if step.state == "pending":
                continue
            again = f", attempt {step.attempts}" if step.attempts > 1 else ""
            self._say(
                progress,
                str(step.position),
                f"{_round(progress)}step {step.position} {terminal.inert(step.worker)} "
                f"{state_words(step.state, step.reason)}{again}",
                took=between(step.started_at, step.ended_at),
            )
            self._first_call.seen(progress)
        for run_id, line in progress_lines(progress):
            # Told once, whatever the round of the run above is by now.
            self._say(progress, run_id, line, round_number=0)
        # A run waits because a step does, and ends after its last step.
        self._say(progress, "run", run)
        if terminal.err_is_terminal():
            # Whoever sits there may answer; for others the command ends, and says it then.
            for number, hint in enumerate(hint_lines(progress)):
                self._say(progress, f"hint {number}", f"hint: {hint}")

    def pieces(self, round_number: int, place: str, count: int) -> None:
        """Nothing: a line for every few tokens would drown the rest."""

    def _say(
        self,
        progress: RunProgress,
        subject: str,
        words: str,
        *,
        took: float | None = None,
        round_number: int | None = None,
    ) -> None:
        key = (progress.round if round_number is None else round_number, subject)
        if self._said.get(key) == words:
            return
        self._said[key] = words
        after = "" if took is None else f" in {duration(took)}"
        terminal.err(f"{elapsed(progress):>8}  {words}{after}")


def _round(progress: RunProgress) -> str:
    """The head of what is said of a later round."""
    return f"round {progress.round}: " if progress.round else ""


class LiveView:
    """A table on the terminal that redraws itself."""

    def __init__(self, first_call: FirstCall) -> None:
        self._first_call = first_call
        self._progress: RunProgress | None = None
        self._pieces: dict[tuple[int, str], int] = {}

    def update(self, progress: RunProgress) -> None:
        """Takes the new state; it is drawn at the next redraw."""
        self._progress = progress
        self._first_call.seen(progress)

    def pieces(self, round_number: int, place: str, count: int) -> None:
        """Takes the number of pieces that have arrived."""
        self._pieces[round_number, place] = count

    def __rich__(self) -> RenderableType:
        """The picture of this moment."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        progress = self._progress
        if progress is None:
            return Text("")
        head = Text(f"run {progress.id}  ")
        head.append(state_words(progress.state, progress.reason), STYLES.get(progress.state, ""))
        head.append(f"  {_round(progress)}{elapsed(progress)}", "dim")
        table = Table(box=None, pad_edge=False, show_header=False)
        planning = progress.planning
        if planning is not None and not progress.steps:
            table.add_row(
                "plan",
                "Conductor",
                Text(planning.state, STYLES.get(planning.state, "")),
                f"call {planning.attempts}" if planning.attempts > 1 else "",
                self._arriving(progress.round, "plan", planning.state == "sent"),
                duration(between(planning.sent_at, progress.read_at)) if planning.state == "sent" else "",
            )
        for step in progress.steps:
            table.add_row(*self._row(progress, step))
        below = [Text(line, "dim") for _, line in progress_lines(progress)]
        lines = [Text(line, STYLES["waiting"]) for line in wait_lines(progress)]
        hints = [Text(f"hint: {line}", "dim") for line in hint_lines(progress)]
        return Group(head, table, *below, *lines, *hints)

    def _row(self, progress: RunProgress, step: StepProgress) -> list[str | Text]:
        from rich.text import Text

        running = step.state == "running"
        return [
            str(step.position),
            Text(preview(step.worker, 24)),
            Text(state_words(step.state, step.reason), STYLES.get(step.state, "")),
            f"attempt {step.attempts}" if step.attempts > 1 else "",
            self._arriving(step.round, str(step.position), running),
            duration(between(step.started_at, step.ended_at or progress.read_at)) if step.started_at else "",
            Text(f"reads {positions(step.reads)}" if step.reads else "", "dim"),
        ]

    def _arriving(self, round_number: int, place: str, running: bool) -> str:
        count = self._pieces.get((round_number, place))
        return f"{tokens(count)} tokens" if running and count else ""


@contextmanager
def open_view(*, as_json: bool, first_call: bool = False) -> Iterator[View]:
    """The view for this standard error; with `--json` progress is for terminals only.

    With `first_call`, says how long after the command's start the first model call was seen.
    """
    call = FirstCall(wanted=first_call)
    if not terminal.err_is_terminal():
        yield SilentView(call) if as_json else PlainView(call)
        return
    if terminal.no_color():
        # Redrawing takes escape codes too.
        yield PlainView(call)
        return
    from rich.live import Live

    view = LiveView(call)
    live = Live(
        view, console=console(to_error=True), refresh_per_second=REDRAWS_PER_S, transient=True, redirect_stderr=True,
        redirect_stdout=False,
    )  # fmt: skip
    with live:
        yield view
