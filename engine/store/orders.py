"""Orders that people give to a run: cancel, pause, unpause. For going on again see `engine.store.resuming`.

Each is one transaction and one ledger entry, with who and why, before anything is sent to Temporal; Open enforces what
stands here. Must never write a reason anywhere but into an artifact: the entry only commits to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

from engine.errors import InputError, RefusedError
from engine.store.artifacts import ArtifactDraft
from engine.store.database import Database
from engine.store.exchange import Connection, Params, Row
from engine.store.ids import new_run_id
from engine.store.run_writer import RunWriter, lock_run
from engine.store.states import RUN_ENDED
from engine.store.waiting import PAUSED, READ_CALLS

REASON_BYTES_MAX: Final = 4096

# Whether this very order is on record: the link can die between COMMIT and its answer, and then it is given again.
# An entry is canonical JSON, so the id stands in it as it is written here.
_FIND_ORDER = """
    SELECT body FROM ledger_entries
    WHERE run_id = %s AND position(%s::bytea IN body) > 0
"""
READ_PLAN_IN_FORCE = """
    SELECT 1 FROM plans JOIN runs ON runs.id = plans.run_id AND runs.round = plans.round
    WHERE runs.id = %s AND plans.accepted_at IS NOT NULL
"""
_SET_CANCEL = "UPDATE runs SET cancel_requested_at = %(now)s, wake_requested_at = %(now)s WHERE id = %(run_id)s"
_SET_PAUSE = "UPDATE runs SET paused_at = %(now)s, wake_requested_at = %(now)s WHERE id = %(run_id)s"
_CLEAR_PAUSE = "UPDATE runs SET paused_at = NULL, wake_requested_at = %(now)s WHERE id = %(run_id)s"


@dataclass(frozen=True, slots=True)
class Order:
    """What a person wants of a run. ``id`` is made before the transaction, so that repeating it gives one order."""

    run_id: UUID
    actor_id: str
    on_behalf_of: str | None = None
    reason: str | None = None
    id: UUID = field(default_factory=new_run_id)

    def __post_init__(self) -> None:
        """Raises InputError for a reason that cannot be kept as it was given."""
        if self.reason is None:
            return
        try:
            content = self.reason.encode()
        except UnicodeEncodeError:
            content = b"\0"
        if b"\0" in content:
            raise InputError("reason-binary", "the reason is not UTF-8 text", hint="write it in words")
        if len(content) > REASON_BYTES_MAX:
            raise InputError(
                "reason-too-long",
                f"the reason has {len(content):,} bytes; the limit is {REASON_BYTES_MAX:,}",
                hint="say it in a few words",
            )


@dataclass(frozen=True, slots=True)
class Ordered:
    """What came of an order: the run's state, since when the order stands, and whether this order was the first."""

    state: str
    reason: str | None
    at: datetime | None
    changed: bool
    # The run that it belongs to, for a cancel of a run below another one.
    parent: UUID | None = None


async def request_cancel(database: Database, order: Order) -> Ordered:
    """Writes down that a run is to be cancelled. Harmless if that was done before, or if it is cancelled already.

    Raises RefusedError ``run-ended`` for a run that succeeded or failed; nothing was changed then.
    """

    async def work(connection: Connection) -> Ordered:
        writer, known, _ = await lock_for_order(connection, order)
        run = writer.run
        if known:
            return Ordered(run["state"], run["reason"], run["cancel_requested_at"], changed=True)
        if run["state"] == "cancelled":
            return Ordered("cancelled", run["reason"], run["ended_at"], changed=False)
        refuse_ended(run)
        if run["cancel_requested_at"] is not None:
            return Ordered(run["state"], run["reason"], run["cancel_requested_at"], changed=False)
        writer.statement(_SET_CANCEL, {"run_id": order.run_id, "now": writer.now})
        order_entry(writer, "run.cancel_requested", order)
        await writer.commit()
        # Now nothing new is called, whatever becomes of the wake-up.
        return Ordered(run["state"], run["reason"], writer.now, changed=True, parent=run["parent_run_id"])

    return await database.write(work)


async def pause_run(database: Database, order: Order) -> Ordered:
    """Writes down that nothing new may start in a run; calls in flight finish.

    Raises RefusedError: ``run-ended``, ``run-cancelling``, ``run-paused`` (it is already); nothing was changed then.
    """

    async def work(connection: Connection) -> Ordered:
        writer, known, (calls,) = await lock_for_order(connection, order, (READ_CALLS, (order.run_id, [])))
        run = writer.run
        if known:
            return Ordered(run["state"], run["reason"], run["paused_at"], changed=True)
        refuse_ended(run)
        refuse_cancelling(run)
        if run["paused_at"] is not None:
            raise RefusedError(
                "run-paused",
                f"run {order.run_id} has been paused since {moment(run['paused_at'])}",
                hint=f"podium unpause {order.run_id}",
            )
        writer.statement(_SET_PAUSE, {"run_id": order.run_id, "now": writer.now})
        order_entry(writer, "run.paused", order)
        if not calls and run["state"] != "waiting":
            # While a call is in flight the run still runs; Open shows the pause at the next step.
            writer.set_run_state("waiting", PAUSED)
        await writer.commit()
        # Now nothing new is called before the pause is taken back.
        return Ordered(run["state"], run["reason"], writer.now, changed=True)

    return await database.write(work)


async def unpause_run(database: Database, order: Order) -> Ordered:
    """Takes a pause back.

    Raises RefusedError: ``run-ended``, ``run-cancelling``, ``run-not-paused``; nothing was changed then.
    """

    async def work(connection: Connection) -> Ordered:
        writer, known, (plans,) = await lock_for_order(connection, order, (READ_PLAN_IN_FORCE, (order.run_id,)))
        run = writer.run
        if known:
            return Ordered(run["state"], run["reason"], None, changed=True)
        refuse_ended(run)
        refuse_cancelling(run)
        if run["paused_at"] is None:
            raise RefusedError(
                "run-not-paused",
                f"run {order.run_id} is not paused: it is {run['state']}",
                hint=f"podium show {order.run_id}",
            )
        writer.statement(_CLEAR_PAUSE, {"run_id": order.run_id, "now": writer.now})
        order_entry(writer, "run.unpaused", order)
        if (run["state"], run["reason"]) == ("waiting", PAUSED):
            writer.set_run_state("running" if plans else "planning")
        await writer.commit()
        # Now Open lets calls through again; the wake-up only makes it quick.
        return Ordered(run["state"], run["reason"], writer.now, changed=True)

    return await database.write(work)


async def lock_for_order(
    connection: Connection, order: Order, *more: tuple[str, Params]
) -> tuple[RunWriter, bytes | None, list[list[Row]]]:
    """Locks the run for its order; also this order's entry, if it is on record already, and the rows of ``more``.

    The answers to ``more`` and to that question are from after the lock: each is a statement of its own.
    """
    find = (_FIND_ORDER, (order.run_id, f'"order":"{order.id}"'.encode()))
    writer, (known, *rest) = await lock_run(connection, order.run_id, find, *more, actor_id=order.actor_id)
    writer.on_behalf_of = order.on_behalf_of
    return writer, bytes(known[0]["body"]) if known else None, rest


def order_entry(writer: RunWriter, type_: str, order: Order, **fields: Any) -> None:
    """The ledger entry of an order; the reason is stored beside it, and the entry commits to it."""
    drafts = [] if order.reason is None else [ArtifactDraft(order.id, "reason", order.reason.encode())]
    writer.entry(type_, order=str(order.id), **fields, artifacts=writer.artifacts(drafts))


def refuse_ended(run: Row, *, hint: str | None = None) -> None:
    """Raises RefusedError ``run-ended`` for a run that has ended, with when and how; ``hint`` says what is possible."""
    if run["state"] not in RUN_ENDED:
        return
    why = f" ({run['reason']})" if run["state"] == "failed" and run["reason"] else ""
    usual = f"podium show {run['id']}" if run["state"] == "succeeded" else f"podium resume {run['id']}"
    raise RefusedError("run-ended", f"run {run['id']} had already {_ended(run)}{why}", hint=hint or usual)


def refuse_cancelling(run: Row) -> None:
    """Raises RefusedError ``run-cancelling`` for a run whose cancel is under way."""
    if run["cancel_requested_at"] is not None:
        raise RefusedError(
            "run-cancelling",
            f"run {run['id']} is being cancelled since {moment(run['cancel_requested_at'])}",
            hint=f"podium watch {run['id']}",
        )


def _ended(run: Row) -> str:
    verb = "been cancelled" if run["state"] == "cancelled" else run["state"]
    return f"{verb} at {moment(run['ended_at'])}"


def moment(at: datetime) -> str:
    """A time in UTC to the second, for people."""
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
