"""`podium plan check`: reads a plan as a run would, without servers and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from engine.cli import terminal
from engine.errors import ExitCode

if TYPE_CHECKING:
    from engine.plan import PlanError
    from engine.store.drafts import PlanDraft, RejectedPlan


@click.group()
def plan() -> None:
    """Check plans."""


@plan.command(short_help="Say what a plan is, or what is wrong with it.")
@click.argument("file", metavar="FILE|-")
@click.option(
    "--pool", "pool_name", default="local", show_default=True, metavar="NAME|FILE", help="Whose workers count."
)
@click.option("--lenient", is_flag=True, help="Accept readings that are guesses, with a note.")
@click.option(
    "--finish-reason",
    metavar="R",
    help="Why the text ended, in the provider's word: 'stop' for its own end; 'length' or 'max_tokens' for a limit.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was found as one JSON object.")
def check(file: str, pool_name: str, lenient: bool, finish_reason: str | None, as_json: bool) -> int:
    """Read the plan in FILE ('-': standard input) and say what it is, or everything that is wrong with it.

    Ends with 0 for a valid plan and with 2 for an invalid one.
    """
    from activities.plan_text import read_plan
    from engine.cli.contract import plan_object
    from engine.cli.inputs import plan_text
    from engine.plan import plan_digest
    from engine.store.drafts import RejectedPlan
    from worker_pools.pool import load_pool

    pool = load_pool(pool_name)
    text = plan_text(file)
    read = read_plan(pool, text, lenient=lenient, finish_reason=finish_reason)
    if isinstance(read, RejectedPlan):
        if as_json:
            terminal.out_json(plan_object(None, read.form, read.notes, read.errors, None))
        else:
            _print_errors(file, read)
        return ExitCode.BAD_INPUT
    if as_json:
        terminal.out_json(plan_object(read.plan, read.plan.form, read.plan.notes, (), plan_digest(read.plan)))
    else:
        _print_plan(read)
    return ExitCode.OK


def _print_plan(read: PlanDraft) -> None:
    from engine.cli.tables import print_graph
    from engine.plan import plan_digest

    found = read.plan
    print_graph([(step.worker, step.subtask, step.visible()) for step in found.steps])
    for note in found.notes:
        where = "" if note.position is None else f"step {note.position}: "
        terminal.out(f"note: {where}{terminal.inert(note.text)} [{note.code}]")
    count = len(found.steps)
    terminal.out(f"valid: {count} step{'' if count == 1 else 's'}, form {found.form}, digest {plan_digest(found)}")


def fault_line(file: str, error: PlanError) -> str:
    """`plan.txt:3:7: there is no worker 9 [unknown-worker]`."""
    name = "standard input" if file == "-" else file
    place = f"{name}:{error.line}:{error.column}" if error.line else name
    return f"{place}: {error.text} [{error.code}]"


def _print_errors(file: str, read: RejectedPlan) -> None:
    for error in read.errors:
        terminal.err(f"error: {terminal.inert(fault_line(file, error))}")
        if error.hint:
            terminal.err(f"hint: {terminal.inert(error.hint)}")
    for note in read.notes:
        terminal.err(f"note: {terminal.inert(note.text)} [{note.code}]")
