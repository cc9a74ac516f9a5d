"""A ledger's entries in plain words: who did what, when. Pure; holds no text by people or models, as entries do not.

An entry of a type that is not known here is shown by its type and its plain fields, so that nothing is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from engine.evidence.review_words import ReviewFacts

Data = Mapping[str, Any]
ENGINE: Final = "podium-engine"
_PLAIN_CHARS_MAX: Final = 80


@dataclass(frozen=True, slots=True)
class TimelineLine:
    """One entry: its number in its chain, when, who acted (for whom), where in the plan, and what happened."""

    run: str
    seq: int
    at: str
    type: str
    actor: str
    on_behalf_of: str | None
    round: int | None
    step: int | None
    text: str

    @property
    def who(self) -> str:
        """Who acted, for people: the engine acts for whoever submitted the run."""
        if self.actor == ENGINE:
            return "podium"
        return self.actor if self.on_behalf_of is None else f"{self.actor} for {self.on_behalf_of}"


def timeline_line(body: bytes, facts: ReviewFacts | None = None) -> TimelineLine:
    """The line of an entry; ``facts`` of its whole chain tell more of reviews than their entries do alone."""
    entry = json.loads(body)
    type_, data = entry["type"], entry["data"]
    return TimelineLine(
        run=entry["run"],
        seq=entry["seq"],
        at=entry["at"],
        type=entry["type"],
        actor=entry["actor"],
        on_behalf_of=entry["on_behalf_of"],
        round=data.get("round"),
        step=data.get("step"),
        text=_text(type_, entry["seq"], data, facts or ReviewFacts()),
    )


def _text(type_: str, seq: int, data: Data, facts: ReviewFacts) -> str:
    of_review = _REVIEW_WORDS.get(type_)
    if of_review is not None:
        return of_review(data, facts)
    describe = _WORDS.get(type_)
    text = _unknown(type_, data) if describe is None else describe(data)
    ended = facts.ended.get(seq)
    # Whoever decided is the entry's actor, but did not order this: it follows from how the review ended.
    return text if ended is None else f"as review {ended['review'][:8]} is {facts.outcome(ended)}: {text}"


def cost_words(value: str | None) -> str:
    """Dollars as an entry says them, for people; None is unknown, never free."""
    if value is None:
        return "cost unknown"
    amount = Decimal(value).normalize()
    return f"${amount:f}"


def _unknown(type_: str, data: Data) -> str:
    said = [f"{name} {_plain(value)}" for name, value in data.items() if isinstance(value, str | int) and value != ""]
    return type_.replace(".", " ").replace("_", " ") + (f" ({', '.join(said)})" if said else "")


def _plain(value: object) -> str:
    text = str(value)
    return text if len(text) <= _PLAIN_CHARS_MAX else text[: _PLAIN_CHARS_MAX - 1] + "…"


def _place(data: Data) -> str:
    step = data.get("step")
    what = "planning" if step is None else f"step {step}"
    return f"{what} of round {data['round']}" if data.get("round") else what


def _because(data: Data) -> str:
    return f" ({data['reason']})" if data.get("reason") else ""


def _moved(data: Data) -> str:
    moved = data.get("moved")
    return f"; the step is now {moved['state']}{_because(moved)}" if moved else ""


def _with_reason(data: Data) -> str:
    return ", with a reason" if data.get("artifacts") else ""


def _created(data: Data) -> str:
    if "parent" in data:
        return f"run created for step {data['parent_step']} of run {data['parent']}"
    source = data.get("source")
    if source:
        return f"run created as a fork of run {source['run']}; {len(source['reused'])} of its outputs are reused"
    made = {"conductor": "to be planned by the Conductor", "file": "with a plan from a file"}
    return f"run created, {made.get(data['origin'], 'with a plan from a template')}; pool {data['pool'][:12]}"


def _planned(data: Data) -> str:
    if not data["steps"]:
        return f"the answer of the round before is kept (round {data['round']})"
    by = "" if data["attempt"] is None else " from the Conductor"
    steps = "; ".join(
        f"step {step['step']} to {step['worker']}{_reads(step)}{', left out' if step['skipped'] else ''}"
        for step in data["steps"]
    )
    return f"plan of round {data['round']} accepted{by}: {steps}"


def _reads(step: Data) -> str:
    if step["access"] == "all":
        return " reading all before"
    return f" reading {', '.join(map(str, step['access']))}" if step["access"] else ""


def _rejected(data: Data) -> str:
    return f"the Conductor's text was no plan: {', '.join(data.get('codes', [])) or 'invalid'}"


def _sent(data: Data) -> str:
    shown = data.get("shown")
    seen = "" if shown is None else f", shown {_counted(shown)}"
    return f"{_place(data)}: attempt {data['number']} sent to {data['worker']} ({data['model']}){seen}"


def _counted(texts: Sequence[object]) -> str:
    return f"{len(texts)} stored text{'' if len(texts) == 1 else 's'}"


def _closed(data: Data) -> str:
    tokens = [data["input_tokens"], data["output_tokens"]]
    counts = "" if None in tokens else f", {tokens[0]} + {tokens[1]} tokens"
    code = f" ({data['code']})" if data["code"] else ""
    accepted = ", accepted" if data["accepted"] else ""
    model, request = data.get("provider_model"), data.get("provider_request_id")
    by = (f", answered by {model}" if model else "") + (f", the provider's request {request}" if request else "")
    return f"{_place(data)}: {data['state']}{code}{accepted}{counts}, {cost_words(data['cost_usd'])}{by}{_moved(data)}"


def _ended(data: Data) -> str:
    totals = data.get("totals")
    used = "" if totals is None else f" after {totals['attempts']} attempts, {cost_words(totals['cost_usd'])}"
    unknown = f" and {totals['unpriced']} of unknown cost" if totals and totals["unpriced"] else ""
    return f"the run {data['state']}{_because(data)}{used}{unknown}"


def _resumed(data: Data) -> str:
    return f"resumed as execution {data['execution']}{_with_reason(data)}"


def _budget(data: Data) -> str:
    def said(limits: Data | None) -> str:
        if not limits:
            return "no limits"
        return ", ".join(f"{value} {unit}" for unit, value in limits.items() if value is not None)

    return f"budget changed from {said(data['old'])} to {said(data['budget'])}{_with_reason(data)}"


def _answered(data: Data) -> str:
    to = f" with {data['worker']}" if data.get("worker") and data["worker"] != data.get("old_worker") else ""
    return f"{_place(data)}: answered with {data['answer']}{to}{_with_reason(data)}{_moved(data)}"


def _requested(data: Data, facts: ReviewFacts) -> str:
    where = {"plan": "the plan", "answer": "the answer"}.get(data["gate"], f"{_place(data)} ({data['gate']})")
    eyes = ", not by whoever submitted it" if data.get("four_eyes") else ""
    need = f"{data['approvals']} approval{'' if data['approvals'] == 1 else 's'}"
    return f"review of {where} requested: {need}{eyes}{facts.why(data)}"


def _decided(data: Data, facts: ReviewFacts) -> str:
    return f"review {data['review'][:8]}: {facts.decision(data)} by {data['person']}, meaning {data['meaning']}"


_WORDS: Final[dict[str, Callable[[Data], str]]] = {
    "run.created": _created,
    "run.changed": lambda data: f"the run is now {data['state']}{_because(data)}",
    "run.closed": _ended,
    "run.cancel_requested": lambda data: f"asked for a cancel{_with_reason(data)}",
    "run.paused": lambda data: f"paused: nothing new starts{_with_reason(data)}",
    "run.unpaused": lambda data: f"let it go on{_with_reason(data)}",
    "run.resumed": _resumed,
    "run.repinned": lambda data: f"executed by pool {data['new'][:12]} from here on, before by {data['old'][:12]}",
    "run.budget_changed": _budget,
    "run.exported": lambda data: f"exported as evidence bundle {data['export'][:8]}",
    "plan.accepted": _planned,
    "plan.rejected": _rejected,
    "attempt.sent": _sent,
    "attempt.closed": _closed,
    "step.changed": lambda data: f"{_place(data)} is now {data['state']}{_because(data)}",
    "step.substituted": lambda data: f"{_place(data)}: {data['worker']} takes over from {data['old_worker']}",
    "step.routed": lambda data: f"{_place(data)} goes to {data['worker']} ({data['model']})",
    "child.begun": lambda data: f"{_place(data)} is planned by run {data['child']}",
    "child.ended": lambda data: f"{_place(data)}: run {data['child']} {data['child_state']}",
    "operator.answered": _answered,
    "artifact.read": lambda data: f"read {_counted(data['read'])} (podium {data['command']})",
    "artifact.erased": lambda data: f"erased {_counted(data['erased'])} ({_cause(data)})",
    "erasure.refused": lambda data: f"erasure refused ({_cause(data)}): under hold for {', '.join(data['matters'])}",
    "review.sampled": lambda data: (
        f"{_place(data)} ({data['gate']}): drawn for review: {'yes' if data['chosen'] else 'no'}"
    ),
    "review.opened": lambda data: f"review {data['review'][:8]}: looked at by {data['person']}",
    "review.commented": lambda data: f"review {data['review'][:8]}: comment by {data['person']}",
    "review.bypassed": lambda data: f"review {data['review'][:8]}: passed over by {data['person']} (break-glass)",
}
_REVIEW_WORDS: Final[dict[str, Callable[[Data, ReviewFacts], str]]] = {
    "review.requested": _requested,
    "review.decided": _decided,
    "review.closed": lambda data, facts: f"review {data['review'][:8]}: {facts.outcome(data)}{_moved(data)}",
}


def _cause(data: Data) -> str:
    return "by retention" if data["cause"] == "retention" else "by order"
