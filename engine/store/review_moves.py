"""What follows from the end of a review: steps that waited for it go on, begin anew, fail, or wait for somebody else.

Used inside the transaction that ends the review. Must never accept an output: that is for the step's own Open, which
checks everything once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from engine.store import queries
from engine.store.exchange import Row
from engine.store.gates import REVIEW
from engine.store.run_writer import RunWriter
from engine.store.states import STEP_LIVE, StepState
from engine.store.waiting import OPERATOR, PAUSED, waits_for

_SEND_BACK: Final = """
    UPDATE steps SET candidate_attempt_id = NULL, sent_back = sent_back + 1
    WHERE run_id = %(run_id)s AND round = %(round)s AND position = %(position)s
"""


def waiting_steps(review: Row, steps: Sequence[Row]) -> list[Row]:
    """The steps that may wait for a review: all of its round for a plan, else its own; of ``steps``, which are all."""
    return [
        step
        for step in steps
        if step["round"] == review["round"]
        and review["position"] in {None, step["position"]}
        and (step["state"], step["reason"]) == ("waiting", REVIEW)
    ]


def let_go_on(writer: RunWriter, review: Row, steps: Sequence[Row], still_open: Iterable[Row]) -> None:
    """Adds that what waited for this review may be looked at again, unless another review still holds it."""
    held = {(other["round"], other["position"]) for other in still_open if other["holds"]}
    moved = [
        step
        for step in waiting_steps(review, steps)
        if held.isdisjoint({(step["round"], step["position"]), (step["round"], None)})
    ]
    _move(writer, steps, moved, "pending", None)


def send_back(writer: RunWriter, review: Row, steps: Sequence[Row]) -> None:
    """Adds that a step is done once more, with what the reviewer said in its prompt."""
    moved = waiting_steps(review, steps)
    for step in moved:
        writer.statement(_SEND_BACK, _place(writer, step))
    _move(writer, steps, moved, "pending", None)


def give_up(writer: RunWriter, review: Row, steps: Sequence[Row], code: str, *, operator: bool) -> None:
    """Adds that what waited fails with this code, or (``operator``) that an operator has to say what becomes of it."""
    moved = waiting_steps(review, steps)
    for step in moved:
        writer.statement(queries.CLEAR_CANDIDATE, _place(writer, step))
    if operator and review["position"] is not None:
        _move(writer, steps, moved, "waiting", OPERATOR)
    else:
        _move(writer, steps, moved, "failed", code)


def _place(writer: RunWriter, step: Row) -> dict[str, Any]:
    return {"run_id": writer.run_id, "round": step["round"], "position": step["position"]}


def _move(writer: RunWriter, steps: Sequence[Row], moved: Sequence[Row], state: StepState, reason: str | None) -> None:
    for step in moved:
        writer.set_step_state(step, state, reason)
    run = writer.run
    if run["state"] != "waiting" or run["reason"] == PAUSED:
        return
    places = {(step["round"], step["position"]) for step in moved}
    present = [
        {**step, "state": state, "reason": reason} if (step["round"], step["position"]) in places else step
        for step in steps
        if step["round"] == run["round"]
    ]
    # After a failure nothing is waited for.
    waits = None if state == "failed" else waits_for([step for step in present if step["state"] in STEP_LIVE])
    if waits is None:
        writer.set_run_state("running")
    else:
        writer.set_run_state("waiting", waits)
