"""What became of reviews, in words: a review's closing says little without what was asked. Pure; decides nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from engine.verifier.words import SENT_BACK, let_pass

Data = Mapping[str, Any]
ENDING: Final = frozenset({"review.closed", "review.bypassed"})


@dataclass(slots=True)
class ReviewFacts:
    """What a chain says of its reviews: what was asked by id, who looked, what was sent back, who broke the glass.

    ``ended`` is the review that ended last before an entry of the same transaction, by the entry's number.
    """

    asked: dict[str, Data] = field(default_factory=dict)
    looked: set[str] = field(default_factory=set)
    sent_back: set[str] = field(default_factory=set)
    glass: dict[str, str] = field(default_factory=dict)
    ended: dict[int, Data] = field(default_factory=dict)

    @classmethod
    def of(cls, bodies: Sequence[bytes]) -> ReviewFacts:
        """The facts of a chain's entries."""
        facts, at, ended, broke = cls(), "", None, None
        for body in bodies:
            entry = json.loads(body)
            type_, data = entry["type"], entry["data"]
            if entry["at"] != at:
                # The entries of a transaction have one time.
                at, ended, broke = entry["at"], None, None
            if type_ in ENDING:
                ended = data
            elif type_ == "run.changed" and ended is not None:
                facts.ended[entry["seq"]] = ended
            if type_ == "review.bypassed":
                broke = data.get("person")
            elif type_ == "review.requested" and data.get("reason") == "break-glass" and broke:
                facts.glass[data["review"]] = str(broke)
            facts._take(type_, data)
        return facts

    def _take(self, type_: str, data: Data) -> None:
        if type_ == "review.requested":
            self.asked[data["review"]] = data
        elif type_ in {"review.opened", "review.decided"}:
            self.looked.add(data["review"])
        elif type_ == "review.closed" and data.get("sent_back"):
            self.sent_back.add(data["review"])

    def outcome(self, data: Data) -> str:
        """How a review ended, from the data of the entry that ended it."""
        review = data["review"]
        if data.get("sent_back"):
            return SENT_BACK
        state = str(data.get("state", "bypassed"))
        if state == "expired" and self.asked.get(review, {}).get("on_expiry") == "approve":
            return let_pass(looked=review in self.looked)
        return state

    def decision(self, data: Data) -> str:
        """What somebody decided: `approved`, `rejected`, or `sent back` where that is what the rejection did."""
        if data["decision"] == "reject" and data["review"] in self.sent_back:
            return SENT_BACK
        return {"approve": "approved", "reject": "rejected"}.get(data["decision"], str(data["decision"]))

    def why(self, data: Data) -> str:
        """Why a review was asked for, if that is the glass, and whom it asks, if not everybody."""
        by = f", by {', '.join(data['reviewers'])}" if data.get("reviewers") else ""
        if data.get("reason") != "break-glass":
            return by
        person = self.glass.get(data["review"])
        return f"{by}, after the fact, because {person or 'somebody'} broke the glass"
