"""Reviewing runs the way the command line does, and waiting until people are asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

from engine.operations.reviewing import DecisionGiven, decide_review
from engine.service import Submission, submit
from engine.store.database import Database
from engine.store.review_decisions import DecisionKind
from engine.store.review_views import ReviewLine, reviews_of_run
from tests.support.exports import TestSigner, exported, verified
from tests.support.orders import Connect, connecting
from tests.support.provider import Provider
from tests.support.stored import rows
from tests.support.workflows import pool_of, until
from worker_pools.pool import Pool
from worker_pools.process import WorkerProcess


def reviewed_pool(
    folder: Path, provider: Provider, *rules: dict[str, Any], models: tuple[str, ...] = ("plain", "plain", "plain"),
    **changes: Any,
) -> Pool:  # fmt: skip
    """A pool that wants these reviews."""
    policy = {"reviews": list(rules), **changes.pop("policy", {})}
    return pool_of(folder, provider.base_url, *models, policy=policy, **changes)


async def submit_as(process: WorkerProcess, pool: Pool, plan: str | None, actor: str = "alice", **options: Any) -> UUID:
    """Submits a run as somebody."""
    submission = Submission(task="What is gravity?", pool=pool, actor_id=actor, plan_text=plan, **options)
    return (await submit(process.database, process.client, submission)).id


async def reviews_of(database: Database, run_id: UUID) -> tuple[ReviewLine, ...]:
    """All reviews of a run, in order."""
    return await database.query(lambda connection: reviews_of_run(connection, run_id))


async def asked(database: Database, run_id: UUID, *, count: int = 1, timeout_s: float = 15.0) -> list[ReviewLine]:
    """Waits until so many reviews of the run are open, and gives them."""
    found: list[ReviewLine] = []

    async def there() -> bool:
        found[:] = [line for line in await reviews_of(database, run_id) if line.state == "open"]
        return len(found) >= count

    await until(there, timeout_s=timeout_s)
    assert len(found) == count
    return found


async def decide_as(
    process: WorkerProcess, review_id: UUID, who: str, kind: DecisionKind = "approve", connect: Connect | None = None,
    **options: Any,
) -> DecisionGiven:  # fmt: skip
    """Decides a review as somebody."""
    if kind != "approve":
        options.setdefault("reason", "because")
    way = connect or connecting(process.client)
    return await decide_review(process.database, way, review_id, kind, actor_id=who, **options)


async def every_run_is_proven(process: WorkerProcess, folder: Path) -> None:
    """Exports each run of the worker's database that has ended and lets the verifier look for a fault."""
    signer = TestSigner(process.database)
    found = await rows(
        process.database.url, "SELECT id, source_run_id FROM runs WHERE ended_at IS NOT NULL ORDER BY created_at"
    )
    assert found
    for number, row in enumerate(found):
        done = await exported(process.database, folder / f"{number}.zip", row["id"], seal=signer.seal)
        report = verified(done.path, signer)
        # A fork's bundle holds back what its source's owner has not disclosed.
        allowed = {0} if row["source_run_id"] is None else {0, 3}
        assert (report.findings.faults, report.exit_code in allowed) == ([], True), report.as_text()
