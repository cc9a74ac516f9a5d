"""Questions of an auditor to a verified bundle: who approved a step, and who was shown its output."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine.verifier.chains import Entry
from engine.verifier.contents import artifact_id
from engine.verifier.entry_types import committed
from engine.verifier.faults import InvalidError
from engine.verifier.records import Run, Step
from engine.verifier.report import Report
from engine.verifier.review_records import Review
from engine.verifier.words import one_line

PLAN, ANSWER = "plan", "answer"
_TEXT_MAX = 300
_NAME_MAX = 40


def find_run(report: Report, name: str) -> Run:
    """The run whose id begins with ``name``; raises InvalidError if there is none, or more than one."""
    found = [run for run in report.runs.values() if run.id.startswith(name)]
    if len(found) != 1:
        raise InvalidError(f"{'no run' if not found else 'more than one run'} of the bundle begins with {name!r}")
    return found[0]


def find_step(run: Run, name: str) -> Step:
    """A step by its position, ``round:position``, or ``answer``; of several rounds the last one that has it."""
    if len(name) > _NAME_MAX:
        raise InvalidError("that is no step; write its position, for example 2, or round:position")
    number, _, position = name.rpartition(":")
    last = run.last_round
    if last is None:
        raise InvalidError(f"run {run.id} has no plan")
    if name == ANSWER:
        return last.steps[-1]
    if not position.isascii() or not position.isdigit() or (number and not (number.isascii() and number.isdigit())):
        raise InvalidError(f"{name!r} is no step; write its position, for example 2, or round:position")
    rounds = [int(number)] if number else sorted(run.rounds, reverse=True)
    for one in rounds:
        step = run.step(one, int(position))
        if step is not None:
            return step
    raise InvalidError(f"run {run.id} has no step {name}")


def who_approved(report: Report, run: Run, place: str) -> dict[str, Any]:
    """Every review of a step, of the answer (``answer``) or of a plan (``plan``), with everybody's word."""
    reviews = report.reviews[run.id]
    if place == PLAN:
        wanted = [review for review in reviews.all.values() if review.place[0] == PLAN]
        where: dict[str, Any] = {"run": run.id, "place": PLAN}
    else:
        step = find_step(run, place)
        at = (step.round, step.position)
        wanted = [review for review in reviews.all.values() if review.place[1:] == at]
        where = {"run": run.id, "round": step.round, "step": step.position, "state": step.state}
    return {"question": "who-approved", **where, "reviews": [_review(report, review) for review in wanted]}


def _review(report: Report, review: Review) -> dict[str, Any]:
    return {
        "review": review.id,
        "gate": review.place[0],
        "state": review.state,
        "outcome": review.outcome,
        "asked_at": review.requested.at,
        "reason": review.data["reason"],
        "approvals": review.data["approvals"],
        "four_eyes": review.data["four_eyes"],
        "subject": review.data["subject"],
        "decisions": [
            {
                "decision": decision.entry.data["decision"],
                "meaning": decision.entry.data["meaning"],
                "meaning_text": _meaning_text(report, decision.entry),
                "had_it_displayed": any(
                    opened.data["person"] == decision.person and opened.seq < decision.entry.seq
                    for opened in review.opened
                ),
                "person": decision.person,
                "account": decision.entry.actor,
                "on_behalf_of": decision.entry.on_behalf_of,
                "at": decision.entry.at,
                "entry": decision.entry.seq,
            }
            for decision in review.decisions
        ],
        "opened": [{"person": entry.data["person"], "at": entry.at} for entry in review.opened],
        "bypassed": None
        if review.bypassed is None
        else {"person": review.bypassed.data["person"], "at": review.bypassed.at},
    }


def _meaning_text(report: Report, entry: Entry) -> str | None:
    """The sentence that a decision stands for, if the bundle discloses it."""
    for row in committed(entry.data):
        content = report.contents.content(row["artifact"]) if report.contents and row["kind"] == "meaning" else None
        if content is not None:
            return content.decode(errors="replace")
    return None


def who_saw(report: Report, run: Run, place: str) -> dict[str, Any]:
    """Every model and person that was shown an output of a step; and the models of which that is known not to be so."""
    step = find_step(run, place)
    attempts = [attempt.id for attempt in step.attempts] or ([] if step.accepted is None else [step.accepted])
    outputs = {artifact_id(attempt, "output") for attempt in {*attempts, step.accepted} - {None} if attempt is not None}
    made_by = {attempt.model for attempt in step.attempts}
    quoting = outputs | _tasks(report, outputs)
    seen = list(_calls(report, quoting))
    unknown = list(_unknown(report))
    shown = {(row["worker"], row["model"]) for row in seen}
    never = [] if unknown else sorted(_models(report) - shown)
    return {
        "question": "who-saw",
        "run": run.id,
        "round": step.round,
        "step": step.position,
        "outputs": sorted(outputs),
        "made_by": sorted(made_by),
        "calls": seen,
        "people": list(_people(report, outputs)),
        "reads_unrecorded": report.reads_unrecorded,
        "never_shown": [{"worker": worker, "model": model} for worker, model in never],
        "unknown": unknown,
    }


def _calls(report: Report, outputs: set[str]) -> Iterator[dict[str, Any]]:
    for run in report.runs.values():
        for attempt in run.attempts.values():
            if attempt.shown is not None and not attempt.shown.isdisjoint(outputs):
                yield {
                    "run": run.id,
                    "round": attempt.round,
                    "step": attempt.step,
                    "worker": attempt.worker,
                    "model": attempt.model,
                    "at": attempt.sent.at,
                    "rendered_again": attempt.rendered,
                }


def _tasks(report: Report, outputs: set[str]) -> set[str]:
    """The tasks of child runs that quote one of the outputs, or the task of a child run that does."""
    tasks: set[str] = set()
    while True:
        more = {
            artifact_id(entry.data["child"], "task")
            for run in report.runs.values()
            for entry in run.begun
            if not (outputs | tasks).isdisjoint(entry.data.get("shown", []))
        }
        if more <= tasks:
            return tasks
        tasks |= more


def _models(report: Report) -> set[tuple[str, str]]:
    """All models that the runs could have asked: by worker and name."""
    called = {(attempt.worker, attempt.model) for run in report.runs.values() for attempt in run.attempts.values()}
    for run in report.runs.values():
        for digest in run.pools:
            pool = report.pools[digest]
            called |= {(model.name, model.model) for model in (pool.conductor, *pool.workers) if model.kind == "model"}
    return called


def _unknown(report: Report) -> Iterator[dict[str, Any]]:
    """Calls and child runs of which the bundle does not say what they were shown."""
    for run in report.runs.values():
        for attempt in run.attempts.values():
            if attempt.shown is None:
                yield {"run": run.id, "attempt": attempt.id}
        for entry in run.begun:
            if entry.data["child"] not in report.runs:
                yield {"run": entry.data["child"], "attempt": None}


def _people(report: Report, outputs: set[str]) -> Iterator[dict[str, Any]]:
    for run in report.runs.values():
        for entry in run.reads:
            if not outputs.isdisjoint(entry.data.get("read", [])):
                yield {"account": entry.actor, "how": entry.data.get("command", "read"), "at": entry.at}
        reviews = report.reviews[run.id]
        for review in reviews.all.values():
            if outputs.isdisjoint(reviews.displayed(review.id)):
                continue
            for entry in review.opened:
                yield {"account": entry.actor, "how": f"review {review.id}", "at": entry.at}


def answer_text(answer: dict[str, Any]) -> str:
    """An answer for people."""
    if answer["question"] == "who-approved":
        return "\n".join(map(one_line, _approved_lines(answer))) + "\n"
    return "\n".join(map(one_line, _saw_lines(answer))) + "\n"


def _approved_lines(answer: dict[str, Any]) -> list[str]:
    where = "the plan" if answer.get("place") == PLAN else f"step {answer['step']} (round {answer['round']})"
    lines = [f"Who approved {where} of run {answer['run']}:"]
    for review in answer["reviews"]:
        needed = f"{review['approvals']} needed" + (", four eyes" if review["four_eyes"] else "")
        asked = f"asked {review['asked_at']} ({review['reason']}; {needed})"
        lines.append(f"  review {review['review']}, gate `{review['gate']}`, {asked}: {review['outcome']}")
        lines += map(_decision_line, review["decisions"])
        if review["bypassed"] is not None:
            lines.append(f"    {review['bypassed']['at']}  {review['bypassed']['person']} broke the glass")
    if not answer["reviews"]:
        lines.append("  nobody: no review of it is on record")
    return lines


def _decision_line(word: dict[str, Any]) -> str:
    account = f"account {word['account']}" + (f" for {word['on_behalf_of']}" if word["on_behalf_of"] else "")
    text = word["meaning_text"]
    meaning = f"meaning {word['meaning']} (its sentence is not in the bundle)" if text is None else _quoted(text)
    said = f"{word['decision']}, {meaning}, entry {word['entry']}"
    unseen = "" if word["had_it_displayed"] else "; no entry says that the review was displayed to this person before"
    return f"    {word['at']}  {word['person']} ({account}): {said}{unseen}"


def _quoted(text: str) -> str:
    """A text by a person on one line, without signs that could move a terminal's cursor."""
    shown = one_line(" ".join(text.split()))
    return f'"{shown if len(shown) <= _TEXT_MAX else shown[: _TEXT_MAX - 1] + "…"}"'


def _saw_lines(answer: dict[str, Any]) -> list[str]:
    lines = [f"Who was shown the output of step {answer['step']} (round {answer['round']}) of run {answer['run']}:"]
    lines.append(f"  made by {', '.join(answer['made_by']) or 'another run'}")
    for call in answer["calls"]:
        place = "planning" if call["step"] is None else f"step {call['step']}"
        proof = "prompt rendered again" if call["rendered_again"] else "by the names in its entry"
        lines.append(
            f"  {call['at']}  worker {call['worker']} (model {call['model']}), {place} of run {call['run']}; {proof}"
        )
    lines += [f"  {row['at']}  account {row['account']}, {row['how']}" for row in answer["people"]]
    if not (answer["calls"] or answer["people"]):
        lines.append("  no model, and no person on record")
    if answer["reads_unrecorded"]:
        lines.append(
            "  people may have read or printed it all the same: reads are recorded only where the pool asks for it "
            "(`reads: recorded`)"
        )
    lines += [f"  never shown to worker {row['worker']} (model {row['model']})" for row in answer["never_shown"]]
    if answer["unknown"]:
        lines.append(
            f"  not known for {len(answer['unknown'])} calls or child runs: the bundle does not say what they saw"
        )
    return lines
