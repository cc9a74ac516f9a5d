"""Open and Close, interrupted at each point: what the record says then, and what the next try is told."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal

import pytest

from engine.errors import BugError
from engine.store.attempts import open_attempt
from engine.store.closing import close_step_attempt
from engine.store.database import Database
from engine.store.run_writer import AttemptResult
from engine.store.settling import Settlement, settle_run
from engine.store.snapshots import read_run
from tests.support.stored import COST, LOST, answered, check_invariants, ended_with, opening, record, stored_run


async def test_a_crash_before_open_commits_leaves_nothing_and_the_next_try_calls(database: Database) -> None:
    run_id = await stored_run(database, [[]])

    class CrashError(Exception):
        pass

    async def crash(connection: object) -> None:
        raise CrashError

    with pytest.raises(CrashError):
        await database.write(crash)
    assert (await record(database.url, run_id)).attempts == []
    assert (await open_attempt(database, opening(run_id, fence=(1, 0, 2)))).verdict == "call"


async def test_a_worker_that_dies_after_open_leaves_an_unknown_attempt_and_an_incomplete_cost(
    database: Database,
) -> None:
    run_id = await stored_run(database, [[]])
    first, second = opening(run_id), opening(run_id, fence=(1, 0, 2))
    assert (await open_attempt(database, first)).verdict == "call"
    assert (await open_attempt(database, second)).verdict == "call"
    kept = await record(database.url, run_id)
    assert (kept.attempt(first)["state"], kept.attempt(first)["error_code"]) == ("unknown", "outcome-lost")
    assert kept.attempt(second)["state"] == "sent"
    ruling = await close_step_attempt(database, answered(second, ends_run=True))
    assert (ruling.verdict, ruling.run_ended) == ("done", True)
    run = await read_run(database, run_id)
    assert run is not None
    assert not run.cost_complete
    assert run.cost_usd == COST
    check_invariants(await record(database.url, run_id))


async def test_a_call_in_flight_makes_the_cost_incomplete_until_it_is_closed(database: Database) -> None:
    run_id = await stored_run(database, [[]])
    opened = opening(run_id)
    await open_attempt(database, opened)
    before = await read_run(database, run_id)
    await close_step_attempt(database, answered(opened))
    after = await read_run(database, run_id)
    assert before is not None
    assert after is not None
    assert (before.cost_complete, after.cost_complete) == (False, True)


async def test_open_repeated_with_the_same_id_calls_and_writes_once(database: Database) -> None:
    run_id = await stored_run(database, [[]])
    opened = opening(run_id)
    for _ in range(3):
        assert (await open_attempt(database, opened)).verdict == "call"
    kept = await record(database.url, run_id)
    assert len(kept.attempts) == 1
    assert len(kept.entries("attempt.sent")) == 1
    check_invariants(kept)


async def test_a_try_that_temporal_hands_out_twice_is_not_taken_for_a_repeated_open(database: Database) -> None:
    """As after a reset of the workflow: the same numbers, but another prompt, and the first one may be calling."""
    run_id = await stored_run(database, [[]])
    first = opening(run_id)
    assert (await open_attempt(database, first)).verdict == "call"
    twice = await open_attempt(database, opening(run_id))
    assert (twice.verdict, twice.code) == ("retry", "attempt-taken")
    following = opening(run_id, fence=(1, 0, 2))
    assert (await open_attempt(database, following)).verdict == "call"
    assert (await close_step_attempt(database, answered(first))).verdict == "superseded"
    assert (await close_step_attempt(database, answered(following, ends_run=True))).run_ended
    check_invariants(await record(database.url, run_id))


async def test_close_repeated_returns_the_first_result_and_counts_once(database: Database) -> None:
    run_id = await stored_run(database, [[]])
    opened = opening(run_id)
    await open_attempt(database, opened)
    first = await close_step_attempt(database, answered(opened, ends_run=True))
    once = await record(database.url, run_id)
    again = await close_step_attempt(database, answered(opened, "Another answer.", ends_run=True))
    twice = await record(database.url, run_id)
    assert again == first
    assert twice == once
    assert twice.kept_texts(opened) == [b"An answer."]


async def test_a_try_after_close_committed_finds_the_output_and_calls_nothing(database: Database) -> None:
    run_id = await stored_run(database, [[], [0]])
    opened = opening(run_id)
    await open_attempt(database, opened)
    closed = await close_step_attempt(database, answered(opened))
    found = await open_attempt(database, opening(run_id, fence=(1, 0, 2)))
    # What is left of the round is for the Close to say, which has read it.
    assert found == replace(closed, code=None, left=None, told_again=False)
    assert found.cost_usd == COST
    check_invariants(await record(database.url, run_id))


@pytest.mark.parametrize("older", [(1, 0, 1), (1, 0, 4), (1, 1, 2), (1, 1, 1)])
async def test_an_older_fence_is_refused(database: Database, older: tuple[int, int, int]) -> None:
    run_id = await stored_run(database, [[]])
    newest = opening(run_id, fence=(1, 1, 3))
    assert (await open_attempt(database, newest)).verdict == "call"
    ruling = await open_attempt(database, opening(run_id, fence=older))
    assert (ruling.verdict, ruling.code) == ("superseded", "fence-lost")
    kept = await record(database.url, run_id)
    assert len(kept.attempts) == 1
    check_invariants(kept)


@pytest.mark.parametrize("newer", [(1, 1, 4), (1, 2, 1)])
async def test_a_newer_fence_takes_over(database: Database, newer: tuple[int, int, int]) -> None:
    run_id = await stored_run(database, [[]])
    old = opening(run_id, fence=(1, 1, 3))
    await open_attempt(database, old)
    assert (await open_attempt(database, opening(run_id, fence=newer))).verdict == "call"
    repeated = await open_attempt(database, old)
    assert (repeated.verdict, repeated.code) == ("superseded", "attempt-superseded")


@pytest.mark.parametrize("execution", [0, 2])
async def test_another_execution_than_the_runs_is_refused(database: Database, execution: int) -> None:
    run_id = await stored_run(database, [[]])
    ruling = await open_attempt(database, opening(run_id, fence=(execution, 5, 5)))
    assert (ruling.verdict, ruling.code) == ("superseded", "execution-superseded")
    assert (await record(database.url, run_id)).attempts == []


@pytest.mark.parametrize("winner_first", [True, False])
async def test_a_zombie_is_superseded_kept_and_counted_once_and_never_accepted(
    database: Database, winner_first: bool
) -> None:
    run_id = await stored_run(database, [[]])
    zombie, winner = opening(run_id), opening(run_id, fence=(1, 0, 2))
    await open_attempt(database, zombie)
    await open_attempt(database, winner)
    closings = [answered(winner, "The winner's."), answered(zombie, "The zombie's.", cost_usd=Decimal("0.5"))]
    verdicts = ["done", "superseded"]
    for closing, verdict in list(zip(closings, verdicts, strict=True))[:: 1 if winner_first else -1]:
        for _ in range(2):
            assert (await close_step_attempt(database, closing)).verdict == verdict
    kept = await record(database.url, run_id)
    check_invariants(kept)
    assert kept.run["cost_usd"] == COST + Decimal("0.5")
    assert kept.run["attempts_unpriced"] == 0
    assert kept.kept_texts(zombie) == [b"The zombie's."]
    assert kept.attempt(zombie)["state"] == "superseded"
    run = await read_run(database, run_id)
    assert run is not None
    assert run.steps[0].output == "The winner's."
    assert run.cost_complete


async def test_a_zombie_of_a_settled_run_is_counted_and_changes_no_state(database: Database) -> None:
    run_id = await stored_run(database, [[], [0]])
    opened = opening(run_id)
    await open_attempt(database, opened)
    settled = await settle_run(database, Settlement(run_id, 1, "cancelled", "cancelled"))
    assert settled.state == "cancelled"
    incomplete = await record(database.url, run_id)
    assert incomplete.run["attempts_unpriced"] == 1
    assert (await close_step_attempt(database, answered(opened, ends_run=True))).verdict == "superseded"
    kept = await record(database.url, run_id)
    check_invariants(kept)
    assert kept.run["state"] == "cancelled"
    assert kept.run["ended_at"] == incomplete.run["ended_at"]
    assert kept.run["attempts_unpriced"] == 0
    assert kept.run["cost_usd"] == COST


async def test_a_zombie_that_knows_nothing_changes_nothing(database: Database) -> None:
    run_id = await stored_run(database, [[]])
    zombie = opening(run_id)
    await open_attempt(database, zombie)
    await open_attempt(database, opening(run_id, fence=(1, 0, 2)))
    before = await record(database.url, run_id)
    assert (await close_step_attempt(database, ended_with(zombie, LOST, retry=True))).verdict == "superseded"
    assert await record(database.url, run_id) == before


async def test_close_repeated_by_a_worker_that_shuts_down_asks_for_a_retry_both_times(database: Database) -> None:
    run_id = await stored_run(database, [[]])
    opened = opening(run_id)
    await open_attempt(database, opened)
    first = await close_step_attempt(database, ended_with(opened, LOST, retry=True))
    once = await record(database.url, run_id)
    assert (first.verdict, first.code) == ("retry", "worker-shutdown")
    assert await close_step_attempt(database, ended_with(opened, LOST, retry=True)) == first
    assert await record(database.url, run_id) == once


async def test_failures_count_up_to_attempts_max_and_then_fail_the_step(database: Database) -> None:
    run_id = await stored_run(database, [[]])
    overloaded = AttemptResult("failed", "overloaded", provider_status=503, cost_usd=Decimal(0))
    for number in (1, 2, 3):
        opened = opening(run_id, fence=(1, 0, number))
        assert (await open_attempt(database, opened)).verdict == "call"
        for _ in range(2):
            ruling = await close_step_attempt(database, ended_with(opened, overloaded, retry=True))
            assert (ruling.verdict, ruling.code) == ("retry" if number < 3 else "failed", "overloaded")
    for fence in ((1, 0, 4), (1, 1, 1)):
        ruling = await open_attempt(database, opening(run_id, fence=fence))
        assert (ruling.verdict, ruling.code) == ("failed", "overloaded")
    kept = await record(database.url, run_id)
    assert len(kept.attempts) == 3
    check_invariants(kept)


async def test_lost_attempts_count_and_exhaust_the_step_at_open(database: Database) -> None:
    run_id = await stored_run(database, [[]])
    for number in (1, 2):
        assert (await open_attempt(database, opening(run_id, fence=(1, 0, number), attempts_max=2))).verdict == "call"
    for number in (3, 4):
        ruling = await open_attempt(database, opening(run_id, fence=(1, 0, number), attempts_max=2))
        assert (ruling.verdict, ruling.code) == ("failed", "attempts-exhausted")
    kept = await record(database.url, run_id)
    assert [row["state"] for row in kept.attempts] == ["unknown", "unknown"]
    assert (kept.steps[0]["state"], kept.steps[0]["reason"]) == ("failed", "attempts-exhausted")
    check_invariants(kept)


async def test_a_worker_that_shuts_down_does_not_use_up_an_attempt(database: Database) -> None:
    run_id = await stored_run(database, [[]])
    for number in range(1, 5):
        opened = opening(run_id, fence=(1, 0, number), attempts_max=1)
        assert (await open_attempt(database, opened)).verdict == "call"
        assert (await close_step_attempt(database, ended_with(opened, LOST, retry=True))).verdict == "retry"
    check_invariants(await record(database.url, run_id))


async def test_a_terminal_failure_fails_the_step_at_once(database: Database) -> None:
    run_id = await stored_run(database, [[]])
    opened = opening(run_id)
    await open_attempt(database, opened)
    bad_key = AttemptResult("failed", "key-rejected", provider_status=401, cost_usd=Decimal(0))
    for _ in range(2):
        ruling = await close_step_attempt(database, ended_with(opened, bad_key))
        assert (ruling.verdict, ruling.code) == ("failed", "key-rejected")
    check_invariants(await record(database.url, run_id))


async def test_a_cancelled_call_is_told_so_both_times(database: Database) -> None:
    run_id = await stored_run(database, [[]])
    opened = opening(run_id)
    await open_attempt(database, opened)
    for _ in range(2):
        ruling = await close_step_attempt(database, ended_with(opened, AttemptResult("cancelled", "cancelled")))
        assert (ruling.verdict, ruling.code) == ("cancelled", "cancelled")
    kept = await record(database.url, run_id)
    assert kept.run["attempts_unpriced"] == 1
    check_invariants(kept)


async def test_what_was_never_opened_cannot_be_closed(database: Database) -> None:
    run_id = await stored_run(database, [[]])
    with pytest.raises(BugError):
        await close_step_attempt(database, answered(opening(run_id)))
    with pytest.raises(BugError):
        await open_attempt(database, opening(run_id, position=7))
    check_invariants(await record(database.url, run_id))


@pytest.mark.parametrize("tokens", [-1, 2**31, 10**30])
async def test_an_answer_is_not_lost_to_a_providers_impossible_numbers(database: Database, tokens: int) -> None:
    run_id = await stored_run(database, [[]])
    opened = opening(run_id)
    await open_attempt(database, opened)
    closing = answered(opened, cost_usd=Decimal(tokens))
    closing = replace(closing, result=replace(closing.result, output_tokens=tokens))
    first = await close_step_attempt(database, closing)
    assert (first.verdict, first.output_tokens, first.cost_usd) == ("done", None, None)
    kept = await record(database.url, run_id)
    assert (kept.run["input_tokens"], kept.run["attempts_unpriced"]) == (10, 1)
    check_invariants(kept)


async def test_ledger_row_total_and_receipt_say_the_same_cost_to_the_last_digit(database: Database) -> None:
    run_id = await stored_run(database, [[], []])
    opened = [opening(run_id, 0), opening(run_id, 1)]
    for one in opened:
        await open_attempt(database, one)
        ruling = await close_step_attempt(database, answered(one, cost_usd=Decimal("0.00000000005")))
        assert ruling.cost_usd == Decimal("0.0000000001")
        assert await close_step_attempt(database, answered(one)) == ruling
    kept = await record(database.url, run_id)
    assert [entry["data"]["cost_usd"] for entry in kept.entries("attempt.closed")] == ["0.0000000001"] * 2
    assert [row["cost_usd"] for row in kept.attempts] == [Decimal("0.0000000001")] * 2
    assert kept.run["cost_usd"] == Decimal("0.0000000002")
