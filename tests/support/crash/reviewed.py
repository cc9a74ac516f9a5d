"""What must hold of reviews when the dust has settled: each was asked once, and decided once, by somebody else."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any
from uuid import UUID

from engine.store.states import RUN_ENDED
from tests.support.crash.books import Books
from tests.support.crash.shapes import Shape


def review_faults(books: Books, run_id: UUID, shape: Shape | None) -> Iterable[str]:
    """All that is wrong with the reviews of a run that should have ended."""
    run, reviews, decisions = books.runs[run_id], books.reviews[run_id], books.decisions[run_id]
    if shape is not None and len(reviews) != shape.reviews:
        yield f"{len(reviews)} reviews were asked for, there should be {shape.reviews}"
    for review in reviews:
        own = [one for one in decisions if one["review_id"] == review["id"]]
        where = f"review {review['id']} ({review['gate']} {review['round']}/{review['position']})"
        if run["state"] in RUN_ENDED and review["state"] == "open":
            yield f"{where} is still open"
        if run["state"] == "succeeded" and review["holds"]:
            if review["state"] != "approved":
                yield f"{where} is {review['state']} and the run went on"
            if len(own) != review["approvals"] or {one["decision"] for one in own} != {"approve"}:
                yield f"{where} wants {review['approvals']} approvals and has {[one['decision'] for one in own]}"
        if any(run["actor_id"] in {one["actor_id"], one["person"]} for one in own):
            yield f"{where} was decided by whose run it is"
        for step in books.steps[run_id]:
            same = (step["round"], step["position"]) == (review["round"], review["position"])
            if same and step["state"] == "succeeded" and step["accepted_attempt_id"] != review["attempt_id"]:
                yield f"{where} is about another output than the accepted one"
    yield from _twice(reviews)
    yield from _ledger(books, run_id)


def _twice(reviews: Iterable[dict[str, Any]]) -> Iterable[str]:
    places = Counter((one["gate"], one["round"], one["position"], one["attempt_id"], one["level"]) for one in reviews)
    yield from (f"{count} reviews are about {place}" for place, count in places.items() if count > 1)


def _ledger(books: Books, run_id: UUID) -> Iterable[str]:
    """The entries and the rows say the same, each once."""
    entries = [json.loads(body) for body in books.bodies[run_id]]

    def said(kind: str, field: str) -> Counter[str]:
        return Counter(entry["data"][field] for entry in entries if entry["type"] == kind)

    rows = {
        "review.requested": ("review", Counter(str(one["id"]) for one in books.reviews[run_id])),
        "review.decided": ("order", Counter(str(one["id"]) for one in books.decisions[run_id])),
        "review.closed": ("review", Counter(str(one["id"]) for one in books.reviews[run_id] if one["state"] != "open")),
    }
    for kind, (field, true) in rows.items():
        for subject in said(kind, field).keys() | true.keys():
            if said(kind, field)[subject] != true[subject]:
                yield f"the ledger has {said(kind, field)[subject]} {kind} of {subject}, the rows {true[subject]}"
