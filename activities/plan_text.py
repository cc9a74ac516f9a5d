"""From a plan's text to what is stored and executed, by the rules of a pool. Pure: calls nothing, stores nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from engine.graph import PlanGraph
from engine.plan import ParseOptions, Plan, PlanError, PlanNote, parse_plan, render_plan
from engine.plan.template import fill_template
from engine.store.drafts import PlanDraft, RejectedPlan, StepRoute
from worker_pools.pool import Pool

UNREAD = "unread-step"


def read_plan(
    pool: Pool,
    text: str,
    *,
    lenient: bool = False,
    finish_reason: str | None = None,
    output_tokens: int | None = None,
) -> PlanDraft | RejectedPlan:
    """Parses a plan's text against a pool and applies its policy for unread steps."""
    raw = text.encode("utf-8", "surrogatepass")
    options = ParseOptions(
        workers=pool.worker_names,
        steps_max=pool.policy.steps_max,
        lenient=lenient,
        finish_reason=finish_reason,
        output_tokens=output_tokens,
    )
    parsed = parse_plan(text, options)
    if parsed.plan is None:
        return RejectedPlan(raw, parsed.notes, parsed.errors)
    unread = unread_steps(parsed.plan)
    if unread and pool.policy.unread_steps == "reject":
        return RejectedPlan(raw, parsed.notes, [_unread_error(position) for position in unread])
    return _draft(pool, parsed.plan, raw, unread)


def template_draft(pool: Pool, name: str, task: str) -> PlanDraft:
    """A packaged plan template with the task filled in; InputError for an unknown one."""
    plan = fill_template(name, task, pool.worker_names, pool.policy.steps_max)
    raw = render_plan(plan, plan.form, pool.worker_names).encode()
    return _draft(pool, plan, raw, unread_steps(plan))


def unread_steps(plan: Plan) -> tuple[int, ...]:
    """Positions whose outputs nobody reads and that are not the answer."""
    return PlanGraph.of([step.visible() for step in plan.steps]).unread()


def _draft(pool: Pool, plan: Plan, raw: bytes, unread: Iterable[int]) -> PlanDraft:
    treated = "is skipped" if pool.policy.unread_steps == "skip" else "runs all the same"
    notes = [PlanNote(UNREAD, "access_list", position, f"no later step reads it; it {treated}") for position in unread]
    return PlanDraft(
        plan=replace(plan, notes=(*plan.notes, *notes)),
        raw=raw,
        routes={worker.name: StepRoute(worker.model, worker.queue) for worker in pool.workers},
        skip_unread=pool.policy.unread_steps == "skip",
    )


def _unread_error(position: int) -> PlanError:
    return PlanError(
        code=UNREAD,
        field="access_list",
        line=None,
        column=None,
        text=f"no later step reads step {position}, and it is not the last one",
        hint="let a later step read it, or leave it out (the pool rejects unread steps)",
    )
