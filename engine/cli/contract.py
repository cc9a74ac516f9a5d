"""The public contract of `--json`: objects made from records. Described by docs/schemas/, which tests hold them to.

A key is never removed and never changes its meaning under one `schema_version`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from engine.cli.ending import SCHEMA_VERSION

if TYPE_CHECKING:
    from engine.plan import Form, Plan, PlanError, PlanNote
    from engine.store.budgets import Account, BudgetSnapshot
    from engine.store.snapshots import AttemptSnapshot, RunLine, RunSnapshot, StepSnapshot

Json = dict[str, Any]


def versioned(content: Json) -> Json:
    """The object with its `schema_version` in front."""
    return {"schema_version": SCHEMA_VERSION, **content}


def decimal_text(value: Decimal | None) -> str | None:
    """An exact decimal without exponent and without zeros at its end: "0.0012", "0"; None stays None."""
    if value is None:
        return None
    text = format(value, "f")
    return (text.rstrip("0").rstrip(".") if "." in text else text) or "0"


def time_text(value: datetime | None) -> str | None:
    """RFC 3339 in UTC with a Z and microseconds; None stays None."""
    return None if value is None else value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def plan_object(
    plan: Plan | None, form: Form | None, notes: Iterable[PlanNote], errors: Iterable[PlanError], digest: str | None
) -> Json:
    """What `plan check` found. `access` is spelled out; without a plan there are no steps and no digest."""
    return versioned(
        {
            "valid": plan is not None,
            "form": form,
            "steps": [
                {
                    "position": step.position,
                    "worker": step.worker,
                    "subtask": step.subtask,
                    "access": list(step.visible()),
                }
                for step in (() if plan is None else plan.steps)
            ],
            "notes": [asdict(note) for note in notes],
            "errors": [asdict(error) for error in errors],
            "digest": digest,
        }
    )


def run_object(run: RunSnapshot, remarks: Sequence[Json] = ()) -> Json:
    """A run as `run`, `show` and `watch` print it. `cost_usd` is the sum of the known costs, null if none is known.

    Costs and tokens are with all runs below it. `remarks` are notes on what is not on record.
    """
    from engine.cli.diagnosis import answer_notes
    from engine.cli.review_render import review_object
    from engine.cli.tree import below_object, parent_object, rounds_object, totals_object

    return versioned(
        {
            "id": str(run.id),
            "state": run.state,
            "reason": run.reason,
            "execution": run.execution,
            "round": run.round,
            "answer": run.answer,
            "erased": sorted(run.erased),
            "plan_digest": plan_digest_of(run),
            "planning": [{**_attempt(attempt), "round": attempt.round} for attempt in run.planning],
            "rounds": rounds_object(run),
            **totals_object(run.totals),
            "budget": budget_object(run.budget),
            "waiting_since": time_text(run.waiting_since),
            "started_at": time_text(run.started_at),
            "ended_at": time_text(run.ended_at),
            "steps": [_step(step) for step in run.steps],
            "parent": parent_object(run.parent),
            "children": [str(child) for child in run.children],
            "descendants": below_object(run),
            "reviews": [review_object(review) for review in run.reviews],
            "forked_from": None if run.source_run_id is None else str(run.source_run_id),
            "notes": [
                {key: note.get(key) for key in ("code", "field", "position", "text")}
                for note in (*run.notes, *answer_notes(run), *remarks)
            ],
        }
    )


def budget_object(budget: BudgetSnapshot | None) -> Json | None:
    """A budget: whose it is, and for each unit limit, spent, reserved, assumed and left; dollars as decimal strings."""
    if budget is None:
        return None

    def amounts(unit: str, account: Account) -> Json:
        values = {name: getattr(account, name) for name in ("limit", "spent", "reserved", "assumed", "left")}
        if unit == "usd":
            return {name: decimal_text(value) for name, value in values.items()}
        return {name: None if value is None else int(value) for name, value in values.items()}

    return {"run": str(budget.run_id), **{unit: amounts(unit, account) for unit, account in budget.accounts.items()}}


def plan_digest_of(run: RunSnapshot) -> str | None:
    """SHA-256 of the canonical plan in force; None while there is none."""
    return None if run.plan_json is None else hashlib.sha256(run.plan_json).hexdigest()


def list_array(lines: Sequence[RunLine]) -> list[Json]:
    """Runs as `list` prints them, in the given order."""
    from engine.cli.tree import parent_object

    return [
        versioned(
            {
                "id": str(line.id),
                "state": line.state,
                "reason": line.reason,
                "task_preview": line.task_preview,
                "pool": line.pool,
                "created_at": time_text(line.created_at),
                "cost_usd": decimal_text(line.cost_usd),
                "parent": parent_object(line.parent),
            }
        )
        for line in lines
    ]


def _step(step: StepSnapshot) -> Json:
    return {
        "position": step.position,
        "round": step.round,
        "worker": step.worker,
        "model": step.model,
        "state": step.state,
        "reason": step.reason,
        "waiting_since": time_text(step.waiting_since),
        "access": sorted(step.access),
        "output": step.output,
        "erased": step.output_erased,
        "attempts": [_attempt(attempt) for attempt in step.attempts],
    }


def _attempt(attempt: AttemptSnapshot) -> Json:
    return {
        "id": str(attempt.id),
        "number": attempt.number,
        "state": attempt.state,
        "error_code": attempt.error_code,
        "started_at": time_text(attempt.started_at),
        "ended_at": time_text(attempt.ended_at),
        "input_tokens": attempt.input_tokens,
        "output_tokens": attempt.output_tokens,
        "cost_usd": decimal_text(attempt.cost_usd),
        "provider_request_id": attempt.provider_request_id,
        "provider_model": attempt.provider_model,
    }
