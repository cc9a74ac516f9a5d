"""What an operator answers to a step that failed and waits: try again, leave it out, or give up.

One transaction and one ledger entry, with who and why, before anything is sent to Temporal; the workflow then asks
Open, which finds the step as it stands here. Must never touch a step that does not wait for an operator.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal
from uuid import UUID

from engine.errors import InputError, RefusedError
from engine.store import queries
from engine.store.attempts import Substitute
from engine.store.database import Database
from engine.store.exchange import Connection, Row
from engine.store.orders import Order, Ordered, lock_for_order, order_entry, refuse_cancelling, refuse_ended
from engine.store.run_writer import RunWriter
from engine.store.states import STEP_LIVE
from engine.store.waiting import OPERATOR, PAUSED, waits_for

AnswerKind = Literal["retry", "skip", "abort"]
ABORTED: Final = "aborted"

_READ_NUMBERS = """
    SELECT round, position, max(number) AS number FROM attempts
    WHERE run_id = %s AND position IS NOT NULL GROUP BY round, position
"""
_RETRY_STEP = """
    UPDATE steps SET worker = %(worker)s, model = %(model)s, queue = %(queue)s,
        planned_worker = nullif(coalesce(planned_worker, worker), %(worker)s),
        attempts_base = %(attempts_base)s, state = 'pending', reason = NULL, ended_at = NULL
    WHERE run_id = %(run_id)s AND round = %(round)s AND position = %(position)s
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """What to do with a step. ``position`` None is the one that waits.

    For a retry ``to`` is another worker to try it with, and ``pool_seen`` the digest of the pool that it is from.
    """

    kind: AnswerKind
    position: int | None = None
    to: Substitute | None = None
    pool_seen: str | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """What came of an answer: the run after it, and which step it was about, with the worker that the step has now."""

    ordered: Ordered
    round: int
    position: int
    worker: str


async def answer_step(database: Database, order: Order, answer: Answer) -> Answered:
    """Writes an operator's answer down; the step is then pending, skipped or failed (``aborted``).

    Raises RefusedError ``run-ended``, ``run-cancelling``, ``step-not-waiting``, ``answer-needed`` (the plan's last step
    gives the run's answer and cannot be left out), ``run-changed``, and InputError ``step-unknown``, ``step-missing``
    (several steps wait); nothing was changed then.
    """

    async def work(connection: Connection) -> Answered:
        writer, before, (steps, numbers) = await lock_for_order(
            connection,
            order,
            (queries.READ_ALL_STEPS, (order.run_id,)),
            (_READ_NUMBERS, (order.run_id,)),
        )
        present = [step for step in steps if step["round"] == writer.run["round"]]
        if before is not None:
            return _recorded(writer, steps, before)
        refuse_ended(writer.run)
        refuse_cancelling(writer.run)
        step = _waiting_step(writer.run, present, answer.position)
        _refuse_impossible(writer.run, step, present, answer)
        number = next((row["number"] for row in numbers if _place(row) == _place(step)), 0)
        changed = _apply(writer, order, answer, step, number)
        _show_run(writer, present, changed)
        writer.statement(queries.SET_WAKE, (writer.now, order.run_id))
        await writer.commit()
        # Now the step is as the operator wants it, whatever becomes of the wake-up.
        run = writer.run
        ordered = Ordered(run["state"], run["reason"], writer.now, changed=True)
        return Answered(ordered, step["round"], step["position"], changed["worker"])

    return await database.write(work)


def _place(row: Row) -> tuple[int, int]:
    return row["round"], row["position"]


def _recorded(writer: RunWriter, steps: Sequence[Row], body: bytes) -> Answered:
    """The result of an answer that is on record already, for whoever gives it again."""
    entry = json.loads(body)
    place = (entry["data"]["round"], entry["data"]["step"])
    worker = next(step["worker"] for step in steps if _place(step) == place)
    run = writer.run
    return Answered(Ordered(run["state"], run["reason"], None, changed=True), *place, worker)


def _waiting_step(run: Row, steps: Sequence[Row], position: int | None) -> Row:
    """The step that the answer is for."""
    own: UUID = run["id"]
    waiting = [step for step in steps if (step["state"], step["reason"]) == ("waiting", OPERATOR)]
    if position is None:
        if not waiting:
            raise RefusedError(
                "step-not-waiting", f"no step of run {own} waits for an operator", hint=f"podium show {own}"
            )
        if len(waiting) > 1:
            places = ", ".join(str(step["position"]) for step in waiting)
            raise InputError(
                "step-missing", f"several steps of run {own} wait: {places}", hint="say which with --step N"
            )
        return waiting[0]
    step = next((step for step in steps if step["position"] == position), None)
    if step is None:
        raise InputError("step-unknown", f"run {own} has no step {position}", hint=f"podium show {own}")
    if step not in waiting:
        raise RefusedError(
            "step-not-waiting",
            f"step {position} of run {own} does not wait for an operator: it is {_words(step)}",
            hint=_hint(run, step, waiting),
        )
    return step


def _words(step: Row) -> str:
    return f"{step['state']} ({step['reason']})" if step["reason"] else str(step["state"])


def _hint(run: Row, step: Row, waiting: Sequence[Row]) -> str:
    if waiting:
        places = ", ".join(str(other["position"]) for other in waiting)
        return f"waiting for an answer: {places}"
    if step["state"] == "waiting" and (step["reason"] or "").startswith("budget"):
        return f"podium budget {run['id']}"
    return f"podium show {run['id']}"


def _refuse_impossible(run: Row, step: Row, steps: Sequence[Row], answer: Answer) -> None:
    if answer.kind == "skip" and step["position"] == steps[-1]["position"]:
        raise RefusedError(
            "answer-needed",
            f"step {step['position']} is the last of its plan, and its output is the run's answer",
            hint=f"podium retry {run['id']} --step {step['position']} --worker NAME, or podium abort {run['id']}",
        )
    if answer.to is not None and run["pool_digest"] != answer.pool_seen:
        raise RefusedError("run-changed", f"run {run['id']} has another pool by now", hint=f"podium show {run['id']}")


def _apply(writer: RunWriter, order: Order, answer: Answer, step: Row, number: int) -> Row:
    """Adds the change of the step and the entry; returns the step as it will be."""
    said: dict[str, Any] = {"answer": answer.kind, "round": step["round"], "step": step["position"]}
    if answer.kind == "retry":
        to = answer.to or Substitute(step["worker"], step["model"], step["queue"])
        values = {"worker": to.worker, "model": to.model, "queue": to.queue, "attempts_base": number}
        where = {"run_id": order.run_id, "round": step["round"], "position": step["position"]}
        writer.statement(_RETRY_STEP, {**values, **where})
        moved: dict[str, Any] = {"state": "pending", "reason": None, "old": step["state"]}
        said |= {"worker": to.worker, "model": to.model, "old_worker": step["worker"], "attempts_base": number}
        changed = {**step, **values, "state": "pending", "reason": None}
    else:
        state: Literal["skipped", "failed"] = "skipped" if answer.kind == "skip" else "failed"
        reason = OPERATOR if answer.kind == "skip" else ABORTED
        moved = writer.move_step(step, state, reason)
        changed = {**step, "state": state, "reason": reason}
    order_entry(writer, "operator.answered", order, **said, moved=moved)
    return changed


def _show_run(writer: RunWriter, steps: Sequence[Row], changed: Row) -> None:
    """The run goes on, unless other steps still keep all of it waiting. After an abort nothing is waited for."""
    run = writer.run
    if run["state"] != "waiting" or run["reason"] == PAUSED:
        return
    present = [changed if step["position"] == changed["position"] else step for step in steps]
    reason = None if changed["state"] == "failed" else waits_for([row for row in present if row["state"] in STEP_LIVE])
    if reason is None:
        writer.set_run_state("running")
    else:
        writer.set_run_state("waiting", reason)
