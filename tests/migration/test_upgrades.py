"""Upgrades by several processes, by one that dies, behind a lock, and against schemas of other versions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from alembic.script import ScriptDirectory

from engine.errors import ExitCode, UnavailableError
from engine.store.schema import (
    LOCK_KEY,
    refuse_old_server,
    require_current_schema,
    schema_version,
    scripts,
    upgrade_schema,
)
from tests.migration.catalogue import catalogue, revision
from tests.migration.conftest import NEXT_REVISION
from tests.support.processes import environment, kill_hard, until

MakeNext = Callable[[str], ScriptDirectory]
HEAD = scripts().get_current_head()
EVERY = [script.revision for script in reversed(list(scripts().walk_revisions()))]
# Imports first, says that it is ready, and goes when it is told: so that all really start at the same moment.
_PROGRAM = """
import json, sys
from alembic.script import ScriptDirectory
from engine.errors import PodiumError
from engine.store.schema import upgrade_schema
url, folder = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
try:
    print(json.dumps(upgrade_schema(url, ScriptDirectory(folder)).applied))
except PodiumError as error:
    print(json.dumps(error.code))
"""
ADD_COLUMN = 'op.add_column("runs", sa.Column("added", sa.Text()))'
CREATE_TABLE = 'op.create_table("added", sa.Column("id", sa.Integer()))'


class Upgrader:
    """A real process that upgrades a database when `go` is called."""

    def __init__(self, url: str, directory: ScriptDirectory, **variables: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", _PROGRAM, url, str(directory.dir)],
            env=environment() | variables,
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def applied(self) -> object:
        out, err = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, err
        return json.loads(out)


def upgrade_at_once(count: int, url: str, directory: ScriptDirectory) -> list[str]:
    """Upgrades by `count` processes at the same moment; returns all revisions that any of them applied."""
    upgraders = [Upgrader(url, directory) for _ in range(count)]
    for upgrader in upgraders:
        upgrader.wait_until_ready()
    for upgrader in upgraders:
        upgrader.go()
    results = [upgrader.applied() for upgrader in upgraders]
    assert all(isinstance(result, list) for result in results), results
    return [str(one) for result in results if isinstance(result, list) for one in result]


def test_five_processes_upgrade_an_empty_database_at_the_same_moment(
    empty_database_url: str, database_url: str
) -> None:
    # Whoever holds the lock applies one migration; the next may be another's. Each ran exactly once.
    assert sorted(upgrade_at_once(5, empty_database_url, scripts())) == EVERY
    assert catalogue(empty_database_url) == catalogue(database_url)
    require_current_schema(empty_database_url)


@pytest.mark.slow
def test_five_processes_upgrade_a_database_that_is_a_version_behind(
    database_url: str, with_next_migration: MakeNext
) -> None:
    directory = with_next_migration(ADD_COLUMN)
    assert upgrade_at_once(5, database_url, directory) == [NEXT_REVISION]
    require_current_schema(database_url, directory)


def test_two_threads_of_one_process_upgrade_one_after_the_other(empty_database_url: str) -> None:
    applied: list[str] = []

    def upgrade() -> None:
        applied.extend(upgrade_schema(empty_database_url).applied)

    threads = [threading.Thread(target=upgrade) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert applied == EVERY
    assert revision(empty_database_url) == HEAD


def test_a_second_upgrade_does_nothing(database_url: str) -> None:
    before = catalogue(database_url)
    assert upgrade_schema(database_url).applied == []
    assert catalogue(database_url) == before


def test_an_upgrade_killed_in_the_middle_leaves_nothing_half_done_and_no_lock(
    database_url: str, with_next_migration: MakeNext, tmp_path: Path
) -> None:
    marker = tmp_path / "in-the-middle"
    hang = 'Path(os.environ["MARKER"]).touch(); time.sleep(float(os.environ["PAUSE_S"]))'
    directory = with_next_migration(f"{ADD_COLUMN}; {hang}; {CREATE_TABLE}")
    before = catalogue(database_url)
    victim = Upgrader(database_url, directory, MARKER=str(marker), PAUSE_S="60")
    victim.wait_until_ready()
    victim.go()
    until(marker.exists, within_s=20)
    assert advisory_locks(database_url) == 1
    kill_hard(victim.process.pid)
    victim.process.communicate()
    until(lambda: advisory_locks(database_url) == 0, within_s=5)
    assert catalogue(database_url) == before
    assert revision(database_url) == HEAD
    successor = Upgrader(database_url, directory, MARKER=str(marker), PAUSE_S="0")
    successor.wait_until_ready()
    successor.go()
    assert successor.applied() == [NEXT_REVISION]
    assert revision(database_url) == NEXT_REVISION


def test_a_migration_that_fails_leaves_nothing_behind(database_url: str, with_next_migration: MakeNext) -> None:
    directory = with_next_migration(f'{CREATE_TABLE}; raise ZeroDivisionError("a bug in a migration")')
    before = catalogue(database_url)
    with pytest.raises(ZeroDivisionError):
        upgrade_schema(database_url, directory)
    assert catalogue(database_url) == before
    assert revision(database_url) == HEAD


@pytest.mark.slow
def test_a_blocked_migration_gives_up_names_the_blocker_and_keeps_nobody_waiting(
    database_url: str, with_next_migration: MakeNext
) -> None:
    directory = with_next_migration(f"{CREATE_TABLE}; {ADD_COLUMN}")
    before = catalogue(database_url)
    with reader(database_url) as blocker:
        with status_queries(database_url) as waits_s, pytest.raises(UnavailableError) as caught:
            upgrade_schema(database_url, directory)
        assert caught.value.code == "migration-blocked"
        assert caught.value.exit_code == ExitCode.UNAVAILABLE
        assert f"process {blocker} of the database" in caught.value.message
        assert catalogue(database_url) == before
        assert revision(database_url) == HEAD
        assert advisory_locks(database_url) == 0
    # The upgrade waits 0.15 s at a time; what is above that here is a busy machine.
    assert len(waits_s) > 20
    assert max(waits_s) < 1.0
    assert upgrade_schema(database_url, directory).applied == [NEXT_REVISION]


def test_a_blocked_migration_goes_through_when_the_blocker_leaves_in_time(
    database_url: str, with_next_migration: MakeNext
) -> None:
    directory = with_next_migration(ADD_COLUMN)
    release = threading.Event()
    ready = threading.Event()

    def hold() -> None:
        with reader(database_url):
            ready.set()
            release.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    ready.wait(10)
    timer = threading.Timer(1.0, release.set)
    timer.start()
    try:
        assert upgrade_schema(database_url, directory).applied == [NEXT_REVISION]
    finally:
        release.set()
        timer.cancel()
        holder.join()


def test_a_schema_newer_than_the_program_is_refused_and_left_alone(
    database_url: str, with_next_migration: MakeNext
) -> None:
    upgrade_schema(database_url, with_next_migration(ADD_COLUMN))
    before = catalogue(database_url)
    assert schema_version(database_url).standing == "ahead"
    for refuse in (upgrade_schema, require_current_schema):
        with pytest.raises(UnavailableError) as caught:
            refuse(database_url)
        assert caught.value.code == "schema-newer"
        assert NEXT_REVISION in caught.value.message
        assert caught.value.exit_code == ExitCode.UNAVAILABLE
    assert catalogue(database_url) == before
    assert revision(database_url) == NEXT_REVISION


def test_a_schema_that_is_behind_is_refused_with_the_command_that_helps(
    database_url: str, empty_database_url: str, with_next_migration: MakeNext
) -> None:
    directory = with_next_migration(ADD_COLUMN)
    assert schema_version(database_url, directory).standing == "behind"
    assert schema_version(empty_database_url).standing == "empty"
    for url in (database_url, empty_database_url):
        with pytest.raises(UnavailableError) as caught:
            require_current_schema(url, directory)
        assert caught.value.code == "schema-behind"
        assert caught.value.hint == "run `podium db upgrade`"
    require_current_schema(database_url)


def test_a_role_that_may_not_change_the_schema_is_told_so(empty_database_url: str) -> None:
    with psycopg.connect(plain(empty_database_url), autocommit=True) as connection:
        connection.execute("REVOKE ALL ON SCHEMA public FROM pg_database_owner, PUBLIC")
        connection.execute("GRANT USAGE ON SCHEMA public TO PUBLIC")
    with pytest.raises(UnavailableError) as caught:
        upgrade_schema(empty_database_url)
    assert caught.value.code == "migration-not-allowed"


def test_a_server_that_is_not_there_is_an_error_in_words(empty_database_url: str) -> None:
    with pytest.raises(UnavailableError) as caught:
        schema_version(f"{empty_database_url.partition('?')[0]}-gone?{empty_database_url.partition('?')[2]}")
    assert caught.value.code == "database-unreachable"


@pytest.mark.parametrize(("version", "accepted"), [(140022, False), (150000, True), (180004, True)])
def test_postgres_before_15_is_refused(version: int, *, accepted: bool) -> None:
    if accepted:
        refuse_old_server(version)
        return
    with pytest.raises(UnavailableError) as caught:
        refuse_old_server(version)
    assert caught.value.code == "database-too-old"
    assert "14" in caught.value.message
    assert caught.value.hint == "Podium needs PostgreSQL 15 or newer"


def plain(url: str) -> str:
    return url.replace("postgresql+psycopg://", "postgresql://")


def advisory_locks(url: str) -> int:
    """How many sessions hold the migration lock of this database."""
    with psycopg.connect(plain(url)) as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted AND objid = %s AND database ="
            " (SELECT oid FROM pg_database WHERE datname = current_database())",
            [LOCK_KEY & 0xFFFFFFFF],
        ).fetchone()
    assert row is not None
    return int(row[0])


@contextmanager
def reader(url: str) -> Iterator[int]:
    """An open transaction that has read the runs, like a dump or a forgotten session; gives its process id."""
    with psycopg.connect(plain(url)) as connection:
        connection.execute("SELECT count(*) FROM runs")
        yield connection.info.backend_pid
        connection.rollback()


@contextmanager
def status_queries(url: str) -> Iterator[list[float]]:
    """Somebody who looks at the runs all the time; gives the seconds that each look took."""
    waits_s: list[float] = []
    stop = threading.Event()

    def look() -> None:
        with psycopg.connect(plain(url), autocommit=True) as connection:
            while not stop.wait(0.02):
                began = time.monotonic()
                connection.execute("SELECT state, count(*) FROM runs GROUP BY state")
                waits_s.append(time.monotonic() - began)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield waits_s
    finally:
        stop.set()
        thread.join()


def test_the_programs_that_these_tests_start_see_no_settings_of_the_caller() -> None:
    assert not [name for name in os.environ if name.startswith("PODIUM_")]
