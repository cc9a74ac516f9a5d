"""The arithmetic of budgets alone: whatever happens to calls, limits hold and every call is counted once."""

from __future__ import annotations

from decimal import Decimal
from typing import Any
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from engine.store.budgets import UNITS, Need, Used, budget_snapshot, reservation, settlement, shortfall

KINDS = ("spent", "reserved", "assumed")
MONEY = st.integers(0, 10**12).map(lambda units: Decimal(units) / 10**10)
COUNT = st.integers(0, 10**6)
CALLS = st.lists(
    st.tuples(
        MONEY,
        COUNT,
        st.sampled_from(["used", "part", "lost", "lost-then-used", "flying"]),
        st.tuples(st.integers(0, 100), st.integers(0, 100)),
    ),
    max_size=30,
)


def row(number: int, usd: Decimal | None, tokens: int | None, calls: int | None) -> dict[str, Any]:
    zeros: dict[str, Any] = {f"{unit}_{kind}": Decimal(0) if unit == "usd" else 0 for unit in UNITS for kind in KINDS}
    return {"run_id": UUID(int=number), **zeros, "usd_limit": usd, "tokens_limit": tokens, "calls_limit": calls}


def apply(budgets: list[dict[str, Any]], statement: tuple[str, Any]) -> None:
    """What the statement does to the rows."""
    _, change = statement
    for budget in budgets:
        assert budget["run_id"] in change["run_ids"]
        for unit in UNITS:
            for kind in KINDS:
                budget[f"{unit}_{kind}"] += change[f"{unit}_{kind}"]
                assert budget[f"{unit}_{kind}"] >= 0


def holds(budgets: list[dict[str, Any]]) -> bool:
    return all(
        account.limit is None or account.used <= account.limit
        for budget in budgets
        for account in budget_snapshot(budget).accounts.values()
    )


@given(CALLS, MONEY, COUNT, st.integers(0, 20))
def test_calls_that_keep_their_estimate_never_pass_any_limit_and_leave_nothing_reserved(
    calls: list[Any], dollars: Decimal, tokens: int, count: int
) -> None:
    budgets = [row(0, dollars, None, count), row(1, None, tokens, None)]
    flying: list[tuple[dict[str, Any], Used]] = []
    opened: list[tuple[dict[str, Any], Used | None]] = []
    for usd, most, fate, (a, b) in calls:
        if shortfall(budgets, Need(usd, most)) is not None:
            continue
        apply(budgets, reservation(budgets, Need(usd, most)))
        assert holds(budgets)
        attempt = {"state": "sent", "reserved_usd": usd, "reserved_tokens": most}
        used = Used(usd * a / 100, most * b // 100)
        if fate == "flying":
            flying.append((attempt, used))
            continue
        if fate == "part":
            used = Used(None, used.tokens)
        lost = fate.startswith("lost")
        apply(budgets, settlement(budgets, attempt, None if lost else used))
        if fate == "lost-then-used":
            apply(budgets, settlement(budgets, {**attempt, "state": "unknown"}, used))
        opened.append((attempt, None if fate == "lost" else used))
        assert holds(budgets)
    for attempt, used in flying:
        apply(budgets, settlement(budgets, attempt, used))
        opened.append((attempt, used))
    assert holds(budgets)
    spent = sum((used.usd for _, used in opened if used is not None and used.usd is not None), Decimal(0))
    for budget in budgets:
        assert [budget[f"{unit}_reserved"] for unit in UNITS] == [0, 0, 0]
        assert budget["usd_spent"] == spent
        assert budget["calls_spent"] + budget["calls_assumed"] == len(opened)


@given(MONEY, COUNT)
def test_an_unknown_worst_case_fits_into_no_limit_and_no_limit_is_broken_where_there_is_none(
    usd: Decimal, tokens: int
) -> None:
    assert shortfall([row(0, Decimal(10**9), None, None)], Need(None, 1)) == "usd"
    assert shortfall([row(0, None, 10**9, None)], Need(Decimal(1), None)) == "tokens"
    assert shortfall([row(0, None, None, None)], Need(usd, tokens)) is None
    assert shortfall([row(0, None, None, 0)], Need(usd, tokens)) == "calls"
    assert shortfall([row(0, usd, tokens, 1)], Need(usd, tokens)) is None


@given(MONEY, MONEY)
def test_what_is_left_is_never_below_nothing(limit: Decimal, spent: Decimal) -> None:
    account = budget_snapshot({**row(0, limit, None, None), "usd_spent": spent}).usd
    assert account.left == max(limit - spent, Decimal(0))
    assert budget_snapshot(row(0, None, None, None)).usd.left is None
