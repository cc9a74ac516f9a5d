"""The link to the database dies around COMMIT, or while a connection is idle: nothing is written twice or lost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any
from uuid import UUID

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from engine.store import queries
from engine.store.attempts import open_attempt
from engine.store.closing import Closing, close_step_attempt
from engine.store.database import Database
from engine.store.exchange import Connection, exchange
from engine.store.inputs import read_step_inputs
from engine.store.planning import close_planning_attempt
from engine.store.processes import register_process, this_process
from engine.store.run_writer import AttemptResult
from engine.store.runs import create_run
from engine.store.settling import Settlement, note_waiting, settle_run
from engine.store.snapshots import read_run
from tests.support.link import Cut, Link
from tests.support.stored import (
    COST,
    LOST,
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

Write = Callable[[Database, UUID], Awaitable[Any]]


async def _open(database: Database, run_id: UUID) -> Any:
    return await open_attempt(database, opening(run_id, 1))


async def _close(database: Database, run_id: UUID) -> Any:
    return await close_step_attempt(database, answered(opening(run_id, 0), ends_run=True))


async def _close_lost(database: Database, run_id: UUID) -> Any:
    return await close_step_attempt(database, ended_with(opening(run_id, 0), LOST, retry=True))


async def _close_failed(database: Database, run_id: UUID) -> Any:
    failed = AttemptResult("failed", "overloaded", provider_status=503)
    return await close_step_attempt(database, ended_with(opening(run_id, 0), failed, retry=True))


async def _settle(database: Database, run_id: UUID) -> Any:
    return await settle_run(database, Settlement(run_id, 1, "failed", "workflow-lost"))


async def _note_waiting(database: Database, run_id: UUID) -> Any:
    return await note_waiting(database, run_id, 0, 1, "no-worker")


WRITES: dict[str, Write] = {
    "open": _open,
    "close": _close,
    "close-lost": _close_lost,
    "close-failed": _close_failed,
    "settle": _settle,
    "note-waiting": _note_waiting,
}
CUTS: list[list[Cut]] = [["before-commit"], ["after-commit"], ["before-commit", "after-commit", "after-commit"]]


@pytest.fixture
async def link(database_url: str) -> AsyncIterator[Link]:
    async with Link(database_url) as opened:
        yield opened


@pytest.fixture
async def linked(link: Link) -> AsyncIterator[Database]:
    opened = Database(link.url, pool_size=2)
    yield opened
    await opened.close()


async def _begun(database: Database) -> UUID:
    """A run of two steps, the first of which is being called."""
    run_id = await stored_run(database, [[], []])
    await open_attempt(database, opening(run_id, 0))
    return run_id


async def _essence(url: str, run_id: UUID) -> Any:
    """What two runs that went the same way have in common."""
    kept = await record(url, run_id)
    check_invariants(kept)
    return (
        (kept.run["state"], kept.run["reason"], kept.run["cost_usd"], kept.run["attempts_count"]),
        kept.run["attempts_unpriced"],
        [(step["state"], step["reason"]) for step in kept.steps],
        [(row["position"], row["number"], row["state"], row["error_code"], row["accepted"]) for row in kept.attempts],
        sorted((row["kind"], row["content"]) for row in kept.artifacts),
        [(entry["type"], entry["data"].get("state")) for entry in kept.entries()],
    )


@pytest.mark.parametrize("cuts", CUTS, ids="+".join)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
async def test_a_write_whose_link_dies_around_its_commit_counts_once_and_answers_the_same(
    database: Database, link: Link, linked: Database, write: Write, cuts: list[Cut]
) -> None:
    undisturbed, disturbed = await _begun(database), await _begun(database)
    expected = await write(database, undisturbed)
    link.cut_next(*cuts)
    result = await write(linked, disturbed)
    # What follows a cut before the COMMIT is the first commit; after one that arrived there may be none left to cut.
    assert link.cuts >= 1
    if hasattr(expected, "attempt_id") and expected.attempt_id is not None:
        expected = replace(expected, attempt_id=result.attempt_id)
    assert result == expected
    assert await _essence(database.url, disturbed) == await _essence(database.url, undisturbed)


@pytest.mark.parametrize("cuts", CUTS[:2], ids="+".join)
@pytest.mark.parametrize("key", [None, "key"])
@pytest.mark.parametrize("access", [None, [[], [0]]], ids=["conductor", "file"])
async def test_a_run_whose_link_dies_around_its_commit_exists_once(  # noqa: PLR0917  # fixtures and parameters
    database: Database, link: Link, linked: Database, cuts: list[Cut], key: str | None, access: Any
) -> None:
    new = new_run(access, key=None if key is None else f"{key}-{cuts[0]}-{access is None}")
    link.cut_next(*cuts)
    created = await create_run(linked, new)
    assert (created.id, created.existing) == (new.id, False)
    assert link.cuts == 1
    kept = await record(database.url, new.id)
    check_invariants(kept)
    assert [entry["type"] for entry in kept.entries()] == ["run.created", "plan.accepted"][: 1 if access is None else 2]
    if key is not None:
        again = await create_run(linked, replace(new_run(access, key=new.idempotency_key)))
        assert (again.id, again.existing) == (new.id, True)


@pytest.mark.parametrize("cut", ["before-commit", "after-commit"])
async def test_a_failed_planning_call_whose_link_dies_is_recorded_once(
    database: Database, link: Link, linked: Database, cut: Cut
) -> None:
    run_id = await stored_run(database, None)
    opened = opening(run_id, None)
    await open_attempt(database, opened)
    link.cut_next(cut)
    closing = Closing(opened.place, opened.attempt_id, AttemptResult("failed", "key-rejected", cost_usd=COST))
    ruling = await close_planning_attempt(linked, closing, None, fallback=None, repairs_max=2)
    assert (ruling.verdict, ruling.code) == ("failed", "key-rejected")
    kept = await record(database.url, run_id)
    check_invariants(kept)
    assert kept.run["cost_usd"] == COST


async def test_connections_that_died_while_idle_are_replaced_without_an_error(link: Link, linked: Database) -> None:
    run_id = await stored_run(linked, [[], []])
    opened = opening(run_id, 0)
    for _ in range(3):
        await link.hang_up()
        assert (await open_attempt(linked, opened)).verdict == "call"
        await link.hang_up()
        assert await read_run(linked, run_id) is not None
        await link.hang_up()
        assert (await read_step_inputs(linked, run_id, 0, 0)).worker == "alpha"
    assert link.connections >= 9
    check_invariants(await record(linked.url, run_id))


async def test_sessions_that_the_server_ended_are_replaced_without_an_error(
    own_database_url: str,
) -> None:
    database = Database(own_database_url, pool_size=1)
    run_id = await stored_run(database, [[]])
    await execute(
        own_database_url,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'client backend' AND "
        "datname = current_database() AND pid <> pg_backend_pid()",
    )
    assert await read_run(database, run_id) is not None
    await execute(
        own_database_url,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'client backend' AND "
        "datname = current_database() AND pid <> pg_backend_pid()",
    )
    assert (await open_attempt(database, opening(run_id, 0))).verdict == "call"
    await database.close()


async def test_a_read_whose_connection_dies_under_it_is_done_once_more(database: Database) -> None:
    tries = []

    async def read(connection: AsyncConnection) -> int:
        tries.append(1)
        if len(tries) == 1:
            await connection.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
        seven: int = (await connection.execute(text("SELECT 7"))).scalar_one()
        return seven

    assert await database.query(read) == 7
    assert len(tries) == 2


async def test_calls_of_a_dead_worker_are_named_again_when_the_first_answer_was_lost(
    database: Database, link: Link, linked: Database
) -> None:
    dead = replace(this_process(), pid=2**22 + 1, pid_started="1")
    await register_process(database, dead)
    run_id = await stored_run(database, [[]])
    await open_attempt(database, opening(run_id, 0, process_id=dead.id))
    link.cut_next("after-commit")
    inherited = await register_process(linked, this_process())
    assert link.cuts == 1
    assert [(orphan.run_id, orphan.position) for orphan in inherited.orphans] == [(run_id, 0)]
    leases = await rows(database.url, "SELECT ended_at FROM worker_processes WHERE id = %s", dead.id)
    assert leases[0]["ended_at"] is not None


async def test_a_violation_inside_a_packet_is_raised_as_itself_and_leaves_a_clean_connection(
    own_database_url: str,
) -> None:
    database = Database(own_database_url, pool_size=1)
    new = new_run([[]])
    await create_run(database, new)
    with pytest.raises(psycopg.errors.CheckViolation):
        await database.write(_break_a_check)
    assert (await record(own_database_url, new.id)).run["execution_seen"] == 0
    assert (await open_attempt(database, opening(new.id, 0))).verdict == "call"
    assert [
        row["state"]
        for row in await rows(own_database_url, "SELECT state FROM pg_stat_activity WHERE application_name = 'podium'")
    ] == ["idle"]
    await database.close()


async def _break_a_check(connection: Connection) -> None:
    statements = [
        (queries.BEGIN, ()),
        ("UPDATE runs SET execution_seen = 1", ()),
        ("UPDATE runs SET execution = 0", ()),
        ("UPDATE runs SET execution_seen = 0", ()),
        (queries.COMMIT, ()),
    ]
    await exchange(connection, statements)
