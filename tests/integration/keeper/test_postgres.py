"""The embedded PostgreSQL: real binaries, real kills, real other users."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import psutil
import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from engine.errors import BugError, UnavailableError
from engine.keeper.cluster import SUPERUSER, find_programs
from engine.keeper.home import Home
from engine.keeper.postgres import PostgresServer
from engine.keeper.process import find_leftovers
from engine.store.roles import MIGRATOR, OWNER
from tests.support.processes import (
    IS_ROOT,
    OTHER_UID,
    Holder,
    as_other,
    environment,
    is_dead,
    kill_hard,
    permissions,
    public_folder,
    python_for_other,
    until,
)

# Each of them starts servers of its own.
pytestmark = pytest.mark.slow

# What a server's own children need to notice that their postmaster is gone.
GONE_WITHIN_S = 3.0
BUSY = "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query LIKE '%generate_series%00%'"
BUSY += " AND pid <> pg_backend_pid()"
PYTHON = Path(sys.executable).resolve()


def connect(url: str, **changes: str) -> psycopg.Connection[tuple[object, ...]]:
    parts = urlsplit(url)
    options = {name: values[0] for name, values in parse_qs(parts.query).items()}
    given = {"user": str(parts.username), "password": str(parts.password), "dbname": parts.path.lstrip("/"), **options}
    return psycopg.connect(**{**given, **changes}, autocommit=True)  # type: ignore[arg-type] # typed keywords, all text


def as_owner(migration_url: str) -> str:
    """The address for acting as the owner of the database, as migrations do."""
    return f"{migration_url}&options=-c%20role%3D{OWNER}"


def one(url: str, query: str) -> object:
    with connect(url) as connection:
        row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return row[0]


async def test_the_application_connects_as_a_role_without_powers(server: PostgresServer) -> None:
    await server.start()
    engine = create_async_engine(server.url)
    async with engine.connect() as connection:
        row = (
            await connection.execute(
                text(
                    "SELECT rolsuper, rolcreatedb, rolcreaterole, rolbypassrls, rolreplication, rolcanlogin"
                    " FROM pg_roles WHERE rolname = current_user"
                )
            )
        ).one()
        assert tuple(row) == (False, False, False, False, False, True)
        owner = await connection.execute(
            text("SELECT pg_get_userbyid(datdba) FROM pg_database WHERE datname = current_database()")
        )
        assert owner.scalar_one() == OWNER
        version = await connection.execute(text("SHOW server_version_num"))
        assert int(version.scalar_one()) >= 180000
    await engine.dispose()
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        one(server.url, "SELECT pg_read_file('/etc/passwd')")
    with connect(server.url) as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
        connection.execute("COPY (SELECT 1) TO PROGRAM 'true'")


async def test_no_superuser_can_log_in_and_no_password_but_one_exists(server: PostgresServer) -> None:
    await server.start()
    with connect(server.url) as connection:
        rows = connection.execute("SELECT rolname FROM pg_roles WHERE rolcanlogin").fetchall()
    assert sorted(rows) == [("podium",), (MIGRATOR,)]
    for password in ("", "podium", SUPERUSER):
        with pytest.raises(psycopg.OperationalError):
            connect(server.url, user=SUPERUSER, password=password or "x")
    with pytest.raises(psycopg.OperationalError, match="password"):
        connect(server.url, password="wrong")


async def test_it_listens_on_a_private_socket_only_with_safe_settings(server: PostgresServer, home: Home) -> None:
    await server.start()
    assert server.pid is not None
    assert psutil.Process(server.pid).net_connections(kind="inet") == []
    assert (home.run_dir.stat().st_mode & 0o777, home.run_dir.stat().st_uid) == (0o700, os.geteuid())
    wanted = {"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on", "jit": "off", "TimeZone": "UTC"}
    wanted |= {"cluster_name": "podium", "listen_addresses": "", "password_encryption": "scram-sha-256"}
    for name, value in wanted.items():
        assert one(server.url, f"SHOW {name}") == value, name
    assert (home.postgres_dir / "cluster" / "data" / "pg_hba.conf").read_text() == "local all all scram-sha-256\n"


async def test_data_survives_a_stop_and_the_same_address_works_after_a_start(server: PostgresServer) -> None:
    await server.start()
    url = as_owner(server.migration_url)
    with connect(url) as connection:
        connection.execute("CREATE TABLE kept (n int)")
        connection.execute("INSERT INTO kept VALUES (7)")
    await server.stop()
    assert await server.wait() == 0
    assert server.pid is None
    start = time.monotonic()
    await server.start()
    assert time.monotonic() - start < 5.0
    assert as_owner(server.migration_url) == url
    assert one(url, "SELECT n FROM kept") == 7


async def test_starting_a_running_server_is_a_bug(server: PostgresServer) -> None:
    with pytest.raises(BugError):
        _ = server.url
    await server.start()
    with pytest.raises(BugError):
        await server.start()


async def test_no_folder_that_is_not_its_own_changes(server: PostgresServer, home: Home) -> None:
    paths = (home.root, find_programs(), PYTHON, Path.home(), Path("/var/lib"))
    before = permissions(*paths)
    await server.start()
    await server.stop()
    await server.start()
    assert permissions(*paths) == before


async def test_logs_hold_neither_statements_nor_values(server: PostgresServer) -> None:
    await server.start()
    with connect(as_owner(server.migration_url)) as connection:
        connection.execute("CREATE TABLE words (word text PRIMARY KEY, CONSTRAINT short CHECK (length(word) < 30))")
        connection.execute("INSERT INTO words VALUES (%s)", ["canary-one"])
        with pytest.raises(psycopg.errors.UniqueViolation):
            connection.execute("INSERT INTO words VALUES (%s)", ["canary-one"])
        with pytest.raises(psycopg.errors.CheckViolation):
            connection.execute("INSERT INTO words VALUES ('canary-two canary-two canary-two canary-two')")
    await server.stop()
    log = server.log_path.read_text()
    assert "violates check constraint" in log
    assert "canary" not in log
    assert server.log_path.stat().st_mode & 0o777 == 0o600


async def test_the_end_of_a_killed_server_is_seen_and_the_next_start_recovers(server: PostgresServer) -> None:
    for number in range(5):
        await server.start()
        watching = asyncio.create_task(server.wait())
        with connect(as_owner(server.migration_url)) as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS kept (n int)")
            connection.execute(f"INSERT INTO kept VALUES ({number})".encode())
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
        assert await asyncio.wait_for(watching, 5) == -signal.SIGKILL
    await server.start()
    assert one(as_owner(server.migration_url), "SELECT count(*) FROM kept") == 5


def test_a_killed_keeper_takes_its_server_with_it_and_nothing_committed_is_lost(tmp_path: Path) -> None:
    root = tmp_path / "home"
    for number in range(5):
        with Holder(root, "postgres") as holder:
            facts = holder.facts()
            postgres = facts["postgres"]["pid"]
            with connect(as_owner(facts["postgres"]["migration_url"])) as connection:
                connection.execute("CREATE TABLE IF NOT EXISTS kept (n int)")
                connection.execute(f"INSERT INTO kept VALUES ({number})".encode())
                holder.kill()
                if number % 2:  # keeper only: the kernel tells the server; else both at once
                    kill_hard(postgres)
        # No pause: the next keeper starts while the old server is still on its way out.
        if number % 3 == 0:
            until(lambda pid=postgres: is_dead(pid), within_s=GONE_WITHIN_S)  # type: ignore[misc] # a default binds the loop variable
    with Holder(root, "postgres") as holder:
        assert one(as_owner(holder.facts()["postgres"]["migration_url"]), "SELECT count(*) FROM kept") == 5
        assert holder.end() == 0
    until(lambda: find_leftovers(root, frozenset({"postgres"})) == [], within_s=GONE_WITHIN_S)


def test_a_busy_session_of_a_killed_server_does_not_hold_up_the_next(tmp_path: Path) -> None:
    root = tmp_path / "home"
    with Holder(root, "postgres") as holder:
        facts = holder.facts()
        # It looks for signals of its own only, so it does not notice that the postmaster is gone.
        query = "SELECT count(*) FROM generate_series(1, 100000000000)"
        psql = [str(find_programs() / "psql"), "-w", "-h", str(root / "run"), "-U", "podium", "-c", query, "podium"]
        secret = environment() | {"PGPASSWORD": str(urlsplit(facts["postgres"]["url"]).password)}
        client = subprocess.Popen(psql, env=secret, stderr=subprocess.DEVNULL)
        until(lambda: one(facts["postgres"]["url"], BUSY) == 1, within_s=5)
        kill_hard(facts["postgres"]["pid"], holder.pid)
    time.sleep(0.3)
    assert len(find_leftovers(root, frozenset({"postgres"}))) == 1
    start = time.monotonic()
    with Holder(root, "postgres") as holder:
        assert one(holder.facts()["postgres"]["url"], "SELECT 1") == 1
        assert time.monotonic() - start < 8
        assert client.wait(timeout=5) != 0
        assert holder.end() == 0


@pytest.mark.skipif(not IS_ROOT, reason="only root can mount a small file system")
def test_a_disk_too_small_for_the_first_set_up_is_a_clear_error_and_is_not_left_full(tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=24m none "$1" && mkdir -m 700 "$1/home" && "$2" -m tests.support.holder "$1/home" postgres'
    script += '; echo "$?"; ls "$1/home/postgres" | wc -l'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", str(tmp_path), sys.executable]
    done = subprocess.run(command, env=environment(), cwd="/", capture_output=True, text=True, check=True)
    told, code, left = done.stdout.splitlines()
    assert '"disk-full"' in told
    assert (code, left) == ("5", "0")


def test_a_server_that_outlived_its_keeper_is_stopped_by_the_next(tmp_path: Path) -> None:
    root = tmp_path / "home"
    with Holder(root, "postgres") as holder:
        holder.facts()
        assert holder.end() == 0
    # As where the kernel sends no death signal: started by somebody who does not care.
    data = root / "postgres" / "cluster" / "data"
    command = [str(find_programs() / "postgres"), "-D", str(data), "-c", "listen_addresses="]
    command += ["-c", f"unix_socket_directories={root / 'run'}"]
    if IS_ROOT:
        command = ["unshare", "--user", f"--map-user={OTHER_UID}", *command]
    with (tmp_path / "log").open("wb") as log:
        leftover = subprocess.Popen(command, stderr=log, start_new_session=True)
    until((root / "run" / ".s.PGSQL.5432").exists, within_s=10)
    with Holder(root, "postgres") as holder:
        facts = holder.facts()
        # Nobody has waited for it yet, so it is a zombie, and its id is in the old postmaster.pid.
        assert psutil.Process(leftover.pid).status() == psutil.STATUS_ZOMBIE
        assert one(facts["postgres"]["url"], "SELECT 1") == 1
        assert holder.end() == 0
    leftover.wait()


def test_a_postmaster_file_with_the_id_of_a_zombie_or_a_stranger_holds_nobody_up(tmp_path: Path) -> None:
    root = tmp_path / "home"
    with Holder(root, "postgres") as holder:
        holder.facts()
        assert holder.end() == 0
    zombie = subprocess.Popen(["true"])
    stranger = subprocess.Popen(["sleep", "60"])
    until(lambda: psutil.Process(zombie.pid).status() == psutil.STATUS_ZOMBIE, within_s=5)
    try:
        for pid in (zombie.pid, stranger.pid):
            content = f"{pid}\n{root / 'postgres' / 'cluster' / 'data'}\n1\n5432\n{root / 'run'}\n\n1 1\nready\n"
            (root / "postgres" / "cluster" / "data" / "postmaster.pid").write_text(content)
            (root / "run" / ".s.PGSQL.5432.lock").write_text(content)
            with Holder(root, "postgres") as holder:
                assert one(holder.facts()["postgres"]["url"], "SELECT 1") == 1
                assert holder.end() == 0
        assert stranger.poll() is None
    finally:
        zombie.wait()
        stranger.kill()
        stranger.wait()


@pytest.mark.parametrize("wait_s", [0.2, 0.6])
def test_a_first_set_up_that_was_killed_is_done_again(tmp_path: Path, wait_s: float) -> None:
    root = tmp_path / "home"
    with Holder(root, "postgres") as holder:
        until(lambda: (root / "postgres").exists() and any((root / "postgres").iterdir()), within_s=10)
        time.sleep(wait_s)
        holder.kill()
    with Holder(root, "postgres") as holder:
        assert one(holder.facts()["postgres"]["url"], "SELECT 1") == 1
        assert [path.name for path in (root / "postgres").iterdir()] == ["cluster"]
        assert holder.end() == 0


def test_a_cluster_of_another_major_version_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "home"
    with Holder(root, "postgres") as holder:
        holder.facts()
        assert holder.end() == 0
    (root / "postgres" / "cluster" / "data" / "PG_VERSION").write_text("17\n")
    with Holder(root, "postgres") as holder:
        assert holder.facts()["code"] == "postgres-version"
        assert holder.end() == 5


async def test_a_damaged_cluster_is_one_clear_line(server: PostgresServer, home: Home) -> None:
    await server.start()
    await server.stop()
    (home.postgres_dir / "cluster" / "data" / "global" / "pg_control").write_bytes(b"\0" * 8192)
    with pytest.raises(UnavailableError) as caught:
        await server.start()
    assert caught.value.code == "postgres-start-failed"
    assert "\n" not in caught.value.message
    assert caught.value.hint


@pytest.mark.skipif(not IS_ROOT, reason="only root can become another user")
def test_another_user_can_neither_connect_nor_read() -> None:
    with public_folder() as folder, Holder(folder / "home", "postgres") as holder:
        root = folder / "home"
        secret = urlsplit(holder.facts()["postgres"]["url"]).password
        other = environment() | {"PGPASSWORD": str(secret), "LC_ALL": "C"}
        psql = [
            str(find_programs() / "psql"),
            "-w",
            "-h",
            str(root / "run"),
            "-U",
            "podium",
            "-c",
            "SELECT 1",
            "podium",
        ]

        def run(command: list[str]) -> subprocess.CompletedProcess[str]:
            return subprocess.run(command, env=other, cwd="/", capture_output=True, text=True, check=False)

        assert run(psql).returncode == 0, "the owner can connect with this very command"
        refused = run(as_other(psql))
        assert refused.returncode != 0
        assert "Permission denied" in refused.stderr
        for path in (root, root / "run", root / "postgres" / "cluster" / "password", root / "logs" / "postgres.log"):
            command = ["cat" if path.is_file() else "ls", str(path)]
            assert run(command).returncode == 0
            assert run(as_other(command)).returncode != 0
        # Even without the outer wall every file is closed.
        assert [path for path in root.rglob("*") if not path.is_socket() and path.stat().st_mode & 0o077] == []
        assert holder.end() == 0


@pytest.mark.skipif(not IS_ROOT, reason="the suite runs as a normal user already")
def test_a_normal_user_runs_it_too() -> None:
    python = python_for_other()
    if python is None:
        pytest.skip("no Python is here that another user can run")
    with public_folder() as folder:
        os.chown(folder, OTHER_UID, OTHER_UID)
        root = folder / "home"
        for _ in range(2):
            with Holder(root, "postgres", "temporal", prefix=as_other([]), python=python) as holder:
                facts = holder.facts()
                assert "postgres" in facts, facts
                assert one(facts["postgres"]["url"], "SELECT 1") == 1
                pids = [facts[name]["pid"] for name in ("postgres", "temporal")]
                assert [psutil.Process(pid).uids().real for pid in pids] == [OTHER_UID] * 2
                holder.kill()
            until(lambda pids=pids: all(map(is_dead, pids)), within_s=GONE_WITHIN_S)  # type: ignore[misc] # a default binds the loop variable
        assert {path.stat().st_uid for path in root.rglob("*") if path.exists()} == {OTHER_UID}
        assert [path for path in root.rglob("*") if not path.is_socket() and path.stat().st_mode & 0o077] == []
