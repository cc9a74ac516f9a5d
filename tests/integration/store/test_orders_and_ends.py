"""Orders that stand in the record, the ends of runs, waits, and steps that are left out."""

from __future__ import annotations

from uuid import UUID

import pytest

from engine.store.attempts import open_attempt
from engine.store.closing import close_step_attempt
from engine.store.database import Database
from engine.store.inputs import read_step_inputs
from engine.store.runs import create_run
from engine.store.settling import Settlement, note_waiting, settle_run
from tests.support.stored import answered, check_invariants, execute, new_run, opening, record, stored_run

ORDERS = {
    "cancel_requested_at = clock_timestamp()": ("cancelled", "cancelled"),
    "paused_at = clock_timestamp()": ("held", "paused"),
    "deadline_at = clock_timestamp()": ("failed", "deadline-exceeded"),
}


@pytest.mark.parametrize("position", [0, None], ids=["step", "planning"])
@pytest.mark.parametrize("of", ["run", "parent", "grandparent"])
@pytest.mark.parametrize("order", ORDERS)
async def test_an_order_to_a_run_or_its_ancestors_stops_every_call(
    database: Database, order: str, of: str, position: int | None
) -> None:
    family = {name: await stored_run(database, [[]]) for name in ("grandparent", "parent")}
    family["run"] = await stored_run(database, None if position is None else [[]])
    for child, parent in (("run", "parent"), ("parent", "grandparent")):
        await execute(
            database.url,
            "UPDATE runs SET parent_run_id = %s, parent_round = 0, parent_position = 0 WHERE id = %s",
            family[parent],
            family[child],
        )
    await execute(database.url, f"UPDATE runs SET {order} WHERE id = %s", family[of])
    for _ in range(2):
        ruling = await open_attempt(database, opening(family["run"], position))
        assert (ruling.verdict, ruling.code) == ORDERS[order]
    kept = await record(database.url, family["run"])
    assert kept.attempts == []
    check_invariants(kept)


async def test_an_output_that_is_paid_for_is_found_in_spite_of_every_order(database: Database) -> None:
    run_id = await stored_run(database, [[], [0]])
    opened = opening(run_id, 0)
    await open_attempt(database, opened)
    await close_step_attempt(database, answered(opened))
    await execute(database.url, "UPDATE runs SET cancel_requested_at = clock_timestamp() WHERE id = %s", run_id)
    assert (await open_attempt(database, opening(run_id, 0, (1, 1, 1)))).verdict == "done"


async def _skip(database: Database, run_id: UUID, position: int) -> None:
    await execute(
        database.url,
        "UPDATE steps SET state = 'skipped', ended_at = clock_timestamp() WHERE run_id = %s AND position = %s",
        run_id,
        position,
    )


async def test_a_skipped_step_is_not_called_and_not_shown(database: Database) -> None:
    run_id = await stored_run(database, [[], [], [0, 1]])
    await _skip(database, run_id, 1)
    ruling = await open_attempt(database, opening(run_id, 1))
    assert (ruling.verdict, ruling.code, ruling.attempt_id) == ("done", "skipped", None)
    opened = opening(run_id, 0)
    await open_attempt(database, opened)
    await close_step_attempt(database, answered(opened))
    assert [one.position for one in (await read_step_inputs(database, run_id, 0, 2)).visible] == [0]


async def test_an_answer_for_a_step_that_was_skipped_meanwhile_is_kept_and_not_accepted(database: Database) -> None:
    run_id = await stored_run(database, [[], [0]])
    opened = opening(run_id, 0)
    await open_attempt(database, opened)
    await _skip(database, run_id, 0)
    assert (await close_step_attempt(database, answered(opened))).verdict == "superseded"
    kept = await record(database.url, run_id)
    assert kept.steps[0]["state"] == "skipped"
    assert kept.kept_texts(opened) == [b"An answer."]


async def test_a_workflow_that_wishes_to_end_a_run_too_early_does_not(database: Database) -> None:
    run_id = await stored_run(database, [[], []])
    both = [opening(run_id, 0), opening(run_id, 1)]
    for one in both:
        await open_attempt(database, one)
    first = await close_step_attempt(database, answered(both[0], ends_run=True))
    assert (first.verdict, first.run_ended) == ("done", False)
    second = await close_step_attempt(database, answered(both[1], ends_run=True))
    assert (second.verdict, second.run_ended) == ("done", True)
    check_invariants(await record(database.url, run_id))


@pytest.mark.parametrize("state", ["succeeded", "failed", "cancelled"])
@pytest.mark.parametrize("before", ["created", "planning", "running", "waiting"])
async def test_a_run_can_be_settled_from_every_live_state(database: Database, before: str, state: str) -> None:
    run_id = await stored_run(database, None if before == "planning" else [[], [0]])
    if before in {"planning", "running"}:
        await open_attempt(database, opening(run_id, None if before == "planning" else 0))
    elif before == "waiting":
        await note_waiting(database, run_id, 0, 0, "no-worker")
    assert (await record(database.url, run_id)).run["state"] == before
    settled = await settle_run(database, Settlement(run_id, 1, state, None))  # type: ignore[arg-type]  # one of the three
    # No step has an output, so a success is nothing that the record could show.
    expected = ("failed", "answer-missing") if state == "succeeded" else (state, None)
    assert (settled.state, settled.code) == expected
    once = await record(database.url, run_id)
    check_invariants(once)
    assert all(step["state"] == "cancelled" for step in once.steps)
    assert all(row["state"] == "unknown" for row in once.attempts)
    again = await settle_run(database, Settlement(run_id, 1, "failed", "workflow-lost"))
    assert (again.state, again.code) == expected
    assert await record(database.url, run_id) == once


async def test_a_settlement_by_another_execution_changes_nothing(database: Database) -> None:
    run_id = await stored_run(database, [[]])
    before = await record(database.url, run_id)
    for execution in (0, 2):
        assert (await settle_run(database, Settlement(run_id, execution, "failed", "x"))).state == "created"
    assert await record(database.url, run_id) == before


async def test_a_wait_is_shown_changed_and_left_when_the_call_begins(database: Database) -> None:
    run_id = await stored_run(database, [[], []])
    for code in ("no-worker", "secret-missing", "secret-missing"):
        await note_waiting(database, run_id, 0, 0, code)
        kept = await record(database.url, run_id)
        assert (kept.run["state"], kept.run["reason"], kept.steps[0]["reason"]) == ("waiting", code, code)
    assert len(kept.entries("step.changed")) == 2
    await open_attempt(database, opening(run_id, 0))
    kept = await record(database.url, run_id)
    assert (kept.run["state"], kept.run["reason"], kept.steps[0]["reason"]) == ("running", None, None)
    await note_waiting(database, run_id, 0, 1, "no-worker")
    kept = await record(database.url, run_id)
    assert (kept.run["state"], kept.steps[1]["state"]) == ("running", "waiting")
    check_invariants(kept)


async def test_a_planning_call_waits_and_goes_on(database: Database) -> None:
    run_id = await stored_run(database, None)
    await note_waiting(database, run_id, 0, None, "secret-missing")
    assert (await record(database.url, run_id)).run["state"] == "waiting"
    assert (await open_attempt(database, opening(run_id, None))).verdict == "call"
    assert (await record(database.url, run_id)).run["state"] == "planning"


async def test_a_late_note_of_waiting_does_not_stop_a_run_that_goes_on(database: Database) -> None:
    run_id = await stored_run(database, [[], [0]])
    opened = opening(run_id, 0)
    await open_attempt(database, opened)
    await close_step_attempt(database, answered(opened))
    before = await record(database.url, run_id)
    await note_waiting(database, run_id, 0, 0, "secret-missing")
    await note_waiting(database, run_id, 0, None, "secret-missing")
    assert await record(database.url, run_id) == before


async def test_the_policy_for_unread_steps_is_on_record_from_the_start(database: Database) -> None:
    new = new_run([[], [], [0]])
    assert new.plan is not None
    plan = type(new.plan)(new.plan.plan, new.plan.raw, new.plan.routes, skip_unread=True)
    await create_run(
        database, type(new)(**{**{name: getattr(new, name) for name in new.__dataclass_fields__}, "plan": plan})
    )
    kept = await record(database.url, new.id)
    assert [step["state"] for step in kept.steps] == ["pending", "skipped", "pending"]
    check_invariants(kept)
