"""The canonical form of a plan and its digest. Must never depend on how the plan was written or what was noted."""

from __future__ import annotations

import hashlib
from typing import Final

import rfc8785

from engine.plan.plan import Plan

CANONICAL_VERSION: Final = 1


def canonical_plan(plan: Plan) -> bytes:
    """The plan as RFC 8785 JSON: `{"steps": [{"access", "subtask", "worker"}, ...], "version": 1}`.

    "all" stays "all", since a later round reads more from it than the earlier positions. Strings must be free of lone
    surrogates, as those of every parsed plan are.
    """
    steps = [
        {
            "worker": step.worker,
            "subtask": step.subtask,
            "access": step.access if step.access == "all" else list(step.access),
        }
        for step in plan.steps
    ]
    return rfc8785.dumps({"version": CANONICAL_VERSION, "steps": steps})


def plan_digest(plan: Plan) -> str:
    """SHA-256 of the canonical form, in lower-case hexadecimal digits."""
    return hashlib.sha256(canonical_plan(plan)).hexdigest()
