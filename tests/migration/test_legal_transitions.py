"""The database enforces the same moves between states that the code knows, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import UUID, uuid4

import psycopg
import pytest

from engine.store.states import (
    ATTEMPT_STATES,
    RUN_ENDED,
    RUN_STATES,
    STEP_HAS_OUTPUT,
    STEP_STATES,
    TRANSITIONS,
)

STATES: dict[str, tuple[str, ...]] = {"run": RUN_STATES, "step": STEP_STATES, "attempt": ATTEMPT_STATES}
TENANT = UUID(int=1)
# The database's own code for a move that is not legal (the first migration).
ILLEGAL = "PD003"
Connection = psycopg.Connection[tuple[object, ...]]


@pytest.fixture
def connection(database_url: str) -> Iterator[Connection]:
    with psycopg.connect(database_url.replace("postgresql+psycopg://", "postgresql://")) as opened:
        opened.execute("INSERT INTO pool_snapshots (digest, name, document) VALUES ('d', 'test', '')")
        yield opened
        opened.rollback()


def test_the_table_in_the_database_equals_the_table_in_the_code(connection: Connection) -> None:
    stored = connection.execute("SELECT subject, old_state, new_state FROM legal_transitions").fetchall()
    in_code = [(subject, old, new) for subject, moves in TRANSITIONS.items() for old, new in moves]
    assert sorted(map(str, stored)) == sorted(map(str, in_code))
    assert len(set(in_code)) == len(in_code)


def test_the_table_names_only_states_that_exist() -> None:
    assert set(TRANSITIONS) == set(STATES)
    for subject, moves in TRANSITIONS.items():
        assert {state for move in moves for state in move} <= set(STATES[subject])


@pytest.mark.parametrize("subject", sorted(STATES))
def test_every_legal_move_passes_and_every_other_is_refused(connection: Connection, subject: str) -> None:
    for old in STATES[subject]:
        for new in STATES[subject]:
            if old == new:
                continue
            expected = None if (old, new) in TRANSITIONS[subject] else ILLEGAL
            assert move(connection, subject, old, new) == expected, f"{subject}: {old} to {new}"


@pytest.mark.parametrize("subject", sorted(STATES))
def test_a_state_that_does_not_exist_is_refused(connection: Connection, subject: str) -> None:
    with pytest.raises(psycopg.errors.CheckViolation):
        insert(connection, subject, "lost")


def move(connection: Connection, subject: str, old: str, new: str) -> str | None:
    """Makes a row in the old state and moves it; returns the SQLSTATE of the refusal, or None."""
    try:
        with connection.transaction(force_rollback=True):
            row = insert(connection, subject, old)
            changed = connection.execute(_UPDATES[subject], {"id": row, **facts(subject, new)})
            assert changed.rowcount == 1
    except psycopg.errors.RaiseException as error:
        return error.sqlstate
    except psycopg.Error as error:
        if error.sqlstate == ILLEGAL:
            return ILLEGAL
        raise
    return None


def facts(subject: str, state: str) -> dict[str, object]:
    """The columns that the CHECK constraints want together with a state."""
    ended = {"run": state in RUN_ENDED, "step": False, "attempt": state != "sent"}[subject]
    return {"state": state, "ended": ended, "output": uuid4() if state in STEP_HAS_OUTPUT else None}


_ENDED_AT = "CASE WHEN %(ended)s THEN clock_timestamp() END"
_UPDATES = {
    "run": f"UPDATE runs SET state = %(state)s, ended_at = {_ENDED_AT} WHERE id = %(id)s",
    "step": "UPDATE steps SET state = %(state)s, accepted_attempt_id = %(output)s WHERE id = %(id)s",
    "attempt": f"UPDATE attempts SET state = %(state)s, ended_at = {_ENDED_AT} WHERE id = %(id)s",
}
_INSERT_RUN = f"""
    INSERT INTO runs (id, tenant_id, actor_id, state, origin, pool_digest, ended_at)
    VALUES (%(id)s, %(tenant)s, 'tester', %(state)s, 'file', 'd', {_ENDED_AT})"""
_INSERT_PLAN = "INSERT INTO plans (id, run_id, round) VALUES (%(plan)s, %(run)s, 0)"
_INSERT_STEP = """
    INSERT INTO steps (id, run_id, round, position, worker, model, queue, reads, reads_all, state, accepted_attempt_id)
    VALUES (%(id)s, %(run)s, 0, 0, 'alpha', 'm', 'q', '{}', false, %(state)s, %(output)s)"""
_INSERT_ATTEMPT = f"""
    INSERT INTO attempts (id, tenant_id, run_id, round, position, number, state, execution, dispatch, temporal_attempt,
                          worker, model, prompt_commitment, sent_at, ended_at)
    VALUES (%(id)s, %(tenant)s, %(run)s, 0, 0, 1, %(state)s, 1, 1, 1, 'alpha', 'm', '', clock_timestamp(), {_ENDED_AT})"""


def insert(connection: Connection, subject: str, state: str) -> UUID:
    """A row of the subject in the given state, with what it hangs on; returns its id."""
    row = uuid4()
    values: dict[str, object] = {"id": row, "tenant": TENANT, "run": uuid4(), "plan": uuid4(), **facts(subject, state)}
    if subject == "run":
        connection.execute(_INSERT_RUN, values)
        return row
    connection.execute(_INSERT_RUN, values | {"id": values["run"], **facts("run", "running")})
    if subject == "step":
        connection.execute(_INSERT_PLAN, values)
        connection.execute(_INSERT_STEP, values)
    else:
        connection.execute(_INSERT_ATTEMPT, values)
    return row
