"""The steps of an accepted plan: each row against its place, its access list and the pool. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.verifier.chains import Entry
from engine.verifier.contents import derived_id
from engine.verifier.faults import InvalidError
from engine.verifier.pools import Pool
from engine.verifier.records import Run, Step


def planned_steps(run: Run, pool: Pool, data: Mapping[str, Any]) -> list[Step]:
    """The steps that a ``plan.accepted`` gives a run. Raises InvalidError for a row that is not the engine's."""
    number = data["round"]
    steps = [_step(run, pool, number, position, row) for position, row in enumerate(data["steps"])]
    left_out = _useless([step.reads for step in steps]) if pool.skips_unread else frozenset()
    for step in steps:
        if (step.state == "skipped") != (step.position in left_out):
            raise InvalidError(
                f"step {step.position} is left out, which the pool does not ask for"
                if step.state == "skipped"
                else f"step {step.position} is not left out, though nobody reads it and the pool asks for that"
            )
    taken = run.created.data.get("source", {}).get("reused", []) if number == 0 else []
    for row in taken:
        if row["step"] < len(steps):
            # What a step took over was made by another model than the one that it would be done with.
            steps[row["step"]].model = row["model"]
    return steps


def check_author(run: Run, before: Entry | None, data: Mapping[str, Any]) -> None:
    """Checks who wrote a plan that is no planning call's: whoever made the run, or the pool, whose template stands in.

    ``before`` is the entry before it. Raises InvalidError.
    """
    if data["attempt"] is not None or before is None:
        return
    given = before.type == "run.created" and run.created.data["origin"] != "conductor" and data["round"] == 0
    if not given and not (before.type == "plan.rejected" and before.data["round"] == data["round"]):
        raise InvalidError("the plan came neither with the run nor in place of one that was rejected")


def _step(run: Run, pool: Pool, number: int, position: int, row: Mapping[str, Any]) -> Step:
    if row["step"] != position:
        raise InvalidError("the steps of a plan count from 0")
    access = row["access"]
    reads = tuple(range(position)) if access == "all" else tuple(access)
    if any(source >= position for source in reads) or list(reads) != sorted(set(reads)):
        raise InvalidError(f"step {position} cannot read what it names")
    before = access == "all" and number > 0
    stated = (row.get("id", None), row.get("reads", list(reads)), row.get("round_before", before))
    id_ = derived_id(run.id, f"step/{number}/{position}")
    if stated not in [(id_, list(reads), before), (None, list(reads), before)]:
        raise InvalidError(f"step {position} does not say what follows from its place and its access list")
    worker = pool.worker(row["worker"])
    if worker is None:
        raise InvalidError(f"the pool has no worker {row['worker']!r}")
    if worker.model != row["model"]:
        raise InvalidError(f"the pool's worker {row['worker']!r} has another model than {row['model']!r}")
    state, reason = ("skipped", "unread") if row["skipped"] else ("pending", None)
    return Step(number, position, row["worker"], row["worker"], reads, before, state, reason, model=row["model"])


def _useless(reads: Sequence[Sequence[int]]) -> frozenset[int]:
    """The positions from which no way leads to the last step's output."""
    useful = {len(reads) - 1}
    for position in range(len(reads) - 1, -1, -1):
        if position in useful:
            useful.update(reads[position])
    return frozenset(range(len(reads))) - useful
