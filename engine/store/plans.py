"""Writing a plan: the row of its round, its steps, and its text as artifacts.

Used by the submitter (a plan from a file or a template) and by the closing transaction of a planning call.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from uuid import UUID

from engine.plan import PlanError, PlanNote, canonical_plan
from engine.store import queries
from engine.store.artifacts import JSON, ArtifactDraft
from engine.store.drafts import PlanDraft, left_out
from engine.store.ids import plan_id, step_id
from engine.store.run_writer import RunWriter


def write_plan(writer: RunWriter, round_number: int, draft: PlanDraft) -> tuple[int, ...]:
    """Writes the plan of a round; returns the positions that the policy for unread steps leaves out."""
    owner = plan_id(writer.run_id, round_number)
    steps = draft.plan.steps
    skipped = left_out(draft)
    committed = writer.artifacts(
        [
            *raw_plan_drafts(owner, draft.raw, draft.plan.notes),
            ArtifactDraft(owner, "plan", canonical_plan(draft.plan), role="plan", media_type=JSON),
            *(
                ArtifactDraft(step_id(writer.run_id, round_number, step.position), "subtask", step.subtask.encode())
                for step in steps
            ),
        ]
    )
    writer.statement(
        queries.ACCEPT_PLAN,
        (draft.plan.form, len(steps), draft.attempt_id, writer.now, writer.run_id, round_number),
    )
    for step in steps:
        route = draft.routes[step.worker]
        unread = step.position in skipped
        writer.statement(
            queries.INSERT_STEP,
            (
                step_id(writer.run_id, round_number, step.position),
                writer.run_id,
                round_number,
                step.position,
                step.worker,
                route.model,
                route.queue,
                list(step.visible()),
                step.access == "all",
                "skipped" if unread else "pending",
                "unread" if unread else None,
                writer.now if unread else None,
            ),
        )
    writer.entry(
        "plan.accepted",
        round=round_number,
        plan=str(owner),
        form=draft.plan.form,
        attempt=None if draft.attempt_id is None else str(draft.attempt_id),
        steps=[
            {
                "step": step.position,
                "id": str(step_id(writer.run_id, round_number, step.position)),
                "worker": step.worker,
                "model": draft.routes[step.worker].model,
                "access": step.access if step.access == "all" else list(step.access),
                "reads": list(step.visible()),
                "round_before": step.access == "all" and round_number > 0,
                "skipped": step.position in skipped,
            }
            for step in steps
        ],
        notes=sorted({note.code for note in draft.plan.notes}),
        artifacts=committed,
    )
    return skipped


def raw_plan_drafts(
    owner: UUID, raw: bytes, notes: Sequence[PlanNote], errors: Sequence[PlanError] = ()
) -> list[ArtifactDraft]:
    """The text of a plan as it came, with what the parser noted or found wrong: both quote the text."""
    remarks = {"notes": [asdict(note) for note in notes], "errors": [asdict(error) for error in errors]}
    return [
        ArtifactDraft(owner, "plan_text", raw, role="plan"),
        ArtifactDraft(owner, "plan_remarks", json.dumps(remarks).encode(), role="remarks", media_type=JSON),
    ]
