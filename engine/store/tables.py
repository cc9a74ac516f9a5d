"""The tables. Text by people, models and providers is in ``artifacts`` only; other tables hold ids, codes, numbers.

Names of workers, models and queues come from pool files and count as identifiers. Times are the database's clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from decimal import Decimal
from uuid import UUID

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    CheckConstraint,
    DateTime,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Numeric,
    PrimaryKeyConstraint,
    Text,
    UniqueConstraint,
    Uuid,
    func,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from engine.store.states import ATTEMPT_STATES, RUN_STATES, STEP_STATES

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    "pk": "pk_%(table_name)s",
}
# The tenant of an installation that has only one.
DEFAULT_TENANT = "00000000-0000-0000-0000-000000000001"


def _one_of(column: str, values: Iterable[str]) -> str:
    return f"{column} IN ({', '.join(repr(value) for value in values)})"


class Base(DeclarativeBase):
    """All tables; time columns carry their zone, text has no length, money is an exact decimal."""

    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map = {  # noqa: RUF012  # the name and the form are SQLAlchemy's
        datetime: DateTime(timezone=True),
        Decimal: Numeric(20, 10),
        str: Text(),
        int: Integer(),
        UUID: Uuid(),
        bytes: LargeBinary(),
        bool: Boolean(),
    }


class PoolSnapshot(Base):
    """A pool as a run pinned it: the canonical document, prompts included, without secrets."""

    __tablename__ = "pool_snapshots"
    digest: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    document: Mapped[bytes]
    created_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())


class Run(Base):
    """One execution of one task; a tree through ``parent_run_id``. ``execution`` says which workflow should exist."""

    __tablename__ = "runs"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID]
    actor_id: Mapped[str]
    on_behalf_of: Mapped[str | None]
    state: Mapped[str]
    reason: Mapped[str | None]
    execution: Mapped[int] = mapped_column(server_default="1")
    # The highest execution that has shown a sign of life: tells a workflow that is gone from one never started.
    execution_seen: Mapped[int] = mapped_column(server_default="0")
    round: Mapped[int] = mapped_column(server_default="0")
    origin: Mapped[str]
    pool_digest: Mapped[str] = mapped_column(ForeignKey("pool_snapshots.digest"))
    idempotency_key: Mapped[str | None]
    # The tree: a child belongs to a step of its parent; a fork names its source.
    parent_run_id: Mapped[UUID | None] = mapped_column(ForeignKey("runs.id"))
    parent_round: Mapped[int | None]
    parent_position: Mapped[int | None]
    source_run_id: Mapped[UUID | None] = mapped_column(ForeignKey("runs.id"))
    depth: Mapped[int] = mapped_column(server_default="0")
    # Orders given to the run; who gave them and why is in the ledger.
    cancel_requested_at: Mapped[datetime | None]
    paused_at: Mapped[datetime | None]
    deadline_at: Mapped[datetime | None]
    # An order was written down and the workflow has not been woken yet; whoever wakes it clears this.
    wake_requested_at: Mapped[datetime | None]
    # How many rounds of plans the run may have, the first included.
    rounds_max: Mapped[int] = mapped_column(server_default="1")
    # Totals over all attempts, whatever became of them. An attempt of unknown cost makes the total incomplete.
    input_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    output_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    cost_usd: Mapped[Decimal] = mapped_column(server_default="0")
    attempts_unpriced: Mapped[int] = mapped_column(server_default="0")
    attempts_count: Mapped[int] = mapped_column(server_default="0")
    # Which keys its texts are sealed with, see `engine.keystore`; 0 is a run whose texts are in the clear.
    key_epoch: Mapped[int] = mapped_column(server_default="0")
    created_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    started_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]

    __table_args__ = (
        CheckConstraint(_one_of("state", RUN_STATES), name="state"),
        CheckConstraint(_one_of("origin", ("conductor", "file", "template", "fork")), name="origin"),
        CheckConstraint("execution >= 1 AND execution_seen BETWEEN 0 AND execution", name="execution"),
        CheckConstraint("(state IN ('succeeded', 'failed', 'cancelled')) = (ended_at IS NOT NULL)", name="ended"),
        CheckConstraint("num_nonnulls(parent_run_id, parent_round, parent_position) IN (0, 3)", name="parent"),
        CheckConstraint("cost_usd >= 0 AND input_tokens >= 0 AND output_tokens >= 0", name="totals"),
        CheckConstraint("rounds_max >= 1", name="rounds_max"),
        Index("uq_runs_idempotency_key", "tenant_id", "idempotency_key", unique=True),
        Index("ix_runs_created_at", "tenant_id", "created_at", "id"),
        Index("ix_runs_live", "id", postgresql_where=text("state IN ('created', 'planning', 'running', 'waiting')")),
        Index("ix_runs_parent_run_id", "parent_run_id", postgresql_where=text("parent_run_id IS NOT NULL")),
        Index("ix_runs_source_run_id", "source_run_id", postgresql_where=text("source_run_id IS NOT NULL")),
        Index("ix_runs_wake", "id", postgresql_where=text("wake_requested_at IS NOT NULL")),
    )


class Budget(Base):
    """The limits of a run and all runs below it; None is no limit. A run without limits has no row.

    ``reserved`` is the worst case of calls in flight, ``assumed`` the worst case of calls whose outcome is lost.
    """

    __tablename__ = "budgets"
    run_id: Mapped[UUID] = mapped_column(ForeignKey("runs.id"), primary_key=True)
    tenant_id: Mapped[UUID]
    usd_limit: Mapped[Decimal | None]
    tokens_limit: Mapped[int | None] = mapped_column(BigInteger)
    calls_limit: Mapped[int | None] = mapped_column(BigInteger)
    usd_spent: Mapped[Decimal] = mapped_column(server_default="0")
    usd_reserved: Mapped[Decimal] = mapped_column(server_default="0")
    usd_assumed: Mapped[Decimal] = mapped_column(server_default="0")
    tokens_spent: Mapped[int] = mapped_column(BigInteger, server_default="0")
    tokens_reserved: Mapped[int] = mapped_column(BigInteger, server_default="0")
    tokens_assumed: Mapped[int] = mapped_column(BigInteger, server_default="0")
    calls_spent: Mapped[int] = mapped_column(BigInteger, server_default="0")
    calls_reserved: Mapped[int] = mapped_column(BigInteger, server_default="0")
    calls_assumed: Mapped[int] = mapped_column(BigInteger, server_default="0")

    __table_args__ = (
        CheckConstraint("usd_limit >= 0 AND tokens_limit >= 0 AND calls_limit >= 0", name="limits"),
        CheckConstraint(
            "usd_spent >= 0 AND usd_reserved >= 0 AND usd_assumed >= 0"
            " AND tokens_spent >= 0 AND tokens_reserved >= 0 AND tokens_assumed >= 0"
            " AND calls_spent >= 0 AND calls_reserved >= 0 AND calls_assumed >= 0",
            name="sums",
        ),
    )


class Plan(Base):
    """The plan of one round of a run. The row exists from the start; ``accepted_at`` is null until there is a plan."""

    __tablename__ = "plans"
    id: Mapped[UUID] = mapped_column(unique=True)
    run_id: Mapped[UUID] = mapped_column(ForeignKey("runs.id"))
    round: Mapped[int]
    form: Mapped[str | None]
    steps_count: Mapped[int | None]
    accepted_attempt_id: Mapped[UUID | None]
    fence_execution: Mapped[int] = mapped_column(server_default="0")
    fence_dispatch: Mapped[int] = mapped_column(server_default="0")
    fence_attempt: Mapped[int] = mapped_column(server_default="0")
    accepted_at: Mapped[datetime | None]

    __table_args__ = (
        PrimaryKeyConstraint("run_id", "round"),
        CheckConstraint("form IN ('lists', 'json', 'steps-json', 'steps-yaml')", name="form"),
        CheckConstraint("(accepted_at IS NULL) = (steps_count IS NULL)", name="accepted"),
    )


class Step(Base):
    """A position of a plan. ``reads`` is the access list spelled out; ``reads_all`` keeps that it was written "all"."""

    __tablename__ = "steps"
    id: Mapped[UUID] = mapped_column(unique=True)
    run_id: Mapped[UUID] = mapped_column(ForeignKey("runs.id"))
    round: Mapped[int]
    position: Mapped[int]
    worker: Mapped[str]
    model: Mapped[str]
    queue: Mapped[str]
    reads: Mapped[list[int]] = mapped_column(ARRAY(Integer))
    reads_all: Mapped[bool]
    state: Mapped[str]
    reason: Mapped[str | None]
    # The attempt whose output was accepted; in another run's tree when the step is reused.
    accepted_attempt_id: Mapped[UUID | None]
    # The newest try that was opened, in the order (execution, dispatch, Temporal attempt). Older ones are refused.
    fence_execution: Mapped[int] = mapped_column(server_default="0")
    fence_dispatch: Mapped[int] = mapped_column(server_default="0")
    fence_attempt: Mapped[int] = mapped_column(server_default="0")
    # The worker that the plan named, once a substitute has taken its place.
    planned_worker: Mapped[str | None]
    # Attempts up to this number do not count against the worker's limit: a substitute or an operator began anew.
    attempts_base: Mapped[int] = mapped_column(server_default="0")
    # The attempt whose output waits for a review, and how often reviewers have sent an output back.
    candidate_attempt_id: Mapped[UUID | None]
    sent_back: Mapped[int] = mapped_column(server_default="0")
    started_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]

    __table_args__ = (
        PrimaryKeyConstraint("run_id", "round", "position"),
        ForeignKeyConstraint(["run_id", "round"], ["plans.run_id", "plans.round"], name="fk_steps_plan"),
        CheckConstraint(_one_of("state", STEP_STATES), name="state"),
        CheckConstraint("position >= 0", name="position"),
        CheckConstraint(
            "(state IN ('succeeded', 'reused')) = (accepted_attempt_id IS NOT NULL)",
            name="accepted",
        ),
        CheckConstraint("candidate_attempt_id IS NULL OR accepted_attempt_id IS NULL", name="candidate"),
    )


class Attempt(Base):
    """One call of a model, for a step or (``position`` null) for planning, whatever became of it."""

    __tablename__ = "attempts"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID]
    run_id: Mapped[UUID] = mapped_column(ForeignKey("runs.id"))
    round: Mapped[int]
    position: Mapped[int | None]
    number: Mapped[int]
    state: Mapped[str]
    error_code: Mapped[str | None]
    execution: Mapped[int]
    dispatch: Mapped[int]
    temporal_attempt: Mapped[int]
    worker: Mapped[str]
    model: Mapped[str]
    process_id: Mapped[UUID | None]
    accepted: Mapped[bool] = mapped_column(server_default="false")
    # What the model was shown: the manifest artifact renders it again, this salted HMAC proves it.
    prompt_commitment: Mapped[bytes]
    finish_reason: Mapped[str | None]
    # Codes of what was done to the answer, for example "nul-replaced".
    notes: Mapped[list[str]] = mapped_column(ARRAY(Text), server_default="{}")
    provider_status: Mapped[int | None]
    provider_request_id: Mapped[str | None]
    provider_model: Mapped[str | None]
    input_tokens: Mapped[int | None]
    output_tokens: Mapped[int | None]
    cost_usd: Mapped[Decimal | None]
    reserved_usd: Mapped[Decimal | None]
    reserved_tokens: Mapped[int | None] = mapped_column(BigInteger)
    first_token_ms: Mapped[int | None]
    duration_ms: Mapped[int | None]
    sent_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]

    __table_args__ = (
        CheckConstraint(_one_of("state", ATTEMPT_STATES), name="state"),
        CheckConstraint("(state = 'sent') = (ended_at IS NULL)", name="ended"),
        CheckConstraint("NOT accepted OR state = 'succeeded'", name="accepted"),
        CheckConstraint("cost_usd >= 0 AND reserved_usd >= 0", name="cost"),
        UniqueConstraint(
            "run_id", "round", "position", "number", name="uq_attempts_number", postgresql_nulls_not_distinct=True
        ),
        # At most one accepted output per step, and one accepted plan per round, is this index, not a hope.
        Index(
            "uq_attempts_accepted",
            "run_id",
            "round",
            text("coalesce(position, -1)"),
            unique=True,
            postgresql_where=text("accepted"),
        ),
        Index("ix_attempts_sent", "process_id", postgresql_where=text("state = 'sent'")),
    )


class Artifact(Base):
    """Stored bytes. ``owner_id`` is the run, plan, step or attempt; parts of one kind are ordered by ``ordinal``.

    ``salt`` belongs to the commitment that the ledger holds; both go when the artifact is erased. ``content`` is sealed
    with the run's keys of ``key_epoch``, and then the salt is inside it; with epoch 0 both are in the clear. ``run_id``
    is the chain whose entry commits to it: a run's, or the tenant's own.
    """

    __tablename__ = "artifacts"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    tenant_id: Mapped[UUID]
    run_id: Mapped[UUID]
    owner_id: Mapped[UUID]
    kind: Mapped[str]
    ordinal: Mapped[int] = mapped_column(server_default="0")
    role: Mapped[str]
    media_type: Mapped[str]
    content: Mapped[bytes | None]
    salt: Mapped[bytes | None]
    byte_count: Mapped[int]
    key_epoch: Mapped[int] = mapped_column(server_default="0")
    # Set when its erasure begins; the content is there until the key is gone, then both times are.
    erasure_id: Mapped[UUID | None]
    erased_at: Mapped[datetime | None]
    created_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())

    __table_args__ = (
        UniqueConstraint("owner_id", "kind", "ordinal"),
        CheckConstraint("octet_length(salt) = 32", name="salt"),
        CheckConstraint("(content IS NULL) = (erased_at IS NOT NULL)", name="erased"),
        CheckConstraint("(salt IS NOT NULL) = (key_epoch = 0 AND erased_at IS NULL)", name="sealed"),
        Index("ix_artifacts_erasure_id", "erasure_id", postgresql_where=text("erasure_id IS NOT NULL")),
        Index("ix_artifacts_run_id", "run_id"),
    )


class LedgerHead(Base):
    """The end of a chain: the number of entries so far and the hash of the last one (32 zero bytes at first).

    ``run_id`` is the chain's id: a run's, or the tenant's for what belongs to no run (the system chain).
    """

    __tablename__ = "ledger_heads"
    run_id: Mapped[UUID] = mapped_column(primary_key=True)
    seq: Mapped[int] = mapped_column(BigInteger)
    hash: Mapped[bytes]


class LedgerEntry(Base):
    """One event of a run. ``body`` is the truth, byte for byte; ``type`` and ``at`` are projections for queries.

    ``run_id`` is the chain's id, as in ``LedgerHead``. Entries come in through ``ledger_append`` and never change.
    """

    __tablename__ = "ledger_entries"
    run_id: Mapped[UUID]
    seq: Mapped[int] = mapped_column(BigInteger)
    tenant_id: Mapped[UUID]
    prev: Mapped[bytes]
    hash: Mapped[bytes]
    body: Mapped[bytes]
    type: Mapped[str]
    at: Mapped[datetime]

    __table_args__ = (
        PrimaryKeyConstraint("run_id", "seq"),
        CheckConstraint("seq >= 1", name="seq"),
        UniqueConstraint("run_id", "hash"),
        # The history of the signer's keys.
        Index(
            "ix_ledger_entries_keys",
            "run_id",
            "seq",
            postgresql_where=text("type IN ('key.created', 'key.rotated')"),
        ),
    )


class LegalTransition(Base):
    """The moves between states that the database lets through; written by migrations from ``engine.store.states``."""

    __tablename__ = "legal_transitions"
    subject: Mapped[str]
    old_state: Mapped[str]
    new_state: Mapped[str]

    __table_args__ = (PrimaryKeyConstraint("subject", "old_state", "new_state"),)


class WorkerProcess(Base):
    """The lease of a worker process: by host, boot, process id and start time a successor proves it dead."""

    __tablename__ = "worker_processes"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    host: Mapped[str]
    boot_id: Mapped[str]
    pid: Mapped[int]
    pid_started: Mapped[str]
    started_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    seen_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())
    ended_at: Mapped[datetime | None]


class TemporalCluster(Base):
    """The one Temporal cluster and namespace that executes this database's runs; another one is refused."""

    __tablename__ = "temporal_cluster"
    singleton: Mapped[bool] = mapped_column(primary_key=True, server_default="true")
    cluster_id: Mapped[str]
    namespace: Mapped[str]
    remembered_at: Mapped[datetime] = mapped_column(server_default=func.clock_timestamp())

    __table_args__ = (CheckConstraint("singleton", name="singleton"),)


# The tables of other modules, so that all are known wherever these are.
from engine.store import key_tables as _key_tables  # noqa: E402, F401  # they need the base above
from engine.store import log_tables as _log_tables  # noqa: E402, F401  # they need the base above
from engine.store import review_tables as _review_tables  # noqa: E402, F401  # they need the base above
