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
TOO_DEEP = "worker-too-deep"


def read_plan(
    pool: Pool,
    text: str,
    *,
    lenient: bool = False,
    finish_reason: str | None = None,
    output_tokens: int | None = None,
    round_number: int = 0,
    depth: int = 0,
) -> PlanDraft | RejectedPlan:
    """Parses a plan's text against a pool and applies its policy for unread steps.

    In a later round three empty lists are a plan: the answer of the round before is kept. ``depth`` is the run's; at
    the pool's limit no step may be planned by the Conductor.
    """
    raw = text.encode("utf-8", "surrogatepass")
    options = ParseOptions(
        workers=pool.worker_names,
        steps_max=pool.policy.steps_max,
        lenient=lenient,
        finish_reason=finish_reason,
        output_tokens=output_tokens,
        round=round_number,
    )
    parsed = parse_plan(text, options)
    if parsed.plan is None:
        return RejectedPlan(raw, parsed.notes, parsed.errors, parsed.form)
    too_deep = [step.position for step in parsed.plan.steps if pool.worker(step.worker).kind == "conductor"]
    if too_deep and depth >= pool.policy.depth_max:
        return RejectedPlan(raw, parsed.notes, [_depth_error(position) for position in too_deep], parsed.form)
    unread = unread_steps(parsed.plan)
    if unread and pool.policy.unread_steps == "reject":
        return RejectedPlan(raw, parsed.notes, [_unread_error(position) for position in unread], parsed.form)
    return _draft(pool, parsed.plan, raw, unread)


def template_draft(pool: Pool, name: str, task: str) -> PlanDraft:
    """A packaged plan template with the task filled in; InputError for an unknown one."""
    plan = fill_template(name, task, pool.worker_names, pool.policy.steps_max)
    raw = render_plan(plan, plan.form, pool.worker_names).encode()
    return _draft(pool, plan, raw, unread_steps(plan))


def edited_draft(pool: Pool, plan: Plan) -> PlanDraft | RejectedPlan:
    """A plan that was not read but put together (a fork's), by the same policy for unread steps; its text is rendered.

    It is not read back: a subtask may hold what looks like another plan.
    """
    raw = render_plan(plan, plan.form, pool.worker_names).encode()
    unread = unread_steps(plan)
    if unread and pool.policy.unread_steps == "reject":
        return RejectedPlan(raw, plan.notes, [_unread_error(position) for position in unread], plan.form)
    return _draft(pool, plan, raw, unread)


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


def _depth_error(position: int) -> PlanError:
    return PlanError(
        code=TOO_DEEP,
        field="model_id",
        line=None,
        column=None,
        text=f"step {position} is for the Conductor, which may not plan any deeper here",
        hint="choose one of the other workers",
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
