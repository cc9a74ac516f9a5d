"""What the tenant's own chain says of people: whose accounts are whose, and who released holds. Pure.

A link counts from a moment on, and it depends on that moment whether two accounts were two people when they decided.
Its entry states a time, and whoever writes entries can state any. So the time is held against what is known to have
been written after the link, and before; where the log has the two entries in another order than their times, nobody can
say which came first (entries get their places in the log in batches), and what depends on it is undecided.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, Literal

from engine.verifier.chains import Entry
from engine.verifier.faults import Findings, InvalidError
from engine.verifier.log import Log
from engine.verifier.times import later

ENGINE: str = "podium-engine"
# Which links count for an entry: those that say so by their times; of those where log and times disagree all, or none.
Links = Literal["stated", "most", "least"]
# More than any clock is set back by: by the wrong zone of a machine's clock, for example.
CLOCK_ERROR_S: Final = 86_400
# The engine links accounts to people only, never to other accounts, so one link is as far as it goes.
_LINKS_MAX: Final = 8


@dataclass(frozen=True, slots=True)
class Link:
    """An account is a person's, from ``since`` on at the latest: the time that it states, or that of a later entry."""

    entry: Entry
    person: str
    since: str


@dataclass(slots=True)
class Persons:
    """Links by account. An account without a link is its own person."""

    links: dict[str, Link] = field(default_factory=dict)
    # Hashes of the secrets that decide what is sampled, and where in the bundle each number was drawn.
    sampling_salts: set[str] = field(default_factory=set)
    drawn: dict[tuple[str, str], tuple[object, ...]] = field(default_factory=dict)
    log: Log = field(default_factory=Log)

    def person(self, account: str, when: Entry | None = None, links: Links = "stated") -> str:
        """The person of an account when an entry was written, or (None) by everything that is known.

        A person's name that is itself an account of somebody leads on to them.
        """
        return self.names(account, when, links)[-1]

    def people(self, accounts: Iterable[str], when: Entry, links: Links = "stated") -> set[str]:
        """The persons of accounts."""
        if not self.links:
            return set(accounts)
        return {self.person(account, when, links) for account in accounts}

    def names(self, account: str, when: Entry | None = None, links: Links = "stated") -> list[str]:
        """The account and the names that links lead to from it, the person's last."""
        found = [account]
        while found[-1] in self.links and len(found) <= _LINKS_MAX:
            link = self.links[found[-1]]
            if link.person in found or not self._is_before(link, when, links):
                break
            found.append(link.person)
        return found

    def _is_before(self, link: Link, when: Entry | None, links: Links) -> bool:
        if when is None:
            return True
        stated = link.since <= when.at
        if links == "stated":
            return stated
        index, other = self.log.index(link.entry), self.log.index(when)
        if links == "most":
            return stated or (index is not None and (other is None or index < other))
        return stated and (index is None or other is None or index < other)


def read_persons(
    system: Sequence[Entry],
    findings: Findings,
    log: Log | None = None,
    chains: Mapping[str, Sequence[Entry]] | None = None,
    made_at: str | None = None,
) -> Persons:
    """All links. ``chains`` are those of the bundle, ``made_at`` is when it was made by its own word.

    Recorded as faults: an account with two persons, a person that is somebody's account, a link that is dated more than
    a day away from what was written before or after it, a second secret for samples, and a hold that one person
    released alone.
    """
    persons = Persons(log=log or Log())
    is_linked = any(entry.type == "person.linked" for entry in system)
    later_entries = _Later(persons.log, system, chains or {}) if is_linked else None
    asked: dict[str, Entry] = {}
    people: set[str] = set()
    before = ""
    for entry in system:
        before = max(before, entry.at)
        if entry.type == "sampling.salt_made":
            if persons.sampling_salts:
                findings.fault(str(entry), "the secret that decides what is sampled is made once")
            persons.sampling_salts.add(entry.data["salt"])
        elif entry.type == "hold.release_asked":
            asked[entry.data["hold"]] = entry
        elif entry.type == "hold.released":
            _released(persons, asked.get(entry.data["hold"]), entry, findings)
        if entry.type != "person.linked":
            continue
        actor, person = entry.data["actor"], entry.data["person"]
        if person in persons.links or actor in people:
            findings.fault(str(entry), "an account is linked to a person, never to another account")
        people.add(person)
        known = persons.links.get(actor)
        if known is None:
            after = None if later_entries is None else later_entries.first_after(entry)
            since = _since(entry, before, after, made_at, findings)
            persons.links[actor] = Link(entry, person, since)
        elif known.person != person:
            findings.fault(str(entry), f"account {actor!r} is linked to two persons")
    return persons


def _since(link: Entry, before: str, after: Entry | None, made_at: str | None, findings: Findings) -> str:
    """From when on a link counts at the latest; a time that cannot be is recorded.

    ``before`` is the latest time of an entry of the tenant's own chain up to the link.
    """
    try:
        if before > later(link.at, CLOCK_ERROR_S):
            findings.fault(str(link), f"it is dated {link.at}, and an entry that was written before it {before}")
        elif after is not None and link.at > later(after.at, CLOCK_ERROR_S):
            findings.fault(str(link), f"it is dated {link.at}, and {after}, which was written after it, {after.at}")
        elif made_at is not None and link.at > later(made_at, CLOCK_ERROR_S):
            findings.fault(str(link), f"it is dated {link.at}, later than the bundle that holds it ({made_at})")
    except InvalidError as error:
        findings.fault(str(link), str(error))
    return link.at if after is None else min(link.at, after.at)


def _released(persons: Persons, before: Entry | None, entry: Entry, findings: Findings) -> None:
    asked, released = (
        {persons.person(account, entry) for account in (one.actor, one.on_behalf_of) if account is not None}
        for one in (before or entry, entry)
    )
    # Nobody has asked, or who did has a part in the release, be it by letting somebody else act.
    if asked & released:
        findings.fault(str(entry), "a hold is released by two people: one asks, another one does it")
    # Both stand in the tenant's own chain, as the links do, so the order is never in doubt.


def _named_size(entry: Entry) -> int:
    """The size of the checkpoint that an entry names as signed before it; 0 if it names none."""
    named = entry.data.get("checkpoint") if entry.type in ("run.created", "review.decided") else None
    size = named["size"] if isinstance(named, dict) else named
    return size if isinstance(size, int) else 0


class _Later:
    """What is known to have been written after an entry of the tenant's own chain.

    Later entries of that chain; exports that say how long it was; entries that name a checkpoint which covers it.
    """

    def __init__(self, log: Log, system: Sequence[Entry], chains: Mapping[str, Sequence[Entry]]) -> None:
        self._log = log
        self._by_seq = _Earliest((entry.seq - 1, entry) for entry in system)
        self._by_length = _Earliest(
            (entry.data["system"]["entries"], entry)
            for entries in chains.values()
            for entry in entries
            if entry.type == "run.exported" and entry.data.get("system") is not None
        )
        self._by_size = _Earliest(
            (size - 1, entry) for entries in chains.values() for entry in entries if (size := _named_size(entry))
        )

    def first_after(self, entry: Entry) -> Entry | None:
        """The one with the earliest time."""
        index = self._log.index(entry)
        found = [self._by_seq.at_least(entry.seq), self._by_length.at_least(entry.seq)]
        found.append(None if index is None else self._by_size.at_least(index))
        return min((one for one in found if one is not None), key=lambda one: one.at, default=None)


class _Earliest:
    """Entries by a number: which of those from a number on has the earliest time."""

    def __init__(self, rows: Iterable[tuple[int, Entry]]) -> None:
        ordered = sorted(rows, key=lambda row: row[0])
        self._numbers = [number for number, _ in ordered]
        # From the end on: the earliest of all that follow.
        self._first = list(accumulate((entry for _, entry in reversed(ordered)), _earlier))[::-1]

    def at_least(self, number: int) -> Entry | None:
        """The entry with the earliest time among those whose number is not smaller."""
        place = bisect_left(self._numbers, number)
        return self._first[place] if place < len(self._first) else None


def _earlier(one: Entry, two: Entry) -> Entry:
    return one if one.at <= two.at else two
