"""Reviews seen from an activity: the pool's rules as the store needs them, and asking people where Open says so.

Open decides. Where it finds that a review is missing, it is asked for here, and Open is asked again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar
from uuid import UUID

from activities.context import ActivityContext
from engine.store.attempts import Place, ReviewSight
from engine.store.database import Database
from engine.store.gates import NO_GATES, REVIEW_UNSHOWABLE, GateRule, Gates
from engine.store.inputs import read_pinned
from engine.store.review_display import read_displays
from engine.store.review_requests import request_reviews
from engine.store.reviews import GateVerdict, Wanted, answer_verdict, missing_for_output
from engine.store.sampling import sampling_salt
from worker_pools.pool import Pool

# Once to find what is missing, once to find it asked for, and once more where an approval came meanwhile.
LOOKS_MAX = 4


class Reviewed(Protocol):
    """What Open says about reviews."""

    @property
    def missing(self) -> tuple[Wanted, ...]:
        """Reviews that have to be asked for first."""

    @property
    def unchecked(self) -> bool:
        """Whether an approval came that nobody has compared with what it was given for."""


Ruled = TypeVar("Ruled", bound=Reviewed)


async def gates_of(context: ActivityContext, pool: Pool, tenant_id: UUID) -> Gates:
    """The pool's rules for reviews; without any, nothing else is read or written for their sake."""
    rules = tuple(GateRule(rule.document) for rule in pool.policy.reviews)
    if not rules:
        return NO_GATES
    sampled = any(rule.reason == "sample" for rule in rules)
    salt = await sampling_salt(context.database, tenant_id) if sampled else None
    return Gates(rules, {worker.name: worker.clearance for worker in pool.workers}, salt)


def may_review_output(pool: Pool, worker: str, *, is_last: bool) -> bool:
    """Whether the pool may ask for a review of this worker's output, whatever a sample says; the last is the answer."""
    clearance = pool.worker(worker).clearance if worker in pool.worker_names else None
    rules = [GateRule(rule.document) for rule in pool.policy.reviews]
    gates = {"after", "answer"} if is_last else {"after"}
    return any(rule.said["gate"] in gates and rule.is_for(worker, clearance) for rule in rules)


async def sight_of_run(context: ActivityContext, run_id: UUID) -> ReviewSight | None:
    """What the end of a run must know of reviews; None where its pool has no rules."""
    tenant_id, digest = await read_pinned(context.database, run_id)
    gates = await gates_of(context, await context.pool(digest), tenant_id)
    return ReviewSight(gates, await shown_now(context.database, run_id)) if gates else None


async def shown_now(database: Database, run_id: UUID) -> dict[UUID, bytes | None]:
    """Commitments to what the run's reviews would show today; None where a text is missing."""
    displays = await read_displays(database, run_id)
    return {review: None if display is None else display.shown for review, display in displays.items()}


async def reviewed(
    database: Database,
    run_id: UUID,
    gates: Gates,
    look: Callable[[ReviewSight | None], Awaitable[Ruled]],
    *,
    sent_back: int = 0,
    ends_run: bool = False,
) -> Ruled:
    """What ``look`` (an Open) rules, once all reviews that it misses have been asked for."""
    if not gates:
        return await look(None)
    unshowable = False
    for number in range(LOOKS_MAX):
        shown = await shown_now(database, run_id)
        ruling = await look(ReviewSight(gates, shown, sent_back, ends_run, unshowable))
        if not (ruling.missing or ruling.unchecked) or number + 1 == LOOKS_MAX:
            break
        if ruling.missing:
            unshowable = not await request_reviews(database, run_id, gates, ruling.missing)
    return ruling


async def ask_about_output(database: Database, place: Place, gates: Gates) -> None:
    """Asks people about an output that has just come, so that they see it at once; Open would ask as well."""
    if place.position is None:
        return
    missing = await missing_for_output(database, place.run_id, place.round, place.position, gates)
    if missing:
        await request_reviews(database, place.run_id, gates, missing)


async def hold_answer(database: Database, run_id: UUID, gates: Gates) -> GateVerdict:
    """Whether a run may end with the answer that it has; asks people first where nobody has been asked."""
    for _ in range(LOOKS_MAX):
        shown = await shown_now(database, run_id)
        verdict = await answer_verdict(database, run_id, gates, shown)
        if not (verdict.missing or verdict.unchecked):
            break
        if not await request_reviews(database, run_id, gates, verdict.missing):
            return GateVerdict("failed", code=REVIEW_UNSHOWABLE)
    return verdict
