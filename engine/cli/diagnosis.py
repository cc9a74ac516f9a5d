"""What people are told about calls: why one failed and what to do, and what was done to an answer. Pure words.

Must never read anything, and never show a key: only where one is looked for.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from engine.cli.render import preview

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.store.snapshots import AttemptSnapshot, RunSnapshot, StepSnapshot
    from worker_pools.pool import Pool, Worker

SAID_CHARS: Final = 200
WAITS_STOPPED: Final = ("waiting", "operator")
KEY_CODES: Final = frozenset({"auth-failed", "secret-missing"})
REPLACED: Final = {
    "nul-replaced": "NUL characters in the answer were replaced",
    "surrogate-replaced": "halves of characters (lone surrogates) in the answer were replaced",
}


def failure_words(attempt: AttemptSnapshot, model: Worker | None, reads: Sequence[int] = ()) -> str:
    """`auth-failed (401): the provider refuses the key: "no such key"; check OPENAI_API_KEY`, in one line.

    `model` is the pool's entry for who was called, None if that pool cannot be read; `reads` are the steps whose
    outputs the prompt held.
    """
    if attempt.error_code is None:
        return ""
    status = "" if attempt.provider_status is None else f" ({attempt.provider_status})"
    words = attempt.error_code + status
    meaning = _meaning(attempt, attempt.error_code, model)
    if meaning:
        words += f": {meaning}"
    if attempt.message:
        words += f': "{preview(_said(attempt.message), SAID_CHARS)}"'
    if attempt.error_code == "context-too-long" and reads:
        words += f"; it holds the outputs of {'step' if len(reads) == 1 else 'steps'} {', '.join(map(str, reads))}"
    hint = _hint(attempt.error_code, model)
    return f"{words}; {hint}" if hint else words


def model_of(pool: Pool | None, worker: str | None) -> Worker | None:
    """The pool's entry for a worker's name, for None the Conductor; None if there is none."""
    if pool is None:
        return None
    if worker is None:
        return pool.conductor
    return next((model for model in pool.workers if model.name == worker), None)


def called(pool: Pool | None, attempt: AttemptSnapshot) -> Worker | None:
    """The pool's entry for whom an attempt of a step called; None if the run's pool has another one by that name."""
    model = model_of(pool, attempt.worker)
    return model if model is not None and model.model == attempt.model else None


def blame(run: RunSnapshot, pool: Pool | None) -> str:
    """Why a failed run failed, to follow the run's reason; empty if the record does not say."""
    from engine.cli.tree import blame_below

    for step in run.steps:
        if step.state == "failed":
            where = f"round {step.round}, step {step.position}" if step.round else f"step {step.position}"
            said = blame_below(run, step) or _last_step_failure(step, pool)
            return f" ({where}, worker {preview(step.worker, 64)}){said}"
    if run.reason == "plan-invalid" and run.plan_errors:
        return f": {plan_error_words(run.plan_errors[0])}"
    if run.rounds and run.rounds[-1].planned_at is None:
        said = _last_failure(run.planning, model_of(pool, None))
        # The run's reason is the code already.
        return said.removeprefix(f": {run.reason}")
    return ""


def why_stopped(run: RunSnapshot, pool: Pool | None) -> dict[int, str]:
    """Why steps of the present round wait for an operator, by position, to follow what is said of each.

    Without those whose last call did not fail: people have rejected what it gave.
    """
    from engine.cli.tree import blame_below

    stopped = [step for step in run.steps if step.round == run.round and (step.state, step.reason) == WAITS_STOPPED]
    whys = {
        step.position: blame_below(run, step)
        or (_last_step_failure(step, pool) if step.attempts and step.attempts[-1].error_code is not None else "")
        for step in stopped
    }
    return {position: why for position, why in whys.items() if why}


def plan_error_words(error: dict[str, Any]) -> str:
    """`3:7: there is no worker 9 [worker-unknown]`."""
    place = f"{error['line']}:{error['column']}: " if error.get("line") else ""
    return f"{place}{preview(str(error['text']), SAID_CHARS)} [{error['code']}]"


def answer_notes(run: RunSnapshot) -> list[dict[str, Any]]:
    """What was done to the accepted answers of the last round with steps, in the form of the plan's notes."""
    present = run.steps[-1].round if run.steps else run.round
    accepted = [(None, attempt) for attempt in run.planning if attempt.accepted and attempt.round == present] + [
        (step.position, attempt)
        for step in run.steps
        if step.round == present
        for attempt in step.attempts
        if attempt.accepted
    ]
    return [
        {"code": code, "field": None, "position": position, "text": _note_words(code, attempt)}
        for position, attempt in accepted
        for code in attempt.notes
    ]


def note_line(note: dict[str, Any]) -> str:
    """A note for people: `note: step 1: the answer stopped at its output limit ... [answer-truncated]`."""
    where = "" if note.get("position") is None else f"step {note['position']}: "
    return f"note: {where}{preview(str(note['text']), 4 * SAID_CHARS)} [{note['code']}]"


def _note_words(code: str, attempt: AttemptSnapshot) -> str:
    if code == "answer-truncated":
        used = "" if attempt.output_tokens is None else f" ({attempt.output_tokens:,} tokens)"
        return f"the answer stopped at its output limit{used}; raise output_tokens_max"
    return REPLACED.get(code, code)


def _said(message: str) -> str:
    """The sentence in a provider's JSON error; whatever else it sent as it stands."""
    try:
        content = json.loads(message)
    except (ValueError, RecursionError):
        return message
    error = content.get("error", content) if isinstance(content, dict) else None
    sentence = error.get("message") if isinstance(error, dict) else error
    return sentence if isinstance(sentence, str) and sentence.strip() else message


def _last_failure(attempts: tuple[AttemptSnapshot, ...], model: Worker | None) -> str:
    failed = [attempt for attempt in attempts if attempt.error_code is not None]
    return f": {failure_words(failed[-1], model)}" if failed else ""


def _last_step_failure(step: StepSnapshot, pool: Pool | None) -> str:
    failed = [attempt for attempt in step.attempts if attempt.error_code is not None]
    return f": {failure_words(failed[-1], called(pool, failed[-1]), step.access)}" if failed else ""


def _meaning(attempt: AttemptSnapshot, code: str, model: Worker | None) -> str:
    from worker_pools.adapters.codes import CALL_CODES

    known = CALL_CODES.get(code)
    if known is None:
        return ""
    address = None if model is None or model.is_local else model.base_url
    if address is not None and code == "connection-failed":
        return f"no connection to {preview(address, SAID_CHARS)}"
    if address is not None and code == "endpoint-not-found":
        return f"nothing answers at {preview(address, SAID_CHARS)}"
    if code == "model-not-found":
        return f"{known.meaning} ({preview(attempt.model, SAID_CHARS)})"
    return known.meaning


def _hint(code: str, model: Worker | None) -> str:
    from worker_pools.adapters.codes import CALL_CODES

    if code in KEY_CODES and model is not None and model.api_key is not None:
        key = model.api_key.env or f"the file {model.api_key.file}"
        return f"{'set' if code == 'secret-missing' else 'check'} {key}"
    known = CALL_CODES.get(code)
    if known is None or known.hint is None:
        return ""
    return known.hint[0].lower() + known.hint[1:].rstrip(".")
