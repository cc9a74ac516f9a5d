"""Asking for reviews: the row, what will be displayed, and the ledger's entry, in one transaction.

What is wanted was worked out by `engine.store.reviews`; it is compared with the run once more behind the lock, so that
nothing is asked for that has changed meanwhile. What is displayed is read before, because texts never change.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import sha256
from typing import Any, Final
from uuid import UUID, uuid4

from engine.ledger.entry import timestamp
from engine.store.database import Database
from engine.store.exchange import Connection, Row
from engine.store.gates import REVIEW, Draw, Gates
from engine.store.ids import plan_id, step_id
from engine.store.review_display import Display, DisplayPart, make_display
from engine.store.reviews import BOOK_QUERIES, ReviewBook, Wanted, basis_of, book_queries, review_book
from engine.store.run_writer import RunWriter, lock_run
from engine.store.states import RUN_ENDED, STEP_HAS_OUTPUT

_INSERT: Final = """
    INSERT INTO reviews
        (id, tenant_id, run_id, seq, gate, round, position, holds, reason, attempt_id, basis, execution, subject, plan,
         policy, shown, rule, level, approvals, four_eyes, reviewers, excluded, bypass, expires_at, on_expiry,
         requested_at)
    VALUES
        (%(id)s, %(tenant_id)s, %(run_id)s, %(seq)s, %(gate)s, %(round)s, %(position)s, %(holds)s, %(reason)s,
         %(attempt_id)s, %(basis)s, %(execution)s, %(subject)s, %(plan)s, %(policy)s, %(shown)s, %(rule)s,
         %(level)s, %(approvals)s, %(four_eyes)s, %(reviewers)s, %(excluded)s, %(bypass)s, %(expires_at)s,
         %(on_expiry)s, %(now)s)
"""
_CLOSE: Final = """
    UPDATE reviews SET state = %(state)s, closed_at = %(now)s, sent_back = %(sent_back)s WHERE id = %(id)s
"""
_READ_STEPS: Final = """
    SELECT steps.*, runs.pool_digest
    FROM steps JOIN runs ON runs.id = steps.run_id WHERE run_id = %s AND steps.round = %s ORDER BY position
"""
_DONE: Final = frozenset({*STEP_HAS_OUTPUT, "skipped"})


@dataclass(frozen=True, slots=True)
class Asking:
    """A review about to be asked for: by what part of the rule (``level``), and who else may not decide."""

    wanted: Wanted
    display: Display
    level: int = 0
    excluded: frozenset[str] = frozenset()


async def request_reviews(database: Database, run_id: UUID, gates: Gates, wanted: Sequence[Wanted]) -> bool:
    """Asks for these reviews as far as they still fit the run; what was asked before and does not fit gets stale.

    False if one of them cannot be asked for, because nobody can be shown what it is about.
    """
    displays = [await display_of(database, run_id, one, uuid4()) for one in wanted]

    async def work(connection: Connection) -> None:
        rounds = sorted({one.round for one in wanted})
        writer, answers = await lock_run(
            connection, run_id, *book_queries(run_id), *((_READ_STEPS, (run_id, number)) for number in rounds)
        )
        book, steps = review_book(answers[:BOOK_QUERIES]), [row for rows in answers[BOOK_QUERIES:] for row in rows]
        if writer.run["state"] in RUN_ENDED:
            return
        for one, display in zip(wanted, displays, strict=True):
            newest = book.newest(one)
            if not _still_fits(writer, steps, one) or (newest is not None and newest.id != one.replaces):
                # The run has changed meanwhile, or somebody else has asked the same.
                continue
            close_unfit(writer, book, gates, one)
            if display is None:
                continue
            ask(writer, book, Asking(one, display))
            if one.attempt_id is not None and all(step["state"] in _DONE for step in steps):
                # Every step is done, and yet the run may not end.
                _show_waiting(writer)
        await writer.commit()
        # Now people can see what they are asked; a crash before this asks again.

    await database.write(work)
    return None not in displays


def _show_waiting(writer: RunWriter) -> None:
    if writer.run["paused_at"] is None:
        writer.set_run_state("waiting", REVIEW)


def _still_fits(writer: RunWriter, steps: Sequence[Row], wanted: Wanted) -> bool:
    if writer.run["execution"] != wanted.execution:
        return False
    if wanted.position is None:
        return True
    step = next((row for row in steps if (row["round"], row["position"]) == (wanted.round, wanted.position)), None)
    if step is None:
        return False
    if wanted.basis is not None:
        return basis_of(step) == wanted.basis
    return wanted.attempt_id in {step["accepted_attempt_id"], step["candidate_attempt_id"]}


def close_unfit(writer: RunWriter, book: ReviewBook, gates: Gates, wanted: Wanted) -> None:
    """Adds that earlier reviews of this place are stale: by the same rule, or by one that the pool has no more."""
    rules = {rule.digest.hex() for rule in gates.rules} - {wanted.policy}
    for record in book.records.values():
        same = record.place == (wanted.gate, wanted.round, wanted.position) and record.data["holds"]
        if same and record.data["policy"] not in rules and record.state in {"open", "approved", "bypassed"}:
            close_review(writer, record.id, "stale")
            record.state = "stale"


def close_review(writer: RunWriter, review: str, state: str, *, sent_back: bool = False) -> None:
    """Adds the end of a review; ``moved`` says nothing, because steps that move have entries of their own."""
    values = {"state": state, "sent_back": sent_back, "now": writer.now, "id": UUID(review)}
    writer.statement(_CLOSE, values)
    writer.entry("review.closed", review=review, state=state, sent_back=sent_back, moved=None)


def ask(writer: RunWriter, book: ReviewBook, asking: Asking) -> None:
    """Adds the question: the row, the manifest of what is displayed, the entry."""
    wanted, display, rule = asking.wanted, asking.display, asking.wanted.rule
    part = rule.said if asking.level == 0 else rule.said["escalate"]
    terms = rule.terms(asking.level)
    assert terms is not None
    # Nothing waits for a look at what is done, so nothing follows if nobody takes it.
    expires_at = _expiry(writer.now, part["expires_s"] if wanted.holds else None)
    excluded = sorted(book.authors | asking.excluded)
    said: dict[str, Any] = {
        "gate": wanted.gate,
        "round": wanted.round,
        "holds": wanted.holds,
        "reason": wanted.reason,
        "execution": wanted.execution,
        "excluded": excluded,
        **terms,
        "on_expiry": terms["on_expiry"] if wanted.holds else None,
    }
    hashes = {"subject": wanted.subject, "plan": wanted.plan, "policy": wanted.policy, "shown": display.shown.hex()}
    writer.statement(
        _INSERT,
        {
            **said,
            **{name: bytes.fromhex(value) for name, value in hashes.items()},
            "id": display.review_id,
            "tenant_id": writer.tenant_id,
            "run_id": writer.run_id,
            "seq": writer.next_seq,
            "position": wanted.position,
            "attempt_id": wanted.attempt_id,
            "basis": None if wanted.basis is None else json.dumps(dict(wanted.basis)).encode(),
            "rule": wanted.rule.document,
            "expires_at": expires_at,
            "now": writer.now,
        },
    )
    writer.entry(
        "review.requested",
        review=str(display.review_id),
        step=wanted.position,
        attempt=None if wanted.attempt_id is None else str(wanted.attempt_id),
        basis=None if wanted.basis is None else dict(wanted.basis),
        expires_at=None if expires_at is None else timestamp(expires_at),
        artifacts=writer.artifacts([display.draft()]),
        **said,
        **hashes,
    )


def _expiry(now: datetime, seconds: int | None) -> datetime | None:
    return None if seconds is None else now + timedelta(seconds=seconds)


def note_draws(writer: RunWriter, book: ReviewBook, draws: Sequence[Draw], salt: bytes | None) -> None:
    """Adds what sampling rules have drawn, chosen or not, each once: an auditor draws again and compares."""
    known = set(book.sampled)
    for draw in draws:
        place = (draw.rule.digest.hex(), draw.gate, draw.round, draw.position)
        if place in known:
            continue
        known.add(place)
        writer.entry(
            "review.sampled",
            gate=draw.gate,
            round=draw.round,
            step=draw.position,
            policy=place[0],
            percent=draw.rule.said["sample_percent"],
            draw=draw.draw.hex(),
            salt=sha256(salt or b"").hexdigest(),
            chosen=draw.chosen,
        )


async def display_of(database: Database, run_id: UUID, wanted: Wanted, review_id: UUID) -> Display | None:
    """What is to be shown of a review that is wanted; None if it cannot be shown (any more)."""
    (steps,) = await database.fetch((_READ_STEPS, (run_id, wanted.round)))
    if not steps:
        return None
    own = None if wanted.position is None else steps[wanted.position]
    facts: dict[str, Any] = {
        "run": str(run_id),
        "gate": wanted.gate,
        "round": wanted.round,
        "step": wanted.position,
        "pool": steps[0]["pool_digest"],
        "steps": [
            {"step": step["position"], "worker": step["worker"], "model": step["model"], "reads": list(step["reads"])}
            for step in (steps if own is None else [own])
        ],
    }
    return await make_display(database, review_id, facts, _parts(run_id, wanted, steps, own))


def _parts(run_id: UUID, wanted: Wanted, steps: Sequence[Row], own: Mapping[str, Any] | None) -> list[DisplayPart]:
    task = DisplayPart("task", None, run_id, "task")
    if own is None:
        return [task, DisplayPart("plan", None, plan_id(run_id, wanted.round), "plan")]
    subtask = DisplayPart("subtask", own["position"], step_id(run_id, wanted.round, own["position"]), "subtask")
    inputs = [
        DisplayPart("input", step["position"], step["accepted_attempt_id"], "output")
        for step in steps
        if step["position"] in own["reads"] and step["accepted_attempt_id"] is not None
    ]
    if wanted.gate == "before":
        return [task, subtask, *inputs]
    assert wanted.attempt_id is not None
    return [task, subtask, DisplayPart("output", own["position"], wanted.attempt_id, "output")]
