"""What steps may cost at most, worked out by hand."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from activities.prompts import FINAL_NOTE
from engine.operations.worst_case import BLOCK_BYTES, BYTES_A_TOKEN, Bound, PlannedCalls, bounds, total
from engine.plan import Step
from tests.support.runs import make_pool
from worker_pools.pool import Pool
from worker_pools.prices import PROMPT_TOKENS_EXTRA

UNKNOWN = Bound(None, None)


def pool_with(folder: Path, *changes: dict[str, Any], **policy: Any) -> Pool:
    each = {
        "base_url": "http://127.0.0.1:9/v1",
        "model": "plain",
        "description": "works",
        "attempts_max": 3,
        "output_tokens_max": 100,
        "price": {"input_usd_per_mtok": "1", "output_usd_per_mtok": "10"},
    }
    workers = [{**each, "name": f"w{number}", **change} for number, change in enumerate(changes)]
    return make_pool(folder, "http://127.0.0.1:9/v1", workers=workers, policy=policy)


def plan(*reads: tuple[int, ...], worker: str = "w0") -> list[Step]:
    return [Step(position, worker, "Do it.", access) for position, access in enumerate(reads)]


def usd(prompt_bytes: int, output_tokens: int) -> Decimal:
    return Decimal(prompt_bytes + PROMPT_TOKENS_EXTRA + 10 * output_tokens) / 1_000_000


def test_a_call_is_bounded_by_its_texts_a_token_a_byte_and_a_step_by_all_its_tries(tmp_path: Path) -> None:
    pool = pool_with(tmp_path, {})
    base = len(pool.templates.worker.encode()) + len("Tâche".encode()) + len("Do it.")
    found = bounds(pool, PlannedCalls("Tâche", plan((), (0,), (0, 1)), {1, 2}, {0: "An answer.", 1: "never used"}))
    seen = BLOCK_BYTES + len("Do it.")
    once = usd(base + seen + len("An answer."), 100)
    assert found[1] == Bound(once, once * 3)
    # What step 1 is going to write is not known; it is taken to be as long as it may be.
    last = usd(base + len(FINAL_NOTE) + 2 * seen + len("An answer.") + 100 * BYTES_A_TOKEN, 100)
    assert found[2] == Bound(last, last * 3)
    assert set(found) == {1, 2}


def test_a_step_that_is_left_out_is_shown_to_nobody(tmp_path: Path) -> None:
    pool = pool_with(tmp_path, {})
    with_it = bounds(pool, PlannedCalls("T", plan((), (0,)), {1}, {0: "x"}))[1].once_usd
    without = bounds(pool, PlannedCalls("T", plan((), (0,)), {1}, {}))[1].once_usd
    alone = bounds(pool, PlannedCalls("T", plan((), ()), {1}, {}))[1].once_usd
    assert without == alone
    assert with_it is not None
    assert alone is not None
    assert with_it > alone


def test_an_unknown_price_is_unknown_and_a_price_of_nothing_is_nothing(tmp_path: Path) -> None:
    pool = pool_with(tmp_path, {"price": None}, {"price": {"input_usd_per_mtok": "0", "output_usd_per_mtok": "0"}})
    assert bounds(pool, PlannedCalls("T", plan(()), {0}, {}))[0] == UNKNOWN
    assert bounds(pool, PlannedCalls("T", plan((), worker="w1"), {0}, {}))[0] == Bound(Decimal(0), Decimal(0))
    assert total([Decimal(1), None]) is None
    assert total([]) == 0


def test_a_prompt_is_never_larger_than_the_context_that_the_model_has(tmp_path: Path) -> None:
    pool = pool_with(tmp_path, {"context_tokens": 200})
    found = bounds(pool, PlannedCalls("T" * 10_000, plan(()), {0}, {}))[0]
    assert found.once_usd == usd(200, 100)


def test_substitutes_may_have_to_be_paid_too(tmp_path: Path) -> None:
    pool = pool_with(tmp_path, {"fallbacks": ["w1"]}, {"attempts_max": 2}, on_failed_step="fallback")
    found = bounds(pool, PlannedCalls("T", plan(()), {0}, {}))[0]
    assert found.once_usd is not None
    assert found.worst_usd == found.once_usd * 5
    pool = pool_with(tmp_path, {"fallbacks": ["w1"]}, {"price": None}, on_failed_step="fallback")
    found = bounds(pool, PlannedCalls("T", plan(()), {0}, {}))[0]
    assert found.once_usd is not None
    assert found.worst_usd is None


@pytest.mark.parametrize("context", [None, 500])
def test_nobody_knows_what_a_step_costs_that_the_conductor_plans_nor_how_long_its_answer_is(
    tmp_path: Path, context: int | None
) -> None:
    pool = pool_with(tmp_path, {"context_tokens": context})
    conductor = pool.workers[0].model_validate({"name": "planner", "description": "plans", "kind": "conductor"})
    pool = pool.model_copy(update={"workers": (*pool.workers, conductor)})
    steps = [*plan((), worker="planner"), Step(1, "w0", "Do it.", (0,))]
    found = bounds(pool, PlannedCalls("T", steps, {0, 1}, {}))
    assert found[0] == UNKNOWN
    assert found[1].once_usd == (None if context is None else usd(context, 100))
