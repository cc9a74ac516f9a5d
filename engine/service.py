"""What the faces ask of the engine: submit a task, read runs. Takes texts and pools, gives records.

The submitter writes the run and its plan before Temporal hears of it, so it may die at any moment.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

from activities.plan_text import read_plan, template_draft
from engine.errors import InputError, UnavailableError
from engine.plan import PlanError
from engine.plan.template import template_names
from engine.settings import TASK_BYTES_MAX
from engine.store.budgets import Limits
from engine.store.database import Database
from engine.store.drafts import PlanDraft, RejectedPlan
from engine.store.ids import new_run_id
from engine.store.runs import CreatedRun, NewRun, Origin, create_run
from engine.store.snapshots import RunSnapshot, find_runs, list_runs, read_run
from engine.store.tables import DEFAULT_TENANT
from worker_pools.pool import Pool, Worker, pool_digest, pool_document
from worker_pools.prices import worst_case_tokens, worst_case_usd

if TYPE_CHECKING:
    from temporalio.client import Client

TENANT = UUID(DEFAULT_TENANT)
_KEY = re.compile(r"[\x21-\x7e]{1,255}")
_ID_PREFIX = re.compile(r"[0-9a-f-]{4,36}")


@dataclass(frozen=True, slots=True)
class Submission:
    """A request to run a task. At most one of ``plan_text`` and ``template`` is given; with neither the pool plans."""

    task: str
    pool: Pool
    actor_id: str
    on_behalf_of: str | None = None
    plan_text: str | None = None
    template: str | None = None
    lenient: bool = False
    idempotency_key: str | None = None
    # Instead of the pool's own budget.
    limits: Limits | None = None


class InvalidPlanError(InputError):
    """A plan file is not a valid plan; carries every fault. No run was created."""

    def __init__(self, errors: tuple[PlanError, ...]) -> None:
        first = errors[0]
        where = f" (line {first.line}, column {first.column})" if first.line else ""
        more = f", and {len(errors) - 1} more" if len(errors) > 1 else ""
        super().__init__("plan-invalid", f"{first.text}{where}{more}", hint=first.hint or "see `podium plan check`")
        self.errors = errors


def read_task(raw: bytes) -> str:
    """The task as text; raises InputError for an empty, binary or too large one."""
    if len(raw) > TASK_BYTES_MAX:
        raise InputError(
            "task-too-large",
            f"the task has {len(raw):,} bytes; the limit is {TASK_BYTES_MAX:,}",
            hint="pass long material as a file that a tool can read, or split the task",
        )
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise InputError("task-binary", "the task is not UTF-8 text", hint="give text, not a binary file") from None
    if "\0" in text:
        raise InputError("task-binary", "the task holds a NUL character", hint="give text, not a binary file")
    if not text.strip():
        raise InputError("task-empty", "the task is empty", hint='podium run "What is gravity? Explain it to a child."')
    return text


async def submit(
    database: Database, client: Client, submission: Submission, *, prepared: NewRun | None = None
) -> CreatedRun:
    """Creates the run and starts it. If Temporal is away the run is on record and the reconciler starts it.

    `prepared` is what `prepare` made of this submission, if the caller has it already.

    Raises InvalidPlanError for a plan file that is none, RefusedError for an idempotency key of another request.
    """
    # Imported here: Temporal's SDK takes half a second that commands which only read need not wait for.
    from activities.executions import first_request, start_workflow  # noqa: PLC0415  # see above

    new = prepared or prepare(submission)
    created = await create_run(database, new)
    # Now the run is durable: if we die here or Temporal is away, the reconciler of any worker starts it.
    if not created.existing:
        with contextlib.suppress(UnavailableError):
            await start_workflow(client, first_request(new, submission.pool))
    return created


def prepare(submission: Submission) -> NewRun:
    """Checks a submission and makes what is to be written of it; changes nothing."""
    key = submission.idempotency_key
    if key is not None and not _KEY.fullmatch(key):
        raise InputError(
            "idempotency-key-invalid",
            "an idempotency key has 1 to 255 visible ASCII characters and no blanks",
            hint="a UUID is a good one",
        )
    check_policy(submission.pool)
    origin, plan = _plan(submission)
    limits = submission.limits or pool_limits(submission.pool)
    refuse_hopeless(submission.pool, submission.task, plan, limits)
    document = pool_document(submission.pool)
    return NewRun(
        id=new_run_id(),
        tenant_id=TENANT,
        actor_id=submission.actor_id,
        on_behalf_of=submission.on_behalf_of,
        task=submission.task,
        origin=origin,
        pool_name=submission.pool.name,
        pool_digest=pool_digest(document),
        pool_document=document,
        plan=plan,
        idempotency_key=key,
        deadline_s=submission.pool.policy.deadline_s,
        rounds_max=submission.pool.policy.rounds_max,
        limits=limits,
    )


def check_policy(pool: Pool) -> None:
    """Refuses a policy that names a template which is not there; raises InputError."""
    policy = pool.policy
    if policy.on_invalid_plan != "fail" and policy.on_invalid_plan not in template_names():
        raise InputError(
            "unknown-template",
            f"policy.on_invalid_plan: there is no template {policy.on_invalid_plan!r}",
            hint=f"there are {', '.join(template_names())}",
        )


def pool_limits(pool: Pool) -> Limits:
    """The budget that a pool gives each of its runs."""
    budget = pool.policy.budget
    return Limits(budget.usd, budget.tokens, budget.calls)


def refuse_hopeless(pool: Pool, task: str, plan: PlanDraft | None, limits: Limits) -> None:
    """Refuses a budget that the first call could already break, so that no run is created which can only wait.

    The bound is from below: the prompt holds at least the task (and the subtask), and the answer may be as long as the
    worker's `output_tokens_max`. Raises InputError.
    """
    if not limits:
        return
    refuse_unpriced(pool, limits)
    size = len(task.encode())
    first: list[tuple[Worker, int]]
    if plan is None:
        first = [(pool.conductor, size)]
    else:
        roots = [step for step in plan.plan.steps if not step.visible()]
        first = [(pool.worker(step.worker), size + len(step.subtask.encode())) for step in roots]
    calls = [(model, length) for model, length in first if model.kind == "model"]
    for model, length in calls:
        tokens = worst_case_tokens(length, model.output_tokens_max)
        dollars = worst_case_usd(model.price, length, model.output_tokens_max)
        if limits.tokens is not None and tokens > limits.tokens:
            _hopeless(model.name, f"{tokens:,} tokens", f"{limits.tokens:,}")
        if limits.usd is not None and dollars is not None and dollars > limits.usd:
            _hopeless(model.name, f"{dollars:f} USD", f"{limits.usd:f}")
    if limits.calls is not None and limits.calls < 1:
        _hopeless("a model", "1 call", str(limits.calls))


def refuse_unpriced(pool: Pool, limits: Limits) -> None:
    """Refuses a limit in dollars where a call's price is not known. Raises InputError ``budget-price-unknown``."""
    if limits.usd is not None and (unpriced := [model.name for model in pool.models if _unpriced(model)]):
        raise InputError(
            "budget-price-unknown",
            f"a budget in dollars needs the price of every model; {', '.join(unpriced)} has none",
            hint="give it a `price` in the pool file, or limit tokens or calls instead",
        )


def _unpriced(model: Worker) -> bool:
    return model.kind == "model" and model.price is None


def _hopeless(worker: str, need: str, limit: str) -> None:
    raise InputError(
        "budget-hopeless",
        f"the first call, of {worker}, may need {need}, and the budget is {limit}",
        hint="raise the budget, or lower the worker's `output_tokens_max`",
    )


def _plan(submission: Submission) -> tuple[Origin, PlanDraft | None]:
    if submission.template is not None:
        return "template", template_draft(submission.pool, submission.template, submission.task)
    if submission.plan_text is None:
        return "conductor", None
    read = read_plan(submission.pool, submission.plan_text, lenient=submission.lenient)
    if isinstance(read, RejectedPlan):
        raise InvalidPlanError(tuple(read.errors))
    return "file", read


async def find_run(database: Database, reference: str) -> RunSnapshot:
    """A run by its id, a prefix of its id, or ``last``; raises InputError when there is none or more than one."""
    run_id = await resolve_run(database, reference)
    snapshot = await read_run(database, run_id)
    if snapshot is None:
        raise unknown_run(reference)
    return snapshot


async def resolve_run(database: Database, reference: str) -> UUID:
    """The full id for a reference."""
    text = reference.strip().lower()
    if text == "last":
        newest = await list_runs(database, TENANT, limit=1)
        if not newest:
            raise unknown_run(reference)
        return newest[0].id
    if not _ID_PREFIX.fullmatch(text):
        raise InputError("run-id-invalid", f"{reference!r} is not a run id", hint="`podium list` shows the ids")
    found = await find_runs(database, TENANT, text)
    if not found:
        raise unknown_run(reference)
    if len(found) > 1:
        raise InputError("run-id-ambiguous", f"more than one run begins with {text}", hint="give more of the id")
    return found[0]


def unknown_run(reference: str | UUID) -> InputError:
    """The error for a run that is not on record."""
    return InputError("run-unknown", f"there is no run {reference}", hint="`podium list` shows the runs there are")
