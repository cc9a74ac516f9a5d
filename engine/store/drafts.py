"""Plans on their way to the store, as data. Must not import the database: `podium plan check` needs none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

from engine.graph import PlanGraph
from engine.plan import Form, Plan, PlanError, PlanNote


@dataclass(frozen=True, slots=True)
class StepRoute:
    """Where a worker's calls go: the model's name and the pool's queue."""

    model: str
    queue: str


@dataclass(frozen=True, slots=True)
class PlanDraft:
    """A valid plan about to be stored. ``raw`` is the text as it came, byte for byte."""

    plan: Plan
    raw: bytes
    routes: Mapping[str, StepRoute]
    skip_unread: bool
    attempt_id: UUID | None = None


@dataclass(frozen=True, slots=True)
class RejectedPlan:
    """Text of a Conductor that is not a valid plan, with every fault found in it."""

    raw: bytes
    notes: Sequence[PlanNote]
    errors: Sequence[PlanError]
    form: Form | None = None


def left_out(draft: PlanDraft) -> tuple[int, ...]:
    """The positions that the policy for unread steps leaves out."""
    if not draft.skip_unread:
        return ()
    return PlanGraph.of([step.visible() for step in draft.plan.steps]).useless()
