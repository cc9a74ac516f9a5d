"""Budgets: what a run and all runs below it may still use. Reserved before a call, settled after it.

A call reserves its worst case, so parallel calls cannot all see the same money left. A call whose outcome is lost
keeps its worst case as *assumed* until it reports after all. The rows are locked from the root to the leaf.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, LiteralString
from uuid import UUID

from engine.store.exchange import Params, Row
from engine.store.lineage import LINE_ABOVE

# Locked in this order everywhere: an ancestor's row is shared by all its descendants.
LOCK_BUDGETS: Final[LiteralString] = f"""{LINE_ABOVE}
    SELECT budgets.* FROM budgets JOIN line ON line.id = budgets.run_id
    ORDER BY line.height DESC FOR NO KEY UPDATE OF budgets
"""  # noqa: S608  # a constant
INSERT_BUDGET: Final[LiteralString] = """
    INSERT INTO budgets (run_id, tenant_id, usd_limit, tokens_limit, calls_limit) VALUES (%s, %s, %s, %s, %s)
"""
_CHANGE: Final[LiteralString] = """
    UPDATE budgets SET
        usd_spent = usd_spent + %(usd_spent)s,
        usd_reserved = usd_reserved + %(usd_reserved)s,
        usd_assumed = usd_assumed + %(usd_assumed)s,
        tokens_spent = tokens_spent + %(tokens_spent)s,
        tokens_reserved = tokens_reserved + %(tokens_reserved)s,
        tokens_assumed = tokens_assumed + %(tokens_assumed)s,
        calls_spent = calls_spent + %(calls_spent)s,
        calls_reserved = calls_reserved + %(calls_reserved)s,
        calls_assumed = calls_assumed + %(calls_assumed)s
    WHERE run_id = ANY(%(run_ids)s)
"""
# What a call leaves over may be enough for other runs that share the budget. Their workflows do not hear of its end, so
# they are marked for a wake-up, which the reconciler delivers. Whoever is being written at this moment is left out:
# waiting for its lock here, behind the budgets', could go round in a circle; it looks again by itself, only later.
WAKE_OTHERS: Final[LiteralString] = """
    WITH RECURSIVE family AS (
        SELECT id FROM runs WHERE id = %(root)s
        UNION ALL
        SELECT child.id FROM runs child JOIN family ON child.parent_run_id = family.id
    )
    UPDATE runs SET wake_requested_at = %(now)s WHERE id IN (
        SELECT runs.id FROM runs JOIN family ON family.id = runs.id
        WHERE runs.id <> %(own)s AND runs.wake_requested_at IS NULL
            AND runs.state IN ('created', 'planning', 'running', 'waiting')
            AND ((runs.state = 'waiting' AND starts_with(runs.reason, 'budget-')) OR EXISTS (
                SELECT FROM steps
                WHERE steps.run_id = runs.id AND steps.state = 'waiting' AND starts_with(steps.reason, 'budget-')
            ))
        FOR NO KEY UPDATE OF runs SKIP LOCKED
    )
"""
# The budget that a run spends from: its own, else the nearest of its ancestors'.
READ_BUDGET: Final[LiteralString] = f"""{LINE_ABOVE}
    SELECT budgets.* FROM budgets JOIN line ON line.id = budgets.run_id ORDER BY line.height LIMIT 1
"""  # noqa: S608  # a constant
UNITS: Final = ("usd", "tokens", "calls")
_KINDS: Final = ("spent", "reserved", "assumed")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a run may use, its descendants included; None is no limit. Dollars are exact decimals."""

    usd: Decimal | None = None
    tokens: int | None = None
    calls: int | None = None

    def __bool__(self) -> bool:
        return any(limit is not None for limit in (self.usd, self.tokens, self.calls))

    def said(self) -> dict[str, Any] | None:
        """What the ledger says of them."""
        if not self:
            return None
        return {"usd": None if self.usd is None else format(self.usd, "f"), "tokens": self.tokens, "calls": self.calls}


NO_LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True)
class Account:
    """One unit of a budget. ``limit`` None is no limit; all four may pass it by what single calls were misjudged."""

    limit: Decimal | None
    spent: Decimal
    reserved: Decimal
    assumed: Decimal

    @property
    def used(self) -> Decimal:
        """What is spent, may be spent by calls in flight, or may have been by calls whose outcome is lost."""
        return self.spent + self.reserved + self.assumed

    @property
    def left(self) -> Decimal | None:
        """What further calls may reserve; None without a limit, never below 0."""
        return None if self.limit is None else max(self.limit - self.used, Decimal(0))


@dataclass(frozen=True, slots=True)
class BudgetSnapshot:
    """A budget as it stands. ``run_id`` is the run it was given to; all runs below that one share it."""

    run_id: UUID
    usd: Account
    tokens: Account
    calls: Account

    @property
    def accounts(self) -> dict[str, Account]:
        """The three accounts by unit."""
        return {"usd": self.usd, "tokens": self.tokens, "calls": self.calls}


def budget_snapshot(row: Mapping[str, Any]) -> BudgetSnapshot:
    """A row of the table as a snapshot."""
    accounts = {
        unit: Account(
            None if row[f"{unit}_limit"] is None else Decimal(row[f"{unit}_limit"]),
            *(Decimal(row[f"{unit}_{kind}"]) for kind in _KINDS),
        )
        for unit in UNITS
    }
    return BudgetSnapshot(row["run_id"], **accounts)


@dataclass(frozen=True, slots=True)
class Need:
    """The worst case of one call. ``usd`` None means that the price is not known."""

    usd: Decimal | None
    tokens: int | None


@dataclass(frozen=True, slots=True)
class Used:
    """What a call used in the end; None where it is not known."""

    usd: Decimal | None
    tokens: int | None


def shortfall(budgets: Sequence[Row], need: Need) -> str | None:
    """The unit of the first limit that a call could break, or None if it fits into all budgets of the chain.

    A worst case that is not known does not fit into any limit.
    """
    needs: dict[str, Any] = {"usd": need.usd, "tokens": need.tokens, "calls": 1}
    for budget in budgets:
        for unit in UNITS:
            limit = budget[f"{unit}_limit"]
            if limit is None:
                continue
            taken = sum(budget[f"{unit}_{kind}"] for kind in _KINDS)
            if needs[unit] is None or taken + needs[unit] > limit:
                return unit
    return None


def reservation(budgets: Sequence[Row], need: Need) -> tuple[str, Params]:
    """The statement that reserves a call's worst case in every budget of the chain."""
    return _change(budgets, usd_reserved=need.usd or 0, tokens_reserved=need.tokens or 0, calls_reserved=1)


def settlement(budgets: Sequence[Row], attempt: Mapping[str, Any], used: Used | None) -> tuple[str, Params]:
    """The statement that turns a call's reservation into what it used; ``used`` None means that its outcome is lost.

    ``attempt`` is its row before: ``sent`` has a reservation, ``unknown`` has an assumption. A part that is not known
    counts at its worst case.
    """
    before = "assumed" if attempt["state"] == "unknown" else "reserved"
    usd, tokens = attempt["reserved_usd"] or Decimal(0), attempt["reserved_tokens"] or 0
    change: dict[str, Any] = dict.fromkeys((f"{unit}_{kind}" for unit in UNITS for kind in _KINDS), 0)
    for unit, worst, known in (
        ("usd", usd, None if used is None else used.usd),
        ("tokens", tokens, None if used is None else used.tokens),
        ("calls", 1, None if used is None else 1),
    ):
        change[f"{unit}_{before}"] -= worst
        if known is None:
            change[f"{unit}_assumed"] += worst
        else:
            change[f"{unit}_spent"] += known
    return _change(budgets, **change)


def charged(attempt: Mapping[str, Any], used: Used | None) -> dict[str, Any]:
    """What the ledger says of a settlement: what every budget of the chain is charged for the call.

    ``assumed`` names the units that stay at the call's worst case, because what it used is not known.
    """
    usd = attempt["reserved_usd"] if used is None or used.usd is None else used.usd
    tokens = attempt["reserved_tokens"] if used is None or used.tokens is None else used.tokens
    known = {"usd": used is not None and used.usd is not None, "tokens": used is not None and used.tokens is not None}
    known["calls"] = used is not None
    return {
        "usd": None if usd is None else format(usd.normalize(), "f"),
        "tokens": tokens,
        "assumed": [unit for unit in UNITS if not known[unit]],
    }


def _change(budgets: Sequence[Row], **change: Any) -> tuple[str, Params]:
    zeros: dict[str, Any] = dict.fromkeys((f"{unit}_{kind}" for unit in UNITS for kind in _KINDS), 0)
    run_ids: list[UUID] = [budget["run_id"] for budget in budgets]
    return _CHANGE, {**zeros, **change, "run_ids": run_ids}
