"""Orders, budgets, operators' answers, revision rounds: what a run that fails, waits or is continued needs.

Everything is added, nothing is taken away, so workers of the version before go on while the new ones start.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

# A copy on purpose: a migration is history.
NEW_TRANSITIONS = (
    ("step", "running", "pending"),  # a substitute takes over
    ("step", "waiting", "pending"),  # an operator wants another try
)
ORIGINS = ("conductor", "file", "template")
ROUND_0_ORIGINS = (*ORIGINS, "fork")


def upgrade() -> None:
    """Adds columns with defaults, which PostgreSQL does without rewriting a table."""
    op.create_table(
        "budgets",
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("usd_limit", sa.Numeric(20, 10), nullable=True),
        sa.Column("tokens_limit", sa.BigInteger(), nullable=True),
        sa.Column("calls_limit", sa.BigInteger(), nullable=True),
        *(
            sa.Column(f"{unit}_{kind}", type_, server_default="0", nullable=False)
            for unit, type_ in (("usd", sa.Numeric(20, 10)), ("tokens", sa.BigInteger()), ("calls", sa.BigInteger()))
            for kind in ("spent", "reserved", "assumed")
        ),
        sa.CheckConstraint("usd_limit >= 0 AND tokens_limit >= 0 AND calls_limit >= 0", name=op.f("ck_budgets_limits")),
        sa.CheckConstraint(
            "usd_spent >= 0 AND usd_reserved >= 0 AND usd_assumed >= 0"
            " AND tokens_spent >= 0 AND tokens_reserved >= 0 AND tokens_assumed >= 0"
            " AND calls_spent >= 0 AND calls_reserved >= 0 AND calls_assumed >= 0",
            name=op.f("ck_budgets_sums"),
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_budgets_run_id")),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_budgets")),
    )
    op.add_column("runs", sa.Column("rounds_max", sa.Integer(), server_default="1", nullable=False))
    op.add_column("runs", sa.Column("wake_requested_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("steps", sa.Column("planned_worker", sa.Text(), nullable=True))
    op.add_column("steps", sa.Column("attempts_base", sa.Integer(), server_default="0", nullable=False))
    op.add_column("attempts", sa.Column("reserved_tokens", sa.BigInteger(), nullable=True))
    op.create_check_constraint(op.f("ck_runs_rounds_max"), "runs", "rounds_max >= 1")
    op.create_index("ix_runs_source_run_id", "runs", ["source_run_id"], postgresql_where="source_run_id IS NOT NULL")
    op.create_index("ix_runs_wake", "runs", ["id"], postgresql_where="wake_requested_at IS NOT NULL")
    _allow_origins(ROUND_0_ORIGINS)
    table = sa.table("legal_transitions", *map(sa.column, ("subject", "old_state", "new_state")))
    op.bulk_insert(
        table,
        [{"subject": subject, "old_state": old, "new_state": new} for subject, old, new in NEW_TRANSITIONS],
    )


def downgrade() -> None:
    """Takes away what this version added; refuses while the record holds anything that only it can express."""
    connection = op.get_bind()
    for what, query in (
        ("budgets", "SELECT 1 FROM budgets"),
        ("forks", "SELECT 1 FROM runs WHERE origin = 'fork'"),
        ("runs with revision rounds", "SELECT 1 FROM runs WHERE rounds_max > 1"),
        ("child runs", "SELECT 1 FROM runs WHERE parent_run_id IS NOT NULL"),
        ("steps given to another worker", "SELECT 1 FROM steps WHERE planned_worker IS NOT NULL"),
        ("steps that wait for an operator", "SELECT 1 FROM steps WHERE state = 'waiting' AND reason = 'operator'"),
        (
            "steps that began anew",
            "SELECT 1 FROM steps WHERE attempts_base > 0 AND state IN ('pending', 'running', 'waiting')",
        ),
    ):
        if connection.execute(sa.text(f"{query} LIMIT 1")).first() is not None:  # the words above
            raise RuntimeError(f"the database holds {what}, which schema 0001 cannot express")
    for subject, old, new in NEW_TRANSITIONS:
        connection.execute(
            sa.text("DELETE FROM legal_transitions WHERE subject = :subject AND old_state = :old AND new_state = :new"),
            {"subject": subject, "old": old, "new": new},
        )
    _allow_origins(ORIGINS)
    op.drop_index("ix_runs_wake", "runs")
    op.drop_index("ix_runs_source_run_id", "runs")
    op.drop_constraint(op.f("ck_runs_rounds_max"), "runs")
    op.drop_column("attempts", "reserved_tokens")
    op.drop_column("steps", "attempts_base")
    op.drop_column("steps", "planned_worker")
    op.drop_column("runs", "wake_requested_at")
    op.drop_column("runs", "rounds_max")
    op.drop_table("budgets")


def _allow_origins(origins: tuple[str, ...]) -> None:
    words = ", ".join(f"'{origin}'" for origin in origins)
    op.drop_constraint(op.f("ck_runs_origin"), "runs")
    op.create_check_constraint(op.f("ck_runs_origin"), "runs", f"origin IN ({words})")
