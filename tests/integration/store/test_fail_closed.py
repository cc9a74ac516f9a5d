"""An entry that cannot be written stops what it would have recorded: nothing is called, accepted or changed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from decimal import Decimal
from uuid import UUID

import psycopg
import pytest

from engine.errors import BugError
from engine.store import queries
from engine.store.attempts import open_attempt
from engine.store.closing import close_step_attempt
from engine.store.database import Database
from engine.store.exchange import Connection
from engine.store.orders import request_cancel
from engine.store.run_writer import AttemptResult, lock_run
from engine.store.runs import create_run
from engine.store.settling import Settlement, settle_run
from tests.support.orders import order
from tests.support.servers import superuser_url
from tests.support.stored import (
    answered,
    check_invariants,
    ended_with,
    execute,
    new_run,
    opening,
    record,
    rows,
    stored_run,
)

Act = Callable[[Database, UUID], Awaitable[object]]


async def refuse_entries(url: str, type_: str) -> None:
    """From here on the database takes no entry of this type, for whatever reason."""
    await execute(
        superuser_url(url),
        f"ALTER TABLE ledger_entries ADD CONSTRAINT refused CHECK (type <> '{type_}') NOT VALID",
    )


async def sends(database: Database, run_id: UUID) -> object:
    return await open_attempt(database, opening(run_id))


async def closes(database: Database, run_id: UUID) -> object:
    return await close_step_attempt(database, answered(opening(run_id), ends_run=True))


async def fails(database: Database, run_id: UUID) -> object:
    return await close_step_attempt(database, ended_with(opening(run_id), AttemptResult("failed", "auth-failed")))


async def cancels(database: Database, run_id: UUID) -> object:
    return await request_cancel(database, order(run_id, reason="canary reason"))


async def settles(database: Database, run_id: UUID) -> object:
    return await settle_run(database, Settlement(run_id, 1, "failed", "workflow-lost"))


@pytest.mark.parametrize(
    ("type_", "act", "opened"),
    [
        ("attempt.sent", sends, False),
        ("run.changed", sends, False),
        ("attempt.closed", closes, True),
        ("run.closed", closes, True),
        ("attempt.closed", fails, True),
        ("run.cancel_requested", cancels, True),
        ("attempt.closed", settles, True),
        ("run.closed", settles, True),
    ],
)
async def test_what_cannot_be_recorded_does_not_happen(
    own_database_url: str, type_: str, act: Act, opened: bool
) -> None:
    database = Database(own_database_url)
    run_id = await stored_run(database, [[]])
    if opened:
        await sends(database, run_id)
    before = await record(own_database_url, run_id)
    await refuse_entries(own_database_url, type_)
    with pytest.raises(psycopg.errors.CheckViolation):
        await act(database, run_id)
    assert await record(own_database_url, run_id) == before
    await execute(superuser_url(own_database_url), "ALTER TABLE ledger_entries DROP CONSTRAINT refused")
    # As soon as it can be recorded, it happens.
    await act(database, run_id)
    after = await record(own_database_url, run_id)
    check_invariants(after)
    assert after.entries(type_)
    await database.close()


@pytest.mark.parametrize("type_", ["run.created", "plan.accepted"])
async def test_a_run_whose_beginning_cannot_be_recorded_is_not_created(own_database_url: str, type_: str) -> None:
    database = Database(own_database_url)
    await refuse_entries(own_database_url, type_)
    with pytest.raises(psycopg.errors.CheckViolation):
        await create_run(database, new_run([[]]))
    for table in ("runs", "artifacts", "steps", "ledger_entries"):
        assert await rows(own_database_url, f"SELECT 1 FROM {table}") == []
    await database.close()


async def test_behind_the_closing_entry_only_what_may_follow_is_written(database: Database) -> None:
    run_id = await stored_run(database, [[]])
    await sends(database, run_id)
    await closes(database, run_id)
    before = await record(database.url, run_id)
    assert before.run["state"] == "succeeded"

    async def moves(connection: Connection) -> None:
        writer, (steps,) = await lock_run(connection, run_id, (queries.READ_ALL_STEPS, (run_id,)))
        writer.set_step_state(steps[0], "failed", "because")
        await writer.commit()

    with pytest.raises(BugError) as caught:
        await database.write(moves)
    assert caught.value.code == "ledger-closed"
    assert await record(database.url, run_id) == before


async def test_a_late_report_follows_the_closing_entry_and_the_totals_say_what_was_known(database: Database) -> None:
    run_id = await stored_run(database, [[]])
    late = opening(run_id)
    await open_attempt(database, late)
    await settles(database, run_id)
    await close_step_attempt(database, answered(late, cost_usd=Decimal("0.25")))
    kept = await record(database.url, run_id)
    check_invariants(kept)
    assert [entry["type"] for entry in kept.entries()][-2:] == ["run.closed", "attempt.closed"]
    (closing,) = kept.entries("run.closed")
    zeros = {"input_tokens": 0, "output_tokens": 0, "cost_usd": "0", "unpriced": 1}
    assert closing["data"]["totals"] == {"attempts": 1, **zeros}
    assert kept.run["cost_usd"] == Decimal("0.25")
