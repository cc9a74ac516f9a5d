"""Creating a run: everything is written before Temporal hears of it, so a submitter may die at any moment."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal
from uuid import UUID

from psycopg.errors import UniqueViolation

from engine.errors import BugError, RefusedError, UnavailableError
from engine.ledger.entry import timestamp
from engine.plan import canonical_plan
from engine.store import queries
from engine.store.artifacts import TEXT, ArtifactDraft, read_contents_within
from engine.store.budgets import INSERT_BUDGET, NO_LIMITS, Limits
from engine.store.database import Database
from engine.store.drafts import PlanDraft
from engine.store.exchange import Connection, exchange
from engine.store.forks import ForkDraft, fork_fields, hold_sources, write_reused
from engine.store.ids import plan_id
from engine.store.plans import write_plan
from engine.store.run_writer import new_run_writer

Origin = Literal["conductor", "file", "template", "fork"]

_INSERT_RUN = """
    INSERT INTO runs (id, tenant_id, actor_id, on_behalf_of, state, origin, source_run_id, pool_digest,
                      idempotency_key, deadline_at,
                      rounds_max, key_epoch)
    VALUES (%(id)s, %(tenant_id)s, %(actor_id)s, %(on_behalf_of)s, 'created', %(origin)s, %(source_run_id)s,
            %(pool_digest)s, %(idempotency_key)s, clock_timestamp() + make_interval(secs => %(deadline_s)s),
            %(rounds_max)s, %(key_epoch)s)
    RETURNING clock_timestamp() AS now, deadline_at
"""
# The run is younger than this checkpoint, which brackets its time from below.
_READ_CHECKPOINT = "SELECT max(size) AS size FROM log_checkpoints WHERE tenant_id = %s"
_FIND_BY_KEY = """
    SELECT runs.id, runs.origin, runs.pool_digest, created.body AS created
    FROM runs
    JOIN ledger_entries created ON created.run_id = runs.id AND created.seq = 1
    WHERE runs.tenant_id = %s AND runs.idempotency_key = %s
"""


@dataclass(frozen=True, slots=True)
class NewRun:
    """A run about to be created. ``plan`` is None when the Conductor plans; ``deadline_s`` counts from now.

    ``fork`` is given for a fork (which always has a plan): what it takes over, and from where.
    """

    id: UUID
    tenant_id: UUID
    actor_id: str
    on_behalf_of: str | None
    task: str
    origin: Origin
    pool_name: str
    pool_digest: str
    pool_document: bytes
    plan: PlanDraft | None = None
    idempotency_key: str | None = None
    deadline_s: float | None = None
    rounds_max: int = 1
    limits: Limits = NO_LIMITS
    fork: ForkDraft | None = None


@dataclass(frozen=True, slots=True)
class CreatedRun:
    """The run that now exists; ``existing`` says that an earlier request with the same key had made it."""

    id: UUID
    existing: bool


async def create_run(database: Database, new: NewRun) -> CreatedRun:
    """Writes a run with its task, pool and (if there is one) plan.

    With an idempotency key that is in use: the same request gives the run that exists, another one is refused with
    RefusedError ``idempotency-conflict``.
    """

    async def work(connection: Connection) -> CreatedRun:
        if new.idempotency_key is not None:
            existing = await _find_existing(connection, new)
            if existing is not None:
                return existing
        # On disk before the run can be. If we die in between, they are an orphan's, which the sweep forgets.
        keys = None if database.keys is None else await database.keys.create(new.id)
        await _insert(connection, new, key_epoch=0 if keys is None else keys.epoch)
        return CreatedRun(new.id, existing=False)

    try:
        created = await database.write(work)
    except UniqueViolation:
        # Another submitter with the same key, or our own first try whose COMMIT got no answer, was there first.
        created = await database.write(lambda connection: _find_again(connection, new))
    if database.keys is not None and not created.existing:
        with contextlib.suppress(UnavailableError):
            await database.keys.settle(new.id)
    return created


async def _find_again(connection: Connection, new: NewRun) -> CreatedRun:
    (found,) = await exchange(connection, [("SELECT 1 FROM runs WHERE id = %s", (new.id,))])
    if found:
        return CreatedRun(new.id, existing=False)
    existing = await _find_existing(connection, new)
    if existing is None:
        raise BugError("run-lost", "another run stood in the way of this one, and then there was none")
    return existing


async def _find_existing(connection: Connection, new: NewRun) -> CreatedRun | None:
    (rows,) = await exchange(connection, [(_FIND_BY_KEY, (new.tenant_id, new.idempotency_key))])
    if not rows:
        return None
    found = rows[0]
    if found["id"] == new.id:
        return CreatedRun(new.id, existing=False)
    plan = plan_id(found["id"], 0)
    contents = await read_contents_within(connection, [found["id"], plan], ("task", "plan"))
    if contents.erased:
        raise RefusedError(
            "idempotency-conflict",
            f"the idempotency key belongs to run {found['id']}, whose texts were erased, so nobody can compare them",
            hint="use a new key for a new request",
        )
    found |= {"task": contents.get((found["id"], "task")), "plan": contents.get((plan, "plan"))}
    if not _same_request(found, new):
        raise RefusedError(
            "idempotency-conflict",
            f"the idempotency key belongs to run {found['id']}, which was another request",
            hint="use a new key for a new request",
        )
    return CreatedRun(found["id"], existing=True)


def _same_request(found: dict[str, Any], new: NewRun) -> bool:
    """Compares what was asked, not a hash of it: nothing guessable about the task is stored."""
    if (found["origin"], found["pool_digest"]) != (new.origin, new.pool_digest):
        return False
    if not _same_limits(json.loads(bytes(found["created"]))["data"].get("budget"), new.limits):
        return False
    if found["task"] != new.task.encode():
        return False
    return new.plan is None or bool(found["plan"] == canonical_plan(new.plan.plan))


def _same_limits(said: dict[str, Any] | None, limits: Limits) -> bool:
    """Whether a run was created with these limits; ``said`` is from its first entry, they may have changed since."""
    before = said or dict.fromkeys(("usd", "tokens", "calls"))
    usd = None if before["usd"] is None else Decimal(before["usd"])
    return Limits(usd, before["tokens"], before["calls"]) == limits


async def _insert(connection: Connection, new: NewRun, *, key_epoch: int) -> None:
    run = {
        "id": new.id,
        "tenant_id": new.tenant_id,
        "actor_id": new.actor_id,
        "on_behalf_of": new.on_behalf_of,
        "origin": new.origin,
        "source_run_id": None if new.fork is None else new.fork.source_run_id,
        "pool_digest": new.pool_digest,
        "idempotency_key": new.idempotency_key,
        # Seconds, never days: a day is 23 or 25 hours long where clocks are changed.
        "deadline_s": new.deadline_s,
        "rounds_max": new.rounds_max,
        "key_epoch": key_epoch,
    }
    _, _, (row,), (signed,) = await exchange(
        connection,
        [
            (queries.BEGIN, ()),
            (queries.INSERT_POOL, (new.pool_digest, new.pool_name, new.pool_document)),
            (_INSERT_RUN, run),
            (_READ_CHECKPOINT, (new.tenant_id,)),
        ],
    )
    if new.fork is not None:
        await hold_sources(connection, new.fork)
    writer = new_run_writer(
        connection,
        new.id,
        tenant_id=new.tenant_id,
        actor_id=new.actor_id,
        on_behalf_of=new.on_behalf_of,
        now=row["now"],
        key_epoch=key_epoch,
    )
    writer.statement(queries.INSERT_HEAD, (new.id, writer.head))
    writer.statement(queries.INSERT_PLAN_ROW, (plan_id(new.id, 0), new.id, 0))
    if new.limits:
        limits = (new.limits.usd, new.limits.tokens, new.limits.calls)
        writer.statement(INSERT_BUDGET, (new.id, new.tenant_id, *limits))
    task = ArtifactDraft(new.id, "task", new.task.encode(), role="task", media_type=TEXT)
    writer.entry(
        "run.created",
        origin=new.origin,
        pool=new.pool_digest,
        execution=1,
        deadline=None if row["deadline_at"] is None else timestamp(row["deadline_at"]),
        rounds_max=new.rounds_max,
        depth=0,
        budget=new.limits.said(),
        checkpoint=signed["size"],
        artifacts=writer.artifacts([task]),
        **({} if new.fork is None else {"source": fork_fields(new.fork)}),
    )
    if new.plan is not None:
        write_plan(writer, 0, new.plan)
    if new.fork is not None:
        write_reused(writer, new.fork)
    await writer.commit()
    # Now the run exists; whoever starts workers next finds it.
