"""A run's record as text, for the reader of a failed test: its rows, its ledger, the endpoint's view, Temporal's view."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

from temporalio.client import Client
from temporalio.service import RPCError

from engine import contracts
from tests.support.crash.books import Books, Fault
from tests.support.crash.endpoint import Request

SHOWN_MAX: Final = 5


async def describe_runs(
    client: Client, books: Books, requests: Sequence[Request], faults: Sequence[Fault]
) -> list[str]:
    """Everything that is known of the first runs with faults."""
    found = dict.fromkeys(fault.run_id for fault in faults if fault.run_id is not None and fault.run_id in books.runs)
    shown = list(found)[:SHOWN_MAX]
    return [describe_run(books, requests, run_id) + await _workflow(client, books, run_id) for run_id in shown]


def describe_run(books: Books, requests: Sequence[Request], run_id: UUID) -> str:
    """The rows and the ledger of one run."""
    run = {column: str(value) for column, value in books.runs[run_id].items() if value is not None}
    seen = {request.attempt_id: request for request in requests}
    lines = [f"---- run {run_id}", f"  {run}"]
    lines += [
        f"  step {step['round']}/{step['position']} {step['worker']} {step['state']} {step['reason']}"
        for step in books.steps[run_id]
    ]
    lines += [_attempt(one, seen.get(str(one["id"]))) for one in books.attempts[run_id]]
    entries = map(json.loads, books.bodies[run_id])
    lines += [f"  ledger {entry['at']} {entry['type']} {entry['data']}" for entry in entries]
    return "\n".join(lines)


def _attempt(one: dict[str, Any], request: Request | None) -> str:
    fence = f"{one['execution']}.{one['dispatch']}.{one['temporal_attempt']}"
    told = "no request" if request is None else f"request at {request.started_at:.3f}, {request.outcome}"
    return (
        f"  attempt {one['id']} {one['round']}/{one['position']} no. {one['number']} fence {fence} {one['state']} "
        f"{one['error_code']} accepted={one['accepted']} {one['sent_at']:%X.%f} to {one['ended_at']} "
        f"${one['cost_usd']} process {one['process_id']}; {told}"
    )


async def _workflow(client: Client, books: Books, run_id: UUID) -> str:
    own = contracts.workflow_id(str(run_id), books.runs[run_id]["execution"])
    try:
        description = await client.get_workflow_handle(own).describe()
    except RPCError as error:
        return f"\n  Temporal: {error}"
    raw = description.raw_description
    pending = [str(one) for one in raw.pending_activities]
    return f"\n  Temporal: {description.status!r}, workflow task [{raw.pending_workflow_task}], activities {pending}"
