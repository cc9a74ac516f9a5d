"""The tables of erasure, holds and the key store's identity. The keys themselves are never in the database."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Index, PrimaryKeyConstraint, func, text
from sqlalchemy.orm import Mapped, mapped_column

from engine.store.tables import Base


class KeyStoreMemory(Base):
    """The one key store of this database, and up to where its journal of erasures was carried out here."""

    __tablename__ = "key_store"
    singleton: Mapped[bool] = mapped_column(primary_key=True, server_default="true")
    store_id: Mapped[UUID]
    journal_end: Mapped[int] = mapped_column(BigInteger, server_default="0")
    remembered_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())

    __table_args__ = (CheckConstraint("singleton", name="singleton"),)


class Erasure(Base):
    """An erasure's part in one run. ``finished_at`` is null until keys and contents are gone and the entry is written.

    ``key_epoch`` is the run's epoch after it, 0 for a run whose texts are in the clear.
    """

    __tablename__ = "erasures"
    id: Mapped[UUID]
    run_id: Mapped[UUID]
    tenant_id: Mapped[UUID]
    actor_id: Mapped[str]
    on_behalf_of: Mapped[str | None]
    # Why: a person's order, with a text that says on which legal basis, or the pool's time of retention.
    cause: Mapped[str]
    scope: Mapped[str]
    key_epoch: Mapped[int]
    begun_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    finished_at: Mapped[datetime | None]

    __table_args__ = (
        PrimaryKeyConstraint("id", "run_id"),
        CheckConstraint("cause IN ('order', 'retention')", name="cause"),
        CheckConstraint("scope IN ('run', 'step', 'artifact', 'copy')", name="scope"),
        Index("uq_erasures_unfinished", "run_id", unique=True, postgresql_where=text("finished_at IS NULL")),
    )


class Hold(Base):
    """A legal hold by the name of its matter: texts of its runs, or (``all_runs``) of all, must not be erased."""

    __tablename__ = "holds"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID]
    matter: Mapped[str]
    all_runs: Mapped[bool]
    actor_id: Mapped[str]
    placed_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    # Two people release it: one asks, another one confirms.
    release_asked_by: Mapped[str | None]
    release_asked_at: Mapped[datetime | None]
    released_by: Mapped[str | None]
    released_at: Mapped[datetime | None]

    __table_args__ = (
        CheckConstraint("(release_asked_by IS NULL) = (release_asked_at IS NULL)", name="asked"),
        CheckConstraint("(released_by IS NULL) = (released_at IS NULL)", name="released"),
        CheckConstraint("released_by IS NULL OR released_by <> release_asked_by", name="two_people"),
        Index("uq_holds_matter", "tenant_id", "matter", unique=True, postgresql_where=text("released_at IS NULL")),
    )


class HeldRun(Base):
    """A run under a hold; the runs below it are held with it."""

    __tablename__ = "held_runs"
    hold_id: Mapped[UUID] = mapped_column(ForeignKey("holds.id"))
    run_id: Mapped[UUID] = mapped_column(ForeignKey("runs.id"))
    added_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())

    __table_args__ = (PrimaryKeyConstraint("hold_id", "run_id"), Index("ix_held_runs_run_id", "run_id"))
