"""What Open refuses before anything is called: orders and failures come before missing keys and other waits."""

from __future__ import annotations

from dataclasses import replace

from engine.store.attempts import FailurePolicy, open_attempt
from engine.store.closing import close_step_attempt
from engine.store.database import Database
from engine.store.orders import Order, pause_run
from engine.store.run_writer import AttemptResult
from engine.store.settling import note_waiting
from tests.support.stored import answered, check_invariants, ended_with, execute, opening, record, stored_run

BROKEN = AttemptResult("failed", "auth-failed", input_tokens=0, output_tokens=0)
WAIT = FailurePolicy(wait=True)


async def test_a_step_that_waits_for_an_operator_is_left_alone_by_every_other_wait(database: Database) -> None:
    run_id = await stored_run(database, [[]])
    opened = opening(run_id)
    await open_attempt(database, opened)
    held = await close_step_attempt(database, ended_with(opened, BROKEN, on_failure=WAIT))
    assert (held.verdict, held.code) == ("held", "operator")
    for code in ("secret-missing", "no-worker", "workflow-stuck"):
        await note_waiting(database, run_id, 0, 0, code)
        for number, missing in enumerate((True, False)):
            asked = opening(run_id, fence=(1, 1 + number, 1), secret_missing=missing)
            ruling = await open_attempt(database, asked)
            assert (ruling.verdict, ruling.code) == ("held", "operator")
    kept = await record(database.url, run_id)
    assert (kept.steps[0]["state"], kept.steps[0]["reason"]) == ("waiting", "operator")
    assert len(kept.attempts) == 1
    check_invariants(kept)


async def test_a_missing_key_is_shown_and_nothing_is_called_until_it_is_there(database: Database) -> None:
    run_id = await stored_run(database, [[]])
    for number in (1, 2):
        ruling = await open_attempt(database, opening(run_id, fence=(1, 0, number), secret_missing=True))
        assert (ruling.verdict, ruling.code) == ("held", "secret-missing")
    kept = await record(database.url, run_id)
    assert (kept.run["state"], kept.run["reason"], kept.attempts) == ("waiting", "secret-missing", [])
    assert len(kept.entries("step.changed")) == 1
    assert (await open_attempt(database, opening(run_id, fence=(1, 0, 3)))).verdict == "call"
    check_invariants(await record(database.url, run_id))


async def test_while_a_run_is_about_to_fail_nothing_new_and_no_further_try_is_called(database: Database) -> None:
    run_id = await stored_run(database, [[], [], []])
    failing, trying = opening(run_id, 0), opening(run_id, 1)
    await open_attempt(database, failing)
    await open_attempt(database, trying)
    assert (await close_step_attempt(database, ended_with(failing, BROKEN))).verdict == "failed"
    assert (await close_step_attempt(database, ended_with(trying, BROKEN, retry=True))).verdict == "retry"
    for asked in (
        opening(run_id, 1, (1, 0, 2)),
        opening(run_id, 2),
        opening(run_id, 2, (1, 1, 1), secret_missing=True),
    ):
        ruling = await open_attempt(database, asked)
        assert (ruling.verdict, ruling.code) == ("failed", "run-failing")
    kept = await record(database.url, run_id)
    assert len(kept.attempts) == 2
    check_invariants(kept)


async def test_what_a_dead_worker_left_open_is_closed_also_where_a_pause_holds_the_step(database: Database) -> None:
    run_id = await stored_run(database, [[]])
    await open_attempt(database, opening(run_id))
    await pause_run(database, Order(run_id, "tester"))
    assert (await open_attempt(database, opening(run_id, fence=(1, 0, 2)))).verdict == "held"
    kept = await record(database.url, run_id)
    assert [row["state"] for row in kept.attempts] == ["unknown"]
    assert (kept.run["state"], kept.run["reason"]) == ("waiting", "paused")
    check_invariants(kept)


async def test_no_step_ends_a_run_that_may_have_another_round(database: Database) -> None:
    run_id = await stored_run(database, [[]])
    await execute(database.url, "UPDATE runs SET rounds_max = 2 WHERE id = %s", run_id)
    opened = opening(run_id)
    await open_attempt(database, opened)
    assert not (await close_step_attempt(database, answered(opened, ends_run=True))).run_ended


async def test_a_round_begins_only_with_an_open_that_may_call(database: Database) -> None:
    run_id = await stored_run(database, [[]])
    await execute(database.url, "UPDATE runs SET rounds_max = 2 WHERE id = %s", run_id)
    opened = opening(run_id)
    await open_attempt(database, opened)
    await close_step_attempt(database, answered(opened))
    await note_waiting(database, run_id, 1, None, "no-worker", execution=1)
    kept = await record(database.url, run_id)
    assert (kept.run["state"], kept.run["reason"], kept.run["round"]) == ("waiting", "no-worker", 0)
    late = opening(run_id, None, (7, 0, 1))
    late = replace(late, place=replace(late.place, round=1))
    assert (await open_attempt(database, late)).verdict == "superseded"
    assert (await record(database.url, run_id)).run["round"] == 0
