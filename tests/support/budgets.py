"""Runs with budgets, opens that cost something, and what a budget's row says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any
from uuid import UUID

from engine.service import Submission, prepare
from engine.store.attempts import Opening
from engine.store.budgets import Limits
from engine.store.database import Database
from engine.store.runs import create_run
from tests.support.runs import lists_plan, make_pool
from tests.support.stored import opening, rows
from worker_pools.pool import Pool

KINDS = ("spent", "reserved", "assumed")
UNITS = ("usd", "tokens", "calls")
CENTS_40 = Decimal("0.40")


@cache
def one_pool(folder: Path) -> Pool:
    return make_pool(folder, "http://127.0.0.1:9", policy={"steps_max": 16})


async def run_with(
    database: Database, folder: Path, access: Sequence[Any] = ([], [], [], [], []), limits: Limits | None = None
) -> UUID:
    """A run on record with these limits, or without any."""
    pool = one_pool(folder)
    plan = lists_plan([f"Do {number}." for number in range(len(access))], list(access))
    new = prepare(Submission(task="Go.", pool=pool, actor_id="tester", plan_text=plan))
    return (await create_run(database, replace(new, limits=limits or Limits()))).id


def costly(
    run_id: UUID, position: int, fence: tuple[int, int, int] = (1, 0, 1), usd: Decimal = CENTS_40, **changes: Any
) -> Opening:
    return opening(run_id, position, fence, reserve_usd=usd, reserve_tokens=100, **changes)


async def budget_of(database: Database, run_id: UUID) -> dict[str, Any]:
    (row,) = await rows(database.url.partition("&options")[0], "SELECT * FROM budgets WHERE run_id = %s", run_id)
    return row


async def sums(database: Database, run_id: UUID) -> dict[str, Any]:
    budget = await budget_of(database, run_id)
    return {f"{unit}_{kind}": budget[f"{unit}_{kind}"] for unit in UNITS for kind in KINDS}
