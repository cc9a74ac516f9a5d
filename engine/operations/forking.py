"""Forking: a new run from a run with edits. What is proposed is what is started; the source is only read."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TYPE_CHECKING

from activities.plan_text import edited_draft
from activities.review_gates import may_review_output
from engine.errors import BugError, InputError, RefusedError, UnavailableError
from engine.operations.fork_edits import Fate, Fates, StepEdit, Why, edited_steps, fates, why
from engine.operations.worst_case import Bound, PlannedCalls, bounds, candidates, total
from engine.plan import Plan, Step, plan_digest
from engine.service import (
    TENANT,
    InvalidPlanError,
    check_policy,
    pool_limits,
    read_task,
    refuse_hopeless,
    resolve_run,
)
from engine.store.database import Database
from engine.store.drafts import PlanDraft, RejectedPlan, left_out
from engine.store.forks import ForkDraft, ForkSource, ReusedStep, read_fork_source
from engine.store.ids import new_run_id
from engine.store.runs import CreatedRun, NewRun, create_run
from worker_pools.pool import Pool, pool_digest, pool_document, pool_from_document

if TYPE_CHECKING:
    from temporalio.client import Client

__all__ = ["ForkOrder", "ForkProposal", "ProposedStep", "StepEdit", "propose_fork", "running_part", "start_fork"]


@dataclass(frozen=True, slots=True)
class ForkOrder:
    """A wish for a fork. ``source`` is a run's id, the beginning of one, or ``last``; ``pool`` None is the source's."""

    source: str
    actor_id: str
    on_behalf_of: str | None = None
    edits: Sequence[StepEdit] = ()
    task: str | None = None
    pool: Pool | None = None


@dataclass(frozen=True, slots=True)
class ProposedStep:
    """A step of the fork: what becomes of it and why, and the most that it may cost in US dollars (None: unknown).

    ``fields`` names what was edited; ``changed_inputs`` are the steps it reads that run.
    """

    position: int
    worker: str
    model: str
    reads: tuple[int, ...]
    fate: Fate
    why: Why | None
    fields: tuple[str, ...]
    changed_inputs: tuple[int, ...]
    bound: Bound


@dataclass(frozen=True, slots=True)
class ForkProposal:
    """A fork that could be started as it is. ``unpriced`` are the workers for which no bound of the cost is known."""

    source: ForkSource
    new: NewRun
    pool: Pool
    plan: Plan
    steps: tuple[ProposedStep, ...]
    once_usd: Decimal | None
    worst_usd: Decimal | None
    unpriced: tuple[str, ...]

    @property
    def digest(self) -> str:
        """The digest of the edited plan."""
        return plan_digest(self.plan)

    def positions(self, fate: Fate) -> tuple[int, ...]:
        """The steps that share a fate."""
        return tuple(step.position for step in self.steps if step.fate == fate)


async def propose_fork(database: Database, order: ForkOrder) -> ForkProposal:
    """Reads the source and works out the fork; writes nothing.

    Raises InputError and RefusedError, as `edited_steps`, `read_fork_source` and `refuse_hopeless` do, and
    RefusedError ``nothing-to-run`` where all outputs would be reused.
    """
    run_id = await resolve_run(database, order.source)
    source = await read_fork_source(
        database,
        run_id,
        own_task=order.task is not None,
        own_subtasks={edit.position for edit in order.edits if edit.subtask is not None},
    )
    if source is None:
        raise InputError("run-unknown", f"there is no run {run_id}", hint="`podium list` shows the runs there are")
    pool = _pinned(source) if order.pool is None else order.pool
    task_edited = order.task is not None and order.task != source.task
    if order.task is not None and not task_edited:
        raise InputError("edit-changes-nothing", "the task is that already", hint="give another task, or none")
    steps, edited = edited_steps(source, order.edits, pool.worker_names)
    if len(steps) > pool.policy.steps_max:
        raise InputError(
            "too-many-steps",
            f"the plan has {len(steps)} steps; the pool allows {pool.policy.steps_max}",
            hint="raise policy.steps_max in the pool file",
        )
    drafted = edited_draft(pool, Plan(steps, (), source.form))
    if isinstance(drafted, RejectedPlan):
        raise InvalidPlanError(tuple(drafted.errors))
    found = fates(source.steps, steps, range(len(steps)) if task_edited else edited, left_out(drafted))
    if not found.runs:
        raise _nothing_to_run(source, edited)
    fork = _fork_draft(source, found, edited, task_edited=task_edited)
    last = len(steps) - 1
    reviewed = {
        step.position
        for step in fork.reused
        if may_review_output(pool, steps[step.position].worker, is_last=step.position == last)
    }
    # Approvals are not inherited: what the fork takes over is reviewed as if it had just been made.
    fork = replace(fork, reviewed=frozenset(reviewed))
    new = _new_run(order, source, pool, drafted, fork)
    refuse_hopeless(pool, new.task, running_part(drafted, found.runs), new.limits)
    return _proposal(source, new, pool, found, edited)


def running_part(draft: PlanDraft, runs: Collection[int]) -> PlanDraft:
    """The plan as if it had only the steps that run: those are the ones that need keys and money."""
    steps = tuple(step for step in draft.plan.steps if step.position in runs)
    return replace(draft, plan=replace(draft.plan, steps=steps))


def _new_run(order: ForkOrder, source: ForkSource, pool: Pool, drafted: PlanDraft, fork: ForkDraft) -> NewRun:
    check_policy(pool)
    # Byte for byte the source's: this version might write the same pool down differently.
    document = source.pool_document if order.pool is None else pool_document(pool)
    limits = source.limits if order.pool is None and source.limits else pool_limits(pool)
    return NewRun(
        id=new_run_id(),
        tenant_id=TENANT,
        actor_id=order.actor_id,
        on_behalf_of=order.on_behalf_of,
        task=source.task if order.task is None else read_task(order.task.encode()),
        origin="fork",
        pool_name=pool.name,
        pool_digest=pool_digest(document),
        pool_document=document,
        plan=drafted,
        deadline_s=pool.policy.deadline_s,
        # The edited plan and nothing after it: what the Conductor would make of its answer no preview could say.
        rounds_max=1,
        limits=limits,
        fork=fork,
    )


async def start_fork(database: Database, client: Client, proposal: ForkProposal) -> CreatedRun:
    """Writes the fork and starts it. If Temporal is away the run is on record and the reconciler starts it."""
    # Imported here: Temporal's SDK takes half a second that a preview need not wait for.
    from activities.executions import start_execution  # noqa: PLC0415  # see above

    created = await create_run(database, proposal.new)
    # Now the fork is durable: if we die here or Temporal is away, the reconciler of any worker starts it.
    with contextlib.suppress(UnavailableError):
        await start_execution(database, client, created.id)
    return created


def _pinned(source: ForkSource) -> Pool:
    try:
        return pool_from_document(source.pool_document)
    except BugError:
        raise RefusedError(
            "pool-unreadable",
            f"this version cannot read the pool that run {source.run_id} is pinned to",
            hint="give the pool with --pool",
        ) from None


def _nothing_to_run(source: ForkSource, edited: Mapping[int, object]) -> RefusedError:
    if edited:
        words = "no step would run: the pool's policy leaves out what is edited, because nobody reads it"
        return RefusedError("nothing-to-run", words, hint="let a later step read it (--access)")
    words = f"nothing is edited, and every step of run {source.run_id} has its output"
    return RefusedError("nothing-to-run", words, hint="give --task, or --step with --worker, --subtask or --access")


def _fork_draft(
    source: ForkSource, found: Fates, edited: Mapping[int, tuple[str, ...]], *, task_edited: bool
) -> ForkDraft:
    reused = [
        ReusedStep(step.position, step.id, step.attempt_id, step.model)
        for step in source.steps
        if step.position in found.reused and step.attempt_id is not None
    ]
    return ForkDraft(
        source_run_id=source.run_id,
        source_round=source.round,
        task_edited=task_edited,
        edited=edited,
        reused=reused,
        left_out={position: source.steps[position].reason for position in sorted(found.left_out)},
    )


def _proposal(
    source: ForkSource, new: NewRun, pool: Pool, found: Fates, edited: Mapping[int, tuple[str, ...]]
) -> ForkProposal:
    assert new.fork is not None
    assert new.plan is not None
    plan = new.plan.plan
    outputs = {step.position: step.output for step in source.steps if step.output is not None}
    reused = {position: output for position, output in outputs.items() if position in found.reused}
    most = bounds(pool, PlannedCalls(new.task, plan.steps, found.runs, reused))
    models = {step.position: step.model for step in new.fork.reused}
    steps = []
    for step in plan.steps:
        position = step.position
        fate: Fate = "run" if position in found.runs else "reused" if position in found.reused else "skipped"
        steps.append(
            ProposedStep(
                position=position,
                worker=step.worker,
                model=models.get(position, pool.worker(step.worker).model),
                reads=step.visible(),
                fate=fate,
                why=None
                if fate == "reused"
                else why(position, plan.steps, found, edited, task_edited=new.fork.task_edited),
                fields=edited.get(position, ()),
                changed_inputs=tuple(earlier for earlier in step.visible() if earlier in found.runs),
                bound=most.get(position, Bound(Decimal(0), Decimal(0))),
            )
        )
    return ForkProposal(
        source=source,
        new=new,
        pool=pool,
        plan=plan,
        steps=tuple(steps),
        once_usd=total([bound.once_usd for bound in most.values()]),
        worst_usd=total([bound.worst_usd for bound in most.values()]),
        unpriced=_unpriced(pool, [plan.steps[position] for position, bound in most.items() if bound.worst_usd is None]),
    )


def _unpriced(pool: Pool, steps: Sequence[Step]) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for step in steps:
        workers = candidates(pool, step.worker)
        blamed = [worker.name for worker in workers if worker.price is None or worker.kind == "conductor"]
        # With a price for everybody it is what the step reads that may be of any length.
        names |= dict.fromkeys(blamed or [step.worker])
    return tuple(names)
