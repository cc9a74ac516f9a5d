"""Reviews by their entries, and whose approvals count, as `engine.ledger.reviews` counts them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from engine.verifier.chains import Entry
from engine.verifier.persons import ENGINE, Links, Persons
from engine.verifier.pools import Rule
from engine.verifier.words import SENT_BACK, let_pass

# More runs than there ever are above each other; bounds what a hostile bundle can cost.
LINEAGE_MAX: Final = 1_000
# Gate, round and position.
Place = tuple[str, int, int | None]
# What a review is about: place, rule, entry and attempt. Reviews of the same follow each other.
Matter = tuple[Place, str | None, str, str | None]


def accounts_of(entry: Entry) -> set[str]:
    """Who acted, and for whom, the engine itself left out."""
    return {account for account in (entry.actor, entry.on_behalf_of) if account not in (None, ENGINE)}


def authors_before(chains: Mapping[str, Sequence[Entry]], run: str) -> frozenset[str]:
    """The accounts of runs above a run, and of those whose plans it goes back to, as far as the bundle has them.

    Whoever submitted one of these does not review this one. The plan of a source is a person's if it is from a file or
    a fork; else the Conductor made it.
    """
    found: set[str] = set()
    seen, waiting = {run}, [run]
    while waiting and len(seen) <= LINEAGE_MAX:
        data = chains[waiting.pop()][0].data
        parent = data.get("parent")
        for other in (parent, data.get("source", {}).get("run")):
            if other is None or other not in chains or chains[other][0].type != "run.created":
                continue
            created = chains[other][0]
            if other == parent or created.data.get("origin") in ("file", "fork"):
                found |= accounts_of(created)
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    return frozenset(found)


@dataclass(frozen=True, slots=True)
class Decision:
    """One person's word about a review."""

    entry: Entry
    person: str

    @property
    def approves(self) -> bool:
        """Whether it is an approval."""
        return bool(self.entry.data["decision"] == "approve")

    @property
    def accounts(self) -> list[str]:
        """Who acted, and for whom."""
        return [account for account in (self.entry.actor, self.entry.on_behalf_of) if account is not None]


@dataclass(slots=True)
class Review:
    """A review by its entries. ``rule`` is None where somebody asked for it and no rule.

    ``excluded`` are accounts of people who may not decide where four eyes are wanted, authors of the run beside.
    """

    id: str
    requested: Entry
    rule: Rule | None
    excluded: frozenset[str]
    state: str = "open"
    decisions: list[Decision] = field(default_factory=list)
    opened: list[Entry] = field(default_factory=list)
    comments: list[Entry] = field(default_factory=list)
    bypassed: Entry | None = None
    closed: Entry | None = None

    @property
    def data(self) -> Mapping[str, Any]:
        """What was asked."""
        return self.requested.data

    @property
    def place(self) -> Place:
        """Gate, round and position."""
        return self.data["gate"], self.data["round"], self.data["step"]

    @property
    def matter(self) -> Matter:
        """What it is about."""
        return self.place, self.data["policy"], self.data["subject"], self.data.get("attempt")

    @property
    def holds(self) -> bool:
        """Whether something waits for it; False for one that was asked for after the fact."""
        return bool(self.data.get("holds", self.data["reason"] != "break-glass"))

    @property
    def was_let_pass(self) -> bool:
        """Whether it expired and its rule let it pass."""
        return self.state == "expired" and self.data.get("on_expiry") == "approve"

    @property
    def outcome(self) -> str:
        """How it stands, for people."""
        if self.was_let_pass:
            return let_pass(looked=bool(self.opened or self.decisions))
        return SENT_BACK if self.closed is not None and self.closed.data.get("sent_back") else self.state

    @property
    def is_rejected(self) -> bool:
        """Whether somebody rejected, whatever became of the review."""
        return any(not decision.approves for decision in self.decisions)

    def asks(self, account: str, person: str) -> bool:
        """Whether somebody is among those who are asked; nobody named: everybody is."""
        reviewers = self.data.get("reviewers", [])
        return not reviewers or account in reviewers or person in reviewers

    def own(self, authors: Collection[str], persons: Persons, at: Entry, links: Links = "stated") -> set[str]:
        """The people whose run it is, who therefore may not decide; nobody where four eyes are not wanted."""
        if not self.data["four_eyes"]:
            return set()
        return persons.people({*self.excluded, *authors}, at, links)

    def approvers(
        self, authors: Collection[str], persons: Persons, at: Entry, links: Links = "stated"
    ) -> dict[str, None]:
        """The people whose approvals count, by the links as they stood when an entry was written.

        ``authors`` are the accounts whose run it is by then.
        """
        own = self.own(authors, persons, at, links)
        found: dict[str, None] = {}
        # Whoever had a part in a decision that counts, also for somebody else, has none in another.
        taken: set[str] = set()
        for decision in self.decisions:
            data = decision.entry.data
            people = persons.people(decision.accounts, at, links)
            person = persons.person(decision.entry.actor, at, links)
            fits = decision.approves and (data["subject"], data["shown"]) == (self.data["subject"], self.data["shown"])
            asked = self.asks(decision.entry.actor, person)
            if fits and asked and people.isdisjoint(own) and people.isdisjoint(taken):
                found[person] = None
                taken |= people
        return found
