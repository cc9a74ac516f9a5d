"""Keys of artifacts, erasure, holds and retention.

Texts of runs that begin from here on can be sealed with keys outside the database. What is there stays as it is and
readable; workers of the version before go on with runs of theirs, but cannot read texts that are sealed.

Revision ID: 0005
Revises: 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_NOW = sa.text("clock_timestamp()")


def upgrade() -> None:
    """Adds tables and columns with defaults; an artifact may have lost its content, and may belong to a tenant."""
    op.add_column("runs", sa.Column("key_epoch", sa.Integer(), server_default="0", nullable=False))
    op.add_column("artifacts", sa.Column("key_epoch", sa.Integer(), server_default="0", nullable=False))
    op.add_column("artifacts", sa.Column("erasure_id", sa.Uuid(), nullable=True))
    op.add_column("artifacts", sa.Column("erased_at", sa.DateTime(timezone=True), nullable=True))
    op.alter_column("artifacts", "content", nullable=True)
    op.alter_column("artifacts", "salt", nullable=True)
    op.drop_constraint(op.f("fk_artifacts_run_id"), "artifacts")
    op.create_check_constraint(op.f("ck_artifacts_erased"), "artifacts", "(content IS NULL) = (erased_at IS NOT NULL)")
    op.create_check_constraint(
        op.f("ck_artifacts_sealed"), "artifacts", "(salt IS NOT NULL) = (key_epoch = 0 AND erased_at IS NULL)"
    )
    op.create_index(
        "ix_artifacts_erasure_id", "artifacts", ["erasure_id"], postgresql_where=sa.text("erasure_id IS NOT NULL")
    )
    op.create_table(
        "key_store",
        sa.Column("singleton", sa.Boolean(), server_default="true", nullable=False),
        sa.Column("store_id", sa.Uuid(), nullable=False),
        sa.Column("journal_end", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("remembered_at", sa.DateTime(timezone=True), server_default=_NOW, nullable=False),
        sa.CheckConstraint("singleton", name=op.f("ck_key_store_singleton")),
        sa.PrimaryKeyConstraint("singleton", name=op.f("pk_key_store")),
    )
    _create_erasures()
    _create_holds()


def _create_erasures() -> None:
    op.create_table(
        "erasures",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("actor_id", sa.Text(), nullable=False),
        sa.Column("on_behalf_of", sa.Text(), nullable=True),
        sa.Column("cause", sa.Text(), nullable=False),
        sa.Column("scope", sa.Text(), nullable=False),
        sa.Column("key_epoch", sa.Integer(), nullable=False),
        sa.Column("begun_at", sa.DateTime(timezone=True), server_default=_NOW, nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("cause IN ('order', 'retention')", name=op.f("ck_erasures_cause")),
        sa.CheckConstraint("scope IN ('run', 'step', 'artifact', 'copy')", name=op.f("ck_erasures_scope")),
        sa.PrimaryKeyConstraint("id", "run_id", name=op.f("pk_erasures")),
    )
    op.create_index(
        "uq_erasures_unfinished",
        "erasures",
        ["run_id"],
        unique=True,
        postgresql_where=sa.text("finished_at IS NULL"),
    )


def _create_holds() -> None:
    op.create_table(
        "holds",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("matter", sa.Text(), nullable=False),
        sa.Column("all_runs", sa.Boolean(), nullable=False),
        sa.Column("actor_id", sa.Text(), nullable=False),
        sa.Column("placed_at", sa.DateTime(timezone=True), server_default=_NOW, nullable=False),
        sa.Column("release_asked_by", sa.Text(), nullable=True),
        sa.Column("release_asked_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("released_by", sa.Text(), nullable=True),
        sa.Column("released_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("(release_asked_by IS NULL) = (release_asked_at IS NULL)", name=op.f("ck_holds_asked")),
        sa.CheckConstraint("(released_by IS NULL) = (released_at IS NULL)", name=op.f("ck_holds_released")),
        sa.CheckConstraint("released_by IS NULL OR released_by <> release_asked_by", name=op.f("ck_holds_two_people")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_holds")),
    )
    op.create_index(
        "uq_holds_matter",
        "holds",
        ["tenant_id", "matter"],
        unique=True,
        postgresql_where=sa.text("released_at IS NULL"),
    )
    op.create_table(
        "held_runs",
        sa.Column("hold_id", sa.Uuid(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("added_at", sa.DateTime(timezone=True), server_default=_NOW, nullable=False),
        sa.ForeignKeyConstraint(["hold_id"], ["holds.id"], name=op.f("fk_held_runs_hold_id")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_held_runs_run_id")),
        sa.PrimaryKeyConstraint("hold_id", "run_id", name=op.f("pk_held_runs")),
    )
    op.create_index("ix_held_runs_run_id", "held_runs", ["run_id"])


def downgrade() -> None:
    """Takes away what this version added; refuses while the record holds anything that only it can express."""
    connection = op.get_bind()
    for what, query in (
        ("sealed texts", "SELECT 1 FROM artifacts WHERE key_epoch > 0"),
        ("runs with keys", "SELECT 1 FROM runs WHERE key_epoch > 0"),
        ("erased texts", "SELECT 1 FROM artifacts WHERE erased_at IS NOT NULL"),
        ("erasures", "SELECT 1 FROM erasures"),
        ("holds", "SELECT 1 FROM holds"),
        ("texts of no run", "SELECT 1 FROM artifacts WHERE NOT EXISTS (SELECT FROM runs WHERE id = artifacts.run_id)"),
    ):
        if connection.execute(sa.text(f"{query} LIMIT 1")).first() is not None:  # the words above
            raise RuntimeError(f"the database holds {what}, which schema 0004 cannot express")
    for table in ("held_runs", "holds", "erasures", "key_store"):
        op.drop_table(table)
    op.drop_index("ix_artifacts_erasure_id", "artifacts")
    op.drop_constraint(op.f("ck_artifacts_sealed"), "artifacts")
    op.drop_constraint(op.f("ck_artifacts_erased"), "artifacts")
    op.create_foreign_key(op.f("fk_artifacts_run_id"), "artifacts", "runs", ["run_id"], ["id"])
    op.alter_column("artifacts", "salt", nullable=False)
    op.alter_column("artifacts", "content", nullable=False)
    for table, column in (
        ("artifacts", "erased_at"),
        ("artifacts", "erasure_id"),
        ("artifacts", "key_epoch"),
        ("runs", "key_epoch"),
    ):
        op.drop_column(table, column)
