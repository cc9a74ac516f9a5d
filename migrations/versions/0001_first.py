"""The first schema: runs, plans, steps, attempts, artifacts, the ledger with its append function.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# A copy on purpose: a migration is history. A test compares it with engine.store.states.
TRANSITIONS = {
    "run": [
        ("created", "planning"),
        ("created", "running"),
        ("created", "waiting"),
        ("created", "failed"),
        ("created", "cancelled"),
        ("planning", "running"),
        ("planning", "waiting"),
        ("planning", "succeeded"),
        ("planning", "failed"),
        ("planning", "cancelled"),
        ("running", "planning"),
        ("running", "waiting"),
        ("running", "succeeded"),
        ("running", "failed"),
        ("running", "cancelled"),
        ("waiting", "planning"),
        ("waiting", "running"),
        ("waiting", "succeeded"),
        ("waiting", "failed"),
        ("waiting", "cancelled"),
        ("failed", "created"),
        ("cancelled", "created"),
    ],
    "step": [
        ("pending", "running"),
        ("pending", "waiting"),
        ("pending", "succeeded"),
        ("pending", "failed"),
        ("pending", "skipped"),
        ("pending", "reused"),
        ("pending", "cancelled"),
        ("running", "waiting"),
        ("running", "succeeded"),
        ("running", "failed"),
        ("running", "skipped"),
        ("running", "cancelled"),
        ("waiting", "running"),
        ("waiting", "succeeded"),
        ("waiting", "failed"),
        ("waiting", "skipped"),
        ("waiting", "cancelled"),
        ("failed", "pending"),
        ("failed", "running"),
        ("failed", "skipped"),
        ("cancelled", "pending"),
        ("cancelled", "running"),
    ],
    "attempt": [
        ("sent", "succeeded"),
        ("sent", "refused"),
        ("sent", "failed"),
        ("sent", "cancelled"),
        ("sent", "superseded"),
        ("sent", "unknown"),
        ("unknown", "superseded"),
    ],
}

# Appends entries to a run's chain. Compares and swaps the head, and checks that each body carries the run, the
# sequence number and the previous hash that its place demands, so that a wrong entry cannot be written by mistake.
LEDGER_APPEND = """
CREATE FUNCTION ledger_append(p_run_id uuid, p_seq bigint, p_prev bytea, p_bodies bytea[])
RETURNS bytea LANGUAGE plpgsql AS $$
DECLARE
    v_body bytea;
    v_doc jsonb;
    v_seq bigint := p_seq;
    v_prev bytea := p_prev;
BEGIN
    FOREACH v_body IN ARRAY p_bodies LOOP
        v_doc := convert_from(v_body, 'UTF8')::jsonb;
        v_seq := v_seq + 1;
        IF (v_doc->>'run') IS DISTINCT FROM p_run_id::text
            OR (v_doc->>'seq') IS DISTINCT FROM v_seq::text
            OR (v_doc->>'prev') IS DISTINCT FROM encode(v_prev, 'hex') THEN
            RAISE EXCEPTION 'ledger entry does not fit its place' USING ERRCODE = 'PD002';
        END IF;
        INSERT INTO ledger_entries (run_id, seq, tenant_id, prev, hash, body, type, at)
        VALUES (p_run_id, v_seq, (v_doc->>'tenant')::uuid, v_prev, sha256(v_body), v_body,
                v_doc->>'type', (v_doc->>'at')::timestamptz);
        v_prev := sha256(v_body);
    END LOOP;
    UPDATE ledger_heads SET seq = v_seq, hash = v_prev
    WHERE run_id = p_run_id AND seq = p_seq AND hash = p_prev;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'ledger head has moved' USING ERRCODE = 'PD001';
    END IF;
    RETURN v_prev;
END
$$
"""

CHECK_TRANSITION = """
CREATE FUNCTION check_transition() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (
        SELECT FROM legal_transitions
        WHERE subject = TG_ARGV[0] AND old_state = OLD.state AND new_state = NEW.state
    ) THEN
        RAISE EXCEPTION '% cannot go from % to %', TG_ARGV[0], OLD.state, NEW.state USING ERRCODE = 'PD003';
    END IF;
    RETURN NEW;
END
$$
"""

CHECK_TRANSITION_TRIGGER = """
CREATE TRIGGER legal_transition BEFORE UPDATE OF state ON {table}
FOR EACH ROW WHEN (OLD.state IS DISTINCT FROM NEW.state) EXECUTE FUNCTION check_transition('{subject}')
"""


def upgrade() -> None:
    """Creates everything."""
    transitions = op.create_table(
        "legal_transitions",
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("old_state", sa.Text(), nullable=False),
        sa.Column("new_state", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("subject", "old_state", "new_state", name=op.f("pk_legal_transitions")),
    )
    op.create_table(
        "pool_snapshots",
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("document", sa.LargeBinary(), nullable=False),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_pool_snapshots")),
    )
    op.create_table(
        "temporal_cluster",
        sa.Column("singleton", sa.Boolean(), server_default="true", nullable=False),
        sa.Column("cluster_id", sa.Text(), nullable=False),
        sa.Column("namespace", sa.Text(), nullable=False),
        sa.Column(
            "remembered_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.CheckConstraint("singleton", name=op.f("ck_temporal_cluster_singleton")),
        sa.PrimaryKeyConstraint("singleton", name=op.f("pk_temporal_cluster")),
    )
    op.create_table(
        "worker_processes",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("boot_id", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("pid_started", sa.Text(), nullable=False),
        sa.Column(
            "started_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column("seen_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_worker_processes")),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("actor_id", sa.Text(), nullable=False),
        sa.Column("on_behalf_of", sa.Text(), nullable=True),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("execution", sa.Integer(), server_default="1", nullable=False),
        sa.Column("execution_seen", sa.Integer(), server_default="0", nullable=False),
        sa.Column("round", sa.Integer(), server_default="0", nullable=False),
        sa.Column("origin", sa.Text(), nullable=False),
        sa.Column("pool_digest", sa.Text(), nullable=False),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.Column("parent_run_id", sa.Uuid(), nullable=True),
        sa.Column("parent_round", sa.Integer(), nullable=True),
        sa.Column("parent_position", sa.Integer(), nullable=True),
        sa.Column("source_run_id", sa.Uuid(), nullable=True),
        sa.Column("depth", sa.Integer(), server_default="0", nullable=False),
        sa.Column("cancel_requested_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("paused_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("deadline_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("input_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("cost_usd", sa.Numeric(precision=20, scale=10), server_default="0", nullable=False),
        sa.Column("attempts_unpriced", sa.Integer(), server_default="0", nullable=False),
        sa.Column("attempts_count", sa.Integer(), server_default="0", nullable=False),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "(state IN ('succeeded', 'failed', 'cancelled')) = (ended_at IS NOT NULL)", name=op.f("ck_runs_ended")
        ),
        sa.CheckConstraint("origin IN ('conductor', 'file', 'template')", name=op.f("ck_runs_origin")),
        sa.CheckConstraint(
            "state IN ('created', 'planning', 'running', 'waiting', 'succeeded', 'failed', 'cancelled')",
            name=op.f("ck_runs_state"),
        ),
        sa.CheckConstraint("cost_usd >= 0 AND input_tokens >= 0 AND output_tokens >= 0", name=op.f("ck_runs_totals")),
        sa.CheckConstraint("execution >= 1 AND execution_seen BETWEEN 0 AND execution", name=op.f("ck_runs_execution")),
        sa.CheckConstraint(
            "num_nonnulls(parent_run_id, parent_round, parent_position) IN (0, 3)", name=op.f("ck_runs_parent")
        ),
        sa.ForeignKeyConstraint(["parent_run_id"], ["runs.id"], name=op.f("fk_runs_parent_run_id")),
        sa.ForeignKeyConstraint(["pool_digest"], ["pool_snapshots.digest"], name=op.f("fk_runs_pool_digest")),
        sa.ForeignKeyConstraint(["source_run_id"], ["runs.id"], name=op.f("fk_runs_source_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
    )
    op.create_index("ix_runs_created_at", "runs", ["tenant_id", "created_at", "id"], unique=False)
    op.create_index(
        "ix_runs_live",
        "runs",
        ["id"],
        unique=False,
        postgresql_where=sa.text("state IN ('created', 'planning', 'running', 'waiting')"),
    )
    op.create_index(
        "ix_runs_parent_run_id",
        "runs",
        ["parent_run_id"],
        unique=False,
        postgresql_where=sa.text("parent_run_id IS NOT NULL"),
    )
    op.create_index("uq_runs_idempotency_key", "runs", ["tenant_id", "idempotency_key"], unique=True)
    op.create_table(
        "artifacts",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("owner_id", sa.Uuid(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("ordinal", sa.Integer(), server_default="0", nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("media_type", sa.Text(), nullable=False),
        sa.Column("content", sa.LargeBinary(), nullable=False),
        sa.Column("salt", sa.LargeBinary(), nullable=False),
        sa.Column("byte_count", sa.Integer(), nullable=False),
        sa.Column(
            "created_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.CheckConstraint("octet_length(salt) = 32", name=op.f("ck_artifacts_salt")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_artifacts_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_artifacts")),
        sa.UniqueConstraint("owner_id", "kind", "ordinal", name=op.f("uq_artifacts_owner_id_kind_ordinal")),
    )
    op.create_index("ix_artifacts_run_id", "artifacts", ["run_id"], unique=False)
    op.create_table(
        "attempts",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=True),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("error_code", sa.Text(), nullable=True),
        sa.Column("execution", sa.Integer(), nullable=False),
        sa.Column("dispatch", sa.Integer(), nullable=False),
        sa.Column("temporal_attempt", sa.Integer(), nullable=False),
        sa.Column("worker", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("process_id", sa.Uuid(), nullable=True),
        sa.Column("accepted", sa.Boolean(), server_default="false", nullable=False),
        sa.Column("prompt_commitment", sa.LargeBinary(), nullable=False),
        sa.Column("finish_reason", sa.Text(), nullable=True),
        sa.Column("notes", sa.ARRAY(sa.Text()), server_default="{}", nullable=False),
        sa.Column("provider_status", sa.Integer(), nullable=True),
        sa.Column("input_tokens", sa.Integer(), nullable=True),
        sa.Column("output_tokens", sa.Integer(), nullable=True),
        sa.Column("cost_usd", sa.Numeric(precision=20, scale=10), nullable=True),
        sa.Column("reserved_usd", sa.Numeric(precision=20, scale=10), nullable=True),
        sa.Column("first_token_ms", sa.Integer(), nullable=True),
        sa.Column("duration_ms", sa.Integer(), nullable=True),
        sa.Column("sent_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("(state = 'sent') = (ended_at IS NULL)", name=op.f("ck_attempts_ended")),
        sa.CheckConstraint("NOT accepted OR state = 'succeeded'", name=op.f("ck_attempts_accepted")),
        sa.CheckConstraint(
            "state IN ('sent', 'succeeded', 'refused', 'failed', 'cancelled', 'superseded', 'unknown')",
            name=op.f("ck_attempts_state"),
        ),
        sa.CheckConstraint("cost_usd >= 0 AND reserved_usd >= 0", name=op.f("ck_attempts_cost")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_attempts_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_attempts")),
        sa.UniqueConstraint(
            "run_id", "round", "position", "number", name="uq_attempts_number", postgresql_nulls_not_distinct=True
        ),
    )
    op.create_index(
        "ix_attempts_sent", "attempts", ["process_id"], unique=False, postgresql_where=sa.text("state = 'sent'")
    )
    op.create_index(
        "uq_attempts_accepted",
        "attempts",
        ["run_id", "round", sa.literal_column("coalesce(position, -1)")],
        unique=True,
        postgresql_where=sa.text("accepted"),
    )
    op.create_table(
        "ledger_entries",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("prev", sa.LargeBinary(), nullable=False),
        sa.Column("hash", sa.LargeBinary(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("seq >= 1", name=op.f("ck_ledger_entries_seq")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_ledger_entries_run_id")),
        sa.PrimaryKeyConstraint("run_id", "seq", name=op.f("pk_ledger_entries")),
        sa.UniqueConstraint("run_id", "hash", name=op.f("uq_ledger_entries_run_id_hash")),
    )
    op.create_table(
        "ledger_heads",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("hash", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_ledger_heads_run_id")),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_ledger_heads")),
    )
    op.create_table(
        "plans",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("form", sa.Text(), nullable=True),
        sa.Column("steps_count", sa.Integer(), nullable=True),
        sa.Column("accepted_attempt_id", sa.Uuid(), nullable=True),
        sa.Column("fence_execution", sa.Integer(), server_default="0", nullable=False),
        sa.Column("fence_dispatch", sa.Integer(), server_default="0", nullable=False),
        sa.Column("fence_attempt", sa.Integer(), server_default="0", nullable=False),
        sa.Column("accepted_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("form IN ('lists', 'json', 'steps-json', 'steps-yaml')", name=op.f("ck_plans_form")),
        sa.CheckConstraint("(accepted_at IS NULL) = (steps_count IS NULL)", name=op.f("ck_plans_accepted")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_plans_run_id")),
        sa.PrimaryKeyConstraint("run_id", "round", name=op.f("pk_plans")),
        sa.UniqueConstraint("id", name=op.f("uq_plans_id")),
    )
    op.create_table(
        "steps",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("worker", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("reads", sa.ARRAY(sa.Integer()), nullable=False),
        sa.Column("reads_all", sa.Boolean(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("accepted_attempt_id", sa.Uuid(), nullable=True),
        sa.Column("fence_execution", sa.Integer(), server_default="0", nullable=False),
        sa.Column("fence_dispatch", sa.Integer(), server_default="0", nullable=False),
        sa.Column("fence_attempt", sa.Integer(), server_default="0", nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "(state IN ('succeeded', 'reused')) = (accepted_attempt_id IS NOT NULL)", name=op.f("ck_steps_accepted")
        ),
        sa.CheckConstraint(
            "state IN ('pending', 'running', 'waiting', 'succeeded', 'failed', 'skipped', 'reused', 'cancelled')",
            name=op.f("ck_steps_state"),
        ),
        sa.CheckConstraint("position >= 0", name=op.f("ck_steps_position")),
        sa.ForeignKeyConstraint(["run_id", "round"], ["plans.run_id", "plans.round"], name="fk_steps_plan"),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_steps_run_id")),
        sa.PrimaryKeyConstraint("run_id", "round", "position", name=op.f("pk_steps")),
        sa.UniqueConstraint("id", name=op.f("uq_steps_id")),
    )
    op.bulk_insert(
        transitions,
        [
            {"subject": subject, "old_state": old, "new_state": new}
            for subject, moves in TRANSITIONS.items()
            for old, new in moves
        ],
    )
    op.execute(LEDGER_APPEND)
    op.execute(CHECK_TRANSITION)
    for table, subject in (("runs", "run"), ("steps", "step"), ("attempts", "attempt")):
        op.execute(CHECK_TRANSITION_TRIGGER.format(table=table, subject=subject))


def downgrade() -> None:
    """Refuses: it would delete every record."""
    raise NotImplementedError("there is nothing before the first schema; drop the database instead")
