"""What a run's ledger says about reviews, and whether their approvals count. Pure: no database, no clock.

The ledger decides, not a row and not a signal: an approval counts if the entries say so, for exactly the entry, the
rule and the display that it was given for, by people who may give it.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final

REVIEW_DOMAIN: Final = b"podium/review/1/"
SAMPLE_DOMAIN: Final = b"podium/sample/1/"
_DRAWS = 2**64


@dataclass(frozen=True, slots=True)
class Decision:
    """One person's word; ``person`` is what the record said at that time, accounts are looked up again."""

    decision: str
    actor: str
    on_behalf_of: str | None
    person: str
    subject: str
    shown: str

    @property
    def accounts(self) -> tuple[str, ...]:
        """Who acted, and for whom."""
        return (self.actor,) if self.on_behalf_of is None else (self.actor, self.on_behalf_of)


@dataclass(slots=True)
class ReviewRecord:
    """A review by its entries. Hashes are hexadecimal; ``data`` is what ``review.requested`` said."""

    id: str
    data: Mapping[str, Any]
    state: str = "open"
    sent_back: bool = False
    bypassed: bool = False
    decisions: list[Decision] = field(default_factory=list)

    @property
    def place(self) -> tuple[str, int, int | None]:
        """Gate, round and position."""
        return self.data["gate"], self.data["round"], self.data["step"]


def read_reviews(entries: Iterable[Mapping[str, Any]]) -> dict[str, ReviewRecord]:
    """All reviews of a run by id, in the order in which they were asked for; ``entries`` are decoded, in order."""
    found: dict[str, ReviewRecord] = {}
    for entry in entries:
        data = entry["data"]
        if entry["type"] == "review.requested":
            found[data["review"]] = ReviewRecord(data["review"], data)
            continue
        review = found.get(data.get("review", ""))
        if review is None:
            continue
        if entry["type"] == "review.decided":
            review.decisions.append(
                Decision(
                    data["decision"],
                    entry["actor"],
                    entry["on_behalf_of"],
                    data["person"],
                    data["subject"],
                    data["shown"],
                )
            )
        elif entry["type"] == "review.bypassed":
            review.bypassed, review.state = True, "bypassed"
        elif entry["type"] == "review.closed":
            review.state, review.sent_back = data["state"], bool(data.get("sent_back"))
    return found


def counted_approvals(review: ReviewRecord, persons: Mapping[str, str], authors: Iterable[str]) -> set[str]:
    """The people whose approvals count today.

    ``persons`` gives the person of an account that is linked to one; ``authors`` are accounts whose run it is, beside
    those that the request already names.
    """
    data = review.data

    def person_of(account: str) -> str:
        return persons.get(account, account)

    own = {person_of(account) for account in (*data["excluded"], *authors)} if data["four_eyes"] else set()
    reviewers = set(data["reviewers"])
    approved: set[str] = set()
    # Whoever had a part in a decision that counts, also for somebody else, has none in another.
    taken: set[str] = set()
    for decision in review.decisions:
        people = {person_of(account) for account in decision.accounts}
        fits = (decision.decision, decision.subject, decision.shown) == ("approve", data["subject"], data["shown"])
        asked = not reviewers or not reviewers.isdisjoint({decision.actor, person_of(decision.actor)})
        if fits and asked and people.isdisjoint(own) and people.isdisjoint(taken):
            approved |= {person_of(decision.actor)}
            taken |= people
    return approved


def lets_through(review: ReviewRecord, persons: Mapping[str, str], authors: Iterable[str]) -> bool:
    """Whether a gate that waited for this review may open now."""
    if review.state == "bypassed":
        return True
    if review.state == "expired":
        return bool(review.data["on_expiry"] == "approve")
    enough = len(counted_approvals(review, persons, authors)) >= review.data["approvals"]
    return review.state == "approved" and enough


def sampling_draw(salt: bytes, run: str, place: tuple[str, int, int | None], policy: str) -> bytes:
    """HMAC-SHA256 of the place under the installation's salt: 32 bytes that nobody without the salt can foresee.

    ``place`` is gate, round and position, ``policy`` the rule's digest in hex.
    """
    gate, round_number, position = place
    step = "plan" if position is None else str(position)
    return hmac.new(salt, SAMPLE_DOMAIN + f"{run}/{gate}/{round_number}/{step}/{policy}".encode(), sha256).digest()


def is_drawn(draw: bytes, percent: int) -> bool:
    """Whether a draw (its first 8 bytes as a big-endian number) is among the first ``percent`` in a hundred."""
    return int.from_bytes(draw[:8], "big") * 100 < percent * _DRAWS
