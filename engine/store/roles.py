"""The database roles that make append-only real, and what each may do. Must never hold a password.

    podium_owner       owns every table and function; cannot log in
    podium_migrator    logs in for migrations and then becomes the owner; has no rights of its own
    podium_writer      what workers and commands write; appends to the ledger through `ledger_append` only
    podium_reader      reads everything
    podium_sequencer   extends the log through `log_extend`, stores checkpoints

The role that the application connects as is a member of the last three and owns nothing. Where there is one role only,
it owns everything, and what is said here is not in force against it: `podium doctor` says so.
"""

from __future__ import annotations

import re
from typing import Final

from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncConnection

OWNER: Final = "podium_owner"
MIGRATOR: Final = "podium_migrator"
WRITER: Final = "podium_writer"
READER: Final = "podium_reader"
SEQUENCER: Final = "podium_sequencer"
GROUPS: Final = (WRITER, READER, SEQUENCER)

_ALL_BUT_DELETE: Final = ("INSERT", "UPDATE")
# What a writer may do with a table besides reading it. Tables that are not named here: insert and update.
_WRITES: Final[dict[str, tuple[str, ...]]] = {
    "alembic_version": (),
    "legal_transitions": (),
    "ledger_entries": (),
    "ledger_pending": (),
    "log_leaves": (),
    "log_nodes": (),
    "log_checkpoints": (),
    # A new chain's head, which a trigger holds to the genesis; it moves through `ledger_append` only.
    "ledger_heads": ("INSERT",),
    # Runs pin them by digest.
    "pool_snapshots": ("INSERT",),
    # What people decided and looked at, whose accounts are whose, and the salt of samples: only ever added to.
    "review_decisions": ("INSERT",),
    "review_openings": ("INSERT",),
    "persons": ("INSERT",),
    "sampling_salts": ("INSERT",),
}
# Functions that act with the owner's rights and are not for writers.
_SEQUENCES: Final = ("log_extend",)

_MAY_BECOME_OWNER: Final = """
    SELECT coalesce(
        (SELECT pg_has_role(session_user, owner.oid, 'MEMBER') AND coalesce(
            (SELECT relowner = owner.oid FROM pg_class WHERE oid = to_regclass('runs')),
            has_schema_privilege(owner.oid, current_schema(), 'CREATE'))
         FROM pg_roles owner WHERE owner.rolname = :owner), false)
"""
_OWN_TABLES: Final = """
    SELECT relname FROM pg_class
    WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p')
      AND relowner = (SELECT oid FROM pg_roles WHERE rolname = current_user)
    ORDER BY relname
"""
_OWN_FUNCTIONS: Final = """
    SELECT proname, oid::regprocedure::text AS signature FROM pg_proc
    WHERE pronamespace = current_schema()::regnamespace
      AND proowner = (SELECT oid FROM pg_roles WHERE rolname = current_user)
    ORDER BY 2
"""
# Owners may do anything with their tables, also through a role that they are members of, and superusers with all.
_MAY_CHANGE: Final = """
    SELECT current_user AS role, coalesce(
        (SELECT bool_or(
            pg_has_role(current_user, c.relowner, 'MEMBER')
            OR has_table_privilege(current_user, c.oid, 'UPDATE, DELETE, TRUNCATE'))
         FROM pg_class c WHERE c.oid IN (to_regclass('ledger_entries'), to_regclass('log_leaves'))), false) AS may
"""
_IN_FORCE: Final = """
    SELECT coalesce(has_function_privilege(:writer, to_regprocedure('ledger_append(uuid,bigint,bytea,bytea[])'),
                                           'EXECUTE'), false)
"""


def become_owner(connection: Connection) -> bool:
    """Acts as the owner role until the transaction's end, where the roles are in use and this session may.

    They are in use if the owner role owns Podium's tables, or may make them in an empty database. Otherwise whoever is
    connected owns what it makes, and False is returned.
    """
    if not connection.execute(text(_MAY_BECOME_OWNER), {"owner": OWNER}).scalar_one():
        return False
    connection.execute(text(f"SET LOCAL ROLE {OWNER}"))
    return True


def grants_in_force(connection: Connection) -> bool:
    """Whether the roles have their rights on this schema; for the owner, after `become_owner`."""
    return bool(connection.execute(text(_IN_FORCE), {"writer": WRITER}).scalar_one())


def apply_grants(connection: Connection) -> None:
    """Gives the roles exactly their rights on all tables and functions of the owner; repeating it changes nothing."""
    groups = ", ".join(GROUPS)
    for table in connection.execute(text(_OWN_TABLES)).scalars().all():
        writes = _WRITES.get(table, _ALL_BUT_DELETE)
        connection.execute(text(f'REVOKE ALL ON "{table}" FROM PUBLIC, {groups}'))
        connection.execute(text(f'GRANT SELECT ON "{table}" TO {groups}'))
        if writes:
            connection.execute(text(f'GRANT {", ".join(writes)} ON "{table}" TO {WRITER}'))
        if table == "log_checkpoints":
            connection.execute(text(f"GRANT INSERT ON log_checkpoints TO {SEQUENCER}"))
        if table == "alembic_version":
            connection.execute(text(f"GRANT SELECT ON alembic_version TO {MIGRATOR}"))
    for name, signature in connection.execute(text(_OWN_FUNCTIONS)).all():
        connection.execute(text(f"REVOKE ALL ON FUNCTION {signature} FROM PUBLIC, {groups}"))
        caller = SEQUENCER if name in _SEQUENCES else WRITER
        connection.execute(text(f"GRANT EXECUTE ON FUNCTION {signature} TO {caller}"))


async def may_change_ledger(connection: AsyncConnection) -> str | None:
    """The role of this connection if it could change the ledger, by its rights or because it owns it; else None."""
    row = (await connection.execute(text(_MAY_CHANGE))).one()
    return None if not row.may else str(row.role)


def create_statements(migrator_password: str | None = None) -> list[str]:
    """SQL that makes the roles where they are missing, one statement a line; for a superuser or a role that may.

    The password, if given, consists of letters, digits, ``-`` and ``_``.
    """
    attributes = {OWNER: "NOLOGIN", MIGRATOR: "LOGIN NOINHERIT", **dict.fromkeys(GROUPS, "NOLOGIN")}
    statements = [
        f"DO $$ BEGIN IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{role}')"
        f" THEN CREATE ROLE {role} {words}; END IF; END $$;"
        for role, words in attributes.items()
    ]
    # The migrator does not inherit: it must say SET ROLE, and until then it has no rights.
    statements.append(f"GRANT {OWNER} TO {MIGRATOR};")
    if migrator_password is not None:
        statements.append(f"ALTER ROLE {MIGRATOR} PASSWORD '{migrator_password}';")
    return statements


_IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_$-]{0,62}")
_SCRIPT: Final = """\
-- The roles of Podium. Run this once, connected to Podium's database, while no worker runs; again does no harm.
-- As a superuser, or as a role that may create roles and databases and may act for whoever owns this one.
BEGIN;
<create>
DO $$
DECLARE
    one record;
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '<application>') THEN
        CREATE ROLE "<application>" LOGIN;
    END IF;
    GRANT <groups> TO "<application>";
    EXECUTE format('GRANT CONNECT ON DATABASE %I TO <migrator>, "<application>"', current_database());
    -- An administrator that is no superuser must be able to give things to the owner.
    IF NOT pg_has_role(current_user, '<owner>', 'MEMBER') THEN
        GRANT <owner> TO CURRENT_USER;
    END IF;
    EXECUTE format('GRANT USAGE, CREATE ON SCHEMA %I TO <owner>', current_schema());
    EXECUTE format('GRANT USAGE ON SCHEMA %I TO <migrator>, <groups>', current_schema());
    EXECUTE format('REVOKE CREATE ON SCHEMA %I FROM PUBLIC, "<application>"', current_schema());
    -- Whoever owns the database may drop it, and everything in it.
    IF (SELECT pg_has_role('<application>', datdba, 'MEMBER') FROM pg_database WHERE datname = current_database()) THEN
        EXECUTE format('ALTER DATABASE %I OWNER TO <owner>', current_database());
    END IF;
    -- What Podium made here before belongs to the owner from now on.
    IF to_regclass('alembic_version') IS NOT NULL THEN
        FOR one IN SELECT oid::regclass AS name FROM pg_class
            WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p') LOOP
            EXECUTE format('ALTER TABLE %s OWNER TO <owner>', one.name);
        END LOOP;
        FOR one IN SELECT oid::regprocedure AS name FROM pg_proc
            WHERE pronamespace = current_schema()::regnamespace LOOP
            EXECUTE format('ALTER FUNCTION %s OWNER TO <owner>', one.name);
        END LOOP;
    END IF;
END $$;
COMMIT;
-- Then give <migrator> a password (\\password <migrator>), set PODIUM_MIGRATION_URL to it for `podium db upgrade`,
-- and run that: it gives the roles their rights. Workers and other commands never need that address.
"""


def administrator_script(application: str) -> str:
    """The SQL that an administrator runs once, connected to Podium's database, so that the roles are in force.

    ``application`` is the role in PODIUM_DATABASE_URL. It holds no password; running it again changes nothing. Raises
    ValueError for a name that is none. The database must be Podium's alone.
    """
    if not _IDENTIFIER.fullmatch(application) or application in {OWNER, MIGRATOR, *GROUPS}:
        raise ValueError("not a name for the application's role")
    names = {"application": application, "owner": OWNER, "migrator": MIGRATOR, "groups": ", ".join(GROUPS)}
    script = _SCRIPT
    for name, value in {**names, "create": "\n".join(create_statements())}.items():
        script = script.replace(f"<{name}>", value)
    return script
