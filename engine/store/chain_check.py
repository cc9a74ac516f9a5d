"""Checking one chain of ledger entries against itself, its head, its leaves, and the rows of its run.

Fed entry by entry, it keeps a state for each attempt of one run and nothing else. Must never raise for what it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from engine.ledger.entry import GENESIS, entry_hash
from engine.store.exchange import Row
from engine.store.review_rows import ReviewFacts
from engine.verifier.canonical import parse
from engine.verifier.faults import InvalidError
from engine.verifier.merkle import leaf_hash

Fault = Callable[[str, str], None]


class ChainChecker:
    """A chain: ``add`` its entries in order, ``check_head``, then ``finish`` with the rows that it must agree with."""

    def __init__(self, run_id: UUID, tenant_id: UUID, fault: Fault) -> None:
        self.run_id = run_id
        self._tenant_id = tenant_id
        self._fault = fault
        self._seq = 0
        self._prev = GENESIS
        self._state = "created"
        self._attempts: dict[str, str] = {}
        self._accepted: set[str] = set()
        self._reviews = ReviewFacts()
        self._has_head = False
        self._leaf = -1

    def add(self, row: Row) -> None:
        """The next entry, in the order of numbers."""
        self._seq += 1
        where = f"entry {row['seq']} of chain {self.run_id}"
        if row["seq"] != self._seq:
            text = f"chain {self.run_id} has no entry {self._seq}, but one with number {row['seq']}"
            self._fault("entry-missing", text)
            self._seq = row["seq"]
        body = row["body"]
        try:
            document = parse(body)
        except InvalidError as error:
            document = None
            self._fault("entry-altered", f"{where} {error}")
        if isinstance(document, dict):
            self._check_document(where, row, document)
            self._reviews.add(document)
        self._check_links(where, row, body, document)
        self._check_leaf(where, row, body)
        self._prev = entry_hash(body)

    def check_head(self, row: Row) -> None:
        """The row that says where the chain ends."""
        self._has_head = True
        if (row["seq"], row["hash"]) != (self._seq, self._prev):
            text = f"chain {self.run_id} has {self._seq} entries, and its head says {row['seq']} or another last one"
            self._fault("head-mismatch", text)

    def finish(self, run: Row | None, attempts: Sequence[Row], reviews: Sequence[Row]) -> None:
        """The rows of the run, its attempts and its reviews; None for a chain that belongs to no run."""
        if not self._has_head:
            self._fault("head-missing", f"chain {self.run_id} has no head")
        if run is None:
            if self.run_id != self._tenant_id:
                self._fault("run-missing", f"the run of chain {self.run_id} is gone")
            return
        if run["tenant_id"] != self._tenant_id:
            self._fault("row-mismatch", f"run {self.run_id} belongs to another tenant than its entries say")
        if run["state"] != self._state:
            self._fault("row-mismatch", f"run {self.run_id} is {run['state']}, and its entries say {self._state}")
        for review, words in self._reviews.differences(reviews).items():
            self._fault("row-mismatch", f"review {review} of run {self.run_id} {words}")
        rows = {str(attempt["id"]): attempt for attempt in attempts}
        for attempt_id in self._attempts.keys() | rows.keys():
            attempt, said = rows.get(attempt_id), self._attempts.get(attempt_id)
            if attempt is None or said is None or attempt["state"] != said:
                is_now = "gone" if attempt is None else attempt["state"]
                text = f"attempt {attempt_id} is {is_now}, and the entries of run {self.run_id} say {said or 'nothing'}"
                self._fault("row-mismatch", text)
            elif attempt["accepted"] != (attempt_id in self._accepted):
                self._fault("row-mismatch", f"attempt {attempt_id} has another say about its output than its entries")

    def _check_document(self, where: str, row: Row, document: dict[str, Any]) -> None:
        if document.get("run") != str(self.run_id) or document.get("tenant") != str(self._tenant_id):
            self._fault("entry-altered", f"{where} says that it belongs to another chain")
        if document.get("seq") != row["seq"] or type(document.get("seq")) is not int:
            self._fault("entry-altered", f"{where} says that it has another number")
        if row["tenant_id"] != self._tenant_id or document.get("type") != row["type"] or not _same_time(document, row):
            self._fault("row-mismatch", f"{where} is stored under another tenant, type or time than it says")
        self._follow(document)

    def _check_links(self, where: str, row: Row, body: bytes, document: Any) -> None:
        said = document.get("prev") if isinstance(document, dict) else None
        if said != self._prev.hex():
            self._fault("chain-broken", f"{where} does not follow the entry before it")
        if row["prev"] != self._prev or row["hash"] != entry_hash(body):
            self._fault("entry-altered", f"{where} has another hash than the one that was stored with it")

    def _check_leaf(self, where: str, row: Row, body: bytes) -> None:
        if row["leaf_hash"] is None:
            if not row["waiting"]:
                self._fault("leaf-missing", f"{where} is not in the log and does not wait for it")
        elif row["waiting"]:
            self._fault("leaf-twice", f"{where} is in the log and waits for it all the same")
        elif row["leaf_hash"] != leaf_hash(body) or row["leaf_tenant"] != self._tenant_id:
            self._fault("leaf-mismatch", f"{where} is not the one that is in the log")
        elif row["leaf"] <= self._leaf:
            self._fault("leaf-order", f"{where} stands in the log before the entry that it follows")
        else:
            self._leaf = row["leaf"]

    def _follow(self, document: dict[str, Any]) -> None:
        """Keeps what the entries say about states. Shapes are not trusted."""
        data = document.get("data")
        if not isinstance(data, dict):
            return
        type_ = document.get("type")
        if type_ in {"run.changed", "run.closed"}:
            self._state = str(data.get("state"))
        elif type_ == "attempt.sent":
            self._attempts[str(data.get("attempt"))] = "sent"
        elif type_ == "attempt.closed":
            attempt = str(data.get("attempt"))
            self._attempts[attempt] = str(data.get("state"))
            if data.get("accepted"):
                self._accepted.add(attempt)
        elif type_ == "step.changed" and str(data.get("attempt")) in self._attempts:
            # An output that waited for a review.
            self._accepted.add(str(data["attempt"]))


def _same_time(document: dict[str, Any], row: Row) -> bool:
    try:
        return bool(datetime.fromisoformat(str(document.get("at"))) == row["at"])
    except ValueError:
        return False
