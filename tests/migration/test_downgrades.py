"""Going back to the schema before, with records in it: what the older schema can express stays, all else refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import psycopg
import pytest

from engine.errors import ExitCode, InputError, RefusedError, UnavailableError
from engine.store import schema
from engine.store.attempts import open_attempt
from engine.store.closing import close_step_attempt
from engine.store.database import Database
from engine.store.schema import downgrade_schema, require_current_schema, scripts, upgrade_schema
from engine.store.snapshots import read_run
from tests.migration.catalogue import catalogue, revision
from tests.migration.test_upgrades import MakeNext, plain, reader
from tests.support.command import podium
from tests.support.stored import answered, check_invariants, opening, record, stored_run

HEAD = str(scripts().get_current_head())
# Newest first, down to the first schema.
ALL_BUT_FIRST = [script.revision for script in scripts().walk_revisions() if script.revision != "0001"]
# What only schema 0002 can express, and the words in which its downgrade refuses.
ONLY_0002 = {
    "budgets": "INSERT INTO budgets (run_id, tenant_id, usd_limit) SELECT id, tenant_id, 1 FROM runs LIMIT 1",
    "forks": "UPDATE runs SET origin = 'fork'",
    "runs with revision rounds": "UPDATE runs SET rounds_max = 3",
    "child runs": "UPDATE runs SET parent_run_id = id, parent_round = 0, parent_position = 0",
    "steps given to another worker": "UPDATE steps SET planned_worker = 'beta' WHERE position = 0",
    "steps that wait for an operator": "UPDATE steps SET state = 'waiting', reason = 'operator' WHERE position = 1",
    "steps that began anew": "UPDATE steps SET attempts_base = 2 WHERE position = 1",
}


async def _two_runs(url: str) -> tuple[UUID, UUID]:
    """One that has ended and one with a finished step, a call in flight and a step that has not begun."""
    database = Database(url)
    ended, live = await stored_run(database, [[]]), await stored_run(database, [[], [], [0, 1]])
    for run_id, ends in ((ended, True), (live, False)):
        opened = opening(run_id, 0)
        await open_attempt(database, opened)
        await close_step_attempt(database, answered(opened, ends_run=ends))
    await open_attempt(database, opening(live, 1))
    await database.close()
    return ended, live


async def _go_on(url: str, live: UUID) -> None:
    """Ends the run that `_two_runs` left live, as a worker would."""
    database = Database(url)
    await close_step_attempt(database, answered(opening(live, 1)))
    last = opening(live, 2)
    assert (await open_attempt(database, last)).verdict == "call"
    assert (await close_step_attempt(database, answered(last, ends_run=True))).run_ended
    run = await read_run(database, live)
    assert run is not None
    assert run.state == "succeeded"
    check_invariants(await record(url, live))
    await database.close()


@pytest.fixture
def connection(database_url: str) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    with psycopg.connect(plain(database_url), autocommit=True) as opened:
        yield opened


def test_down_to_the_schema_before_and_up_again_keeps_every_record(database_url: str) -> None:
    ended, live = asyncio.run(_two_runs(database_url))
    before, kept = catalogue(database_url), asyncio.run(record(database_url, live))
    assert downgrade_schema(database_url, "0001").reverted == ALL_BUT_FIRST
    assert revision(database_url) == "0001"
    assert "budgets.run_id" not in catalogue(database_url, "columns")["columns"]
    assert downgrade_schema(database_url, "0001").reverted == []
    assert upgrade_schema(database_url).applied == ALL_BUT_FIRST[::-1]
    assert catalogue(database_url) == before
    assert asyncio.run(record(database_url, live)) == kept
    for run_id in (ended, live):
        check_invariants(asyncio.run(record(database_url, run_id)))
    asyncio.run(_go_on(database_url, live))


def test_down_is_the_same_schema_as_one_that_was_never_upgraded(
    database_url: str, empty_database_url: str, with_next_migration: MakeNext
) -> None:
    directory = with_next_migration('op.add_column("runs", sa.Column("added", sa.Text()))')
    upgrade_schema(database_url, directory)
    # The folder's own migration cannot go back, and what is before it stays as it is.
    with pytest.raises(RefusedError) as caught:
        downgrade_schema(database_url, "0001", directory)
    assert caught.value.code == "downgrade-refused"
    upgrade_schema(empty_database_url)
    before = catalogue(empty_database_url)
    downgrade_schema(empty_database_url, "0001")
    upgrade_schema(empty_database_url)
    assert catalogue(empty_database_url) == before


@pytest.mark.parametrize(("words", "statement"), ONLY_0002.items(), ids=[name.replace(" ", "-") for name in ONLY_0002])
def test_what_the_older_schema_cannot_express_keeps_the_newer_one(
    database_url: str, connection: psycopg.Connection[tuple[object, ...]], words: str, statement: str
) -> None:
    _, live = asyncio.run(_two_runs(database_url))
    connection.execute(statement.encode())
    downgrade_schema(database_url, "0002")
    before = catalogue(database_url)
    with pytest.raises(RefusedError) as caught:
        downgrade_schema(database_url, "0001")
    assert caught.value.code == "downgrade-refused"
    assert caught.value.exit_code == ExitCode.FAILED
    assert words in caught.value.message
    assert catalogue(database_url) == before
    assert revision(database_url) == "0002"
    upgrade_schema(database_url)
    require_current_schema(database_url)
    assert asyncio.run(record(database_url, live)).steps


def test_a_refusal_on_the_way_down_leaves_the_oldest_schema_that_can_express_what_is_stored(
    database_url: str, connection: psycopg.Connection[tuple[object, ...]]
) -> None:
    _, live = asyncio.run(_two_runs(database_url))
    connection.execute(ONLY_0002["forks"].encode())
    with pytest.raises(RefusedError) as caught:
        downgrade_schema(database_url, "0001")
    assert caught.value.code == "downgrade-refused"
    assert revision(database_url) == "0002"
    assert upgrade_schema(database_url).applied == ["0003", "0004", "0005"]
    require_current_schema(database_url)
    assert asyncio.run(record(database_url, live)).steps


def test_a_revision_that_does_not_exist_is_refused_with_those_that_do(database_url: str) -> None:
    with pytest.raises(InputError) as caught:
        downgrade_schema(database_url, "0000")
    assert (caught.value.code, caught.value.exit_code) == ("revision-unknown", ExitCode.BAD_INPUT)
    assert HEAD in str(caught.value.hint)
    assert revision(database_url) == HEAD


def test_an_older_program_does_not_take_back_what_it_does_not_know(
    database_url: str, with_next_migration: MakeNext
) -> None:
    upgrade_schema(database_url, with_next_migration('op.add_column("runs", sa.Column("added", sa.Text()))'))
    before = catalogue(database_url)
    with pytest.raises(UnavailableError) as caught:
        downgrade_schema(database_url, "0001")
    assert caught.value.code == "schema-newer"
    assert f"podium db downgrade {HEAD}" in str(caught.value.hint)
    assert catalogue(database_url) == before


def test_a_blocked_downgrade_gives_up_and_names_the_blocker(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "LOCK_TRIES_MAX", 2)
    before = catalogue(database_url)
    with reader(database_url) as blocker:
        with pytest.raises(UnavailableError) as caught:
            downgrade_schema(database_url, "0001")
        assert caught.value.code == "migration-blocked"
        assert f"process {blocker} of the database" in caught.value.message
        assert catalogue(database_url) == before
    assert downgrade_schema(database_url, "0001").reverted == ALL_BUT_FIRST


def test_the_embedded_servers_do_not_go_back(tmp_path: Path) -> None:
    done = podium("db", "downgrade", "0001", "--json", home=tmp_path / "home")
    assert (done.code, done.error_code) == (ExitCode.BAD_INPUT, "servers-not-yours")
    assert not (tmp_path / "home").exists()


def test_the_command_says_what_it_took_back(database_url: str, tmp_path: Path) -> None:
    env = {"PODIUM_DATABASE_URL": database_url, "PODIUM_TEMPORAL_ADDRESS": "127.0.0.1:1"}
    done = podium("db", "downgrade", "0001", home=tmp_path / "home", env=env)
    assert (done.code, done.out) == (0, f"took back {', '.join(ALL_BUT_FIRST)}; the schema is now 0001\n")
    assert (
        podium("db", "downgrade", "0001", home=tmp_path / "home", env=env).out == "nothing to do; the schema is 0001\n"
    )
    refused = podium("db", "downgrade", "7", "--json", home=tmp_path / "home", env=env)
    assert (refused.code, refused.error_code) == (ExitCode.BAD_INPUT, "revision-unknown")
