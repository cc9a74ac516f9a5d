"""What only whoever owns the database server can do to the record: attacks, carried out as a superuser."""

from __future__ import annotations

import psycopg
from psycopg import sql

from tests.support.servers import superuser_url
from tests.support.stored import plain_url

# The tables that triggers guard.
GUARDED = ("ledger_entries", "ledger_heads", "ledger_pending", "log_leaves", "log_nodes", "log_checkpoints")


async def as_superuser(url: str, *statements: str, params: tuple[object, ...] = ()) -> None:
    """Disables the triggers, carries the statements out, and enables the triggers again: attack 16 around any other.

    ``params`` are those of every statement. All of it is one transaction.
    """
    async with await psycopg.AsyncConnection.connect(plain_url(superuser_url(url))) as link:
        for table in GUARDED:
            await link.execute(sql.SQL("ALTER TABLE {} DISABLE TRIGGER USER").format(sql.Identifier(table)))
        for statement in statements:
            await link.execute(statement.encode(), params)
        found = await link.execute(
            "SELECT c.relname, t.tgname FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid"
            " WHERE c.relname = ANY(%s) AND NOT t.tgisinternal",
            [list(GUARDED)],
        )
        for table, trigger in await found.fetchall():
            await link.execute(
                sql.SQL("ALTER TABLE {} ENABLE ALWAYS TRIGGER {}").format(
                    sql.Identifier(table), sql.Identifier(trigger)
                )
            )


async def cut_log(url: str, size: int) -> None:
    """Leaves the first ``size`` leaves: later entries, leaves, nodes and checkpoints vanish, and heads move back.

    That is what restoring a backup does, and what somebody does who deletes the last entries (attacks 5 and 15).
    """
    await as_superuser(
        url,
        f"DELETE FROM log_checkpoints WHERE size > {size}",
        f"DELETE FROM ledger_entries WHERE (run_id, seq) IN (SELECT run_id, seq FROM log_leaves WHERE index >= {size})",
        "DELETE FROM ledger_entries WHERE (run_id, seq) IN (SELECT run_id, seq FROM ledger_pending)",
        "DELETE FROM ledger_pending",
        f"DELETE FROM log_leaves WHERE index >= {size}",
        f"DELETE FROM log_nodes WHERE (index + 1) << level > {size}",
        "DELETE FROM ledger_heads h WHERE NOT EXISTS (SELECT FROM ledger_entries e WHERE e.run_id = h.run_id)",
        "UPDATE ledger_heads h SET seq = e.seq, hash = e.hash FROM ledger_entries e WHERE e.run_id = h.run_id"
        " AND e.seq = (SELECT max(seq) FROM ledger_entries m WHERE m.run_id = h.run_id)",
    )
