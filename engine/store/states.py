"""The legal states of runs, steps and attempts, and the legal moves between them: the one table of both.

The migrations write the same table into the database, where a trigger enforces it; a test compares the two.
"""

from __future__ import annotations

from typing import Final, Literal

RunState = Literal["created", "planning", "running", "waiting", "succeeded", "failed", "cancelled"]
StepState = Literal["pending", "running", "waiting", "succeeded", "failed", "skipped", "reused", "cancelled"]
AttemptState = Literal["sent", "succeeded", "refused", "failed", "cancelled", "superseded", "unknown"]

RUN_STATES: Final[tuple[RunState, ...]] = (
    "created",  # written by the submitter; no execution has done anything yet
    "planning",  # a planning call has been opened
    "running",  # the plan is stored and steps may be called
    "waiting",  # nothing can go on before a person, a secret or a worker is there
    "succeeded",
    "failed",
    "cancelled",
)
STEP_STATES: Final[tuple[StepState, ...]] = (
    "pending",  # stored with the plan
    "running",  # an attempt was opened
    "waiting",  # for a review, budget, operator, secret or worker; the reason says which
    "succeeded",  # has its one accepted output
    "failed",
    "skipped",  # left out by the policy for unread steps, or by an operator
    "reused",  # takes its output from another run (fork)
    "cancelled",
)
ATTEMPT_STATES: Final[tuple[AttemptState, ...]] = (
    "sent",  # it is durable that the call may happen
    "succeeded",
    "refused",  # the model declined; billed
    "failed",
    "cancelled",  # we closed the connection; may have been billed
    "superseded",  # answered after it had lost its fence; billed, not accepted
    "unknown",  # the outcome is lost; may have been billed
)

RUN_LIVE: Final[tuple[RunState, ...]] = ("created", "planning", "running", "waiting")
RUN_ENDED: Final[tuple[RunState, ...]] = ("succeeded", "failed", "cancelled")
STEP_LIVE: Final[tuple[StepState, ...]] = ("pending", "running", "waiting")
STEP_HAS_OUTPUT: Final[tuple[StepState, ...]] = ("succeeded", "reused")

TRANSITIONS: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "run": (
        ("created", "planning"),
        ("created", "running"),
        ("created", "waiting"),
        ("created", "failed"),
        ("created", "cancelled"),
        ("planning", "running"),
        ("planning", "waiting"),
        ("planning", "succeeded"),
        ("planning", "failed"),
        ("planning", "cancelled"),
        ("running", "planning"),
        ("running", "waiting"),
        ("running", "succeeded"),
        ("running", "failed"),
        ("running", "cancelled"),
        ("waiting", "planning"),
        ("waiting", "running"),
        ("waiting", "succeeded"),
        ("waiting", "failed"),
        ("waiting", "cancelled"),
        ("failed", "created"),  # resume: a new execution
        ("cancelled", "created"),
    ),
    "step": (
        ("pending", "running"),
        ("pending", "waiting"),
        ("pending", "succeeded"),
        ("pending", "failed"),
        ("pending", "skipped"),
        ("pending", "reused"),
        ("pending", "cancelled"),
        ("running", "pending"),  # a substitute takes over
        ("running", "waiting"),
        ("running", "succeeded"),
        ("running", "failed"),
        ("running", "skipped"),
        ("running", "cancelled"),
        ("waiting", "pending"),  # an operator wants another try
        ("waiting", "running"),
        ("waiting", "succeeded"),
        ("waiting", "failed"),
        ("waiting", "skipped"),
        ("waiting", "cancelled"),
        ("failed", "pending"),  # resume, or an operator's retry
        ("failed", "running"),
        ("failed", "skipped"),
        ("cancelled", "pending"),
        ("cancelled", "running"),
    ),
    "attempt": (
        ("sent", "succeeded"),
        ("sent", "refused"),
        ("sent", "failed"),
        ("sent", "cancelled"),
        ("sent", "superseded"),
        ("sent", "unknown"),
        ("unknown", "superseded"),
    ),
}


def as_markdown() -> str:
    """The table as a page with one diagram a subject: ``docs/states.md`` is this text, and a test compares them."""
    starts = {"run": "created", "step": "pending", "attempt": "sent"}
    parts = ["# States\n\nDrawn from `engine/store/states.py`; the database enforces the same table.\n"]
    for subject, moves in TRANSITIONS.items():
        lines = [f"    [*] --> {starts[subject]}", *(f"    {old} --> {new}" for old, new in moves)]
        parts.append(f"## {subject.capitalize()}\n\n```mermaid\nstateDiagram-v2\n" + "\n".join(lines) + "\n```\n")
    return "\n".join(parts)
