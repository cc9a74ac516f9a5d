"""What a database's catalogue says about our tables, in a form that can be compared."""

from __future__ import annotations

from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

# The order of columns is left out: a column that a later migration adds is the last one there.
_QUERIES = {
    "columns": """
        SELECT c.relname || '.' || a.attname, format_type(a.atttypid, a.atttypmod) || CASE WHEN a.attnotnull
               THEN ' NOT NULL' ELSE '' END || coalesce(' DEFAULT ' || pg_get_expr(d.adbin, d.adrelid), '')
        FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
        LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
        WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r' AND a.attnum > 0 AND NOT a.attisdropped
          AND c.relname <> 'alembic_version'""",
    "constraints": """
        SELECT c.relname || '.' || k.conname, pg_get_constraintdef(k.oid) || ' ' || k.convalidated
        FROM pg_constraint k JOIN pg_class c ON c.oid = k.conrelid
        WHERE c.relnamespace = 'public'::regnamespace AND c.relname <> 'alembic_version'""",
    "indexes": """
        SELECT tablename || '.' || indexname, indexdef FROM pg_indexes
        WHERE schemaname = 'public' AND tablename <> 'alembic_version'""",
    "triggers": """
        SELECT c.relname || '.' || t.tgname, pg_get_triggerdef(t.oid) || ' enabled ' || t.tgenabled::text
        FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
        WHERE c.relnamespace = 'public'::regnamespace AND NOT t.tgisinternal""",
    "functions": """
        SELECT p.proname || '(' || pg_get_function_arguments(p.oid) || ')',
               p.prosrc || ' definer ' || p.prosecdef || coalesce(p.proconfig::text, '')
        FROM pg_proc p WHERE p.pronamespace = 'public'::regnamespace""",
    "rows": "SELECT subject || ': ' || old_state || ' to ' || new_state, '' FROM legal_transitions",
}
STRUCTURE = ("columns", "constraints", "indexes")


def catalogue(url: str, *parts: str) -> dict[str, dict[str, str]]:
    """Name and definition of everything of the given kinds (all without `parts`)."""
    engine = create_engine(url, poolclass=NullPool)
    try:
        with engine.connect() as connection:
            return {
                part: {str(name): str(definition) for name, definition in connection.execute(text(_QUERIES[part]))}
                for part in parts or _QUERIES
            }
    finally:
        engine.dispose()


def revision(url: str) -> str | None:
    """The revision that the database says it has."""
    engine = create_engine(url, poolclass=NullPool)
    try:
        with engine.connect() as connection:
            if connection.execute(text("SELECT to_regclass('alembic_version')")).scalar_one() is None:
                return None
            return connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()
    finally:
        engine.dispose()
