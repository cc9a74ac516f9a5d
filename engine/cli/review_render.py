"""Reviews as people and programs see them: lines, what a reviewer is shown, JSON objects. Must never read or decide."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from engine.cli import terminal
from engine.cli.contract import Json, time_text, versioned
from engine.cli.render import between, counted, duration, local_time, preview
from engine.verifier.words import SENT_BACK, let_pass

if TYPE_CHECKING:
    from engine.operations.reviewing import DecisionGiven, ShownReview
    from engine.store.review_display import ShownPart
    from engine.store.review_views import GateStats, ReviewerStats, ReviewLine

GATES: Final = {
    "plan": "the plan",
    "before": "before step {step} is called",
    "after": "the output of step {step}",
    "answer": "the run's answer",
}
# What somebody puts their name to is never cut: a pool's words are no longer than this.
WORDS_MAX: Final = 1000
_ROLES: Final = {
    "task": "the task",
    "plan": "the plan",
    "subtask": "what step {step} is asked",
    "input": "what step {step} answered, which is shown to this step",
    "output": "what step {step} answered",
}


def what_words(line: ReviewLine) -> str:
    """`the output of step 2`, with the round if it is a later one."""
    words = GATES[line.gate].format(step=line.step)
    return f"{words} (round {line.round})" if line.round else words


def need_words(line: ReviewLine) -> str:
    """`1 of 2 approvals`, with who may decide if not everybody else may, and until when."""
    words = f"{line.approved} of {counted(line.approvals, 'approval')}"
    if line.reviewers:
        words += f", by {', '.join(line.reviewers)}"
    if line.expires_at is not None:
        left = between(line.read_at, line.expires_at) or 0.0
        words += f", {'expired' if left <= 0 else 'expires in ' + duration(left)} ({line.on_expiry})"
    return words


def list_line(line: ReviewLine) -> list[str]:
    """The columns of a list: id, run, what, state, need, since when."""
    since = duration(between(line.requested_at, line.closed_at or line.read_at))
    return [str(line.id), str(line.run_id), what_words(line), state_words(line), need_words(line), since]


def state_words(line: ReviewLine, *, opened: bool = False) -> str:
    """How a review stands; what a rejection or an expiry did is said instead of the bare state.

    ``opened`` says that somebody is known to have had it displayed.
    """
    if line.state == "open":
        return "open" if line.holds else "open (after the fact)"
    if line.state == "expired" and line.on_expiry == "approve":
        return let_pass(looked=opened or bool(line.decided_by))
    return SENT_BACK if line.sent_back else line.state


def print_review(shown: ShownReview) -> None:
    """Everything about a review, with what a reviewer has to look at."""
    line = shown.snapshot.line
    terminal.out(f"review  {line.id}")
    terminal.out(f"run     {line.run_id}")
    terminal.out(f"gate    {what_words(line)} ({line.reason}{'' if line.holds else ', nothing waits for it'})")
    state = "open" if line.state == "open" else state_words(line, opened=bool(shown.snapshot.openings))
    terminal.out(f"state   {state}; {need_words(line)}")
    terminal.out(f"asked   {local_time(line.requested_at)}")
    if line.four_eyes and line.excluded:
        terminal.out(f"not by  {', '.join(line.excluded)} (nobody reviews their own)")
    for opening in shown.snapshot.openings:
        terminal.out(f"opened  {local_time(opening.at)} by {opening.person}")
    for decision in shown.snapshot.decisions:
        person = decision.person if decision.person == decision.actor_id else f"{decision.person} ({decision.actor_id})"
        terminal.out(f"{decision.decision:<7} {local_time(decision.at)} by {person}: {_said(decision.meaning_text)}")
        if decision.reason is not None:
            terminal.out(f"        {_said(decision.reason)}")
    for comment in shown.snapshot.comments:
        terminal.out(f"comment {local_time(comment.at)} by {comment.person}: {_said(comment.text)}")
    if line.state == "open":
        for kind, word in (("approve", "approving"), ("reject", "rejecting")):
            terminal.out(f"{word} says: {preview(_words(line, kind), WORDS_MAX)}")
    _print_display(shown)


def _words(line: ReviewLine, kind: str) -> str:
    """What whoever decides puts their name to, unless they give words of their own."""
    from engine.operations.meanings import usual_meaning

    return usual_meaning(line.gate, kind, line.meaning)[1]


def _print_display(shown: ShownReview) -> None:
    if shown.display is None:
        if shown.erased:
            run = shown.snapshot.line.run_id
            terminal.out(f"what it is about was erased; who had it erased, and why: podium audit log {run}")
        else:
            terminal.out("what it is about is not stored any more, or was damaged")
        return
    if not shown.is_intact:
        terminal.out("WARNING: what is stored now is not what this review was asked for; it cannot be decided")
    steps = shown.display.facts["steps"]
    for step in steps:
        reads = ", ".join(map(str, step["reads"])) or "nothing"
        words = f"step {step['step']}: worker {step['worker']} ({step['model']}), reads {reads}"
        terminal.out(terminal.inert(words))
    for part in shown.display.parts:
        terminal.out()
        terminal.out(f"--- {_ROLES[part.role].format(step=part.step)} ---")
        _print_part(part, steps)


def _print_part(part: ShownPart, steps: Sequence[dict[str, Any]]) -> None:
    if part.role != "plan":
        terminal.out(terminal.inert(part.text))
        return
    from engine.cli.tables import print_graph

    # The canonical plan is one line of JSON; the same, for eyes: the graph, then each step in full.
    planned = json.loads(part.text)["steps"]
    print_graph([(step["worker"], step["subtask"], facts["reads"]) for step, facts in zip(planned, steps, strict=True)])
    for facts, step in zip(steps, planned, strict=True):
        terminal.out()
        terminal.out(f"step {facts['step']}: {terminal.inert(step['subtask'])}")


def _said(text: str | None) -> str:
    return "(erased)" if text is None else preview(text, 400)


def review_object(line: ReviewLine) -> Json:
    """A review as `review list`, `review show` and `show` print it; hashes in hex."""
    return {
        "id": str(line.id),
        "run": str(line.run_id),
        "gate": line.gate,
        "round": line.round,
        "step": line.step,
        "state": line.state,
        "reason": line.reason,
        "holds": line.holds,
        "level": line.level,
        "approved": line.approved,
        "approvals": line.approvals,
        "decided_by": list(line.decided_by),
        "four_eyes": line.four_eyes,
        "reviewers": list(line.reviewers),
        "excluded": list(line.excluded),
        "sent_back": line.sent_back,
        "attempt": None if line.attempt_id is None else str(line.attempt_id),
        "requested_at": time_text(line.requested_at),
        "expires_at": time_text(line.expires_at),
        "on_expiry": line.on_expiry,
        "closed_at": time_text(line.closed_at),
        "subject": line.subject.hex(),
        "plan": line.plan.hex(),
        "policy": line.policy.hex(),
        "shown": line.shown.hex(),
    }


def shown_object(shown: ShownReview) -> Json:
    """A review with what was decided and said, and what a reviewer is shown (null where it is not stored any more)."""
    snapshot, display = shown.snapshot, shown.display
    return versioned(
        {
            **review_object(snapshot.line),
            "decisions": [
                {
                    "id": str(one.id),
                    "decision": one.decision,
                    "meaning": one.meaning,
                    "meaning_text": one.meaning_text,
                    "reason": one.reason,
                    "person": one.person,
                    "actor": one.actor_id,
                    "on_behalf_of": one.on_behalf_of,
                    "at": time_text(one.at),
                }
                for one in snapshot.decisions
            ],
            "comments": [
                {"person": one.person, "at": time_text(one.at), "text": one.text} for one in snapshot.comments
            ],
            "openings": [{"person": one.person, "at": time_text(one.at)} for one in snapshot.openings],
            "intact": shown.is_intact,
            "meanings": {kind: _words(snapshot.line, kind) for kind in ("approve", "reject")},
            "erased": shown.erased,
            "display": None
            if display is None
            else {
                "steps": [dict(step) for step in display.facts["steps"]],
                "parts": [
                    {"role": part.role, "step": part.step, "artifact": str(part.artifact_id), "text": part.text}
                    for part in display.parts
                ],
            },
        }
    )


def decision_object(kind: str, given: DecisionGiven) -> Json:
    """What came of a decision: the review and the run after it."""
    decided = given.decided
    return versioned(
        {
            "decision": kind,
            "review": str(given.review.id),
            "run": str(given.review.run_id),
            "review_state": decided.review_state,
            "approved": decided.approvals,
            "approvals": decided.approvals_needed,
            "delivered": given.delivered,
            "at": time_text(decided.ordered.at),
            "state": decided.ordered.state,
            "reason": decided.ordered.reason,
        }
    )


def stats_object(people: Sequence[ReviewerStats], gates: Sequence[GateStats]) -> Json:
    """How people review, by person and gate; times in seconds, rates from 0 to 1."""
    return versioned(
        {
            "reviewers": [
                {**asdict(one), "reject_rate": _rate(one.rejected, one.decisions),
                 "opened_rate": _rate(one.opened, one.decisions)}
                for one in people
            ],
            "gates": [asdict(one) for one in gates],
        }
    )  # fmt: skip


def stats_rows(people: Sequence[ReviewerStats]) -> list[list[str]]:
    """The columns of the table for people."""
    return [
        [
            one.person,
            one.gate,
            str(one.decisions),
            f"{_rate(one.rejected, one.decisions):.0%}",
            f"{_rate(one.opened, one.decisions):.0%}",
            duration(one.dwell_median_s),
            duration(one.dwell_min_s),
            duration(one.waited_median_s),
            str(one.bypassed),
        ]
        for one in people
    ]


def _rate(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def lines_object(lines: Sequence[ReviewLine]) -> list[dict[str, Any]]:
    """A list of reviews."""
    return [versioned(review_object(line)) for line in lines]
