"""Schema 0004 is not taken back while the record holds what only it can express."""

from __future__ import annotations

import asyncio

import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from engine.store.database import Database
from engine.store.schema import scripts
from tests.support.servers import superuser_url
from tests.support.stored import stored_run

ROWS = {
    "accounts linked to persons": "INSERT INTO persons VALUES (gen_random_uuid(), 'a', 'b', 'c', now())",
    "draws of samples": "INSERT INTO sampling_salts VALUES (gen_random_uuid(), sha256('x'), now())",
    "outputs that wait for a review": "UPDATE steps SET candidate_attempt_id = gen_random_uuid()",
    "reviews": """
        INSERT INTO reviews (id, tenant_id, run_id, seq, gate, round, holds, reason, execution, subject, plan, policy,
                             shown, rule, approvals, four_eyes, bypass)
        SELECT id, tenant_id, id, 1, 'plan', 0, true, 'policy', 1, sha256('x'), sha256('x'), sha256('x'), sha256('x'),
               'x', 1, true, 'never' FROM runs""",
}


@pytest.mark.parametrize(("words", "statement"), ROWS.items(), ids=[name.replace(" ", "-") for name in ROWS])
def test_what_the_schema_before_cannot_express_keeps_this_one(database_url: str, words: str, statement: str) -> None:
    async def make() -> None:
        database = Database(database_url)
        await stored_run(database, [[]])
        await database.close()

    asyncio.run(make())
    engine = create_engine(superuser_url(database_url), poolclass=NullPool)
    (script,) = [one for one in scripts().walk_revisions() if one.revision == "0004"]
    with engine.connect() as connection:
        connection.execute(text(statement))
        with (
            Operations.context(MigrationContext.configure(connection)),
            pytest.raises(RuntimeError, match=f"the database holds {words}"),
        ):
            script.module.downgrade()
        connection.rollback()
    engine.dispose()
