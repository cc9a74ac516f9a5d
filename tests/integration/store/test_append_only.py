"""What the application's role cannot do to the record, and what it can: the roles of the embedded default."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import psycopg
import pytest
from psycopg import sql

from engine.errors import UnavailableError
from engine.signing import AuditFolder, Signer
from engine.store import log
from engine.store.database import Database
from engine.store.roles import GROUPS, MIGRATOR, OWNER, may_change_ledger
from engine.store.schema import require_current_schema, schema_version, upgrade_schema
from engine.store.tables import DEFAULT_TENANT
from tests.integration.store.test_log import check_log, runs_on_record, system_entry
from tests.integration.store.test_signer import sealed
from tests.migration.catalogue import catalogue
from tests.support.command import podium
from tests.support.servers import SINGLE, SUPERUSER, TestServers, migrator_url, superuser_url
from tests.support.stored import check_invariants, execute, plain_url, record, rows

TENANT = UUID(DEFAULT_TENANT)
GUARDED = ("ledger_entries", "log_leaves", "log_nodes", "log_checkpoints")
NO_RIGHT = "42501"
ONLY_GROWS = "PD010"
# What somebody could try who has the application's password. Each is refused for want of rights.
ATTACKS = {
    "edit an entry": "UPDATE ledger_entries SET body = body",
    "delete an entry": "DELETE FROM ledger_entries",
    "empty the ledger": "TRUNCATE ledger_entries",
    "insert past the function": "INSERT INTO ledger_entries SELECT * FROM ledger_entries",
    "move a head": "UPDATE ledger_heads SET seq = 0",
    "delete a head": "DELETE FROM ledger_heads",
    "lock a head": "SELECT 1 FROM ledger_heads FOR UPDATE",
    "empty the queue": "DELETE FROM ledger_pending",
    "queue what is there": "INSERT INTO ledger_pending SELECT tenant_id, run_id, seq FROM log_leaves",
    "edit a leaf": "UPDATE log_leaves SET leaf_hash = leaf_hash",
    "add a leaf": "INSERT INTO log_leaves SELECT tenant_id, index + 1000, run_id, seq + 1000, leaf_hash FROM log_leaves",
    "delete leaves": "DELETE FROM log_leaves",
    "add a node": "INSERT INTO log_nodes SELECT tenant_id, level + 40, index, hash FROM log_nodes",
    "edit a checkpoint": "UPDATE log_checkpoints SET note = note",
    "delete checkpoints": "DELETE FROM log_checkpoints",
    "empty the checkpoints": "TRUNCATE log_checkpoints",
    "disable the triggers": "ALTER TABLE ledger_entries DISABLE TRIGGER ALL",
    "disable the rules of tables": "SET session_replication_role = replica",
    "drop the ledger": "DROP TABLE ledger_entries CASCADE",
    "drop a trigger": "DROP TRIGGER append_only ON ledger_entries",
    "change the function": "ALTER FUNCTION ledger_append(uuid, bigint, bytea, bytea[]) SECURITY INVOKER",
    "replace the function": (
        "CREATE OR REPLACE FUNCTION ledger_append(p_run_id uuid, p_seq bigint, p_prev bytea, p_bodies bytea[])"
        " RETURNS bytea LANGUAGE sql AS 'SELECT p_prev'"
    ),
    "put a table in the way": "CREATE TABLE public.anything (n int)",
    "put a schema in the way": "CREATE SCHEMA other",
    "become the owner": f"SET ROLE {OWNER}",
    "become the migrator": f"SET ROLE {MIGRATOR}",
    "grant oneself rights": "GRANT UPDATE ON ledger_entries TO podium; UPDATE ledger_entries SET body = body",
    "take ownership": "ALTER TABLE ledger_entries OWNER TO podium",
    "allow any move of states": "INSERT INTO legal_transitions VALUES ('run', 'succeeded', 'running')",
    "say another schema version": "UPDATE alembic_version SET version_num = '0001'",
    "change a pinned pool": "UPDATE pool_snapshots SET document = ''",
    "delete runs": "DELETE FROM runs",
    "delete attempts": "DELETE FROM attempts",
}


@pytest.fixture
async def filled(database: Database, tmp_path: Path) -> Database:
    """A database with runs on record, a log, nodes and a checkpoint."""
    await runs_on_record(database)
    await sealed(database, Signer(AuditFolder(tmp_path / "audit")))
    return database


@pytest.fixture
def database_url(own_database_url: str) -> str:
    """Each test has its own log."""
    return own_database_url


async def refused(url: str, statement: str) -> str | None:
    """The SQLSTATE with which a statement is refused; None if it is not."""
    async with await psycopg.AsyncConnection.connect(plain_url(url)) as link:
        try:
            await link.execute(statement.encode())
        except psycopg.Error as error:
            return error.sqlstate
        finally:
            await link.rollback()
    return None


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=[name.replace(" ", "-") for name in ATTACKS])
async def test_the_applications_role_has_no_right_to(own_filled: str, attack: str) -> None:
    assert await refused(own_filled, attack) == NO_RIGHT


@pytest.fixture(scope="module")
def own_filled(servers: TestServers, template_database: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """One filled database for all the refused attacks, which change nothing."""
    import asyncio

    url = servers.new_database(template_database)

    async def fill() -> None:
        database = Database(url)
        await runs_on_record(database)
        await sealed(database, Signer(AuditFolder(tmp_path_factory.mktemp("signer") / "audit")))
        await database.close()

    asyncio.run(fill())
    return url


async def test_a_temporary_table_does_not_stand_in_the_way_of_the_functions(filled: Database) -> None:
    """The functions act with the owner's rights, so nobody may slip other tables or operators under them."""
    before = await rows(filled.url, "SELECT count(*) AS n FROM ledger_entries")
    async with await psycopg.AsyncConnection.connect(plain_url(filled.url), autocommit=True) as link:
        for table in ("ledger_entries", "ledger_heads", "runs", "log_leaves"):
            await link.execute(f"CREATE TEMP TABLE {table} (LIKE public.{table})".encode())
        await link.execute("SET search_path = pg_temp, public")
        with pytest.raises(psycopg.Error) as caught:
            await link.execute(
                "SELECT public.ledger_append(%s, 0, decode(repeat('00', 32), 'hex'), ARRAY['{}'::bytea])", (TENANT,)
            )
        assert caught.value.sqlstate == "PD002"
        count = await (await link.execute("SELECT count(*) FROM public.ledger_entries")).fetchone()
        assert count == (before[0]["n"],)
        assert await (await link.execute("SELECT count(*) FROM pg_temp.ledger_entries")).fetchone() == (0,)


@pytest.mark.parametrize("role", ["superuser", "owner"])
async def test_the_triggers_stop_whoever_has_the_rights_too(filled: Database, role: str) -> None:
    """An accident of the owner or a superuser; whoever means it disables the triggers, which checkpoints find out."""
    for table in GUARDED:
        column = "signed_at" if table == "log_checkpoints" else "tenant_id"
        statements = (
            f"UPDATE {table} SET {column} = {column}",
            f"DELETE FROM {table} WHERE false",
            f"TRUNCATE {table}",
            f"SET session_replication_role = replica; DELETE FROM {table}"
            if role == "superuser"
            else f"DELETE FROM {table}",
        )
        for statement in statements:
            made = f"SET ROLE {OWNER}; {statement}" if role == "owner" else statement
            assert await refused(superuser_url(filled.url), made) == ONLY_GROWS, statement
    for statement in (
        "DELETE FROM ledger_heads",
        "TRUNCATE ledger_heads",
        "UPDATE ledger_heads SET seq = seq",
        "UPDATE ledger_heads SET seq = seq - 1",
        f"INSERT INTO ledger_heads VALUES ('{UUID(int=5)}', 3, sha256('x'))",
    ):
        assert await refused(superuser_url(filled.url), statement) == ONLY_GROWS, statement


async def test_a_head_begins_at_the_genesis_only(filled: Database) -> None:
    genesis = "decode(repeat('00', 32), 'hex')"
    made = f"INSERT INTO ledger_heads VALUES ('{UUID(int=5)}', {{}}, {{}})"
    assert await refused(filled.url, made.format(3, genesis)) == ONLY_GROWS
    assert await refused(filled.url, made.format(0, "sha256('x')")) == ONLY_GROWS
    assert await refused(filled.url, made.format(0, genesis)) is None


async def test_what_is_inserted_past_the_function_waits_for_its_leaf_all_the_same(filled: Database) -> None:
    """As a session of the version before does that was in the middle of its append while the schema was upgraded."""
    run_id = UUID(int=9)
    async with await psycopg.AsyncConnection.connect(plain_url(superuser_url(filled.url)), autocommit=True) as link:
        await link.execute("SET session_replication_role = replica")
        await link.execute(
            "INSERT INTO ledger_entries VALUES (%s, 1, %s, sha256('a'), sha256('b'), 'b', 'x', now())", (run_id, TENANT)
        )
    assert await rows(filled.url, "SELECT * FROM ledger_pending") == [{"tenant_id": TENANT, "run_id": run_id, "seq": 1}]


async def test_the_application_owns_nothing_and_everything_has_one_owner(filled: Database) -> None:
    owned = await rows(
        filled.url,
        "SELECT relname AS name, pg_get_userbyid(relowner) AS owner FROM pg_class"
        " WHERE relnamespace = 'public'::regnamespace"
        " UNION ALL SELECT proname, pg_get_userbyid(proowner) FROM pg_proc WHERE pronamespace = 'public'::regnamespace"
        " UNION ALL SELECT datname, pg_get_userbyid(datdba) FROM pg_database WHERE datname = current_database()",
    )
    assert len(owned) > 40
    assert {row["owner"] for row in owned} == {OWNER}
    member = "SELECT r.rolname FROM pg_auth_members m JOIN pg_roles r ON r.oid = m.roleid WHERE m.member = %s::regrole"
    assert {row["rolname"] for row in await rows(filled.url, member, "podium")} == set(GROUPS)
    assert {row["rolname"] for row in await rows(filled.url, member, MIGRATOR)} == {OWNER}
    powers = "SELECT rolname FROM pg_roles WHERE rolname LIKE 'podium%%' AND (rolsuper OR rolcreaterole OR rolcreatedb)"
    assert [row["rolname"] for row in await rows(filled.url, powers)] == ["podium_setup"]


async def test_the_migrator_has_no_rights_until_it_says_that_it_is_the_owner(filled: Database) -> None:
    url = migrator_url(filled.url)
    for statement in (
        "SELECT * FROM runs",
        "SELECT * FROM ledger_entries",
        "INSERT INTO pool_snapshots VALUES ('a', 'b', '')",
    ):
        assert await refused(url, statement) == NO_RIGHT
    assert await refused(url, "CREATE TABLE more (n int)") == NO_RIGHT
    assert await refused(url, f"SET ROLE {OWNER}; CREATE TABLE more (n int)") is None
    assert schema_version(url).standing == "current"


async def test_the_application_may_not_migrate(servers: TestServers) -> None:
    url = servers.new_database(roles=True)
    try:
        with pytest.raises(UnavailableError) as caught:
            upgrade_schema(url)
        assert caught.value.code == "migration-not-allowed"
        assert upgrade_schema(migrator_url(url)).applied
        require_current_schema(url)
        # A database that is up to date needs no rights to be found so.
        assert upgrade_schema(url).applied == []
    finally:
        servers.drop_database(url)


async def test_with_one_role_everything_works_and_the_triggers_hold(servers: TestServers) -> None:
    """A server of one's own with one role: it owns the tables, so nothing but its own will keeps it from changes."""
    url = servers.new_database()
    upgrade_schema(url)
    database = Database(url)
    try:
        (run_id,) = await runs_on_record(database)
        await system_entry(database)
        await log.extend_log(database)
        check_invariants(await record(url, run_id))
        assert await check_log(url) > 6
        assert await refused(url, "DELETE FROM ledger_entries") == ONLY_GROWS
        owners = await rows(
            url,
            "SELECT DISTINCT pg_get_userbyid(relowner) AS o FROM pg_class WHERE relnamespace = 'public'::regnamespace",
        )
        assert owners == [{"o": SINGLE}]
        # Another installation's roles in the same cluster get nothing here.
        assert not (await rows(url, "SELECT has_table_privilege('podium_reader', 'runs', 'SELECT') AS may"))[0]["may"]
    finally:
        await database.close()
        servers.drop_database(url)


async def test_both_ways_lead_to_the_same_schema(servers: TestServers, filled: Database) -> None:
    url = servers.new_database()
    upgrade_schema(url)
    try:
        assert catalogue(url) == catalogue(superuser_url(filled.url))
    finally:
        servers.drop_database(url)


async def test_rights_are_given_again_where_the_roles_came_later(servers: TestServers, filled: Database) -> None:
    admin = superuser_url(filled.url)
    async with await psycopg.AsyncConnection.connect(plain_url(admin), autocommit=True) as link:
        for group in GROUPS:
            for kind in ("TABLES", "FUNCTIONS"):
                statement = sql.SQL("REVOKE ALL ON ALL {} IN SCHEMA public FROM {}")
                await link.execute(statement.format(sql.SQL(kind), sql.Identifier(group)))
    assert await refused(filled.url, "SELECT 1 FROM runs") == NO_RIGHT
    assert upgrade_schema(migrator_url(filled.url)).applied == []
    await runs_on_record(filled)
    await log.extend_log(filled)
    assert await check_log(filled.url) > 6


ADMINISTRATOR = "podium_test_administrator"


@pytest.mark.parametrize("administrator", ["superuser", "owner of the database"])
async def test_the_printed_script_turns_a_server_of_ones_own_into_one_with_roles(
    servers: TestServers, administrator: str, tmp_path: Path
) -> None:
    """As a DBA would: one role before, runs on record; the script; the upgrade as the migrator; then attacks."""
    url = servers.new_database()
    upgrade_schema(url)
    database = Database(url)
    (run_id,) = await runs_on_record(database)
    await database.close()
    env = {"PODIUM_DATABASE_URL": url, "PODIUM_TEMPORAL_ADDRESS": "127.0.0.1:1", "PODIUM_KEY_STORE": "none"}
    done = podium("db", "roles", home=tmp_path / "home", env=env)
    assert (done.code, done.err) == (0, "")
    script = done.out
    assert "PASSWORD" not in script
    # As in docker-compose.yml: whoever is not named does not get in.
    name = url.partition("?")[0].rpartition("/")[2]
    await execute(superuser_url(url), f'REVOKE CONNECT, TEMPORARY ON DATABASE "{name}" FROM PUBLIC')
    if administrator == "superuser":
        link = await psycopg.AsyncConnection.connect(plain_url(superuser_url(url)), autocommit=True)
    else:
        # As on a managed server: may make roles, may not do everything. The roles of this cluster are there already.
        link = await psycopg.AsyncConnection.connect(plain_url(superuser_url(url)), autocommit=True)
        for statement in (
            f"CREATE ROLE {ADMINISTRATOR} LOGIN CREATEROLE",
            f'ALTER DATABASE "{name}" OWNER TO {ADMINISTRATOR}',
            f"GRANT {SINGLE}, {OWNER}, {MIGRATOR}, {', '.join(GROUPS)} TO {ADMINISTRATOR} WITH ADMIN OPTION",
            f"SET SESSION AUTHORIZATION {ADMINISTRATOR}",
        ):
            await link.execute(statement.encode())
    try:
        for _ in range(2):
            await link.execute(script.encode())
        await link.execute("RESET SESSION AUTHORIZATION")
        assert upgrade_schema(migrator_url(url)).applied == []
        assert await refused(url, "DELETE FROM ledger_entries") == NO_RIGHT
        assert await refused(url, "ALTER TABLE ledger_entries DISABLE TRIGGER ALL") == NO_RIGHT
        assert await refused(url, "CREATE TABLE more (n int)") == NO_RIGHT
        database = Database(url)
        await runs_on_record(database)
        await sealed(database, Signer(AuditFolder(tmp_path / "audit")))
        check_invariants(await record(url, run_id))
        async with database.read() as connection:
            assert await may_change_ledger(connection) is None
        await database.close()
    finally:
        await link.close()
        servers.drop_database(url)
        # The single role of the other tests is no member of anything.
        grantor = "" if administrator == "superuser" else f"GRANTED BY {ADMINISTRATOR}"
        await execute(servers.postgres_admin_url, f"REVOKE {', '.join(GROUPS)} FROM {SINGLE} {grantor}")


@pytest.mark.parametrize("name", ["podium_owner", "podium_migrator", 'a"b', "", "x" * 70])
def test_a_name_that_cannot_be_the_applications_is_refused(name: str, tmp_path: Path) -> None:
    done = podium("db", "roles", "--application", name, "--json", home=tmp_path / "home")
    assert done.code == 2
    assert not (tmp_path / "home").exists()


async def test_doctor_knows_who_could_change_the_ledger(servers: TestServers, filled: Database) -> None:
    async with filled.read() as connection:
        assert await may_change_ledger(connection) is None
    single = Database(servers.new_database())
    upgrade_schema(single.url)
    for database, role in ((single, SINGLE), (Database(superuser_url(filled.url)), SUPERUSER)):
        async with database.read() as connection:
            assert await may_change_ledger(connection) == role
        await database.close()
    servers.drop_database(single.url)
