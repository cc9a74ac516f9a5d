"""What a run of a pool may do and spend, and what happens when something goes wrong.

Pure data. Nothing in here is carried out here: the engine reads it from the pinned pool.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from worker_pools.pool.fields import Count, Frozen
from worker_pools.pool.reviews import RULES_MAX, ReviewRule
from worker_pools.prices import Usd


class Budget(Frozen):
    """Limits of one run, its child runs included. What is absent is not limited."""

    usd: Usd | None = Field(
        default=None, description="Most US dollars, a decimal number; every model of the pool then needs a `price`."
    )
    tokens: Annotated[Count, Field(ge=1, le=10**15)] | None = Field(
        default=None, description="Most tokens, input and output together."
    )
    calls: Annotated[Count, Field(ge=1, le=10**9)] | None = Field(
        default=None, description="Most calls of models, planning calls and repeated ones included."
    )

    @property
    def is_set(self) -> bool:
        """Whether anything is limited at all."""
        return self != Budget()


class Policy(Frozen):
    """What a run of this pool may do and what happens when something goes wrong."""

    steps_max: Annotated[Count, Field(ge=1, le=64)] = Field(default=5, description="Most steps of one plan.")
    unread_steps: Literal["run", "skip", "reject"] = Field(
        default="run", description="Steps that no later step reads and that are not the last one."
    )
    on_invalid_plan: str = Field(
        default="fail",
        pattern=r"^[a-z0-9-]{1,64}$",
        description="`fail`, or the name of a plan template to run instead.",
    )
    plan_repairs_max: Annotated[Count, Field(ge=0, le=10)] = Field(
        default=2, description="Times an invalid plan is sent back."
    )
    on_failed_step: Literal["fail", "wait", "fallback"] = Field(
        default="fail",
        description="`fail` ends the run; `wait` keeps it alive until an operator answers (retry, another worker, "
        "skip, abort); `fallback` gives the step to its worker's `fallbacks` in turn, then fails.",
    )
    rounds_max: Annotated[Count, Field(ge=1, le=8)] = Field(
        default=1,
        description="Planning rounds of one run: above 1 the Conductor sees a finished round and may plan another.",
    )
    depth_max: Annotated[Count, Field(ge=0, le=8)] = Field(
        default=2,
        description="How deep runs may nest through workers of `kind: conductor`; 0 forbids them, 1 allows children.",
    )
    deadline_s: Annotated[float, Strict(), Field(gt=0, le=31_536_000, allow_inf_nan=False)] | None = Field(
        default=None, description="Seconds from a run's start to its deadline."
    )
    budget: Budget = Field(default=Budget(), description="What a run may spend, its child runs included.")
    retention_days: Annotated[Count, Field(ge=1, le=36_500)] | None = Field(
        default=None,
        # A pool that says nothing of it keeps the digest that it had before there was this choice.
        exclude_if=lambda days: days is None,
        description="Days after a run's end until its texts are erased; entries and numbers stay. Absent: the "
        "installation's PODIUM_RETENTION_DAYS, else never.",
    )
    reads: Literal["unrecorded", "recorded", "required"] = Field(
        default="unrecorded",
        # A pool that says nothing of it keeps the digest that it had before there was this choice.
        exclude_if=lambda reads: reads == "unrecorded",
        description="Whether it is put on record that a person reads stored text by `output`, `show`, `watch`, `run`: "
        "`recorded` warns if that fails, `required` shows nothing then.",
    )
    reviews: tuple[ReviewRule, ...] = Field(
        default=(),
        max_length=RULES_MAX,
        # A pool without reviews keeps the digest that it had before there were any.
        exclude_if=lambda rules: not rules,
        description="What people have to review before a run goes on.",
    )
