"""Resuming: a run that failed or was cancelled gets a new execution, in one transaction.

Accepted outputs stay as they are, so the new execution finds them and pays nothing twice. Must never touch them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from engine.errors import InputError, RefusedError
from engine.ledger.entry import timestamp
from engine.store import queries
from engine.store.database import Database
from engine.store.drafts import StepRoute
from engine.store.exchange import Connection, Row
from engine.store.lineage import FAMILY
from engine.store.orders import Order, lock_for_order, moment, order_entry
from engine.store.run_writer import RunWriter
from engine.store.sealing import text_erased
from engine.store.states import RUN_LIVE, STEP_HAS_OUTPUT

# Seconds, never days: a day is 23 or 25 hours long where clocks are changed.
_READ_DEADLINE = "SELECT clock_timestamp() + make_interval(secs => %s) AS at"
_READ_LIVE_BELOW = f"""{FAMILY}
    SELECT runs.id FROM runs JOIN family ON family.id = runs.id
    WHERE family.height > 0 AND runs.state = ANY(%s) ORDER BY runs.id
"""  # noqa: S608  # a constant
# What runs below would do when they are begun again, which those of unfinished steps are.
_READ_STEPS_BELOW = """
    WITH RECURSIVE unfinished AS (
        SELECT runs.id AS run_id, steps.round, steps.position, steps.worker, steps.planned_worker, 0 AS height
        FROM runs JOIN steps ON steps.run_id = runs.id
        WHERE runs.id = %s AND steps.state NOT IN ('succeeded', 'reused', 'skipped')
        UNION ALL
        SELECT child.id, steps.round, steps.position, steps.worker, steps.planned_worker, up.height + 1
        FROM unfinished up
        JOIN runs child ON child.parent_run_id = up.run_id
            AND child.parent_round = up.round AND child.parent_position = up.position AND child.state <> 'succeeded'
        JOIN steps ON steps.run_id = child.id
        WHERE steps.state NOT IN ('succeeded', 'reused', 'skipped')
    )
    SELECT run_id AS below, position, worker, planned_worker FROM unfinished
    WHERE height > 0 ORDER BY height, run_id, position
"""
# What the steps that are left may have to read; the runs below are begun again with the same texts.
_READ_ERASED = f"""{FAMILY}
    SELECT artifacts.kind, artifacts.run_id FROM artifacts JOIN family ON family.id = artifacts.run_id
    WHERE erasure_id IS NOT NULL AND kind IN ('task', 'subtask', 'output', 'plan') LIMIT 1
"""  # noqa: S608  # a constant
_RESUME_RUN = """
    UPDATE runs SET execution = %(execution)s, cancel_requested_at = NULL, paused_at = NULL, wake_requested_at = NULL,
        deadline_at = %(deadline_at)s, pool_digest = %(pool_digest)s
    WHERE id = %(run_id)s
"""
_ROUTE_STEP = """
    UPDATE steps SET worker = %(worker)s, model = %(model)s, queue = %(queue)s, planned_worker = %(planned_worker)s
    WHERE run_id = %(run_id)s AND round = %(round)s AND position = %(position)s
"""


@dataclass(frozen=True, slots=True)
class PoolSnapshotDraft:
    """A pool that a run is to be pinned to from now on."""

    name: str
    digest: str
    document: bytes


@dataclass(frozen=True, slots=True)
class Resumption:
    """How a run is to go on.

    ``pool_seen`` is the digest of the pool that the rest was made from, or that ``repin`` replaces. ``routes`` says
    where each worker's calls go in the pool from now on; ``deadline_s`` counts from now. With ``planned_workers`` the
    substitutes of unfinished steps make room for the workers that the plan named.
    """

    pool_seen: str
    routes: Mapping[str, StepRoute]
    deadline_s: float | None
    planned_workers: bool
    repin: PoolSnapshotDraft | None = None


@dataclass(frozen=True, slots=True)
class Resumed:
    """The execution that should exist now."""

    execution: int


async def resume_run(database: Database, order: Order, resumption: Resumption) -> Resumed:
    """Gives a failed or cancelled run a new execution; its unfinished steps are pending again.

    Raises RefusedError ``run-live``, ``run-succeeded``, ``run-is-child``, ``descendants-live``, ``run-changed``,
    ``text-erased`` and InputError ``worker-missing`` (the new pool lacks a worker of an unfinished step); nothing was
    changed then.
    """

    async def work(connection: Connection) -> Resumed:
        writer, known, (steps, below, steps_below, erased, deadline) = await lock_for_order(
            connection,
            order,
            (queries.READ_ALL_STEPS, (order.run_id,)),
            (_READ_LIVE_BELOW, (order.run_id, list(RUN_LIVE))),
            (_READ_STEPS_BELOW, (order.run_id,)),
            (_READ_ERASED, (order.run_id,)),
            (_READ_DEADLINE, (resumption.deadline_s,)),
        )
        run = writer.run
        if known:
            return Resumed(run["execution"])
        _refuse(run, below, resumption)
        if erased:
            raise text_erased(erased[0]["kind"], erased[0]["run_id"])
        unfinished = unfinished_steps(steps)
        for step in [*unfinished, *steps_below]:
            _refuse_missing(step, resumption)
        routed = [route_step(step, resumption.routes, planned=resumption.planned_workers) for step in unfinished]
        execution = run["execution"] + 1
        deadline_at = deadline[0]["at"]
        order_entry(
            writer,
            "run.resumed",
            order,
            execution=execution,
            deadline=None if deadline_at is None else timestamp(deadline_at),
        )
        repin = resumption.repin
        if repin is not None:
            writer.statement(queries.INSERT_POOL, (repin.digest, repin.name, repin.document))
            writer.entry("run.repinned", order=str(order.id), old=resumption.pool_seen, new=repin.digest)
        reopen(
            writer,
            routed,
            execution=execution,
            deadline_at=deadline_at,
            pool_digest=resumption.pool_seen if repin is None else repin.digest,
        )
        await writer.commit()
        # Now the new execution should exist: if we die here, the reconciler of any worker starts it.
        return Resumed(execution)

    return await database.write(work)


def _refuse(run: Row, below: Sequence[Row], resumption: Resumption) -> None:
    own = run["id"]
    if run["state"] == "succeeded":
        raise RefusedError(
            "run-succeeded",
            f"run {own} succeeded at {moment(run['ended_at'])}; there is nothing to resume",
            hint=f"podium output {own}",
        )
    if run["state"] in RUN_LIVE:
        raise RefusedError("run-live", f"run {own} has not ended: it is {run['state']}", hint=_live_hint(run))
    if run["parent_run_id"] is not None:
        raise RefusedError(
            "run-is-child",
            f"run {own} belongs to step {run['parent_position']} of run {run['parent_run_id']}",
            hint=f"podium resume {run['parent_run_id']}",
        )
    if below:
        count = len(below)
        raise RefusedError(
            "descendants-live",
            f"{count} run{'' if count == 1 else 's'} below run {own} {'has' if count == 1 else 'have'} not ended yet",
            hint=f"wait for it (podium watch {below[0]['id']}), then resume again",
        )
    if run["pool_digest"] != resumption.pool_seen:
        raise RefusedError(
            "run-changed", f"somebody else has just resumed run {own} with another pool", hint=f"podium show {own}"
        )


def _live_hint(run: Row) -> str:
    if run["cancel_requested_at"] is not None:
        return f"its cancel is under way (podium watch {run['id']}); resume it when it has ended"
    if run["paused_at"] is not None:
        return f"it is paused: podium unpause {run['id']}"
    return f"podium watch {run['id']}"


def _refuse_missing(step: Row, resumption: Resumption) -> None:
    """Raises InputError ``worker-missing`` if the new pool does not have the worker of an unfinished step."""
    worker = _worker_of(step, planned=resumption.planned_workers)[0]
    if resumption.repin is None or worker in resumption.routes:
        return
    whose = f" of run {step['below']}" if "below" in step else ""
    raise InputError(
        "worker-missing",
        f"step {step['position']}{whose} is for worker {worker}, which pool {resumption.repin.name} does not have",
        hint=f"it has {', '.join(resumption.routes)}; `podium fork` gives steps to other workers",
    )


@dataclass(frozen=True, slots=True)
class RoutedStep:
    """An unfinished step and where its calls go from now on."""

    step: Row
    worker: str
    planned_worker: str | None
    route: StepRoute

    @property
    def moved(self) -> bool:
        """Whether that is another place, or another worker, than before."""
        before = (self.step["worker"], self.step["model"], self.step["queue"], self.step["planned_worker"])
        return before != (self.worker, self.route.model, self.route.queue, self.planned_worker)


def _worker_of(step: Row, *, planned: bool) -> tuple[str, str | None]:
    """Who has the step from now on, and whom the plan named if that is another one."""
    if planned and step["planned_worker"] is not None:
        return step["planned_worker"], None
    return step["worker"], step["planned_worker"]


def route_step(step: Row, routes: Mapping[str, StepRoute], *, planned: bool) -> RoutedStep:
    """Where an unfinished step's calls go in the pool from now on; a worker it does not have keeps its route.

    With ``planned`` a substitute makes room for the worker that the plan named.
    """
    worker, planned_worker = _worker_of(step, planned=planned)
    route = routes.get(worker)
    return RoutedStep(step, worker, planned_worker, route or StepRoute(step["model"], step["queue"]))


def unfinished_steps(steps: Sequence[Row]) -> list[Row]:
    """The steps that a new execution has to perform."""
    return [step for step in steps if step["state"] not in {*STEP_HAS_OUTPUT, "skipped"}]


def reopen(
    writer: RunWriter,
    routed: Sequence[RoutedStep],
    *,
    execution: int,
    deadline_at: datetime | None,
    pool_digest: str,
) -> None:
    """Adds what a new execution of an ended run begins with: its unfinished steps, where they go now, are pending."""
    _write_routes(writer, routed)
    for each in routed:
        writer.set_step_state(each.step, "pending")
    writer.set_run_state("created")
    change = {"execution": execution, "deadline_at": deadline_at, "pool_digest": pool_digest}
    writer.statement(_RESUME_RUN, {"run_id": writer.run_id, **change})


def _write_routes(writer: RunWriter, routed: Sequence[RoutedStep]) -> None:
    """Writes down where steps go from now on, as far as that is new."""
    for each in routed:
        if not each.moved:
            continue
        place: dict[str, Any] = {"round": each.step["round"], "position": each.step["position"]}
        values = {"worker": each.worker, "model": each.route.model, "queue": each.route.queue}
        planned = {"run_id": writer.run_id, "planned_worker": each.planned_worker}
        writer.statement(_ROUTE_STEP, {**place, **values, **planned})
        writer.entry("step.routed", round=place["round"], step=place["position"], **values)
