"""The types of entries that this verifier knows, the shapes of the fields that its rules look at, and their chains.

A field that an older Podium did not write yet is optional here. Fields beyond these are not looked at; types are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from engine.verifier.shapes import (
    Shape,
    either,
    exactly,
    fields,
    is_any,
    is_count,
    is_flag,
    is_hash,
    is_id,
    is_provider_word,
    is_text,
    is_time,
    is_usd,
    list_of,
    one_of,
    optional,
)

RUN_STATES: Final = ("created", "planning", "running", "waiting", "succeeded", "failed", "cancelled")
RUN_ENDED: Final = ("succeeded", "failed", "cancelled")
STEP_STATES: Final = ("pending", "running", "waiting", "succeeded", "failed", "skipped", "reused", "cancelled")
ATTEMPT_STATES: Final = ("sent", "succeeded", "refused", "failed", "cancelled", "superseded", "unknown")
CLOSING: Final = "run.closed"
REOPENING: Final = "run.resumed"
# What may stand behind a closing entry: whole types, and (ending in a dot) families of types.
AFTER_CLOSING: Final = ("attempt.closed", "run.exported", REOPENING, "artifact.", "erasure.", "hold.", "review.")

# What every list of the name `artifacts` looks like, whatever the type.
COMMITTED: Final = list_of(fields({"artifact": is_id, "kind": is_text, "bytes": is_count, "commitment": is_hash}))
_ARTIFACTS: Mapping[str, Shape] = {"artifacts": is_any}
_REASON = optional(is_text)
_RUN_MOVE = {"state": one_of(*RUN_STATES), "reason": _REASON, "old": one_of(*RUN_STATES)}
_STEP_MOVE = {"state": one_of(*STEP_STATES), "reason": _REASON, "old": one_of(*STEP_STATES)}
_MOVED = optional(fields(_STEP_MOVE))
_STEP = {"round": is_count, "step": is_count}
_CALL = {"round": is_count, "step": optional(is_count)}
_ROOTED = exactly({"size": is_count, "root": is_hash})
_CHECKPOINT = either(optional(is_count), _ROOTED)
_ORDER = fields({"order": is_id}, _ARTIFACTS)
_BUDGET = optional(
    fields({"usd": optional(is_usd), "tokens": optional(is_count), "calls": optional(is_count)}),
)
_TOTALS = fields(
    {
        "attempts": is_count,
        "input_tokens": is_count,
        "output_tokens": is_count,
        "cost_usd": is_usd,
        "unpriced": is_count,
    }
)


_COUNTS = list_of(is_count)
_ACCESS = either(one_of("all"), _COUNTS)
# Execution, dispatch, Temporal's attempt.
_FENCE = Shape(list, lambda values: len(values) == 3 and _COUNTS(values))  # noqa: PLR2004  # three numbers
_PLANNED = fields(
    {"step": is_count, "worker": is_text, "model": is_text, "access": _ACCESS, "skipped": is_flag},
    {"id": is_id, "reads": list_of(is_count), "round_before": is_flag},
)
_SOURCE = fields(
    {
        "run": is_id,
        "reused": list_of(fields({"step": is_count, "attempt": is_id, "model": is_text}, {"source_step": is_id})),
    },
    {"round": is_count, "task_edited": is_flag, "edited": list_of(fields({"step": is_count}))},
)
_REVIEW: Mapping[str, Shape] = {"review": is_id}
_HELD = {"hold": is_id, "matter": is_text, "runs": list_of(is_id), "all_runs": is_flag}

_RUN_SHAPES: dict[str, Shape] = {
    "run.created": fields(
        {
            "origin": one_of("conductor", "file", "template", "fork"),
            "pool": is_hash,
            "execution": is_count,
            **_ARTIFACTS,
        },
        {
            "parent": is_id,
            "parent_round": is_count,
            "parent_step": is_count,
            "source": _SOURCE,
            "checkpoint": _CHECKPOINT,
            "rounds_max": is_count,
            "depth": is_count,
            "budget": _BUDGET,
        },
    ),
    "run.changed": fields(_RUN_MOVE),
    CLOSING: fields({**_RUN_MOVE, "entries_before": is_count}, {"totals": _TOTALS}),
    "plan.accepted": fields(
        {"round": is_count, "attempt": optional(is_id), "steps": list_of(_PLANNED), **_ARTIFACTS}, {"plan": is_id}
    ),
    "plan.rejected": fields({"round": is_count, "attempt": is_id, "number": is_count}),
    "attempt.sent": fields(
        {
            "attempt": is_id,
            **_CALL,
            "number": is_count,
            "worker": is_text,
            "model": is_text,
            "fence": _FENCE,
            "prompt": is_hash,
            "moved": _MOVED,
            **_ARTIFACTS,
        },
        {"shown": list_of(is_id)},
    ),
    "attempt.closed": fields(
        {
            "attempt": is_id,
            **_CALL,
            "state": one_of(*ATTEMPT_STATES[1:]),
            "code": _REASON,
            "accepted": is_flag,
            "input_tokens": optional(is_count),
            "output_tokens": optional(is_count),
            "cost_usd": optional(is_usd),
            "moved": _MOVED,
            **_ARTIFACTS,
        },
        {"provider_request_id": optional(is_provider_word), "provider_model": optional(is_provider_word)},
    ),
    "step.changed": fields({**_STEP, **_STEP_MOVE}, {"attempt": is_id}),
    "step.substituted": fields(
        {**_STEP, "worker": is_text, "model": is_text, "old_worker": is_text, "moved": _MOVED},
        {"attempts_base": is_count},
    ),
    "step.routed": fields({**_STEP, "worker": is_text, "model": is_text}),
    "child.begun": fields(
        {**_STEP, "child": is_id, "child_execution": is_count}, {"shown": list_of(is_id), **_ARTIFACTS}
    ),
    "child.ended": fields(
        {**_STEP, "child": is_id, "child_state": one_of(*RUN_STATES), "child_reason": _REASON},
        {"answer": optional(is_id)},
    ),
    "run.cancel_requested": _ORDER,
    "run.paused": _ORDER,
    "run.unpaused": _ORDER,
    REOPENING: fields({"execution": is_count}, {"order": is_id, "parent_execution": is_count, **_ARTIFACTS}),
    "run.repinned": fields({"old": is_hash, "new": is_hash}, {"order": is_id}),
    "run.budget_changed": fields({"order": is_id}, {"budget": _BUDGET, "old": _BUDGET, **_ARTIFACTS}),
    "operator.answered": fields(
        {"order": is_id, "answer": one_of("retry", "skip", "abort"), **_STEP, "moved": _MOVED},
        {"worker": is_text, "model": is_text, "old_worker": is_text, "attempts_base": is_count, **_ARTIFACTS},
    ),
    "run.exported": fields(
        {"export": is_id, "runs": list_of(is_id)},
        {"system": optional(exactly({"entries": is_count, "head": is_hash}))},
    ),
    "artifact.read": fields({}, {"command": is_text, "read": list_of(is_id)}),
    "artifact.erased": fields({"erased": list_of(is_id)}, {"erasure": is_id, "restored": is_flag, **_ARTIFACTS}),
    "erasure.refused": fields({}, _ARTIFACTS),
    "review.requested": fields(
        {
            **_REVIEW,
            "gate": one_of("plan", "before", "after", "answer"),
            "round": is_count,
            "step": optional(is_count),
            "subject": is_hash,
            "approvals": is_count,
            "four_eyes": is_flag,
            "policy": optional(is_hash),
            "shown": optional(is_hash),
            "reason": is_text,
            **_ARTIFACTS,
        },
        {
            "holds": is_flag,
            "plan": optional(is_hash),
            "execution": is_count,
            "level": is_count,
            "reviewers": list_of(is_text),
            "excluded": list_of(is_text),
            "attempt": optional(is_id),
            "expires_at": optional(is_time),
            "on_expiry": _REASON,
        },
    ),
    "review.sampled": fields(
        {
            "gate": one_of("plan", "before", "after", "answer"),
            "round": is_count,
            "step": optional(is_count),
            "policy": is_hash,
            "percent": is_count,
            "draw": is_hash,
            "salt": is_hash,
            "chosen": is_flag,
        }
    ),
    "review.opened": fields({**_REVIEW, "person": is_text, "shown": optional(is_hash)}),
    "review.commented": fields({**_REVIEW, "person": is_text, **_ARTIFACTS}),
    "review.decided": fields(
        {
            **_REVIEW,
            "decision": one_of("approve", "reject"),
            "meaning": is_text,
            "person": is_text,
            "subject": is_hash,
            "shown": optional(is_hash),
            **_ARTIFACTS,
        },
        {"checkpoint": _CHECKPOINT},
    ),
    "review.closed": fields(
        {**_REVIEW, "state": one_of("approved", "rejected", "expired", "stale", "withdrawn", "bypassed")},
        {"moved": optional(is_any)},
    ),
    "review.bypassed": fields({**_REVIEW, "person": is_text, **_ARTIFACTS}),
}
_SYSTEM_SHAPES: dict[str, Shape] = {
    "key.created": fields({"key": is_text}),
    "log.restored": fields({"size": is_count, "remembered": optional(is_count)}),
    "key.rotated": fields({"old": is_text, "new": is_text, "size": is_count}),
    "person.linked": fields({"actor": is_text, "person": is_text}),
    "hold.placed": fields(_HELD, _ARTIFACTS),
    "hold.widened": fields(_HELD, _ARTIFACTS),
    "hold.release_asked": fields({"hold": is_id}, {"matter": is_text, **_ARTIFACTS}),
    "hold.released": fields({"hold": is_id}, {"matter": is_text, "asked_by": is_text, **_ARTIFACTS}),
    "sampling.salt_made": fields({"salt": is_hash}),
    "retention.swept": fields({}, _ARTIFACTS),
    "keys.adopted": fields({}, _ARTIFACTS),
}

SHAPES: Final[Mapping[str, Shape]] = {**_RUN_SHAPES, **_SYSTEM_SHAPES}


def is_system_type(type_: str) -> bool:
    """Whether entries of this type stand in the tenant's own chain."""
    return type_ in _SYSTEM_SHAPES


def may_follow_closing(type_: str) -> bool:
    """Whether an entry of this type may stand behind ``run.closed``."""
    return any(type_ == allowed or (allowed[-1] == "." and type_.startswith(allowed)) for allowed in AFTER_CLOSING)


def committed(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The artifacts that an entry commits to; its shape was checked before."""
    rows: list[dict[str, Any]] = data.get("artifacts", [])
    return rows
