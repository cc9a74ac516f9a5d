"""Changing what a run may use while it goes on: raising a limit, lowering it, lifting it, or giving a first one.

One transaction and one ledger entry, with who and why. A run that had no budget gets one with exactly what its tree has
used so far, counted while no run of the tree can open or close a call. Must never set a limit below what is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

from engine.errors import RefusedError
from engine.store import queries
from engine.store.budgets import NO_LIMITS, UNITS, BudgetSnapshot, Limits, budget_snapshot
from engine.store.database import Database
from engine.store.exchange import Connection, Row, exchange
from engine.store.lineage import FAMILY
from engine.store.orders import (
    READ_PLAN_IN_FORCE,
    Order,
    Ordered,
    lock_for_order,
    order_entry,
    refuse_cancelling,
    refuse_ended,
)
from engine.store.run_writer import RunWriter
from engine.store.waiting import BUDGET_REASONS

# Locked from the root to the leaves, and before any budget, as the runs' own transactions do.
_LOCK_FAMILY: Final = f"""{FAMILY}
    SELECT runs.id FROM runs JOIN family ON family.id = runs.id
    ORDER BY family.height, runs.id FOR NO KEY UPDATE OF runs
"""  # noqa: S608  # a constant
# The same sums that reserving and settling every call in turn would have come to, see `engine.store.budgets`.
_MEASURE: Final = """
    SELECT
        coalesce(sum(usd), 0) AS usd_spent,
        coalesce(sum(worst_usd) FILTER (WHERE state = 'sent'), 0) AS usd_reserved,
        coalesce(sum(worst_usd) FILTER (WHERE state <> 'sent' AND usd IS NULL), 0) AS usd_assumed,
        coalesce(sum(tokens), 0)::bigint AS tokens_spent,
        coalesce(sum(worst_tokens) FILTER (WHERE state = 'sent'), 0)::bigint AS tokens_reserved,
        coalesce(sum(worst_tokens) FILTER (WHERE state <> 'sent' AND tokens IS NULL), 0)::bigint AS tokens_assumed,
        count(*) FILTER (WHERE state NOT IN ('sent', 'unknown')) AS calls_spent,
        count(*) FILTER (WHERE state = 'sent') AS calls_reserved,
        count(*) FILTER (WHERE state = 'unknown') AS calls_assumed,
        count(*) FILTER (WHERE usd IS NULL AND reserved_usd IS NULL) AS unpriced
    FROM (
        SELECT state, reserved_usd,
            coalesce(reserved_usd, 0) AS worst_usd,
            coalesce(reserved_tokens, 0) AS worst_tokens,
            CASE WHEN state NOT IN ('sent', 'unknown') THEN cost_usd END AS usd,
            CASE WHEN state IN ('sent', 'unknown') THEN NULL
                 WHEN input_tokens IS NOT NULL AND output_tokens IS NOT NULL
                     THEN input_tokens::bigint + output_tokens
                 WHEN state IN ('failed', 'cancelled') AND cost_usd = 0 THEN 0
            END AS tokens
        FROM attempts WHERE run_id = ANY(%s)
    ) tries
"""
_INSERT: Final = """
    INSERT INTO budgets (run_id, tenant_id, usd_limit, tokens_limit, calls_limit,
        usd_spent, usd_reserved, usd_assumed, tokens_spent, tokens_reserved, tokens_assumed,
        calls_spent, calls_reserved, calls_assumed)
    VALUES (%(run_id)s, %(tenant_id)s, %(usd_limit)s, %(tokens_limit)s, %(calls_limit)s,
        %(usd_spent)s, %(usd_reserved)s, %(usd_assumed)s, %(tokens_spent)s, %(tokens_reserved)s, %(tokens_assumed)s,
        %(calls_spent)s, %(calls_reserved)s, %(calls_assumed)s)
"""
_SET_LIMITS: Final = """
    UPDATE budgets SET usd_limit = %(usd_limit)s, tokens_limit = %(tokens_limit)s, calls_limit = %(calls_limit)s
    WHERE run_id = %(run_id)s
"""


@dataclass(frozen=True, slots=True)
class LimitChange:
    """New limits; None leaves a limit as it is, and the units in ``lifted`` are not limited any more."""

    limits: Limits = NO_LIMITS
    lifted: frozenset[str] = frozenset()

    def applied(self, present: Limits) -> Limits:
        """The limits after the change."""

        def after(unit: str) -> Any:
            wanted = getattr(self.limits, unit)
            return None if unit in self.lifted else getattr(present, unit) if wanted is None else wanted

        return Limits(*(after(unit) for unit in UNITS))


@dataclass(frozen=True, slots=True)
class BudgetChanged:
    """The run after the order, and its budget as it is now."""

    ordered: Ordered
    budget: BudgetSnapshot | None


async def change_budget(database: Database, order: Order, change: LimitChange) -> BudgetChanged:
    """Changes a live run's limits. Harmless if they are as wanted already.

    Raises RefusedError ``run-ended``, ``run-cancelling``, ``budget-below-used``, ``budget-spend-unknown`` (a limit in
    dollars where the cost of an earlier call has no bound); nothing was changed then.
    """

    async def work(connection: Connection) -> BudgetChanged:
        writer, known, (family, again, plans) = await lock_for_order(
            connection,
            order,
            (_LOCK_FAMILY, (order.run_id,)),
            # Once more: a child may have been made while its parent's lock was waited for.
            (_LOCK_FAMILY, (order.run_id,)),
            (READ_PLAN_IN_FORCE, (order.run_id,)),
        )
        run = writer.run
        own = next((row for row in writer.budgets if row["run_id"] == order.run_id), None)
        if known:
            return BudgetChanged(Ordered(run["state"], run["reason"], None, changed=True), _snapshot(own))
        refuse_ended(run, hint=_hint_ended(run))
        refuse_cancelling(run)
        measured = await _measured(connection, order.run_id, (family, again))
        before = measured if own is None else own
        present = Limits(*(before[f"{unit}_limit"] for unit in UNITS))
        limits = change.applied(present)
        after = {**before, **{f"{unit}_limit": getattr(limits, unit) for unit in UNITS}}
        if limits == present:
            return BudgetChanged(Ordered(run["state"], run["reason"], None, changed=False), _snapshot(own))
        _refuse(order.run_id, present, budget_snapshot(after), unpriced=measured["unpriced"])
        writer.statement(_INSERT if own is None else _SET_LIMITS, {**after, "tenant_id": writer.tenant_id})
        _write(writer, order, (present, limits), budget_snapshot(after), is_first=own is None)
        if run["state"] == "waiting" and run["reason"] in BUDGET_REASONS:
            # If it is still not enough, the next Open says so again.
            writer.set_run_state("running" if plans else "planning")
        await writer.commit()
        # Now the new limits hold for every call that begins.
        ordered = Ordered(run["state"], run["reason"], writer.now, changed=True)
        return BudgetChanged(ordered, budget_snapshot(after))

    return await database.write(work)


async def _measured(connection: Connection, run_id: UUID, passes: Sequence[Sequence[Row]]) -> dict[str, Any]:
    """What the run and all runs below it have used, as a budget without limits; all of them are locked."""
    before, family = passes
    while {row["id"] for row in before} != {row["id"] for row in family}:
        before, (family,) = family, await exchange(connection, [(_LOCK_FAMILY, (run_id,))])
    (rows,) = await exchange(connection, [(_MEASURE, ([row["id"] for row in family],))])
    return {"run_id": run_id, **{f"{unit}_limit": None for unit in UNITS}, **rows[0]}


def _snapshot(row: Mapping[str, Any] | None) -> BudgetSnapshot | None:
    return None if row is None else budget_snapshot(row)


def _hint_ended(run: Row) -> str:
    if run["state"] == "succeeded":
        return "its budget is closed; give a new run its own: `podium run ... --budget-usd USD`"
    return f"`podium resume {run['id']}`, then change the budget while the run goes on"


def _refuse(run_id: UUID, present: Limits, after: BudgetSnapshot, *, unpriced: int) -> None:
    if after.usd.limit is not None and present.usd is None and unpriced:
        raise RefusedError(
            "budget-spend-unknown",
            f"run {run_id} has {unpriced} call{'' if unpriced == 1 else 's'} of unknown cost, so a budget in dollars "
            "could not be kept",
            hint="limit tokens or calls instead",
        )
    for unit, account in after.accounts.items():
        if account.limit is not None and account.limit != getattr(present, unit) and account.limit < account.used:
            name = "USD" if unit == "usd" else unit
            raise RefusedError(
                "budget-below-used",
                f"the budget would be {account.limit.normalize():f} {name}, and run {run_id} has used or reserved "
                f"{account.used.normalize():f}",
                hint="give at least that much; `podium pause` stops new calls, `podium cancel` ends the run",
            )


def _write(
    writer: RunWriter, order: Order, limits: tuple[Limits, Limits], after: BudgetSnapshot, *, is_first: bool
) -> None:
    writer.statement(queries.SET_WAKE, (writer.now, order.run_id))
    old, new = limits
    said: dict[str, Any] = {"budget": new.said(), "old": old.said()}
    if is_first:
        # Where the account begins; from here on every attempt's entry says how it goes on.
        said["opening"] = {
            unit: {kind: _said(unit, getattr(account, kind)) for kind in ("spent", "reserved", "assumed")}
            for unit, account in after.accounts.items()
        }
    order_entry(writer, "run.budget_changed", order, **said)


def _said(unit: str, amount: Decimal) -> str | int:
    return format(amount, "f") if unit == "usd" else int(amount)
