"""`podium run`: checks everything that a user handed in, then submits it and follows it to its end.

Nothing is half done: task, pool, plan and keys are checked before any server is started or asked.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from uuid import UUID

import click

from engine.cli import terminal
from engine.cli.limits import budget_options
from engine.errors import InputError

if TYPE_CHECKING:
    from engine.cli.session import Session
    from engine.plan import Plan
    from engine.service import InvalidPlanError, Submission
    from engine.settings import Settings
    from engine.store.runs import CreatedRun, NewRun
    from worker_pools.pool import Pool, Worker

# Named here because reading the package's folder for the help would cost its time; a test compares them.
TEMPLATES: Final = ("single", "self-consistency", "mixture-of-agents", "planner-executor-verifier")
LOCAL_REMARK: Final = (
    "the local model is real but very small (135 million parameters): it shows how Podium works, and its answers are "
    "often wrong; --pool FILE takes models of your own"
)


@dataclass(slots=True)
class Job:
    """What to do: the checked submission, and how to show it. ``run_id`` is set as soon as there is a run."""

    settings: Settings
    submission: Submission
    new: NewRun
    detach: bool
    as_json: bool
    run_id: UUID | None = field(default=None)


@click.command()
@click.argument("task", required=False)
@click.option("-f", "--file", "task_file", metavar="FILE", help="Read the task from a file ('-': standard input).")
@click.option(
    "--plan", "plan_file", metavar="FILE", help="Perform the plan in this file instead of asking a Conductor."
)
@click.option("--lenient", is_flag=True, help="Accept readings of the plan file that are guesses, with a note.")
@click.option("--template", metavar="NAME", help=f"Perform a packaged plan: {', '.join(TEMPLATES)}.")
@click.option("--pool", "pool_name", default="local", show_default=True, metavar="NAME|FILE", help="The models to use.")
@click.option("--detach", is_flag=True, help="Do not wait: print the run's id and leave.")
@click.option(
    "--idempotency-key",
    metavar="KEY",
    help="The same request again is the same run, for as long as the run is on record.",
)
@budget_options
@click.option("--json", "as_json", is_flag=True, help="Print the run as one JSON object.")
def run(  # noqa: PLR0917  # click passes them by name
    task: str | None,
    task_file: str | None,
    plan_file: str | None,
    lenient: bool,
    template: str | None,
    pool_name: str,
    detach: bool,
    idempotency_key: str | None,
    budget_usd: str | None,
    budget_tokens: int | None,
    budget_calls: int | None,
    as_json: bool,
) -> int:
    """Run TASK: plan it, perform the plan, print the answer.

    TASK may also come from --file or from a pipe. Ctrl-C leaves the run going on. Into a pipe or a file only the
    answer goes; progress, table and summary go to standard error then.
    """
    from engine.cli.inputs import STDIN, plan_text, task_bytes
    from engine.settings import load_settings

    if plan_file is not None and template is not None:
        raise InputError("plan-twice", "--plan and --template exclude each other", hint="give one of them")
    if plan_file == STDIN and (task_file == STDIN or task in (None, STDIN)) and task_file in (None, STDIN):
        raise InputError("stdin-twice", "task and plan cannot both come from standard input", hint="use a file for one")
    settings = load_settings()
    content = task_bytes(task, task_file)

    # Imported only now: it takes a second, and what is wrong with files and options was said at once.
    from engine.cli.limits import run_limits, usd
    from engine.service import InvalidPlanError, Submission, prepare, read_task
    from worker_pools.pool import load_pool

    text = read_task(content)
    dollars = usd(budget_usd, "--budget-usd")
    pool = load_pool(pool_name)
    submission = Submission(
        task=text,
        pool=pool,
        limits=run_limits(pool, dollars, budget_tokens, budget_calls),
        actor_id=settings.actor_id,
        on_behalf_of=settings.on_behalf_of,
        plan_text=None if plan_file is None else plan_text(plan_file),
        template=template,
        lenient=lenient,
        idempotency_key=idempotency_key,
    )
    try:
        new = prepare(submission)
    except InvalidPlanError as error:
        assert plan_file is not None
        raise _all_faults(error, plan_file, pool_name, lenient=lenient) from None
    if settings.embedded:
        require_keys(submission.pool, None if new.plan is None else new.plan.plan)
    return _perform(Job(settings, submission, new, detach=detach, as_json=as_json))


def _all_faults(error: InvalidPlanError, plan_file: str, pool_name: str, *, lenient: bool) -> InputError:
    """Every fault of a plan file on a line of its own, with its place."""
    from engine.cli.plan import fault_line

    command = ["podium", "plan", "check", plan_file, "--pool", pool_name, *(["--lenient"] if lenient else [])]
    lines = [fault_line(plan_file, fault) for fault in error.errors]
    return InputError(error.code, "\n".join(lines), hint=shlex.join(command))


def require_keys(pool: Pool, plan: Plan | None) -> None:
    """Raises InputError `key-missing` unless every key that this run may need is here.

    With a plan only its workers count; when the Conductor plans, it and all workers do.
    """
    from worker_pools.secrets import SecretStore

    used: list[Worker] = list(pool.models)
    if plan is not None:
        names = dict.fromkeys(step.worker for step in plan.steps)
        used = [pool.worker(name) for name in names]
    store = SecretStore()
    for model in used:
        if model.api_key is not None and store.get(model.api_key) is None:
            where = f"the variable {model.api_key.env}" if model.api_key.env else f"the file {model.api_key.file}"
            who = "the Conductor" if model is pool.conductor else f"worker {model.name}"
            raise InputError(
                "key-missing",
                f"{where}, the key of {who}, is not set"
                if model.api_key.env
                else f"{where}, the key of {who}, is empty",
                hint=f"export {model.api_key.env}=..." if model.api_key.env else "put the key on its first line",
            )


def _perform(job: Job) -> int:
    from engine.cli.escort import interrupted, interrupted_early
    from engine.cli.session import run_async

    try:
        return run_async(_submit_and_follow(job))
    except KeyboardInterrupt:
        if job.run_id is not None:
            return interrupted(job.run_id, as_json=job.as_json, embedded=job.settings.embedded)
        words, hint = "interrupted before the run was confirmed", "`podium list` shows whether there is one"
        return interrupted_early(words, hint, line=f"{words}; {hint}", as_json=job.as_json)


async def _submit_and_follow(job: Job) -> int:
    from engine.cli.escort import escort, leave, report
    from engine.cli.session import needs_of, open_session, quiet_status

    pool = job.submission.pool
    if pool.needs_local_model and not job.as_json:
        terminal.err(f"note: {LOCAL_REMARK}")
    on_status = quiet_status() if job.as_json else terminal.err
    async with open_session(job.settings, needs_of(pool), on_status=on_status) as session:
        created = await _create(job, session)
        if created.existing and not job.as_json:
            terminal.err(f"run {created.id} was created by an earlier request with this key")
        if job.detach:
            return await leave(session, created.id, as_json=job.as_json)
        seen = await escort(
            session,
            created.id,
            as_json=job.as_json,
            # For a run of an earlier command the time since this one's start says nothing.
            first_call=not created.existing,
        )
    return report(seen, pool, as_json=job.as_json)


async def _create(job: Job, session: Session) -> CreatedRun:
    from engine.cli.escort import let_finish
    from engine.service import submit

    def done(created: CreatedRun) -> None:
        job.run_id = session.run_id = created.id

    client = await session.client()
    session.unconfirmed = True
    return await let_finish(submit(session.database, client, job.submission, prepared=job.new), done)
