"""The graph of a plan: who may read whom, what is ready, what the plan costs in time at least.

Pure: no I/O, no clock, no randomness, because the workflow imports this module and replays it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The chain of steps that decides how long a plan takes at least.

    ``positions`` are in order of execution; ``duration_s`` is the sum of their durations.
    """

    positions: tuple[int, ...]
    duration_s: float


@dataclass(frozen=True, slots=True)
class PlanGraph:
    """The directed acyclic graph that access lists define.

    ``reads[i]`` holds the sorted earlier positions whose outputs step ``i`` may read; every one is below ``i``, so
    the order of positions is a topological order and a cycle cannot be written.
    """

    reads: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, reads: Sequence[Sequence[int]]) -> PlanGraph:
        """Builds the graph; raises ValueError when a step reads itself, a later step or a negative position."""
        for position, sources in enumerate(reads):
            for source in sources:
                if not 0 <= source < position:
                    raise ValueError(f"step {position} cannot read step {source}")
        return cls(tuple(tuple(sorted(set(sources))) for sources in reads))

    @property
    def size(self) -> int:
        """The number of steps."""
        return len(self.reads)

    @property
    def answer(self) -> int:
        """The position whose output is the answer of the run: the last one."""
        return self.size - 1

    def ready(self, *, done: Collection[int], begun: Collection[int]) -> tuple[int, ...]:
        """Positions that may start now: all they may read is in ``done`` and they are not in ``begun``."""
        return tuple(
            position
            for position, sources in enumerate(self.reads)
            if position not in begun and all(source in done for source in sources)
        )

    def readers(self, position: int) -> tuple[int, ...]:
        """The later steps that may read ``position`` directly."""
        return tuple(later for later in range(position + 1, self.size) if position in self.reads[later])

    def unread(self) -> tuple[int, ...]:
        """Steps that are not last and that no later step may read: their outputs are paid for and used by nobody."""
        read = {source for sources in self.reads for source in sources}
        return tuple(position for position in range(self.size - 1) if position not in read)

    def useless(self) -> tuple[int, ...]:
        """Steps from which no path leads to the answer: what the ``skip`` policy for unread steps leaves out.

        A step that only an unread step reads is useless too once that one is skipped.
        """
        useful = {self.answer} if self.reads else set()
        for position in range(self.size - 1, -1, -1):
            if position in useful:
                useful.update(self.reads[position])
        return tuple(position for position in range(self.size) if position not in useful)

    def reach(self, edited: Collection[int]) -> tuple[int, ...]:
        """The given positions and every step that can see something of them, directly or through others."""
        reached = set(edited)
        for position, sources in enumerate(self.reads):
            if any(source in reached for source in sources):
                reached.add(position)
        return tuple(sorted(reached))

    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Steps by depth: level 0 reads nothing, level n reads at least one step of level n - 1."""
        depth: list[int] = []
        for sources in self.reads:
            depth.append(1 + max((depth[source] for source in sources), default=-1))
        return tuple(
            tuple(position for position, own in enumerate(depth) if own == level)
            for level in range(max(depth, default=-1) + 1)
        )

    def critical_path(self, durations_s: Mapping[int, float]) -> CriticalPath:
        """The longest chain by duration.

        ``durations_s`` maps positions to seconds; a position that is missing counts as 0 s.
        """
        if not self.reads:
            return CriticalPath((), 0.0)
        finish_s: list[float] = []
        before: list[int | None] = []
        for position, sources in enumerate(self.reads):
            slowest = max(sources, key=lambda source: finish_s[source], default=None)
            start_s = 0.0 if slowest is None else finish_s[slowest]
            before.append(slowest)
            finish_s.append(start_s + durations_s.get(position, 0.0))
        position = max(range(self.size), key=lambda candidate: finish_s[candidate])
        total_s = finish_s[position]
        chain: list[int] = []
        walker: int | None = position
        while walker is not None:
            chain.append(walker)
            walker = before[walker]
        return CriticalPath(tuple(reversed(chain)), total_s)
