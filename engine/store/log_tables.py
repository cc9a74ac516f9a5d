"""The tables of the log: one RFC 6962 Merkle tree a tenant, of which every ledger entry is a leaf.

Entries wait in ``ledger_pending`` until the sequencer gives them their leaf, so that an entry is never updated. Only
functions of the database write leaves and nodes; triggers refuse every change of what is there.
"""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from sqlalchemy import BigInteger, CheckConstraint, PrimaryKeyConstraint, UniqueConstraint, func
from sqlalchemy.orm import Mapped, mapped_column

from engine.store.tables import Base


class LedgerPending(Base):
    """An entry that is not in the log yet. Written by a trigger with the entry, taken away with its leaf."""

    __tablename__ = "ledger_pending"
    tenant_id: Mapped[UUID]
    run_id: Mapped[UUID]
    seq: Mapped[int] = mapped_column(BigInteger)

    # In the order in which the sequencer takes them.
    __table_args__ = (PrimaryKeyConstraint("tenant_id", "run_id", "seq"),)


class LogLeaf(Base):
    """The place of an entry in its tenant's log, from 0 without gaps: SHA-256(0x00 || body)."""

    __tablename__ = "log_leaves"
    tenant_id: Mapped[UUID]
    index: Mapped[int] = mapped_column(BigInteger)
    run_id: Mapped[UUID]
    seq: Mapped[int] = mapped_column(BigInteger)
    leaf_hash: Mapped[bytes]

    __table_args__ = (
        PrimaryKeyConstraint("tenant_id", "index"),
        UniqueConstraint("run_id", "seq"),
        CheckConstraint("index >= 0", name="index"),
        CheckConstraint("octet_length(leaf_hash) = 32", name="leaf_hash"),
    )


class LogNode(Base):
    """The root of a complete subtree: 2^level leaves from index x 2^level. Level 0 is ``log_leaves``."""

    __tablename__ = "log_nodes"
    tenant_id: Mapped[UUID]
    level: Mapped[int]
    index: Mapped[int] = mapped_column(BigInteger)
    hash: Mapped[bytes]

    __table_args__ = (
        PrimaryKeyConstraint("tenant_id", "level", "index"),
        CheckConstraint("level >= 1 AND index >= 0", name="place"),
        CheckConstraint("octet_length(hash) = 32", name="hash"),
    )


class LogCheckpoint(Base):
    """A signed note that the log had ``size`` leaves and this root. ``key_id`` is the signing key's, eight digits."""

    __tablename__ = "log_checkpoints"
    tenant_id: Mapped[UUID]
    size: Mapped[int] = mapped_column(BigInteger)
    root: Mapped[bytes]
    note: Mapped[bytes]
    key_id: Mapped[str]
    signed_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())

    __table_args__ = (
        PrimaryKeyConstraint("tenant_id", "size"),
        CheckConstraint("size >= 1", name="size"),
        CheckConstraint("octet_length(root) = 32", name="root"),
    )
