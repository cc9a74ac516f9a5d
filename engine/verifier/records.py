"""What a run's entries say, put together: plans, steps, attempts. Filled by `replay`, read by everything behind it."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal

from engine.verifier.chains import Entry

ACCEPTED_STATES = ("succeeded", "reused")


@dataclass(slots=True)
class Attempt:
    """One call of a model. ``step`` is None for a planning call; ``state`` is ``sent`` until it was closed."""

    id: str
    round: int
    step: int | None
    number: int
    worker: str
    model: str
    pool: str
    sent: Entry
    fence: tuple[int, ...]
    state: str = "sent"
    closed: Entry | None = None
    accepted: bool = False
    input_tokens: int | None = None
    output_tokens: int | None = None
    cost_usd: Decimal | None = None
    # Every artifact that its prompt was made of; None where neither the entry nor the manifest says it.
    shown: frozenset[str] | None = None
    # Whether the prompt was rendered again and is the one that was committed to.
    rendered: bool = False


@dataclass(slots=True)
class Step:
    """A position of a round's plan, as it stands at the point of the replay."""

    round: int
    position: int
    planned_worker: str
    worker: str
    reads: tuple[int, ...]
    reads_round_before: bool
    state: str
    reason: str | None = None
    # Attempts up to this number do not count any more: they were another worker's, or an operator began anew.
    attempts_base: int = 0
    # The attempt whose output is its output, and the entry by which it became so.
    accepted: str | None = None
    accepted_by: Entry | None = None
    attempts: list[Attempt] = field(default_factory=list)
    child: str | None = None
    child_ended: Entry | None = None
    # The execution of the child that was begun last; 0 before.
    child_execution: int = 0
    # The model that the step is done with, or that made what it took over.
    model: str = ""

    @property
    def is_done(self) -> bool:
        """Whether steps that read it may be called."""
        return self.state in ACCEPTED_STATES or self.state == "skipped"


@dataclass(slots=True)
class Round:
    """A plan and its steps."""

    number: int
    entry: Entry
    steps: list[Step]


@dataclass(slots=True)
class Run:
    """A run at the point of the replay."""

    id: str
    created: Entry
    pool: str
    state: str = "created"
    reason: str | None = None
    execution: int = 1
    closed: bool = False
    paused: bool = False
    cancelling: bool = False
    rounds: dict[int, Round] = field(default_factory=dict)
    attempts: dict[str, Attempt] = field(default_factory=dict)
    planning: dict[int, list[Attempt]] = field(default_factory=dict)
    pools: list[str] = field(default_factory=list)
    # The first attempt of each place (a round and a step, or None for its plan) that was accepted.
    accepted: dict[tuple[int, int | None], str] = field(default_factory=dict)
    # What it may use: dollars, tokens, calls; None for no limit.
    limits: tuple[Decimal | int | None, ...] = (None, None, None)
    # What the calls used of which it is known.
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: Decimal = Decimal(0)
    unpriced: int = 0
    # How it ended, each time: state and reason.
    endings: list[tuple[str, str | None]] = field(default_factory=list)
    # Steps that it left out from its beginning, since its source had left them out.
    left_out: list[Step] = field(default_factory=list)
    # Entries about child runs that were begun and ended, and about people who read stored text.
    begun: list[Entry] = field(default_factory=list)
    returned: list[Entry] = field(default_factory=list)
    reads: list[Entry] = field(default_factory=list)
    # Entries about bundles that were made of it, and about texts that were erased, each with whether it had ended.
    exports: list[Entry] = field(default_factory=list)
    erasures: list[tuple[Entry, bool]] = field(default_factory=list)

    @property
    def depth(self) -> int:
        """How deep in a tree it stands."""
        return int(self.created.data.get("depth", 0 if "parent" not in self.created.data else 1))

    @property
    def rounds_max(self) -> int:
        """How many rounds it may have; as many as there are steps in a plan where an older Podium did not say it."""
        return int(self.created.data.get("rounds_max", 64))

    def step(self, round_number: int, position: int) -> Step | None:
        """A step by its place."""
        found = self.rounds.get(round_number)
        return found.steps[position] if found is not None and position < len(found.steps) else None

    @property
    def last_round(self) -> Round | None:
        """The last round whose plan has steps: the answer is its last step's output."""
        with_steps = [number for number, found in self.rounds.items() if found.steps]
        return self.rounds[max(with_steps)] if with_steps else None

    @property
    def closed_attempts(self) -> list[Attempt]:
        """The attempts of which it is known what became of them."""
        return [attempt for attempt in self.attempts.values() if attempt.closed is not None]
