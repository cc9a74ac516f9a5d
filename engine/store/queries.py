"""The statements of the hot path, named, in one place. Each transaction is few round trips.

They go out through `engine.store.exchange`, which gives the form of the placeholders. Times come from the database's
clock, read once per transaction by ``READ_HEAD``.
"""

from __future__ import annotations

from typing import Final, LiteralString

# Every writer of a run takes this lock first; FOR NO KEY UPDATE lets foreign keys to the run pass.
LOCK_RUN: Final[LiteralString] = "SELECT * FROM runs WHERE id = %s FOR NO KEY UPDATE"

READ_HEAD: Final[LiteralString] = """
    SELECT seq, hash, clock_timestamp() AS now, EXISTS (SELECT FROM budgets WHERE run_id = %(run_id)s) AS budgeted,
           EXISTS (SELECT FROM steps WHERE run_id = %(run_id)s AND state = 'failed') AS failing
    FROM ledger_heads WHERE run_id = %(run_id)s
"""

READ_STEP: Final[LiteralString] = "SELECT * FROM steps WHERE run_id = %s AND round = %s AND position = %s"

READ_PLAN: Final[LiteralString] = "SELECT * FROM plans WHERE run_id = %s AND round = %s"

READ_STEPS: Final[LiteralString] = "SELECT * FROM steps WHERE run_id = %s AND round = %s ORDER BY position"

READ_ALL_STEPS: Final[LiteralString] = "SELECT * FROM steps WHERE run_id = %s ORDER BY round, position"

# Steps that are neither finished nor left out: with none but its own, a Close may end the run.
READ_UNFINISHED: Final[LiteralString] = """
    SELECT position, state, reason, reads FROM steps
    WHERE run_id = %s AND round = %s AND state NOT IN ('succeeded', 'reused', 'skipped')
"""

READ_ATTEMPTS: Final[LiteralString] = """
    SELECT id, round, position, number, state, error_code, accepted, execution, dispatch, temporal_attempt,
           input_tokens, output_tokens, cost_usd, worker, reserved_usd, reserved_tokens,
           prompt_commitment
    FROM attempts
    WHERE run_id = %s AND round = %s AND position IS NOT DISTINCT FROM %s
    ORDER BY number
"""

READ_OPEN_ATTEMPTS: Final[LiteralString] = """
    SELECT id, round, position, number, state, error_code, accepted, execution, dispatch, temporal_attempt,
           input_tokens, output_tokens, cost_usd, worker, reserved_usd, reserved_tokens,
           prompt_commitment
    FROM attempts
    WHERE run_id = %s AND state = 'sent'
    ORDER BY id
"""

# The orders and deadlines of all ancestors: a child may not call anything that its parent may not. An ancestor with a
# step that failed for good starts nothing new, and lets only calls in flight finish.
READ_ANCESTORS: Final[LiteralString] = """
    WITH RECURSIVE ancestors AS (
        SELECT id, parent_run_id, state, round, cancel_requested_at, paused_at, deadline_at
        FROM runs WHERE id = (SELECT parent_run_id FROM runs WHERE id = %s)
        UNION ALL
        SELECT up.id, up.parent_run_id, up.state, up.round, up.cancel_requested_at, up.paused_at, up.deadline_at
        FROM runs up JOIN ancestors ON up.id = ancestors.parent_run_id
    )
    SELECT state, cancel_requested_at, paused_at, deadline_at,
           EXISTS (SELECT FROM steps
                   WHERE run_id = ancestors.id AND round = ancestors.round AND steps.state = 'failed') AS failing
    FROM ancestors
"""

BEGIN: Final[LiteralString] = "BEGIN ISOLATION LEVEL READ COMMITTED"

COMMIT: Final[LiteralString] = "COMMIT"

# All that a transaction changes in a run's row: its state (if it moves), signs of life, and the totals.
UPDATE_RUN: Final[LiteralString] = """
    UPDATE runs SET
        state = %(state)s,
        reason = %(reason)s,
        started_at = CASE WHEN %(moved)s AND %(state)s <> 'created' THEN coalesce(started_at, %(now)s)
                          ELSE started_at END,
        ended_at = CASE WHEN NOT %(moved)s THEN ended_at WHEN %(ended)s THEN %(now)s::timestamptz END,
        execution_seen = greatest(execution_seen, %(execution_seen)s),
        input_tokens = input_tokens + %(input_tokens)s,
        output_tokens = output_tokens + %(output_tokens)s,
        cost_usd = cost_usd + %(cost_usd)s,
        attempts_unpriced = attempts_unpriced + %(attempts_unpriced)s,
        attempts_count = attempts_count + %(attempts_count)s
    WHERE id = %(run_id)s
"""

SET_STEP_STATE: Final[LiteralString] = """
    UPDATE steps SET
        state = %(state)s,
        reason = %(reason)s,
        accepted_attempt_id = coalesce(%(accepted)s, accepted_attempt_id),
        started_at = CASE WHEN %(state)s = 'running' THEN coalesce(started_at, %(now)s) ELSE started_at END,
        ended_at = CASE WHEN %(state)s IN ('succeeded', 'failed', 'skipped', 'reused', 'cancelled')
                        THEN %(now)s::timestamptz END
    WHERE run_id = %(run_id)s AND round = %(round)s AND position = %(position)s
"""

# An output waits for its reviews; afterwards it is accepted, or gone.
SET_CANDIDATE: Final[LiteralString] = """
    UPDATE steps SET candidate_attempt_id = %(candidate)s
    WHERE run_id = %(run_id)s AND round = %(round)s AND position = %(position)s
"""

CLEAR_CANDIDATE: Final[LiteralString] = """
    UPDATE steps SET candidate_attempt_id = NULL
    WHERE run_id = %(run_id)s AND round = %(round)s AND position = %(position)s
"""

ACCEPT_ATTEMPT: Final[LiteralString] = "UPDATE attempts SET accepted = true WHERE id = %s"

# Another worker takes a step over; what was tried before does not count against it.
SUBSTITUTE_STEP: Final[LiteralString] = """
    UPDATE steps SET worker = %(worker)s, model = %(model)s, queue = %(queue)s,
        planned_worker = coalesce(planned_worker, worker), attempts_base = %(attempts_base)s,
        state = 'pending', reason = NULL, ended_at = NULL
    WHERE run_id = %(run_id)s AND round = %(round)s AND position = %(position)s
"""

# A new try of a step: it holds the fence, and the step runs.
TAKE_STEP: Final[LiteralString] = """
    UPDATE steps SET fence_execution = %s, fence_dispatch = %s, fence_attempt = %s,
        state = 'running', reason = NULL, started_at = coalesce(started_at, %s), ended_at = NULL
    WHERE run_id = %s AND round = %s AND position = %s
"""

SET_PLAN_FENCE: Final[LiteralString] = """
    UPDATE plans SET fence_execution = %s, fence_dispatch = %s, fence_attempt = %s
    WHERE run_id = %s AND round = %s
"""

INSERT_ATTEMPT: Final[LiteralString] = """
    INSERT INTO attempts
        (id, tenant_id, run_id, round, position, number, state, execution, dispatch, temporal_attempt,
         worker, model, process_id, prompt_commitment, reserved_usd, reserved_tokens, sent_at)
    VALUES
        (%(id)s, %(tenant_id)s, %(run_id)s, %(round)s, %(position)s, %(number)s, 'sent', %(execution)s, %(dispatch)s,
         %(temporal_attempt)s, %(worker)s, %(model)s, %(process_id)s, %(prompt_commitment)s, %(reserved_usd)s,
         %(reserved_tokens)s, %(now)s)
"""

CLOSE_ATTEMPT: Final[LiteralString] = """
    UPDATE attempts SET
        state = %(state)s, error_code = %(error_code)s, accepted = %(accepted)s, ended_at = %(now)s,
        finish_reason = %(finish_reason)s, notes = %(notes)s, provider_status = %(provider_status)s,
        provider_request_id = %(provider_request_id)s, provider_model = %(provider_model)s,
        input_tokens = %(input_tokens)s, output_tokens = %(output_tokens)s, cost_usd = %(cost_usd)s,
        first_token_ms = %(first_token_ms)s, duration_ms = %(duration_ms)s
    WHERE id = %(id)s
"""

ACCEPT_PLAN: Final[LiteralString] = """
    UPDATE plans SET form = %s, steps_count = %s, accepted_attempt_id = %s, accepted_at = %s
    WHERE run_id = %s AND round = %s
"""

INSERT_STEP: Final[LiteralString] = """
    INSERT INTO steps (id, run_id, round, position, worker, model, queue, reads, reads_all, state, reason, ended_at)
    VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)
"""

APPEND_LEDGER: Final[LiteralString] = "SELECT ledger_append(%s, %s, %s, %s)"

READ_RUN: Final[LiteralString] = "SELECT * FROM runs WHERE id = %s"

INSERT_PLAN_ROW: Final[LiteralString] = "INSERT INTO plans (id, run_id, round) VALUES (%s, %s, %s)"

SET_ROUND: Final[LiteralString] = "UPDATE runs SET round = %s WHERE id = %s"

SET_STEP_FENCE: Final[LiteralString] = """
    UPDATE steps SET fence_execution = %s, fence_dispatch = %s, fence_attempt = %s
    WHERE run_id = %s AND round = %s AND position = %s
"""

INSERT_HEAD: Final[LiteralString] = "INSERT INTO ledger_heads (run_id, seq, hash) VALUES (%s, 0, %s)"

INSERT_POOL: Final[LiteralString] = """
    INSERT INTO pool_snapshots (digest, name, document) VALUES (%s, %s, %s) ON CONFLICT (digest) DO NOTHING
"""

# An order was written down, and the workflow is to look at the record.
SET_WAKE: Final[LiteralString] = "UPDATE runs SET wake_requested_at = %s WHERE id = %s"
