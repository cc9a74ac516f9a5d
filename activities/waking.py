"""Bringing orders to workflows: the order itself is a row; what is sent to Temporal is only a wake-up.

Whoever gave an order calls this once, and the reconciler repeats it until it got through. Must never decide anything:
what a run may still do is decided by Open, from the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.service import RPCError, RPCStatusCode

from engine import contracts
from engine.errors import UnavailableError
from engine.store.database import Database
from engine.store.exchange import Connection, exchange
from engine.store.lineage import FAMILY
from engine.store.settling import Settlement, settle_run
from engine.store.states import RUN_ENDED

CANCELLED = "cancelled"
# Somebody at a terminal waits for it. The order stands in any case, and the reconciler is more patient.
DELIVERY_TIMEOUT = timedelta(seconds=5)

# The run and everything below it. A child whose parent has ended may still be on its way to its own end.
_READ_FAMILY = f"""{FAMILY}
    SELECT runs.id, state, execution, round, cancel_requested_at, wake_requested_at
    FROM runs JOIN family ON family.id = runs.id ORDER BY family.height
"""  # noqa: S608  # a constant
_CLEAR = "UPDATE runs SET wake_requested_at = NULL WHERE id = %s AND wake_requested_at = %s"


@dataclass(frozen=True, slots=True)
class OrderedRun:
    """A run as somebody finds it who is to wake its workflow."""

    id: UUID
    state: str
    execution: int
    round: int
    cancel_requested_at: datetime | None
    wake_requested_at: datetime | None


async def deliver_orders(database: Database, client: Client, run_id: UUID) -> None:
    """Wakes the workflows of a run and its live descendants, or cancels them, then notes that it was done.

    A run that is to be cancelled and has no workflow is ended at once. Raises UnavailableError
    ``temporal-unreachable``; what was not delivered then stays noted.
    """
    (rows,) = await database.fetch((_READ_FAMILY, (run_id,)))
    for row in rows:
        run = OrderedRun(**row)
        if run.state not in RUN_ENDED:
            await _deliver(database, client, run)
        if run.wake_requested_at is not None:
            await _clear(database, run)


async def _deliver(database: Database, client: Client, run: OrderedRun) -> None:
    workflow = contracts.workflow_id(str(run.id), run.execution)
    try:
        if run.cancel_requested_at is None:
            await _signal(client, workflow)
            if run.round > 0:
                # A later round has a workflow of its own, and it is the one that waits.
                await _signal(client, contracts.round_workflow_id(str(run.id), run.execution, run.round))
        elif not await _cancel(client, workflow):
            # Not started yet, gone, or closed. Nothing will end the run, and if it is started after all, Open refuses.
            await settle_run(database, Settlement(run.id, run.execution, "cancelled", CANCELLED))
            await stop_rounds(client, run.id, run.execution, run.round)
    except RPCError as error:
        raise temporal_unreachable(error) from None


async def stop_rounds(client: Client, run_id: UUID, execution: int, last: int) -> None:
    """Asks the workflows of later rounds to end, for a run whose own workflow is no longer there to do so.

    The round behind the ``last`` on record may have begun as well.
    """
    for number in range(1, last + 2):
        await stop_workflow(client, contracts.round_workflow_id(str(run_id), execution, number))


async def stop_workflow(client: Client, workflow: str) -> None:
    """Asks a workflow to end, if it is there. Raises UnavailableError ``temporal-unreachable``."""
    try:
        await client.get_workflow_handle(workflow).cancel(rpc_timeout=DELIVERY_TIMEOUT)
    except RPCError as error:
        if error.status != RPCStatusCode.NOT_FOUND:
            raise temporal_unreachable(error) from None


async def _signal(client: Client, workflow: str) -> None:
    try:
        await client.get_workflow_handle(workflow).signal(contracts.WAKE_SIGNAL, rpc_timeout=DELIVERY_TIMEOUT)
    except RPCError as error:
        # One that is not there does not wait: what it finds when it begins is the newest record.
        if error.status != RPCStatusCode.NOT_FOUND:
            raise


async def _cancel(client: Client, workflow: str) -> bool:
    """Asks a workflow to end; its children are cancelled by it. False if there is none that could."""
    handle = client.get_workflow_handle(workflow)
    try:
        await handle.cancel(rpc_timeout=DELIVERY_TIMEOUT)
        # Temporal also says yes for a workflow that is closed.
        return (await handle.describe(rpc_timeout=DELIVERY_TIMEOUT)).status == WorkflowExecutionStatus.RUNNING
    except RPCError as error:
        if error.status != RPCStatusCode.NOT_FOUND:
            raise
        return False


async def _clear(database: Database, run: OrderedRun) -> None:
    """Forgets the wish, unless another order was given meanwhile."""

    async def work(connection: Connection) -> None:
        await exchange(connection, [(_CLEAR, (run.id, run.wake_requested_at))])

    await database.write(work)


def temporal_unreachable(error: RPCError) -> UnavailableError:
    """The error for a Temporal service that does not answer; its own text is not passed on."""
    return UnavailableError(
        "temporal-unreachable",
        f"Temporal does not answer ({error.status.name.lower().replace('_', '-')})",
        hint="check PODIUM_TEMPORAL_ADDRESS and that the server is up; `podium doctor` looks closer",
    )
