"""Homes that were made before there were roles: they get them at the next start, whatever interrupts it."""

from __future__ import annotations

import asyncio

import psycopg
import pytest

from engine.keeper import cluster as module
from engine.keeper.cluster import MIGRATOR_PASSWORD, ROLE, Cluster
from engine.keeper.postgres import PostgresServer
from engine.keeper.process import Program, run_to_end
from engine.store.database import Database
from engine.store.roles import GROUPS, MIGRATOR, OWNER
from engine.store.schema import upgrade_schema
from tests.integration.store.test_log import check_log, runs_on_record
from tests.support.processes import kill_hard
from tests.support.stored import check_invariants, plain_url, record, rows, stored_run

# Each of them starts servers of its own.
pytestmark = pytest.mark.slow

# Undoes what the set-up does today, so that the cluster is one of the version before.
_BEFORE = (
    f"REASSIGN OWNED BY {OWNER} TO {ROLE};",
    f"DROP OWNED BY {', '.join((MIGRATOR, OWNER, *GROUPS))};",
    f"DROP ROLE {', '.join((MIGRATOR, OWNER, *GROUPS))};",
)


async def as_superuser(cluster: Cluster, *statements: str) -> str:
    """Carries statements out in the stopped cluster's database."""
    arguments = ("--single", "-D", str(cluster.data), "-c", "exit_on_error=on", "podium")
    program = Program(cluster.programs / "postgres", arguments, cluster.folder, cluster.identity)
    code, output = await run_to_end(program, text="\n".join(statements) + "\n", timeout_s=60)
    assert code == 0, output
    return output


async def make_it_old(server: PostgresServer) -> Cluster:
    """The home as the version before left it: one role, which owns everything; it holds a run at schema 0002."""
    await server.start()
    cluster = server._running_cluster()
    await server.stop()
    await as_superuser(cluster, *_BEFORE)
    (cluster.folder / MIGRATOR_PASSWORD).unlink()
    return cluster


async def _roles(url: str) -> set[str]:
    return {row["rolname"] for row in await rows(url, "SELECT rolname FROM pg_roles WHERE rolname LIKE 'podium%%'")}


async def test_a_home_made_before_gets_its_roles_and_keeps_its_runs(server: PostgresServer) -> None:
    await server.start()
    await asyncio.to_thread(upgrade_schema, server.migration_url)
    database = Database(server.url)
    run_id = await stored_run(database, [[], [0]])
    await database.close()
    kept = await record(server.url, run_id)
    await server.stop()
    cluster = server._running_cluster()
    await as_superuser(cluster, *_BEFORE)
    (cluster.folder / MIGRATOR_PASSWORD).unlink()
    # A stale file of a server that was killed, with a process id that is now somebody else's.
    (cluster.data / "postmaster.pid").write_text("1\n/nowhere\n")

    await server.start()
    assert (cluster.folder / MIGRATOR_PASSWORD).stat().st_mode & 0o777 == 0o600
    assert await _roles(server.url) >= {OWNER, MIGRATOR, *GROUPS}
    owned = await rows(
        server.migration_url,
        "SELECT DISTINCT pg_get_userbyid(relowner) AS owner FROM pg_class WHERE relnamespace = 'public'::regnamespace"
        " UNION SELECT pg_get_userbyid(datdba) FROM pg_database WHERE datname = 'podium'",
    )
    assert owned == [{"owner": OWNER}]
    assert (await asyncio.to_thread(upgrade_schema, server.migration_url)).applied == []
    assert await record(server.url, run_id) == kept
    check_invariants(kept)
    database = Database(server.url)
    await runs_on_record(database)
    from engine.store import log

    await log.extend_log(database)
    assert await check_log(server.url) > len(kept.bodies)
    await database.close()
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        async with await psycopg.AsyncConnection.connect(plain_url(server.url)) as link:
            await link.execute("DELETE FROM ledger_entries")
    # Done once: the next start finds it done, with the same password.
    password = cluster.migrator_password()
    await server.stop()
    await server.start()
    assert cluster.migrator_password() == password


@pytest.mark.parametrize("after", range(0, 9, 2))
async def test_killed_in_the_middle_it_is_done_again_and_ends_the_same(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """The set-up of the roles is killed after each of its statements; the next start knows nothing of it and ends it."""
    cluster = await make_it_old(server)
    true_run = module._run

    async def killed(program: Program, *, text: str = "") -> None:
        kept = text.splitlines()[:after]
        # The statements so far are carried out and on disk; then everything is gone at once.
        process = await asyncio.create_subprocess_exec(
            *program.command(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=program.full_environment(),
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(("\n".join([*kept, "SELECT 'so far';"]) + "\n").encode())
        await process.stdin.drain()
        async with asyncio.timeout(30):
            while b"so far" not in await process.stdout.readline():
                pass
        kill_hard(process.pid)
        await process.wait()
        raise ConnectionAbortedError

    with monkeypatch.context() as patched:
        patched.setattr(module, "_run", killed)
        with pytest.raises(Exception):  # noqa: B017  # as good as a kill: nothing is cleaned up
            await server.start()
    assert not (cluster.folder / MIGRATOR_PASSWORD).exists()
    assert module._run is true_run
    await server.start()
    assert await _roles(server.url) >= {OWNER, MIGRATOR, *GROUPS}
    assert (await asyncio.to_thread(upgrade_schema, server.migration_url)).applied
    member = "SELECT count(*) AS n FROM pg_auth_members WHERE member = 'podium'::regrole"
    assert (await rows(server.url, member))[0]["n"] == len(GROUPS)
