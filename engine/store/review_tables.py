"""The tables of reviews: what was asked of people, who looked, who decided, and which accounts are one person.

Rows are what lists and statistics read; a gate believes the ledger, and only where the rows, which have passed the
triggers, say the same. Texts (reasons, comments, meanings) are
artifacts.
"""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from sqlalchemy import (
    ARRAY,
    BigInteger,
    CheckConstraint,
    ForeignKey,
    Index,
    PrimaryKeyConstraint,
    Text,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from engine.store.tables import Base, _one_of

GATES = ("plan", "before", "after", "answer")
REVIEW_STATES = (
    "open",  # somebody has to decide
    "approved",  # by as many different people as the rule wants
    "rejected",
    "expired",  # nobody decided in time; the rule says what follows
    "stale",  # what it was about has changed
    "withdrawn",  # the run ended before
    "bypassed",  # the glass was broken; a later review is forced
)


class Review(Base):
    """A question to people. Only ``state``, ``closed_at`` and ``sent_back`` ever change; a trigger holds that."""

    __tablename__ = "reviews"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID]
    run_id: Mapped[UUID] = mapped_column(ForeignKey("runs.id"))
    # The ledger's number of the entry that asks.
    seq: Mapped[int] = mapped_column(BigInteger)
    gate: Mapped[str]
    round: Mapped[int]
    position: Mapped[int | None]
    # Whether the run waits for it; if not, it looks at what is done.
    holds: Mapped[bool]
    reason: Mapped[str]
    # The output that is reviewed: the attempt that made it.
    attempt_id: Mapped[UUID | None]
    # For `before`: what the step would be done with, as the entry says it (JSON); whoever asks others asks the same.
    basis: Mapped[bytes | None]
    execution: Mapped[int]
    # What exactly is reviewed: hashes of entries, the rule's digest, and the commitment to what is displayed.
    subject: Mapped[bytes]
    plan: Mapped[bytes]
    policy: Mapped[bytes]
    shown: Mapped[bytes]
    # The rule, byte for byte, and what of it is in force: after an escalation (level 1) others decide.
    rule: Mapped[bytes]
    level: Mapped[int] = mapped_column(server_default="0")
    approvals: Mapped[int]
    four_eyes: Mapped[bool]
    reviewers: Mapped[list[str]] = mapped_column(ARRAY(Text), server_default="{}")
    # Accounts whose persons may not decide.
    excluded: Mapped[list[str]] = mapped_column(ARRAY(Text), server_default="{}")
    bypass: Mapped[str]
    expires_at: Mapped[datetime | None]
    on_expiry: Mapped[str | None]
    state: Mapped[str] = mapped_column(server_default="open")
    sent_back: Mapped[bool] = mapped_column(server_default="false")
    requested_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    closed_at: Mapped[datetime | None]

    __table_args__ = (
        CheckConstraint(_one_of("gate", GATES), name="gate"),
        CheckConstraint(_one_of("state", REVIEW_STATES), name="state"),
        CheckConstraint("reason IN ('policy', 'label', 'sample', 'order', 'break-glass')", name="reason"),
        CheckConstraint("bypass IN ('never', 'others', 'anyone')", name="bypass"),
        CheckConstraint("on_expiry IN ('reject', 'escalate', 'approve')", name="on_expiry"),
        CheckConstraint("(expires_at IS NULL) = (on_expiry IS NULL)", name="expiry"),
        CheckConstraint("(state = 'open') = (closed_at IS NULL)", name="closed"),
        CheckConstraint("(gate = 'plan') = (position IS NULL)", name="position"),
        CheckConstraint("basis IS NULL OR gate = 'before'", name="basis"),
        CheckConstraint("approvals >= 1 AND level >= 0", name="approvals"),
        CheckConstraint(
            "octet_length(subject) = 32 AND octet_length(plan) = 32 AND octet_length(policy) = 32"
            " AND octet_length(shown) = 32",
            name="hashes",
        ),
        UniqueConstraint("run_id", "seq"),
        Index("ix_reviews_open", "tenant_id", "requested_at", postgresql_where=text("state = 'open'")),
        Index(
            "ix_reviews_expires_at", "expires_at", postgresql_where=text("state = 'open' AND expires_at IS NOT NULL")
        ),
    )


class ReviewDecision(Base):
    """What one person decided. Never changed, never deleted; a trigger refuses one by somebody who may not decide."""

    __tablename__ = "review_decisions"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    review_id: Mapped[UUID] = mapped_column(ForeignKey("reviews.id"))
    decision: Mapped[str]
    meaning: Mapped[str]
    actor_id: Mapped[str]
    on_behalf_of: Mapped[str | None]
    person: Mapped[str]
    subject: Mapped[bytes]
    shown: Mapped[bytes]
    decided_at: Mapped[datetime]

    __table_args__ = (
        CheckConstraint("decision IN ('approve', 'reject', 'bypass')", name="decision"),
        # Four eyes are two people: nobody decides twice in one review.
        UniqueConstraint("review_id", "person"),
    )


class ReviewOpening(Base):
    """Somebody had a review displayed for the first time."""

    __tablename__ = "review_openings"
    review_id: Mapped[UUID] = mapped_column(ForeignKey("reviews.id"))
    person: Mapped[str]
    actor_id: Mapped[str]
    opened_at: Mapped[datetime]

    __table_args__ = (PrimaryKeyConstraint("review_id", "person"),)


class PersonLink(Base):
    """An account and the person whose it is; an account without a row is its own person. Links are never undone."""

    __tablename__ = "persons"
    tenant_id: Mapped[UUID]
    actor_id: Mapped[str]
    person: Mapped[str]
    linked_by: Mapped[str]
    linked_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())

    __table_args__ = (PrimaryKeyConstraint("tenant_id", "actor_id"), Index("ix_persons_person", "tenant_id", "person"))


class SamplingSalt(Base):
    """The secret of an installation that decides, with a run's id, what is sampled. Made once, shown to auditors."""

    __tablename__ = "sampling_salts"
    tenant_id: Mapped[UUID] = mapped_column(primary_key=True)
    salt: Mapped[bytes]
    made_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())

    __table_args__ = (CheckConstraint("octet_length(salt) = 32", name="salt"),)
