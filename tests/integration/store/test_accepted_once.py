"""At most one accepted output for a step, and one accepted plan for a round: the database itself refuses a second."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from engine.store.attempts import open_attempt
from engine.store.closing import close_step_attempt
from engine.store.database import Database
from tests.support.stored import answered, check_invariants, execute, opening, record, rows, stored_run


async def another(url: str, like: UUID, **changes: Any) -> None:
    """Writes a copy of an attempt's row beside it, with the next number and these changes."""
    (row,) = await rows(url, "SELECT * FROM attempts WHERE id = %s", like)
    row |= {"id": uuid4(), "number": row["number"] + 1, **changes}
    names = ", ".join(row)
    places = ", ".join(["%s"] * len(row))
    await execute(url, f"INSERT INTO attempts ({names}) VALUES ({places})", *row.values())


@pytest.mark.parametrize("position", [0, None])
async def test_a_second_accepted_row_for_a_step_or_a_plan_is_refused(database: Database, position: int | None) -> None:
    run_id = await stored_run(database, [[], []] if position is not None else None)
    opened = opening(run_id, position)
    await open_attempt(database, opened)
    if position is not None:
        assert (await close_step_attempt(database, answered(opened))).verdict == "done"
    else:
        statement = "UPDATE attempts SET state = 'succeeded', ended_at = now(), accepted = true WHERE id = %s"
        await execute(database.url, statement, opened.attempt_id)
    before = await record(database.url, run_id)
    assert [row["accepted"] for row in before.attempts] == [True]
    for _ in range(2):
        with pytest.raises(psycopg.errors.UniqueViolation) as caught:
            await another(database.url, opened.attempt_id, accepted=True)
        assert caught.value.diag.constraint_name == "uq_attempts_accepted"
    assert (await record(database.url, run_id)).attempts == before.attempts
    # It is the acceptance that is refused: without it, or at another place, the same row is taken.
    if position is not None:
        await another(database.url, opened.attempt_id, accepted=True, position=position + 1)
    await another(database.url, opened.attempt_id, accepted=False)
    with pytest.raises(psycopg.errors.UniqueViolation):
        await execute(database.url, "UPDATE attempts SET accepted = true WHERE run_id = %s", run_id)
    if position is not None:
        check_invariants(before)
