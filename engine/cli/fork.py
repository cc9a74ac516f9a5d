"""`podium fork`: a new run from a run with edits, previewed before it starts.

Must never start anything else than what it has shown, and with `--dry-run` nothing at all.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal
from uuid import UUID

import click

from engine.cli import terminal
from engine.errors import ExitCode, InputError

if TYPE_CHECKING:
    from engine.cli.session import Session
    from engine.operations.forking import ForkOrder, ForkProposal
    from engine.settings import Settings
    from engine.store.runs import CreatedRun

_ORDER: Final = f"{__name__}.order"
_FIELDS: Final = ("worker", "subtask", "access")
_FILE_MARK: Final = "@"


class _GroupedCommand(click.Command):
    """Remembers in which order the options were given: `--worker` and its kind belong to the `--step` before them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does it; the order goes into the context's `meta`."""
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        ctx.meta[_ORDER] = [parameter.name for parameter in order]
        return super().parse_args(ctx, args)


@dataclass(slots=True)
class _Job:
    """What was asked for. ``run_id`` is set as soon as there is a run."""

    settings: Settings
    order: ForkOrder
    dry_run: bool
    detach: bool
    as_json: bool
    run_id: UUID | None = field(default=None)


@click.command(cls=_GroupedCommand)
@click.argument("run_reference", metavar="RUN")
@click.option(
    "--step",
    type=click.IntRange(0),
    multiple=True,
    metavar="N",
    help="Edit step N (from 0): --worker, --subtask and --access that follow are about it. May be given again.",
)
@click.option("--worker", multiple=True, metavar="NAME", help="Give the step to this worker of the pool.")
@click.option("--subtask", multiple=True, metavar="TEXT|@FILE", help="Give the step this subtask ('@-': a pipe).")
@click.option("--access", multiple=True, metavar="0,1|all|none", help="Let the step read these earlier steps.")
@click.option("--task", metavar="TEXT|@FILE", help="Give the whole run another task: every step runs.")
@click.option("--pool", "pool_name", metavar="NAME|FILE", help="Use another pool than the one RUN is pinned to.")
@click.option("--dry-run", is_flag=True, help="Only show what would run, what would be reused, and the most it costs.")
@click.option("--detach", is_flag=True, help="Do not wait: print the new run's id and leave.")
@click.option("--json", "as_json", is_flag=True, help="Print the new run (with --dry-run: the preview) as JSON.")
@click.pass_context
def fork(
    context: click.Context,
    /,
    *,
    run_reference: str,
    task: str | None,
    pool_name: str | None,
    dry_run: bool,
    detach: bool,
    as_json: bool,
    **edits: tuple[Any, ...],
) -> int:  # fmt: skip
    """Make a new run from RUN (an id, the beginning of one, or 'last') with edits, and follow it.

    The steps that an edit can reach run: the edited ones and all that read them, directly or through others. So do
    steps that have no output yet. The outputs of all other steps are reused and cost nothing. RUN stays as it is.

    Example: podium fork last --step 1 --worker editor --subtask @brief.txt --step 2 --access 0,1

    A text that begins with @ names a file; write @@ for an @ of its own. Unedited steps keep the workers that they
    had at the end of RUN.
    """
    groups = grouped(context.meta[_ORDER], edits)
    task_bytes, step_texts = _texts(task, groups)

    # Imported only now: it takes a second, and what is wrong with the options was said at once.
    from engine.cli.session import settings_for_run
    from engine.operations.fork_edits import StepEdit, read_subtask
    from engine.operations.forking import ForkOrder
    from engine.service import read_task
    from worker_pools.pool import load_pool

    subtasks = {position: read_subtask(content) for position, content in step_texts.items()}
    step_edits = [
        StepEdit(position, group.get("worker"), subtasks.get(position), _access(group.get("access")))
        for position, group in groups.items()
    ]
    wanted_task = None if task_bytes is None else read_task(task_bytes)
    pool = None if pool_name is None else load_pool(pool_name)
    settings = settings_for_run()
    order = ForkOrder(run_reference, settings.actor_id, settings.on_behalf_of, step_edits, wanted_task, pool)
    return _perform(_Job(settings, order, dry_run=dry_run, detach=detach, as_json=as_json))


def grouped(order: Sequence[str | None], values: dict[str, tuple[Any, ...]]) -> dict[int, dict[str, str]]:
    """The edits by step: names in ``order`` as they were given, each with the next of its ``values``."""
    left = {name: list(given) for name, given in values.items()}
    groups: dict[int, dict[str, str]] = {}
    current: dict[str, str] | None = None
    for name in order:
        if name == "step":
            position = left[name].pop(0)
            if position in groups:
                raise InputError("step-twice", f"--step {position} is given twice", hint="give its edits together")
            groups[position] = current = {}
        elif name in _FIELDS:
            value = left[name].pop(0)
            if current is None:
                raise InputError(
                    "edit-without-step", f"--{name} names no step", hint=f"--step N --{name} ..., the step first"
                )
            if name in current:
                raise InputError("edit-twice", f"--{name} is given twice for one step", hint="give it once")
            current[name] = value
    for position, group in groups.items():
        if not group:
            raise InputError(
                "edit-missing",
                f"--step {position} is followed by no edit",
                hint=f"--step {position} with --worker, --subtask or --access behind it",
            )
    return groups


def _texts(task: str | None, groups: dict[int, dict[str, str]]) -> tuple[bytes | None, dict[int, bytes]]:
    """The task and the subtasks as they were given, in bytes, files read."""
    given = [task, *(group.get("subtask") for group in groups.values())]
    if given.count("@-") > 1:
        raise InputError("stdin-twice", "two texts cannot both come from standard input", hint="use a file for one")
    subtasks = {
        position: _content(group["subtask"], "subtask file") for position, group in groups.items() if "subtask" in group
    }
    return None if task is None else _content(task, "task file"), subtasks


def _content(value: str, what: str) -> bytes:
    from engine.cli.inputs import read_bytes

    if value.startswith(_FILE_MARK * 2):
        return os.fsencode(value[1:])
    if value.startswith(_FILE_MARK):
        return read_bytes(value[1:], what=what)
    return os.fsencode(value)


def _access(value: str | None) -> tuple[int, ...] | Literal["all"] | None:
    if value is None:
        return None
    word = value.strip().casefold()
    if word == "all":
        return "all"
    if word == "none":
        return ()
    parts = [part.strip() for part in word.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) <= 9 for part in parts):  # noqa: PLR2004  # no plan has so many steps
        raise InputError(
            "access-invalid",
            f"--access {value[:80]!a} is no list of steps",
            hint="write positions such as 0,1 (from 0), all, or none",
        )
    return tuple(int(part) for part in parts)


def _perform(job: _Job) -> int:
    from engine.cli.escort import interrupted, interrupted_early
    from engine.cli.session import run_async

    try:
        return run_async(_fork(job))
    except KeyboardInterrupt:
        if job.run_id is not None:
            return interrupted(job.run_id, as_json=job.as_json, embedded=job.settings.embedded)
        words, hint = "interrupted before the fork was confirmed", "`podium list` shows whether there is one"
        return interrupted_early(words, hint, line=f"{words}; {hint}", as_json=job.as_json)


async def _fork(job: _Job) -> int:
    from engine.cli.fork_preview import preview_object, print_preview
    from engine.cli.run import require_keys
    from engine.cli.session import open_session, quiet_status
    from engine.keeper.client import Needs
    from engine.operations.forking import propose_fork, running_part

    async with open_session(job.settings, Needs()) as session:
        proposal = await propose_fork(session.database, job.order)
        if job.dry_run and job.as_json:
            terminal.out_json(preview_object(proposal))
        else:
            print_preview(proposal, to_error=not job.dry_run)
        if job.dry_run:
            return ExitCode.OK
        drafted = proposal.new.plan
        if job.settings.embedded and drafted is not None:
            # Only the workers of steps that run need their keys.
            require_keys(proposal.pool, running_part(drafted, proposal.positions("run")).plan)
        await session.need(proposal.pool, on_status=quiet_status() if job.as_json else terminal.err)
        return await _start_and_follow(job, proposal, session)


async def _start_and_follow(job: _Job, proposal: ForkProposal, session: Session) -> int:
    from engine.cli.escort import escort, leave, report

    created = await _create(job, proposal, session)
    if job.detach:
        return await leave(session, created.id, as_json=job.as_json)
    seen = await escort(session, created.id, as_json=job.as_json, first_call=True)
    return report(seen, proposal.pool, as_json=job.as_json)


async def _create(job: _Job, proposal: ForkProposal, session: Session) -> CreatedRun:
    from engine.cli.escort import let_finish
    from engine.operations.forking import start_fork

    def done(created: CreatedRun) -> None:
        job.run_id = session.run_id = created.id

    client = await session.client()
    session.unconfirmed = True
    return await let_finish(start_fork(session.database, client, proposal), done)
