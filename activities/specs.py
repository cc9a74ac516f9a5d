"""From steps to what the workflow may know of them: positions, queue names and seconds."""

from __future__ import annotations

from collections.abc import Iterable

from engine.contracts import StepSpec
from engine.store.drafts import PlanDraft
from engine.store.inputs import StoredStep
from worker_pools.pool import Pool


def step_specs(pool: Pool, steps: Iterable[StoredStep]) -> list[StepSpec]:
    """What the workflow needs to know of stored steps: numbers and queue names."""
    return [
        StepSpec(step.position, list(step.reads), step.queue, pool.worker(step.worker).timeouts.call_s)
        for step in steps
    ]


def planned_specs(pool: Pool, draft: PlanDraft) -> list[StepSpec]:
    """The same for a plan that has just been stored."""
    workers = [pool.worker(step.worker) for step in draft.plan.steps]
    return [
        StepSpec(step.position, list(step.visible()), worker.queue, worker.timeouts.call_s)
        for step, worker in zip(draft.plan.steps, workers, strict=True)
    ]
