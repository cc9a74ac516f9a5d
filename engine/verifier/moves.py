"""Which entry moves a step where, and what it has to say with that: the engine writes nothing else. Pure.

The table of states says which moves are legal at all (`engine.verifier.transitions`). A move that is legal may still be
nobody's: only a person leaves a step out, only a new execution or an answer begins a failed one again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from engine.verifier.entry_types import RUN_ENDED
from engine.verifier.faults import InvalidError
from engine.verifier.pools import Pool
from engine.verifier.records import Attempt, Run, Step

OPERATOR: Final = "operator"
REVIEW: Final = "review"
# How the three answers of an operator move a step: its state and reason from then on.
_ANSWERS: Final = {"retry": ("pending", None), "skip": ("skipped", OPERATOR), "abort": ("failed", "aborted")}
_LIVE: Final = ("pending", "running", "waiting")


def is_reopening(run: Run) -> bool:
    """Whether a new execution has been ordered and has not begun: only then steps are set back and routed."""
    return not run.closed and run.state in RUN_ENDED


def check_sent(step: Step) -> None:
    """Raises InvalidError for a step that is called while an operator is asked what becomes of it."""
    if (step.state, step.reason) == ("waiting", OPERATOR):
        raise InvalidError(f"step {step.position} was called while it waited for an operator")


def check_closed(step: Step, attempt: Attempt, moved: Mapping[str, Any] | None) -> None:
    """Checks how a step moves by a call whose output is not accepted there. Raises InvalidError."""
    reviewed = attempt.state == "succeeded"
    if moved is None:
        if reviewed and (step.state, step.reason) != ("waiting", REVIEW):
            raise InvalidError("a good output was neither accepted nor held for a review")
        return
    where = (moved["state"], moved["reason"])
    fits = where == ("waiting", REVIEW) if reviewed else where == ("waiting", OPERATOR) or where[0] == "failed"
    if not fits:
        raise InvalidError(f"the end of a call that is {attempt.state} does not move its step to {moved['state']}")


def check_changed(run: Run, pool: Pool, step: Step, old: tuple[str, str | None]) -> None:
    """Checks that a step has moved by an entry of its own, from a state with its reason. Raises InvalidError."""
    reopening, asked = is_reopening(run), old == ("waiting", OPERATOR)
    if asked and not reopening and step.state not in ("failed", "cancelled"):
        raise InvalidError(f"step {step.position} waited for an operator, and nobody answered")
    if step.state == "pending" and not reopening and old != ("waiting", REVIEW):
        raise InvalidError(f"step {step.position} begins anew, and nobody had it begin anew")
    if step.state == "running":
        worker = pool.worker(step.worker)
        if worker is None or worker.kind != "conductor":
            raise InvalidError(f"step {step.position} runs without a call")
    if step.state == "skipped":
        _check_left_out(run, step)


def _check_left_out(run: Run, step: Step) -> None:
    """A fork leaves out from its beginning what an operator had left out in its source; nothing else does."""
    begun = run.state != "created" or run.attempts or run.begun or run.execution > 1
    if "source" not in run.created.data or step.round or begun:
        raise InvalidError(f"step {step.position} was left out, and nobody left it out")


def check_answered(run: Run, pool: Pool, step: Step, data: Mapping[str, Any]) -> None:
    """Checks an operator's answer, not yet applied. Raises InvalidError."""
    if step.state != "waiting":
        raise InvalidError("the step did not wait for anybody")
    if step.reason != OPERATOR:
        raise InvalidError("the step did not wait for an operator")
    moved, answer = data["moved"], data["answer"]
    if moved is None or (moved["state"], moved["reason"]) != _ANSWERS[answer]:
        raise InvalidError(f"the answer {answer} does not move a step there")
    if answer == "skip" and step.position == len(run.rounds[step.round].steps) - 1:
        raise InvalidError("the last step of a plan gives the answer and cannot be left out")
    if answer != "retry" or "worker" not in data:
        return
    if data.get("old_worker", step.worker) != step.worker:
        raise InvalidError(f"the step belonged to worker {step.worker!r}, not {data['old_worker']!r}")
    if (data["worker"], data.get("model", step.model)) != (step.worker, step.model):
        _check_worker(pool, data["worker"], data.get("model"))
    _check_base(step, data)


def check_substituted(pool: Pool, step: Step, data: Mapping[str, Any]) -> None:
    """Checks that a step is given to a substitute, not yet applied. Raises InvalidError."""
    planned = pool.worker(step.planned_worker)
    if data["old_worker"] != step.worker or planned is None or data["worker"] not in planned.fallbacks:
        raise InvalidError("the worker is no substitute that the pool names")
    moved = data["moved"]
    if step.state not in _LIVE or moved is None or (moved["state"], moved["reason"]) != ("pending", None):
        raise InvalidError("a step that is given to a substitute begins anew")
    _check_worker(pool, data["worker"], data["model"])
    _check_base(step, data)


def check_routed(run: Run, pool: Pool, step: Step, data: Mapping[str, Any]) -> None:
    """Checks that a new execution sends a step elsewhere, not yet applied. Raises InvalidError."""
    if step.is_done:
        raise InvalidError("a finished step goes nowhere")
    if not is_reopening(run):
        raise InvalidError("only a new execution sends steps elsewhere")
    if data["worker"] not in (step.worker, step.planned_worker):
        raise InvalidError("a new execution gives a step to nobody but the worker that has it or was planned")
    if pool.worker(data["worker"]) is not None:
        _check_worker(pool, data["worker"], data["model"])
    elif data["worker"] == step.worker and data["model"] != step.model:
        # A worker that the pool does not have keeps its place.
        raise InvalidError(f"the pool has no worker {data['worker']!r}")


def _check_worker(pool: Pool, name: str, model: str | None) -> None:
    worker = pool.worker(name)
    if worker is None or model not in (None, worker.model):
        raise InvalidError(f"the pool has no worker {name!r} with model {model!r}")


def _check_base(step: Step, data: Mapping[str, Any]) -> None:
    if data.get("attempts_base", len(step.attempts)) != len(step.attempts):
        raise InvalidError("it forgives other attempts than those that there were")
