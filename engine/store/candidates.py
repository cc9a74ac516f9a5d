"""Outputs that waited for people: how one becomes the step's output. Asks nothing; whoever calls this has asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from engine.store.run_writer import RunWriter


def accept_candidate(
    writer: RunWriter, step: Mapping[str, Any], own: Sequence[Mapping[str, Any]], *, reused: bool
) -> UUID | None:
    """Accepts the output that a step waits with; None if it has none.

    For one that has passed its reviews, or that nobody is asked about any more, because the run was resumed with a pool
    that does not want to. ``own`` are the step's attempts; an output of none of them is taken over from another run, or
    (not ``reused``) from the run that the step was delegated to. Never called again: it is paid for.
    """
    candidate: UUID | None = step.get("candidate_attempt_id")
    if candidate is None:
        return None
    mine = any(attempt["id"] == candidate for attempt in own)
    writer.accept_reviewed(step, candidate, own=mine, reused=reused and not mine)
    if writer.run["state"] == "created":
        # Resumed, and nothing had to be called: from here on it may end.
        writer.set_run_state("running")
    return candidate
