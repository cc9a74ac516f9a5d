"""Shared totals under parallel steps: exact to the last digit, whoever ends at once (G4-04)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path
from urllib.parse import quote

import pytest

from engine.store.attempts import Opening, open_attempt
from engine.store.budgets import Limits
from engine.store.closing import close_step_attempt
from engine.store.database import Database
from tests.support.budgets import KINDS, UNITS, costly, run_with, sums
from tests.support.stored import answered, execute

ISOLATIONS = ["read committed", "repeatable read", "serializable"]
ODD = Decimal("0.0123456789")
ROUNDS = 23


@pytest.fixture(params=ISOLATIONS)
async def isolated(request: pytest.FixtureRequest, database_url: str) -> AsyncIterator[Database]:
    """A pool on a server whose default isolation is another one."""
    options = quote(f"-c default_transaction_isolation={request.param.replace(' ', chr(92) + ' ')}", safe="")
    opened = Database(f"{database_url}&options={options}", pool_size=8)
    yield opened
    await opened.close()


@pytest.mark.slow
async def test_steps_that_end_in_the_same_instant_settle_a_shared_budget_exactly(
    isolated: Database, tmp_path: Path
) -> None:
    """Two runs below one root, four steps each, in opposite orders: 69 times under each of three isolation levels."""
    url = isolated.url.partition("&options")[0]
    root = await run_with(isolated, tmp_path, [[]], limits=Limits(usd=Decimal(10**6), tokens=10**9, calls=10**6))
    access: list[list[int]] = [[]] * (4 * 3)
    for number in range(ROUNDS):
        below = [await run_with(isolated, tmp_path, access) for _ in range(2)]
        await execute(
            url,
            "UPDATE runs SET parent_run_id = %s, parent_round = 0, parent_position = 0 WHERE id = ANY(%s)",
            root,
            below,
        )
        for batch in range(3):
            positions = list(range(4 * batch, 4 * batch + 4))
            opened = [costly(below[0], position, usd=ODD) for position in positions]
            opened += [costly(below[1], position, usd=ODD) for position in reversed(positions)]
            barrier = asyncio.Barrier(len(opened))

            async def perform(one: Opening, barrier: asyncio.Barrier = barrier) -> str:
                assert (await open_attempt(isolated, one)).verdict == "call"
                await barrier.wait()
                return (await close_step_attempt(isolated, answered(one, cost_usd=ODD / 3))).verdict

            assert await asyncio.gather(*(perform(one) for one in opened)) == ["done"] * 8
            calls = (3 * number + batch + 1) * 8
            each = (ODD / 3).quantize(Decimal("1E-10"))
            expected = {"usd_spent": calls * each, "tokens_spent": 15 * calls, "calls_spent": calls}
            assert await sums(isolated, root) == {f"{unit}_{kind}": 0 for unit in UNITS for kind in KINDS} | expected
