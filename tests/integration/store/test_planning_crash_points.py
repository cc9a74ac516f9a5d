"""Planning calls on record: valid, invalid, repaired, given up, repeated, superseded."""

from __future__ import annotations

import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from activities.plan_text import read_plan
from engine.store.attempts import Opening, Ruling, open_attempt
from engine.store.closing import Closing
from engine.store.database import Database
from engine.store.drafts import PlanDraft, RejectedPlan
from engine.store.inputs import read_plan_inputs, read_steps
from engine.store.planning import close_planning_attempt
from engine.store.run_writer import AttemptResult
from engine.store.settling import Settlement, settle_run
from tests.support.runs import lists_plan, make_pool
from tests.support.stored import COST, LOST, check_invariants, opening, record, stored_run

VALID = lists_plan(["Do this.", "Do that."], [[], [0]])
INVALID = lists_plan(["Do this.", "Do that."], [[1], [0]])
REPAIRS_MAX = 2


def read(text: str) -> PlanDraft | RejectedPlan:
    with tempfile.TemporaryDirectory() as folder:
        return read_plan(make_pool(Path(folder), "http://127.0.0.1:9"), text)


def planning(run_id: UUID, fence: tuple[int, int, int] = (1, 0, 1), **options: Any) -> Opening:
    return opening(run_id, None, fence, invalid_plans_max=REPAIRS_MAX + 1, **options)


async def close(
    database: Database,
    opened: Opening,
    text: str | None,
    *,
    fallback: str | None = None,
    result: AttemptResult | None = None,
    retry: bool = False,
) -> Ruling:
    planned = None if text is None else read(text)
    spare = None if fallback is None else read(fallback)
    assert not isinstance(spare, RejectedPlan)
    result = result or AttemptResult("succeeded", input_tokens=10, output_tokens=5, cost_usd=COST)
    closing = Closing(opened.place, opened.attempt_id, result, retry=retry, attempts_max=opened.attempts_max)
    return await close_planning_attempt(database, closing, planned, fallback=spare, repairs_max=REPAIRS_MAX)


async def test_a_valid_plan_is_stored_once_and_found_by_every_later_try(database: Database) -> None:
    run_id = await stored_run(database, None)
    opened = planning(run_id)
    assert (await open_attempt(database, opened)).verdict == "call"
    assert (await close(database, opened, VALID)).verdict == "done"
    once = await record(database.url, run_id)
    assert (await close(database, opened, VALID)).verdict == "done"
    for fence in ((1, 0, 2), (1, 1, 1)):
        assert (await open_attempt(database, planning(run_id, fence))).verdict == "done"
    kept = await record(database.url, run_id)
    assert kept == once
    assert [step.worker for step in await read_steps(database, run_id, 0)] == ["alpha", "beta"]
    assert (kept.run["state"], kept.run["cost_usd"]) == ("planning", COST)
    check_invariants(kept)


async def test_invalid_plans_are_repaired_up_to_the_limit_and_each_answer_can_be_repeated(database: Database) -> None:
    run_id = await stored_run(database, None)
    for number in range(REPAIRS_MAX + 1):
        opened = planning(run_id, (1, number, 1))
        assert (await open_attempt(database, opened)).verdict == "call"
        for _ in range(2):
            ruling = await close(database, opened, INVALID)
            expected = "retry" if number < REPAIRS_MAX else "failed"
            assert (ruling.verdict, ruling.code) == (expected, "plan-invalid")
        failed = (await read_plan_inputs(database, run_id, 0)).failed
        assert [one.plan_text.text for one in failed] == [INVALID] * (number + 1)
    kept = await record(database.url, run_id)
    assert [entry["data"]["number"] for entry in kept.entries("plan.rejected")] == [1, 2, 3]
    assert kept.run["cost_usd"] == 3 * COST
    check_invariants(kept)


async def test_a_worker_that_dies_after_the_last_invalid_plan_does_not_pay_for_another(database: Database) -> None:
    run_id = await stored_run(database, None)
    for number in range(REPAIRS_MAX + 1):
        opened = planning(run_id, (1, number, 1))
        await open_attempt(database, opened)
        await close(database, opened, INVALID)
    ruling = await open_attempt(database, planning(run_id, (1, REPAIRS_MAX, 2)))
    assert (ruling.verdict, ruling.code) == ("failed", "plan-invalid")
    assert len((await record(database.url, run_id)).attempts) == REPAIRS_MAX + 1


async def test_a_plan_that_stays_invalid_gives_way_to_the_template_and_no_later_try_calls(database: Database) -> None:
    run_id = await stored_run(database, None)
    for number in range(REPAIRS_MAX + 1):
        opened = planning(run_id, (1, number, 1))
        await open_attempt(database, opened)
        ruling = await close(database, opened, INVALID, fallback=VALID)
    assert ruling.verdict == "done"
    assert (await close(database, opened, INVALID, fallback=VALID)).verdict == "done"
    again = await open_attempt(database, planning(run_id, (1, REPAIRS_MAX, 2)))
    assert again.verdict == "done"
    kept = await record(database.url, run_id)
    assert len(kept.steps) == 2
    assert len(kept.attempts) == REPAIRS_MAX + 1
    check_invariants(kept)


@pytest.mark.parametrize("text", [VALID, INVALID])
async def test_a_late_plan_is_kept_and_counted_but_not_used(database: Database, text: str) -> None:
    run_id = await stored_run(database, None)
    zombie, winner = planning(run_id), planning(run_id, (1, 0, 2))
    await open_attempt(database, zombie)
    await open_attempt(database, winner)
    assert (await close(database, winner, VALID)).verdict == "done"
    late = await close(database, zombie, text)
    assert (late.verdict, late.code) == ("superseded", "fence-lost")
    kept = await record(database.url, run_id)
    assert kept.kept_texts(zombie, "plan_text") == [text.encode()]
    assert kept.run["cost_usd"] == 2 * COST
    assert kept.run["attempts_unpriced"] == 0
    assert len(kept.entries("plan.accepted")) == 1
    check_invariants(kept)


async def test_a_plan_that_comes_after_the_run_was_settled_is_not_used(database: Database) -> None:
    run_id = await stored_run(database, None)
    opened = planning(run_id)
    await open_attempt(database, opened)
    await settle_run(database, Settlement(run_id, 1, "failed", "workflow-lost"))
    assert (await close(database, opened, VALID)).verdict == "superseded"
    kept = await record(database.url, run_id)
    assert kept.steps == []
    check_invariants(kept)


async def test_failed_planning_calls_count_and_a_shut_down_worker_does_not(database: Database) -> None:
    run_id = await stored_run(database, None)
    overloaded = AttemptResult("failed", "overloaded", cost_usd=Decimal(0))
    for dispatch in range(3):
        opened = planning(run_id, (1, 0, dispatch + 1), attempts_max=1)
        assert (await open_attempt(database, opened)).verdict == "call"
        for _ in range(2):
            assert (await close(database, opened, None, result=LOST, retry=True)).verdict == "retry"
    opened = planning(run_id, (1, 0, 9), attempts_max=1)
    assert (await open_attempt(database, opened)).verdict == "call"
    for _ in range(2):
        ruling = await close(database, opened, None, result=overloaded, retry=True)
        assert (ruling.verdict, ruling.code) == ("failed", "overloaded")
    ruling = await open_attempt(database, planning(run_id, (1, 0, 10), attempts_max=1))
    assert (ruling.verdict, ruling.code) == ("failed", "attempts-exhausted")
    check_invariants(await record(database.url, run_id))


async def test_a_terminal_failure_of_planning_stays_terminal_when_repeated(database: Database) -> None:
    run_id = await stored_run(database, None)
    opened = planning(run_id)
    await open_attempt(database, opened)
    for _ in range(2):
        ruling = await close(database, opened, None, result=AttemptResult("failed", "key-rejected"))
        assert (ruling.verdict, ruling.code) == ("failed", "key-rejected")


async def test_a_cancelled_planning_call_is_told_so_both_times(database: Database) -> None:
    run_id = await stored_run(database, None)
    opened = planning(run_id)
    await open_attempt(database, opened)
    for _ in range(2):
        assert (await close(database, opened, None, result=AttemptResult("cancelled", "cancelled"))).verdict == (
            "cancelled"
        )
