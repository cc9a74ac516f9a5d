"""What the tenant's own chain says of people: whose accounts are whose, and who released holds. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.verifier.chains import Entry
from engine.verifier.faults import Findings

ENGINE: str = "podium-engine"


@dataclass(slots=True)
class Persons:
    """Links by account: since when, and to whom. An account without a link is its own person."""

    links: dict[str, tuple[str, str]] = field(default_factory=dict)
    # Hashes of the secrets that decide what is sampled.
    sampling_salts: set[str] = field(default_factory=set)

    def person(self, account: str, at: str | None = None) -> str:
        """The person of an account at a time (RFC 3339, as entries write it), or by everything that is known."""
        since, person = self.links.get(account, ("", account))
        return person if at is None or since <= at else account


def read_persons(system: Sequence[Entry], findings: Findings) -> Persons:
    """All links. An account with two persons, and a hold that one person released alone, are recorded as faults."""
    persons = Persons()
    asked: dict[str, Entry] = {}
    for entry in system:
        if entry.type == "sampling.salt_made":
            persons.sampling_salts.add(entry.data["salt"])
        elif entry.type == "hold.release_asked":
            asked[entry.data["hold"]] = entry
        elif entry.type == "hold.released":
            before = asked.get(entry.data["hold"])
            if before is None or persons.person(before.actor, entry.at) == persons.person(entry.actor, entry.at):
                findings.fault(str(entry), "a hold is released by two people: one asks, another one does it")
        if entry.type != "person.linked":
            continue
        actor, person = entry.data["actor"], entry.data["person"]
        if persons.links.setdefault(actor, (entry.at, person))[1] != person:
            findings.fault(str(entry), f"account {actor!r} is linked to two persons")
    return persons
