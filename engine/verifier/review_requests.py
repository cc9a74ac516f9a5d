"""What a request for a review has to say to be the one that the pool's rule wants, about what is there. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from engine.verifier.chains import Entry
from engine.verifier.entry_types import committed
from engine.verifier.faults import InvalidError
from engine.verifier.pools import REVIEWERS_MAX, Rule
from engine.verifier.records import Run, Step
from engine.verifier.review_records import Review
from engine.verifier.shapes import exactly, is_count, is_text
from engine.verifier.times import later

# Why a rule asks; nothing waits for a review that is asked for otherwise.
BY_RULE: Final = frozenset({"policy", "label", "sample"})
_OTHERWISE: Final = frozenset({"order", "break-glass"})
_OUTPUT_GATES: Final = ("after", "answer")
# More accounts than any run has authors, those above and before it included; bounds what a hostile bundle can cost.
PEOPLE_MAX: Final = 1_000
_MISSING: Final[Mapping[str, str]] = {
    "reviewers": "who is asked",
    "excluded": "whose run it is",
    "attempt": "which output is to be reviewed",
    "execution": "which execution of the run it is about",
    "plan": "which plan it is about",
    "holds": "whether something waits for it",
    "level": "who is asked first",
    "bypass": "who may break the glass",
    "expires_at": "when it expires",
    "on_expiry": "what follows when it expires",
    "basis": "what the step would be done with",
}
_BASIS: Final = exactly({"worker": is_text, "model": is_text, "attempts_base": is_count, "sent_back": is_count})


def check_request(review: Review, run: Run, authors: frozenset[str], same: Sequence[Review]) -> None:
    """Raises InvalidError for a request that the engine would not have written.

    ``authors`` are the accounts whose run it is by then; ``same`` are earlier reviews of the same matter.
    """
    data, rule = review.data, review.rule
    said = data.get("excluded", [])
    if len(said) > PEOPLE_MAX or len(data.get("reviewers", [])) > REVIEWERS_MAX:
        raise InvalidError("it names more people than any review does")
    if data["four_eyes"] and "excluded" in data and not authors <= set(said):
        raise InvalidError("it does not exclude everybody whose run it is")
    if data["approvals"] < 1:
        raise InvalidError("a review takes at least one approval")
    # Whatever the reason: by naming a rule it could pass for a review that the rule asked for.
    if rule is not None or data["reason"] in BY_RULE:
        _follows_rule(review, rule, same)
    _expires_properly(review)
    _is_whole(review)
    if data["reason"] == "break-glass" and not any(_forces(other, review) for other in same):
        raise InvalidError("it follows a broken glass, and nobody broke it")
    if rule is not None:
        _has_the_rules_terms(review, rule)
    if review.holds and not data["level"] and data["execution"] != run.execution:
        raise InvalidError("it is about another execution of the run")
    _has_its_subject(review, run)


def _follows_rule(review: Review, rule: Rule | None, same: Iterable[Review]) -> None:
    data = review.data
    level = data.get("level", 0)
    if rule is None or rule.gate != data["gate"] or level >= len(rule.groups):
        raise InvalidError("the pool has no rule that asks for it")
    group = rule.groups[level]
    if "reviewers" not in data:
        raise InvalidError("it does not say who is asked")
    asked = (data["approvals"], tuple(data["reviewers"]), data["four_eyes"])
    if asked != (group.approvals, group.reviewers, rule.four_eyes):
        raise InvalidError("it does not ask for what the pool's rule wants")
    if level and not any(_escalates_to(other, review) or _forces(other, review) for other in same):
        raise InvalidError("others are asked only when a review by those before them has expired")
    if data.get("on_expiry") == "escalate" and level + 1 >= len(rule.groups):
        raise InvalidError("the pool's rule names nobody who would be asked next")


def _escalates_to(before: Review, review: Review) -> bool:
    """Whether a review expired so that the people of another one's level are asked."""
    old, new = before.data, review.data
    follows = old.get("level", 0) + 1 == new.get("level", 0) and old.get("on_expiry") == "escalate"
    alike = (old.get("execution"), old.get("basis")) == (new.get("execution"), new.get("basis"))
    return follows and alike and before.state == "expired"


def _forces(before: Review, review: Review) -> bool:
    """Whether the glass of one was broken, so that the other one has to follow."""
    is_later = review.data["reason"] == "break-glass" and before.bypassed is not None
    return is_later and before.data.get("level") == review.data.get("level")


def _expires_properly(review: Review) -> None:
    """Raises InvalidError for an expiry that no rule could have set."""
    expires_at, on_expiry = review.data.get("expires_at"), review.data.get("on_expiry")
    if (expires_at is None) != (on_expiry is None):
        raise InvalidError("it expires if and only if it says what follows")
    if expires_at is not None and expires_at <= review.requested.at:
        raise InvalidError("it had expired before it was asked for")


def _is_whole(review: Review) -> None:
    """Everything that decides what an approval is worth is there, and fits together."""
    data = review.data
    for name, what in _MISSING.items():
        if name not in data:
            raise InvalidError(f"it does not say {what}")
    if data["reason"] not in BY_RULE | _OTHERWISE:
        raise InvalidError("there is no such reason to ask for a review")
    if review.holds != (data["reason"] in BY_RULE):
        raise InvalidError("the run waits for what a rule asks for, and for nothing else")
    if (data["step"] is None) != (data["gate"] == "plan"):
        raise InvalidError("it is about a plan and a step at once, or about neither")
    if data["gate"] in _OUTPUT_GATES and data["attempt"] is None:
        raise InvalidError("it does not say which output is to be reviewed")
    if data["gate"] not in _OUTPUT_GATES and data["attempt"] is not None:
        raise InvalidError("it names an output where none is to be reviewed")
    if data["gate"] != "before" and data["basis"] is not None:
        raise InvalidError("it speaks of a call that is not asked about")
    if data["gate"] == "before" and not _BASIS(data["basis"]):
        raise InvalidError("it does not say by which worker the step would be done, and after how many attempts")


def _has_the_rules_terms(review: Review, rule: Rule) -> None:
    """What the rule says of time and of breaking the glass, as the engine works it out."""
    data, group = review.data, rule.groups[review.data["level"]]
    if data["reason"] in BY_RULE and data["reason"] != rule.reason:
        raise InvalidError(f"the pool's rule asks for the reason `{rule.reason}`")
    if data["bypass"] != rule.bypass:
        raise InvalidError("the pool's rule lets others break the glass")
    # Nothing waits for a look at what is done, so nothing follows if nobody takes it.
    expires = review.holds and group.expires_s is not None
    at = later(review.requested.at, group.expires_s or 0) if expires else None
    if (data["expires_at"], data["on_expiry"]) != (at, group.on_expiry if expires else None):
        raise InvalidError("it does not expire when and as the pool's rule says")


def _has_its_subject(review: Review, run: Run) -> None:
    """The entry that is reviewed is the one of its place, and the plan the round's."""
    data = review.data
    plan = run.rounds.get(data["round"])
    step = None if data["step"] is None else run.step(data["round"], data["step"])
    if plan is None or (step is None and data["step"] is not None):
        raise InvalidError("its subject is not the entry that is to be reviewed")
    subject = plan.entry
    if step is not None and data["attempt"] is not None:
        subject = output_entry(run, step, data["attempt"])
    if data["subject"] != subject.hash:
        raise InvalidError("its subject is not the entry that is to be reviewed")
    if step is not None and data["attempt"] is not None and not _is_output(run, step, data["attempt"]):
        raise InvalidError("what it is about is no output of the step")
    commitments = [row["commitment"] for row in committed(plan.entry.data) if row["kind"] == "plan"]
    if data["plan"] not in commitments:
        raise InvalidError("it speaks of another plan")


def output_entry(run: Run, step: Step, attempt: str | None) -> Entry:
    """The entry by which an output came into a run: its call, its child's end, or the fork that took it over."""
    own = None if attempt is None else run.attempts.get(attempt)
    if own is not None and own.closed is not None:
        return own.closed
    return step.child_ended or run.created


def _is_output(run: Run, step: Step, attempt: str) -> bool:
    """Whether an attempt is one that the step has its output from, or may have: its own, its child's, its source's."""
    own = run.attempts.get(attempt)
    if own is not None:
        return bool(step.attempts) and own is step.attempts[-1] and own.state == "succeeded"
    if step.child_ended is not None:
        return bool(step.child_ended.data.get("answer") == attempt)
    source: Mapping[str, Any] = run.created.data.get("source", {})
    return any((row["step"], row["attempt"]) == (step.position, attempt) for row in source.get("reused", []))
