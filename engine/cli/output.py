"""`podium output`: the text of an answer, byte for byte, for other programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from engine.cli import terminal
from engine.errors import ExitCode, InputError, RefusedError

if TYPE_CHECKING:
    from engine.settings import Settings
    from engine.store.snapshots import RunSnapshot


@click.command()
@click.argument("run_reference", metavar="RUN")
@click.option("--step", type=click.IntRange(0), metavar="N", help="The output of step N (from 0), not the answer.")
@click.option(
    "--round", "round_number", type=click.IntRange(0), metavar="N", help="Of this round; the last if not given."
)
@click.option("--json", "as_json", is_flag=True, help="Print the text in one JSON object.")
def output(run_reference: str, step: int | None, round_number: int | None, as_json: bool) -> int:
    """Print the answer of RUN (an id, the beginning of one, or 'last') and nothing else.

    A pipe or file gets the bytes as they are stored; on a terminal control characters are spelled out.
    """
    from engine.cli.session import run_async, settings_for_run

    if round_number is not None and step is None:
        raise InputError("step-missing", "--round needs --step", hint="the answer of a run has no round of its own")
    settings = settings_for_run()
    run = run_async(_fetch(settings, run_reference, step, round_number))
    found = None
    if step is None:
        what, text, state, place = "answer", run.answer, run.state, None
    else:
        from engine.cli.tables import step_of

        found = step_of(run, step, round_number)
        if found is None:
            raise InputError("step-unknown", f"run {run.id} has no step {step}", hint=f"podium show {run.id}")
        what, text, state, place = f"output of step {step}", found.output, found.state, found.round
    if text is None and (run.answer_erased if found is None else found.output_erased):
        raise RefusedError("text-erased", f"the {what} was erased", hint=f"by whom and why: podium audit log {run.id}")
    if text is None:
        raise RefusedError("output-missing", f"there is no {what}: it is {state}", hint=f"podium show {run.id}")
    if as_json:
        from engine.cli.contract import versioned

        terminal.out_json(versioned({"id": str(run.id), "round": place, "step": step, "text": text}))
    elif terminal.out_is_terminal():
        terminal.out(terminal.inert(text))
    else:
        terminal.out_bytes(text.encode())
    return ExitCode.OK


async def _fetch(settings: Settings, reference: str, step: int | None, round_number: int | None) -> RunSnapshot:
    """The run, once it is on record that its text is read, where its pool wants that."""
    from engine.cli.reads import note_read
    from engine.cli.session import open_session, pinned_pool
    from engine.cli.tables import step_of
    from engine.keeper.client import Needs
    from engine.service import find_run

    async with open_session(settings, Needs()) as session:
        run = await find_run(session.database, reference)
        found = None if step is None else step_of(run, step, round_number)
        if (run.answer if step is None else found and found.output) is not None:
            place = None if found is None else (found.round, found.position)
            await note_read(session, run, await pinned_pool(session.database, run.pool_digest), "output", place)
        return run
