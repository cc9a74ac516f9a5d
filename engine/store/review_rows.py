"""Whether the tables of reviews say the same as the ledger.

Nobody is let through by one of them alone: entries can be added by whoever may call the append function, and rows by
whoever may write tables, but only a row of a decision has passed the triggers that know who may decide. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from engine.ledger.entry import timestamp
from engine.store.exchange import Row

# A row for each decision; one without decisions for a review that has none.
COLUMNS: Final = """
    reviews.*, decided.id AS decision_id, decided.decision, decided.actor_id AS decided_by, decided.on_behalf_of,
    decided.person, decided.subject AS decided_subject, decided.shown AS decided_shown
    FROM reviews LEFT JOIN review_decisions decided ON decided.review_id = reviews.id
"""
READ_ROWS: Final = f"SELECT {COLUMNS} WHERE reviews.run_id = %s ORDER BY reviews.seq, decided.id"
READ_ALL_ROWS: Final = f"SELECT {COLUMNS} ORDER BY reviews.run_id, reviews.seq, decided.id"
# What a review asks, by the names of its entry; rows have them under the same names but for the step.
_ASKED: Final = (
    "gate", "round", "holds", "reason", "execution", "level", "approvals", "four_eyes", "reviewers", "excluded",
    "bypass", "on_expiry",
)  # fmt: skip
_SAYING: Final = frozenset({"review.requested", "review.decided", "review.bypassed", "review.closed"})
_HASHES: Final = ("subject", "plan", "policy", "shown")


class ReviewFacts:
    """What entries and rows say of one run's reviews; ``add`` every entry in order, then ask for ``differences``."""

    def __init__(self) -> None:
        self._asked: dict[str, tuple[int, Mapping[str, Any]]] = {}
        self._states: dict[str, tuple[str, bool]] = {}
        # By review and decision.
        self._decided: dict[str, dict[str, tuple[Any, ...]]] = {}
        self._twice: set[str] = set()

    def add(self, entry: Mapping[str, Any]) -> None:
        """The next entry, decoded; one that is not about reviews says nothing."""
        kind, data = entry.get("type"), entry.get("data")
        if kind not in _SAYING or not isinstance(data, dict):
            return
        # Whoever may append may append nonsense: it differs from every row.
        own = str(data.get("review"))
        if kind == "review.requested":
            if own in self._asked:
                self._twice.add(own)
            self._asked[own] = (entry.get("seq", 0), data)
            self._states.setdefault(own, ("open", False))
        elif kind == "review.closed":
            self._states[own] = (str(data.get("state")), bool(data.get("sent_back")))
        else:
            decision = "bypass" if kind == "review.bypassed" else data.get("decision")
            # A broken glass is about what was asked for.
            request = self._asked.get(own, (0, data))[1]
            said = data if kind == "review.decided" else request
            self._decide(own, str(data.get("order")), (
                decision, entry.get("actor"), entry.get("on_behalf_of"), data.get("person"), said.get("subject"),
                said.get("shown"),
            ))  # fmt: skip
            if kind == "review.bypassed":
                self._states[own] = ("bypassed", False)

    def _decide(self, review: str, order: str, said: tuple[Any, ...]) -> None:
        decisions = self._decided.setdefault(review, {})
        if order in decisions:
            self._twice.add(review)
        decisions[order] = said

    def differences(self, rows: Iterable[Row]) -> dict[str, str]:
        """What differs, in words that follow `review ID`, by review; ``rows`` are the answer to ``READ_ROWS``."""
        stored: dict[str, list[Row]] = {}
        for row in rows:
            stored.setdefault(str(row["id"]), []).append(row)
        found = {}
        for own in sorted(stored.keys() | self._asked.keys() | self._states.keys() | self._decided.keys()):
            words = self._difference(own, stored.get(own, []))
            if words is not None:
                found[own] = words
        return found

    def _difference(self, own: str, rows: Sequence[Row]) -> str | None:
        if own not in self._asked or not rows:
            return "is in the table, but no entry asks for it" if rows else "has entries, but is not in the table"
        if own in self._twice:
            return "has entries that say the same twice"
        seq, data = self._asked[own]
        row = rows[0]
        if _asks(seq, data) != _stored_asks(row):
            return "asks for something else in the table than in its entry"
        decided = {
            str(one["decision_id"]): (
                one["decision"], one["decided_by"], one["on_behalf_of"], one["person"],
                bytes(one["decided_subject"]).hex(), bytes(one["decided_shown"]).hex(),
            )
            for one in rows
            if one["decision_id"] is not None
        }  # fmt: skip
        entries = self._decided.get(own, {})
        if decided != entries:
            return f"has {len(decided)} decisions in the table, and its entries say {len(entries)} or other ones"
        state, sent_back = self._states[own]
        if (row["state"], row["sent_back"]) != (state, sent_back):
            return f"is {row['state']} in the table, and its entries say {state}"
        return None


def _asks(seq: int, data: Mapping[str, Any]) -> tuple[Any, ...]:
    return (
        seq,
        *(data.get(name) for name in (*_ASKED, *_HASHES)),
        data.get("basis"),
        data.get("step"),
        data.get("attempt"),
        data.get("expires_at"),
    )


def _stored_asks(row: Row) -> tuple[Any, ...]:
    expires_at, attempt = row["expires_at"], row["attempt_id"]
    return (
        row["seq"],
        *(row[name] for name in _ASKED),
        *(bytes(row[name]).hex() for name in _HASHES),
        None if row["basis"] is None else json.loads(bytes(row["basis"])),
        row["position"],
        None if attempt is None else str(attempt),
        None if expires_at is None else timestamp(expires_at),
    )
