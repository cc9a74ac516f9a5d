"""`podium retry`, `skip` and `abort`: an operator's answers to a step that failed and waits.

Must never answer a step that does not wait: whoever comes second is told so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from engine.cli import terminal
from engine.cli.orders import reason_option, run_argument
from engine.errors import ExitCode

if TYPE_CHECKING:
    from engine.cli.session import Session
    from engine.operations.answers import AnswerGiven
    from engine.settings import Settings
    from engine.store.orders import Order

Command = TypeVar("Command", bound=Callable[..., Any])
_WORDS: Final = {
    "retry": "is tried again by worker {worker}",
    "skip": "is left out; steps that may read it see nothing of it",
    "abort": "is given up, and the run fails",
}


@dataclass(frozen=True, slots=True)
class _Job:
    """What was asked for. ``kind`` is the command's name."""

    kind: str
    settings: Settings
    reference: str
    step: int | None
    worker: str | None
    reason: str | None
    as_json: bool


def _options(command: Command) -> Command:
    step = click.option(
        "--step", type=click.IntRange(0), metavar="N", help="The step (from 0); not needed if only one waits."
    )
    as_json = click.option("--json", "as_json", is_flag=True, help="Print what came of it as one JSON object.")
    return run_argument(step(reason_option(as_json(command))))


@click.command()
@_options
@click.option("--worker", metavar="NAME", help="Give the step to this worker of the run's pool.")
def retry(run_reference: str, step: int | None, reason: str | None, as_json: bool, worker: str | None) -> int:
    """Let a step of RUN (an id, the beginning of one, or 'last') that failed and waits be tried again.

    What was tried before does not count against the worker's attempts.
    """
    return _answer("retry", run_reference, step, worker, reason, as_json=as_json)


@click.command()
@_options
def skip(run_reference: str, step: int | None, reason: str | None, as_json: bool) -> int:
    """Leave a step of RUN (an id, the beginning of one, or 'last') out that failed and waits.

    Steps that may read it see nothing of it. The last step of a plan gives the answer and cannot be left out.
    """
    return _answer("skip", run_reference, step, None, reason, as_json=as_json)


@click.command()
@_options
def abort(run_reference: str, step: int | None, reason: str | None, as_json: bool) -> int:
    """Give a step of RUN (an id, the beginning of one, or 'last') up that failed and waits: the run fails.

    Calls in flight finish and are kept; `podium resume` goes on from there.
    """
    return _answer("abort", run_reference, step, None, reason, as_json=as_json)


def _answer(
    kind: str, reference: str, step: int | None, worker: str | None, reason: str | None, *, as_json: bool
) -> int:  # fmt: skip
    from engine.cli.orders import settings_for_order
    from engine.cli.session import run_async

    settings = settings_for_order(reason)
    return run_async(_give(_Job(kind, settings, reference, step, worker, reason, as_json)))


async def _give(job: _Job) -> int:
    from engine.cli.orders import order_object, order_of, say_if_not_delivered
    from engine.cli.session import open_session
    from engine.keeper.client import Needs
    from engine.service import resolve_run

    async with open_session(job.settings, Needs()) as session:
        run_id = await resolve_run(session.database, job.reference)
        session.run_id = run_id
        order = order_of(job.settings, run_id, job.reason)
        result = await _send(job, session, order)
    answered, given = result.answered, result.given
    if job.as_json:
        place = {"round": answered.round, "step": answered.position, "worker": answered.worker}
        terminal.out_json(
            order_object(job.kind, order, given, given.ordered.state, given.ordered.reason) | place
        )  # fmt: skip
        return ExitCode.OK
    say_if_not_delivered(given)
    words = _WORDS[job.kind].format(worker=terminal.inert(answered.worker))
    terminal.out(f"step {answered.position} of run {run_id} {words}")
    if given.ordered.state == "waiting":
        # Other steps wait, too, or somebody has paused the run.
        terminal.err(f"the run still waits ({given.ordered.reason})")
        terminal.err(f"hint: podium show {run_id}")
    else:
        terminal.err(f"hint: podium watch {run_id}")
    return ExitCode.OK


async def _send(job: _Job, session: Session, order: Order) -> AnswerGiven:
    from engine.operations.answers import abort_step, retry_step, skip_step

    database, connect = session.database, session.client
    if job.kind == "retry":
        return await retry_step(database, connect, order, position=job.step, worker=job.worker)
    if job.kind == "skip":
        return await skip_step(database, connect, order, position=job.step)
    return await abort_step(database, connect, order, position=job.step)
