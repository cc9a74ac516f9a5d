"""``settle_run`` and ``note_waiting``: the rare activities that only keep books. Both are idempotent."""

from __future__ import annotations

import re
from uuid import UUID

from temporalio import activity

from activities.context import ActivityContext
from activities.guard import guarded
from activities.queues import NO_WORKER, queue_of, why_unpolled
from activities.review_gates import sight_of_run
from engine.contracts import SettleReceipt, SettleRequest, WaitRequest
from engine.store.settling import Settlement, note_waiting, settle_run

_CODE = re.compile(r"[a-z0-9-]{1,80}")


def checked_code(code: str | None) -> str | None:
    """A code as it came from Temporal, or a word for what is none: no text may get into the record this way."""
    return code if code is None or _CODE.fullmatch(code) else "bug-code"


class BookkeepingActivities:
    """Activities that write the ends and waits that no step's own transactions write."""

    def __init__(self, context: ActivityContext) -> None:
        self._context = context

    @activity.defn(name="settle_run")
    @guarded
    async def settle_run(self, request: SettleRequest) -> SettleReceipt:
        """Ends a run that its last step did not end."""
        run_id = UUID(request.run_id)
        review = await sight_of_run(self._context, run_id) if request.state == "succeeded" else None
        settlement = Settlement(run_id, request.execution, request.state, checked_code(request.code), review)
        settled = await settle_run(self._context.database, settlement)
        return SettleReceipt(settled.state, settled.code)

    @activity.defn(name="note_waiting")
    @guarded
    async def note_waiting(self, request: WaitRequest) -> None:
        """Shows on the record what a step, or the planning, waits for."""
        database, run_id = self._context.database, UUID(request.run_id)
        code = checked_code(request.code) or "bug-code"
        if code == NO_WORKER:
            # The workflow only knows that nobody has taken it for a while.
            queue = await queue_of(database, run_id, request.round, request.position)
            code = await why_unpolled(database, activity.client(), queue)
        await note_waiting(database, run_id, request.round, request.position, code, execution=request.execution)
