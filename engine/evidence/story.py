"""A run's entries put together for a reader: rounds, steps, attempts, reviews, who was shown what. Pure.

Tells what the entries say; whether they may say it is the verifier's question, so a strange chain is told as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from engine.evidence.review_words import ENDING, ReviewFacts
from engine.evidence.timeline import TimelineLine, timeline_line
from engine.verifier.entry_types import committed

Place = tuple[int, int | None]
_ANSWERING: Final = frozenset({"succeeded", "reused"})


@dataclass(slots=True)
class Text:
    """A stored text that an entry commits to."""

    id: str
    kind: str
    size: int


@dataclass(slots=True)
class AttemptStory:
    """One call: what was sent, what came of it. ``closed`` is the data of its closing entry."""

    id: str
    place: Place
    sent_at: str
    sent: Mapping[str, Any]
    manifest: str | None
    closed_at: str | None = None
    closed: Mapping[str, Any] | None = None
    texts: list[Text] = field(default_factory=list)

    @property
    def state(self) -> str:
        """How it stands: ``sent`` until it was closed."""
        return "sent" if self.closed is None else str(self.closed["state"])

    @property
    def shown(self) -> list[str]:
        """The artifacts that its prompt is made of."""
        return list(self.sent.get("shown", []))


@dataclass(slots=True)
class ReviewStory:
    """One review: what was asked for, and everything that people did with it."""

    id: str
    requested: Mapping[str, Any]
    requested_at: str
    events: list[tuple[str, str, str, Mapping[str, Any]]] = field(default_factory=list)
    state: str = "waiting"
    # How it ended, in words, where that is more than its state.
    outcome: str | None = None

    def was_displayed_to(self, person: str, number: int) -> bool:
        """Whether it was displayed to a person before the event of this number."""
        return any(type_ == "review.opened" and data["person"] == person for type_, _, _, data in self.events[:number])

    @property
    def place(self) -> Place:
        """The round and step that it is about."""
        return self.requested.get("round", 0), self.requested.get("step")


@dataclass(slots=True)
class StepStory:
    """A step: what the plan says, where it stands, its calls, and the attempt whose output it has."""

    round: int
    position: int
    planned: Mapping[str, Any]
    subtask: str | None
    worker: str
    model: str
    state: str
    reason: str | None = None
    accepted: str | None = None
    child: str | None = None
    attempts: list[AttemptStory] = field(default_factory=list)

    @property
    def reads(self) -> list[int]:
        """The earlier steps of its round that it may read."""
        access = self.planned["access"]
        return list(self.planned.get("reads", range(self.position) if access == "all" else access))


@dataclass(slots=True)
class RoundStory:
    """A plan with its steps, and the planning calls that led to it."""

    number: int
    plan: Mapping[str, Any] | None = None
    texts: list[Text] = field(default_factory=list)
    steps: list[StepStory] = field(default_factory=list)
    planning: list[AttemptStory] = field(default_factory=list)


@dataclass(slots=True)
class RunStory:
    """A run. ``lines`` is every entry in words."""

    id: str
    created_at: str
    actor: str
    on_behalf_of: str | None
    created: Mapping[str, Any]
    task: str | None
    pool: str
    state: str = "created"
    reason: str | None = None
    ended_at: str | None = None
    totals: Mapping[str, Any] | None = None
    rounds: dict[int, RoundStory] = field(default_factory=dict)
    attempts: dict[str, AttemptStory] = field(default_factory=dict)
    reviews: dict[str, ReviewStory] = field(default_factory=dict)
    lines: list[TimelineLine] = field(default_factory=list)
    # Manifests of child runs' tasks, and what they are made of.
    delegated: dict[str, list[str]] = field(default_factory=dict)
    # Reads by people: when, who, by which command, what.
    reads: list[tuple[str, str, str, list[str]]] = field(default_factory=list)
    # What people wrote with their orders, with the type of the entry.
    reasons: list[tuple[str, Text]] = field(default_factory=list)

    def round(self, number: int) -> RoundStory:
        """A round by its number."""
        return self.rounds.setdefault(number, RoundStory(number))

    def step(self, place: Place) -> StepStory | None:
        """A step by its place; None if the plan has none there."""
        round_story = self.rounds.get(place[0])
        steps = [] if round_story is None else round_story.steps
        return next((step for step in steps if step.position == place[1]), None)

    @property
    def answer(self) -> StepStory | None:
        """The step whose output is the run's answer: the last of the last round that has steps."""
        with_steps = [found for found in self.rounds.values() if found.steps]
        last = max(with_steps, key=lambda found: found.number, default=None)
        return None if last is None or last.steps[-1].state not in _ANSWERING else last.steps[-1]

    def take(self, entry: Mapping[str, Any]) -> None:
        """Looks at the next entry."""
        type_, data = entry["type"], entry["data"]
        if type_.startswith("review.") and "review" in data:
            self._review(entry)
        handler = _HANDLERS.get(type_)
        if handler is not None:
            handler(self, entry, data)
        if ("order" in data or "erasure" in data) and not type_.startswith("review."):
            self.reasons += [(type_, text) for text in _texts(data)]
        moved = data.get("moved")
        if isinstance(moved, dict) and not type_.startswith("review."):
            self._move(data, moved)

    def _move(self, data: Mapping[str, Any], moved: Mapping[str, Any]) -> None:
        step = self.step((data.get("round", 0), data.get("step")))
        if step is not None:
            step.state, step.reason = moved["state"], moved["reason"]

    def _review(self, entry: Mapping[str, Any]) -> None:
        data = entry["data"]
        if entry["type"] == "review.requested":
            self.reviews[data["review"]] = ReviewStory(data["review"], data, entry["at"])
        story = self.reviews.get(data["review"])
        if story is None:
            return
        story.events.append((entry["type"], entry["at"], entry["actor"], data))
        if entry["type"] == "review.closed":
            story.state = data["state"]


def run_story(bodies: Iterable[bytes]) -> RunStory:
    """The story of a run's chain; ValueError for a chain that does not begin with ``run.created``."""
    story: RunStory | None = None
    chain = list(bodies)
    facts = ReviewFacts.of(chain)
    for body in chain:
        entry = json.loads(body)
        if story is None:
            if entry["type"] != "run.created":
                raise ValueError("a run's chain begins with run.created")
            data = entry["data"]
            task = next((text.id for text in _texts(data) if text.kind == "task"), None)
            story = RunStory(entry["run"], entry["at"], entry["actor"], entry["on_behalf_of"], data, task, data["pool"])
        else:
            story.take(entry)
        story.lines.append(timeline_line(body, facts))
    if story is None:
        raise ValueError("a run's chain has entries")
    for review in story.reviews.values():
        review.outcome = next((facts.outcome(data) for type_, _, _, data in review.events if type_ in ENDING), None)
    return story


def _texts(data: Mapping[str, Any]) -> list[Text]:
    return [Text(row["artifact"], row["kind"], row["bytes"]) for row in committed(data)]


def _moved_run(story: RunStory, entry: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    story.state, story.reason = data["state"], data["reason"]
    if entry["type"] == "run.closed":
        story.ended_at, story.totals = entry["at"], data.get("totals")


def _repinned(story: RunStory, _: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    story.pool = data["new"]


def _planned(story: RunStory, _: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    texts = _texts(data)
    subtasks = [text.id for text in texts if text.kind == "subtask"]
    round_story = story.round(data["round"])
    round_story.plan = data
    round_story.texts = [text for text in texts if text.kind != "subtask"]
    round_story.steps = [
        StepStory(
            data["round"],
            step["step"],
            step,
            # The subtasks stand in the order of the steps.
            subtasks[number] if number < len(subtasks) else None,
            step["worker"],
            step["model"],
            "skipped" if step["skipped"] else "pending",
            "unread" if step["skipped"] else None,
        )
        for number, step in enumerate(data["steps"])
    ]


def _sent(story: RunStory, entry: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    place = (data["round"], data["step"])
    manifest = next((text.id for text in _texts(data) if text.kind == "prompt_manifest"), None)
    attempt = AttemptStory(data["attempt"], place, entry["at"], data, manifest)
    story.attempts[attempt.id] = attempt
    step = story.step(place)
    if step is not None:
        step.attempts.append(attempt)
    elif place[1] is None:
        story.round(place[0]).planning.append(attempt)


def _closed(story: RunStory, entry: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    attempt = story.attempts.get(data["attempt"])
    if attempt is None:
        return
    attempt.closed_at, attempt.closed = entry["at"], data
    attempt.texts += _texts(data)
    step = story.step(attempt.place)
    if step is not None and data["accepted"]:
        step.accepted = attempt.id


def _step_changed(story: RunStory, _: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    step = story.step((data["round"], data["step"]))
    if step is not None:
        step.state, step.reason = data["state"], data["reason"]
        step.accepted = data.get("attempt", step.accepted)


def _given(story: RunStory, _: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    step = story.step((data["round"], data["step"]))
    if step is not None and "worker" in data:
        step.worker, step.model = data["worker"], data["model"]


def _begun(story: RunStory, _: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    step = story.step((data["round"], data["step"]))
    if step is not None:
        step.child = data["child"]
    if "shown" in data:
        story.delegated[data["child"]] = list(data["shown"])


def _read(story: RunStory, entry: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    story.reads.append((entry["at"], entry["actor"], data["command"], list(data["read"])))


_HANDLERS: Final = {
    "artifact.read": _read,
    "run.changed": _moved_run,
    "run.closed": _moved_run,
    "run.repinned": _repinned,
    "plan.accepted": _planned,
    "attempt.sent": _sent,
    "attempt.closed": _closed,
    "step.changed": _step_changed,
    "step.substituted": _given,
    "step.routed": _given,
    "operator.answered": _given,
    "child.begun": _begun,
}
