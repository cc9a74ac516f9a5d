"""Child runs on paper: a step that is delegated, and the run that does it."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from engine.verifier.contents import derived_id
from tests.support.bundles import POOL, RUN, PaperRun, Record
from worker_pools.pool import Pool
from worker_pools.pool.file import parse_pool


def recursive_pool() -> Pool:
    """A pool whose last worker is the Conductor."""
    more = "  - {name: self, description: plans, kind: conductor}\npolicy: {depth_max: 1}\n"
    return parse_pool(POOL + more, label="pool.yaml")


def delegated(*, answer_: str | None = "own", accepted: str = "own", **child_more: Any) -> PaperRun:
    """A run whose only step is done by a child run of three steps; ``first`` names the output of the first of them."""
    pool = recursive_pool()
    record = Record()
    run = PaperRun(record, pool, rounds_max=2)
    run.plan([("self", "Split it up.", ())])
    child_id = UUID(derived_id(str(RUN), "child/0/0"))
    run.chain.add("step.changed", round=0, step=0, state="running", reason=None, old="pending")
    run.move("running")
    run.chain.add("child.begun", round=0, step=0, child=str(child_id), child_execution=1)
    above = {"parent": str(RUN), "parent_round": 0, "parent_step": 0, "depth": 1, "rounds_max": 1}
    child = PaperRun(record, child_more.pop("pool", pool), run=child_id, **{**above, **child_more}).whole()
    outputs = {"own": str(child.outputs[2][0]), "first": str(child.outputs[0][0])}
    said = {} if answer_ is None else {"answer": outputs[answer_]}
    ended = {"child": str(child_id), "child_state": "succeeded", "child_reason": None}
    run.chain.add("child.ended", round=0, step=0, **ended, **said)
    run.chain.add(
        "step.changed", round=0, step=0, state="succeeded", reason=None, old="running", attempt=outputs[accepted]
    )
    run.end()
    return run
