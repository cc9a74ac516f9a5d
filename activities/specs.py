"""From steps to what the workflow may know of them: positions, queue names and seconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.contracts import StepSpec
from engine.store.drafts import PlanDraft
from engine.store.inputs import StoredStep
from worker_pools.pool import Pool, Worker


def step_specs(pool: Pool, steps: Iterable[StoredStep]) -> list[StepSpec]:
    """What the workflow needs to know of stored steps: numbers and queue names."""
    return [_spec(step.position, step.reads, pool.worker(step.worker)) for step in steps]


def planned_specs(pool: Pool, draft: PlanDraft) -> list[StepSpec]:
    """The same for a plan that has just been stored."""
    return [_spec(step.position, step.visible(), pool.worker(step.worker)) for step in draft.plan.steps]


def _spec(position: int, reads: Sequence[int], worker: Worker) -> StepSpec:
    return StepSpec(position, list(reads), worker.queue, worker.timeouts.call_s, worker.kind)
