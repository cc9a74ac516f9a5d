"""What a parsed plan is, and how its reading is reported. Must never hold how any form is written.

A plan is frozen: steps in order, each with a worker's name, a subtask and the earlier positions that it may read.
Positions count from 0 whatever the form counted from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Access = tuple[int, ...] | Literal["all"]
"""Earlier positions, sorted and distinct, or "all" for every earlier one (and, in a later round, the round before)."""

Form = Literal["lists", "json", "steps-json", "steps-yaml"]
"""The written form of a plan; README.md shows each."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step: at `position` (from 0), the worker named `worker` does `subtask`, seeing what `access` allows."""

    position: int
    worker: str
    subtask: str
    access: Access

    def visible(self) -> tuple[int, ...]:
        """Earlier positions of this plan whose outputs the step may read, with "all" spelled out."""
        return tuple(range(self.position)) if self.access == "all" else self.access


@dataclass(frozen=True, slots=True)
class PlanNote:
    """Something that was accepted and should be known; `position` is the step's, or None for the whole plan."""

    code: str
    field: str | None
    position: int | None
    text: str


@dataclass(frozen=True, slots=True)
class PlanError:
    """Why a text is no plan; `line` and `column` count code points from 1 and are None where there is no place."""

    code: str
    field: str | None
    line: int | None
    column: int | None
    text: str
    hint: str | None


@dataclass(frozen=True, slots=True)
class Plan:
    """Steps in order, the notes of their reading, and the form in which they were written."""

    steps: tuple[Step, ...]
    notes: tuple[PlanNote, ...]
    form: Form


@dataclass(frozen=True)
class ParseOptions:
    """What the text cannot say of itself.

    `workers` are the pool's names in the file's order; `steps_max` the pool's limit; `lenient` accepts the two
    readings that are named guesses (a surplus mark after a closing quote, a missing comma between subtasks);
    `finish_reason` and `output_tokens` come from the provider; `round` above 0 allows three empty lists.
    """

    workers: tuple[str, ...]
    steps_max: int = 5
    lenient: bool = False
    finish_reason: str | None = None
    round: int = 0
    output_tokens: int | None = None


@dataclass(frozen=True)
class ParseResult:
    """A plan, or the errors that forbid it; `errors` is non-empty exactly if `plan` is None."""

    plan: Plan | None
    form: Form | None
    notes: tuple[PlanNote, ...]
    errors: tuple[PlanError, ...]

    @property
    def valid(self) -> bool:
        """Whether the text held a plan."""
        return self.plan is not None
