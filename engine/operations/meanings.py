"""What a decision says in the usual words, where neither the reviewer nor the pool has words of their own."""

from __future__ import annotations

from typing import Final

# Code and words, by gate and decision.
MEANINGS: Final[dict[tuple[str, str], tuple[str, str]]] = {
    ("plan", "approve"): ("plan-checked", "I checked that this plan is fit for the task and may be performed."),
    ("before", "approve"): ("call-checked", "I checked that this step may be done by this worker with these inputs."),
    ("after", "approve"): ("output-checked", "I checked the output against the task and the step's instruction."),
    ("answer", "approve"): ("answer-checked", "I checked the answer against the task, and it may be given out."),
    ("plan", "reject"): ("plan-rejected", "I checked the plan, and it must not be performed."),
    ("before", "reject"): ("call-rejected", "I checked the step, and it must not be done like this."),
    ("after", "reject"): ("output-rejected", "I checked the output, and it must not be used."),
    ("answer", "reject"): ("answer-rejected", "I checked the answer, and it must not be given out."),
}


def usual_meaning(gate: str, kind: str, pools: str | None) -> tuple[str, str]:
    """Code and words of a decision at a gate; ``pools`` are the pool's words for an approval, if it has any."""
    code, words = MEANINGS[gate, kind]
    return (code, pools) if kind == "approve" and pools is not None else (code, words)
