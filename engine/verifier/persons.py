"""What the tenant's own chain says of people: whose accounts are whose, and who released holds. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.verifier.chains import Entry
from engine.verifier.faults import Findings
from engine.verifier.log import Log

ENGINE: str = "podium-engine"


@dataclass(slots=True)
class Persons:
    """Links by account: by which entry, and to whom. An account without a link is its own person.

    ``log`` says which entry was first; where it does not, their times do.
    """

    links: dict[str, tuple[Entry, str]] = field(default_factory=dict)
    # Hashes of the secrets that decide what is sampled.
    sampling_salts: set[str] = field(default_factory=set)
    log: Log = field(default_factory=Log)

    def person(self, account: str, when: Entry | str | None = None) -> str:
        """The person of an account when an entry was written, at a time (RFC 3339), or by everything that is known.

        A person's name that is itself an account of somebody leads on to them.
        """
        return self.names(account, when)[-1]

    def names(self, account: str, when: Entry | str | None = None) -> list[str]:
        """The account and the names that links lead to from it, the person's last."""
        found = [account]
        while found[-1] in self.links:
            link, person = self.links[found[-1]]
            if person in found or not self._is_before(link, when):
                break
            found.append(person)
        return found

    def _is_before(self, link: Entry, when: Entry | str | None) -> bool:
        if when is None:
            return True
        if isinstance(when, str):
            return link.at <= when
        own, other = self.log.index(link), self.log.index(when)
        if own is not None and other is not None:
            return own < other
        return link.at <= when.at


def read_persons(system: Sequence[Entry], findings: Findings, log: Log | None = None) -> Persons:
    """All links. An account with two persons, and a hold that one person released alone, are recorded as faults."""
    persons = Persons(log=log or Log())
    asked: dict[str, Entry] = {}
    for entry in system:
        if entry.type == "sampling.salt_made":
            persons.sampling_salts.add(entry.data["salt"])
        elif entry.type == "hold.release_asked":
            asked[entry.data["hold"]] = entry
        elif entry.type == "hold.released":
            before = asked.get(entry.data["hold"])
            if before is None or persons.person(before.actor, entry) == persons.person(entry.actor, entry):
                findings.fault(str(entry), "a hold is released by two people: one asks, another one does it")
        if entry.type != "person.linked":
            continue
        actor, person = entry.data["actor"], entry.data["person"]
        if persons.links.setdefault(actor, (entry, person))[1] != person:
            findings.fault(str(entry), f"account {actor!r} is linked to two persons")
    return persons
