"""The tables and texts that `run`, `watch`, `show` and `list` print for people. Must never read or decide."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final

from engine.cli import terminal
from engine.cli.contract import plan_digest_of, run_object
from engine.cli.diagnosis import answer_notes, called, failure_words, model_of, note_line, plan_error_words
from engine.cli.render import (
    STYLES,
    aligned,
    between,
    counted,
    duration,
    lanes,
    local_time,
    money,
    positions,
    preview,
    short_time,
    show,
    state_words,
    tokens,
)
from engine.cli.review_render import what_words
from engine.cli.tree import blame_below, child_preview, place_words, round_words, tree_lines

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from engine.store.budgets import Account
    from engine.store.snapshots import AttemptSnapshot, RunLine, RunSnapshot, StepSnapshot
    from worker_pools.pool import Pool, Worker

# More lanes than that no terminal shows side by side; the column "reads" says the same.
LANES_MAX: Final = 24
DIGEST_CHARS: Final = 12
ID_CHARS: Final = 36
ID_CHARS_MIN: Final = 13
# With less of each task than this beside whole ids, the ids are shortened; less than the least is never shown.
TASK_CHARS_MIN: Final = 20
TASK_CHARS_LEAST: Final = 8
PLAN_LINES_MAX: Final = 40
PLAN_LINE_CHARS: Final = 400


def print_result(run: RunSnapshot, *, as_json: bool) -> None:
    """What `run` and `watch` end with: the answer, then the table of steps; or the one object.

    Only the answer goes into a pipe or a file; the rest is for people, so it goes to standard error then.
    """
    if as_json:
        terminal.out_json(run_object(run))
        return
    if run.answer is not None:
        terminal.out(terminal.inert(run.answer))
    piped = not terminal.out_is_terminal()
    say = terminal.err if piped else terminal.out
    if run.answer is not None:
        say()
    if run.steps:
        show(steps_table(run), to_error=piped)
    say(summary(run))
    for note in answer_notes(run):
        say(note_line(note))


def print_run(
    run: RunSnapshot,
    pool: Pool | None,
    remarks: Sequence[dict[str, Any]] = (),
    waits: Sequence[str] = (),
    hints: Sequence[str] = (),
) -> None:
    """Everything about a run. The pool, if it can be read, tells where failed calls went.

    Remarks follow the state, then what it waits for and the commands that let it go on.
    """
    terminal.out(f"run     {run.id}")
    terminal.out(f"state   {state_words(run.state, run.reason)}")
    for remark in remarks:
        terminal.out(note_line(remark))
    for line in waits:
        terminal.out(f"waits   {line}")
    for hint in hints:
        terminal.out(f"hint    {hint}")
    terminal.out(f"task    {'(erased)' if run.task is None and 'task' in run.erased else preview(run.task, 200)}")
    if run.erased:
        terminal.out(f"erased  {', '.join(sorted(kind.replace('_', ' ') for kind in run.erased))}")
    digest = plan_digest_of(run)
    terminal.out(f"pool    {run.pool} ({run.pool_digest[:DIGEST_CHARS]})")
    if digest is not None:
        whence = {
            "conductor": "by the Conductor",
            "file": "from a file",
            "template": "from a template",
            "fork": "edited",
        }
        revised = run.steps[-1].round if run.steps else 0
        said = f"by the Conductor in round {revised}" if revised else whence.get(run.origin, run.origin)
        terminal.out(f"plan    {said}, form {run.plan_form} ({digest[:DIGEST_CHARS]})")
    terminal.out(f"made    {local_time(run.created_at)} by {run.actor_id}")
    if run.source_run_id is not None:
        terminal.out(f"forked from {run.source_run_id}")
    if run.parent is not None:
        terminal.out(f"below   {place_words(run.parent)} of run {run.parent.run_id}")
    for line in budget_lines(run):
        terminal.out(line)
    if run.steps:
        terminal.out()
        _print_rounds(run)
        terminal.out()
        show(steps_table(run))
    terminal.out(summary(run))
    _print_planning(run, pool)
    _print_failures(run, pool)
    _print_reviews(run)
    for note in (*run.notes, *answer_notes(run)):
        terminal.out(note_line(note))
    if run.answer is not None:
        terminal.out()
        terminal.out(terminal.inert(run.answer))


def _print_reviews(run: RunSnapshot) -> None:
    for review in run.reviews:
        took = duration(between(review.requested_at, review.closed_at or review.read_at))
        back = ", sent back" if review.sent_back else ""
        who = f" by {', '.join(review.decided_by)}" if review.decided_by else ""
        have = f"{review.approved} of {counted(review.approvals, 'approval')}"
        words = f"{review.state}{back}{who} with {have} after {took}"
        terminal.out(f"review {review.id} of {what_words(review)}: {words}")


def _print_rounds(run: RunSnapshot) -> None:
    for one in run.rounds:
        steps = [step for step in run.steps if step.round == one.number]
        if head := round_words(one, run):
            terminal.out(head)
        if steps:
            graph = [(step.worker, step.subtask or "", step.access) for step in steps]
            print_graph(graph, [tree_lines(run, step) for step in steps])


def print_graph(steps: Sequence[tuple[str, str, Sequence[int]]], under: Sequence[Sequence[str]] = ()) -> None:
    """A plan as a graph: a line a step with its lanes, worker and subtask, for (worker, subtask, access) in order.

    ``under`` are lines to follow each step.
    """
    drawn = lanes([access for _, _, access in steps]) if len(steps) <= LANES_MAX else [""] * len(steps)
    wide = max(len(line) for line in drawn)
    name = max(len(preview(worker, 24)) for worker, _, _ in steps)
    for position, ((worker, subtask, _), line) in enumerate(zip(steps, drawn, strict=True)):
        terminal.out(f"{position:>3} {line:<{wide}}  {preview(worker, 24):<{name}}  {preview(subtask)}".rstrip())
        for more in under[position] if under else ():
            terminal.out(more)


def steps_table(run: RunSnapshot) -> Table:
    """A line a step: worker, state, time, tokens, cost, attempts, what it could read."""
    table = _table("step", "worker", "state", "time", "in", "out", "cost", "calls", "reads")
    for step in run.steps:
        table.add_row(
            str(step.position) if not step.round else f"{step.round}/{step.position}",
            preview(step.worker, 24),
            _styled(step.state, step.reason),
            duration(between(step.started_at, step.ended_at or (run.ended_at or run.read_at))),
            *_used(run, step),
            positions(step.access),
        )
    return table


def _used(run: RunSnapshot, step: StepSnapshot) -> tuple[str, str, str, str]:
    """Tokens, cost and calls of a step; of a delegated one all that its run and those below it used."""
    from engine.store.trees import with_below

    child = run.child_of(step)
    if child is not None and not step.attempts:
        used = with_below(child, run.below)
        cost = money(used.cost_usd, complete=used.cost_complete)
        return tokens(used.input_tokens), tokens(used.output_tokens), cost, str(used.calls)
    return (
        tokens(_sum([attempt.input_tokens for attempt in step.attempts])),
        tokens(_sum([attempt.output_tokens for attempt in step.attempts])),
        _cost(step.attempts),
        str(len(step.attempts)),
    )


def run_lines(runs: Sequence[RunLine], width: int | None) -> list[Text]:
    """A header and a line a run, for `list`. Where it is narrow, ids are as short as `show` can tell them apart."""
    header = ("run", "created", "state", "cost", "task")
    rows = [
        (
            str(run.id),
            short_time(run.created_at),
            _styled(run.state, run.reason),
            money(run.cost_usd),
            child_preview(run.parent, run.task_preview),
        )
        for run in runs
    ]
    if width is not None:
        taken = sum(max(len(head), *(len(row[column]) for row in rows)) + 2 for column, head in enumerate(header[:4]))
        if taken + TASK_CHARS_MIN > width:
            chars = _id_chars([row[0] for row in rows])
            rows = [(row[0][:chars], *row[1:]) for row in rows]
            taken += chars - ID_CHARS
        width = max(width, taken + TASK_CHARS_LEAST)
    return aligned(header, rows, width)


def _id_chars(ids: Sequence[str]) -> int:
    """How much of the ids tells them apart; those of one millisecond share their first 13 characters."""
    return next(chars for chars in range(ID_CHARS_MIN, ID_CHARS + 1) if len({own[:chars] for own in ids}) == len(ids))


def summary(run: RunSnapshot) -> str:
    """One line: state, time, tokens and cost of the whole run, with all runs below it."""
    took = duration(between(run.created_at, run.ended_at or run.read_at))
    used = run.totals
    cost = money(used.cost_usd, complete=used.cost_complete)
    below = f" with {counted(len(run.below), 'run')} below it" if run.below else ""
    return (
        f"run {run.id} {state_words(run.state, run.reason)} after {took}, "
        f"{tokens(used.input_tokens)} tokens in, {tokens(used.output_tokens)} out, cost {cost}{below}"
    )


def budget_lines(run: RunSnapshot) -> list[str]:
    """A line for each limited unit: what is spent, reserved and assumed of how much, and what is left."""
    budget = run.budget
    if budget is None:
        return []
    shared = "" if budget.run_id == run.id else f", shared with run {budget.run_id}"
    return [
        f"budget  {_account(unit, account)}{shared}"
        for unit, account in budget.accounts.items()
        if account.limit is not None
    ]


def _account(unit: str, account: Account) -> str:
    def said(amount: Decimal | None) -> str:
        return money(amount) if unit == "usd" else f"{int(amount or 0):,}"

    parts = [f"{said(account.spent)} spent"]
    if account.reserved:
        parts.append(f"{said(account.reserved)} reserved")
    if account.assumed:
        parts.append(f"{said(account.assumed)} assumed")
    noun = "" if unit == "usd" else f" {unit}"
    return f"{', '.join(parts)} of {said(account.limit)}{noun}, {said(account.left)} left"


def _print_planning(run: RunSnapshot, pool: Pool | None) -> None:
    for attempt in run.planning:
        took = duration(between(attempt.started_at, attempt.ended_at))
        used = f"{tokens(attempt.input_tokens)} tokens in, {tokens(attempt.output_tokens)} out"
        cost = money(attempt.cost_usd)
        where = f"round {attempt.round}, " if attempt.round else ""
        terminal.out(f"{where}planning call {attempt.number}: {attempt.state} in {took}, {used}, cost {cost}")
        _print_failure(attempt, model_of(pool, None))
    if run.rounds and run.rounds[-1].planned_at is None:
        _print_invalid_plan(run)


def _print_invalid_plan(run: RunSnapshot) -> None:
    if run.plan_text is not None:
        # As the parser counts lines, so that its places can be found.
        lines = run.plan_text.split("\n")
        terminal.out("the last text that was not a valid plan:")
        for line in lines[:PLAN_LINES_MAX]:
            terminal.out(f"    {terminal.inert(line.rstrip(chr(13)))[:PLAN_LINE_CHARS]}".rstrip())
        if len(lines) > PLAN_LINES_MAX:
            terminal.out(f"    … and {counted(len(lines) - PLAN_LINES_MAX, 'more line')}")
    for error in run.plan_errors:
        terminal.out(f"plan error: {plan_error_words(error)}")


def _print_failures(run: RunSnapshot, pool: Pool | None) -> None:
    for step in run.steps:
        where = f"round {step.round}, step {step.position}" if step.round else f"step {step.position}"
        for attempt in step.attempts:
            if attempt.error_code is not None:
                # After a retry with another worker, or a fallback, the step has not the worker that was called.
                other = "" if attempt.worker == step.worker else f" (worker {preview(attempt.worker, 64)})"
                terminal.out(f"{where}, attempt {attempt.number}{other}: {attempt.state}")
                _print_failure(attempt, called(pool, attempt), step.access)
        if step.state == "failed" and (said := blame_below(run, step)):
            terminal.out(f"{where}{said}")


def _print_failure(attempt: AttemptSnapshot, model: Worker | None, reads: Sequence[int] = ()) -> None:
    if attempt.error_code is not None:
        terminal.out(f"    {failure_words(attempt, model, reads)}")


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        right = column in {"step", "time", "in", "out", "cost", "calls"}
        table.add_column(column, justify="right" if right else "left", no_wrap=True)
    return table


def _styled(state: str, reason: str | None) -> Text:
    from rich.text import Text

    return Text(state_words(state, reason), STYLES.get(state, ""))


def _sum(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _cost(attempts: Sequence[AttemptSnapshot]) -> str:
    if not attempts:
        return "-"
    known = [attempt.cost_usd for attempt in attempts if attempt.cost_usd is not None]
    if not known:
        return "unknown"
    total = known[0]
    for cost in known[1:]:
        total += cost
    return money(total, complete=len(known) == len(attempts))


def step_of(run: RunSnapshot, position: int, round_number: int | None) -> StepSnapshot | None:
    """The step at a position of a round (if not given, the last one that has steps); None where there is none."""
    wanted = (run.steps[-1].round if run.steps else run.round) if round_number is None else round_number
    return next((step for step in run.steps if (step.round, step.position) == (wanted, position)), None)
