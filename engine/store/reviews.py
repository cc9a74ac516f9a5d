"""Whether a run's gates are open: what Open, Close and the end of a run ask before anything goes on.

The answer is worked out anew each time from the run's ledger: which reviews the pool's rules want for exactly this
plan, step or output, and whether approvals of people who may give them are on record for it. Writes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, Final, Literal
from uuid import UUID

from engine.errors import BugError
from engine.ledger.reviews import ReviewRecord, counted_approvals, lets_through, read_reviews
from engine.store import queries
from engine.store.database import Database
from engine.store.exchange import Params, Row
from engine.store.gates import (
    REVIEW_CONTRADICTED,
    REVIEW_EXPIRED,
    REVIEW_REJECTED,
    Draw,
    Gate,
    GateRule,
    Gates,
    ReviewReason,
)
from engine.store.review_rows import READ_ROWS, ReviewFacts
from engine.store.states import STEP_HAS_OUTPUT

# Entries that say what is reviewed, by whom, and whose the run is.
READ_ENTRIES: Final = """
    SELECT type, body FROM ledger_entries
    WHERE run_id = %s AND (type LIKE 'review.%' OR type IN
        ('run.created', 'plan.accepted', 'attempt.closed', 'child.ended', 'operator.answered', 'run.repinned'))
    ORDER BY seq
"""
READ_AUTHORS: Final = "SELECT run_authors(%s) AS account"
READ_PERSONS: Final = """
    SELECT actor_id, person FROM persons WHERE tenant_id = (SELECT tenant_id FROM runs WHERE id = %s)
"""
# Nobody is linked to a person before this transaction ends: what is counted by today's persons stays so. The same name
# as `engine.store.system_chain` locks, shared; behind the run's lock, in front of the persons.
_KEEP_PERSONS: Final = """
    SELECT pg_advisory_xact_lock_shared(hashtextextended('podium/system/' || tenant_id::text, 0))
    FROM runs WHERE id = %s
"""
# How many queries `book_queries` are, for whoever takes their answers apart.
BOOK_QUERIES: Final = 5


def book_queries(run_id: UUID) -> tuple[tuple[str, Params], ...]:
    """The queries whose answers make a ``ReviewBook``, to be read behind the run's lock."""
    return (
        (READ_ENTRIES, (run_id,)),
        (READ_AUTHORS, (run_id,)),
        (_KEEP_PERSONS, (run_id,)),
        # A statement of its own behind the lock: it sees what was committed while that waited.
        (READ_PERSONS, (run_id,)),
        (READ_ROWS, (run_id,)),
    )


@dataclass(slots=True)
class ReviewBook:
    """What a run's ledger says that matters to reviews. Hashes are hexadecimal."""

    records: Mapping[str, ReviewRecord]
    # Hash of plan.accepted and commitment of the canonical plan, by round.
    plans: Mapping[int, tuple[str, str]]
    # Hash of the entry that an output is on record with, by attempt; of a child's end by round and step.
    outputs: Mapping[str, str]
    children: Mapping[tuple[int, int], str]
    created: str
    authors: frozenset[str]
    persons: Mapping[str, str]
    sampled: frozenset[tuple[str, str, int, int | None]]
    # Reviews of which the tables say something else than the ledger, and what.
    contradicted: Mapping[str, str]

    def newest(self, wanted: Wanted) -> ReviewRecord | None:
        """The newest review on record of what is wanted."""
        return next((own for own in reversed(list(self.records.values())) if wanted.is_met_by(own)), None)

    def output_entry(self, step: Row, attempt: UUID) -> str:
        """The entry that an output came into this run with: its call, its child's end, or the fork that reuses it."""
        return self.outputs.get(str(attempt)) or self.children.get((step["round"], step["position"])) or self.created

    def approvals(self, record: ReviewRecord) -> int:
        """How many people's approvals of a review count today, by whose account it is by now."""
        return len(counted_approvals(record, self.persons, self.authors))


def review_book(answers: Sequence[Sequence[Row]]) -> ReviewBook:
    """The book from the answers to ``book_queries``."""
    entry_rows, author_rows, _, person_rows, review_rows = answers
    entries = [(json.loads(bytes(row["body"])), sha256(bytes(row["body"])).hexdigest()) for row in entry_rows]
    plans: dict[int, tuple[str, str]] = {}
    outputs: dict[str, str] = {}
    children: dict[tuple[int, int], str] = {}
    sampled = set()
    facts = ReviewFacts()
    created = ""
    authors = {row["account"] for row in author_rows}
    for entry, own in entries:
        data = entry["data"]
        facts.add(entry)
        if entry["type"] == "run.created":
            created = own
        elif entry["type"] == "plan.accepted":
            committed = next(one["commitment"] for one in data["artifacts"] if one["kind"] == "plan")
            plans[data["round"]] = (own, committed)
        elif entry["type"] == "attempt.closed":
            outputs[data["attempt"]] = own
        elif entry["type"] == "child.ended":
            children[data["round"], data["step"]] = own
        elif entry["type"] == "review.sampled":
            sampled.add((data["policy"], data["gate"], data["round"], data["step"]))
        elif _is_edit(entry):
            authors |= {entry["actor"], entry["on_behalf_of"]} - {None}
    return ReviewBook(
        records=read_reviews(entry for entry, _ in entries),
        plans=plans,
        outputs=outputs,
        children=children,
        created=created,
        authors=frozenset(authors),
        persons={row["actor_id"]: row["person"] for row in person_rows},
        sampled=frozenset(sampled),
        contradicted=facts.differences(review_rows),
    )


def _is_edit(entry: Mapping[str, Any]) -> bool:
    """Whether somebody changed by an order what the run does: whoever did is one of its authors."""
    data = entry["data"]
    if entry["type"] == "run.repinned":
        return "order" in data
    return bool(entry["type"] == "operator.answered") and (
        data["answer"] == "skip" or data.get("worker") != data.get("old_worker")
    )


@dataclass(frozen=True, slots=True)
class Wanted:
    """A review that a rule wants, for exactly this. ``basis`` is what a step would be done with, for `before`.

    ``replaces`` is the review on record that does not count (any more), if there is one.
    """

    gate: Gate
    round: int
    position: int | None
    rule: GateRule
    reason: ReviewReason
    subject: str
    plan: str
    execution: int
    attempt_id: UUID | None = None
    basis: Mapping[str, Any] | None = None
    holds: bool = True
    replaces: str | None = None

    @property
    def policy(self) -> str:
        """The digest of the rule, in hex."""
        return self.rule.digest.hex()

    def is_met_by(self, record: ReviewRecord) -> bool:
        """Whether a review on record is about this very thing, by this very rule."""
        data = record.data
        same = record.place == (self.gate, self.round, self.position) and data["holds"]
        exact = (data["subject"], data["plan"], data["policy"]) == (self.subject, self.plan, self.policy)
        if not (same and exact):
            return False
        # A new execution is a new decision to spend, and may ask again what was rejected before.
        renewed = self.gate in {"plan", "before"} or record.state in {"rejected", "expired"}
        if renewed and data["execution"] != self.execution:
            return False
        return self.gate != "before" or data["basis"] == self.basis

    def asks_the_same(self, record: ReviewRecord) -> bool:
        """Whether a review that names this rule asks of people what the rule wants, and no less."""
        terms = self.rule.terms(record.data["level"])
        return terms is not None and terms == {name: record.data[name] for name in terms}


@dataclass(frozen=True, slots=True)
class GateVerdict:
    """``passed``; ``held`` with the reviews that have to be asked for first; ``failed`` with the code.

    ``held`` with the code ``review-contradicted`` is not for people to decide: the ledger and the tables differ.
    ``unchecked`` says that an approval came while nobody had compared what it was given for: look again.
    """

    kind: Literal["passed", "held", "failed"]
    missing: tuple[Wanted, ...] = ()
    code: str | None = None
    unchecked: bool = False


@dataclass(slots=True)
class GateCheck:
    """Asks about one run, inside a transaction. ``displays`` are commitments to what reviews would show today."""

    run: Row
    gates: Gates
    book: ReviewBook
    displays: Mapping[UUID, bytes | None]
    draws: list[Draw] = field(default_factory=list)

    def step(self, step: Row, steps: Sequence[Row]) -> GateVerdict:
        """Whether a step may go on: be called, or have its output accepted. ``steps`` are all of its round, in order.

        What it reads must have passed its own reviews, too.
        """
        is_last = step["position"] == steps[-1]["position"]
        own: list[Wanted] = []
        if step["state"] not in STEP_HAS_OUTPUT:
            own += self._plan(step["round"])
            own += self._before(step) if step["candidate_attempt_id"] is None else []
        own += self.output(step, is_last=is_last)
        inputs = [other for other in steps if other["position"] in step["reads"] and other["state"] != "skipped"]
        for other in inputs:
            own += self.output(other, is_last=False)
        return self.verdict(own)

    def output(self, step: Row, *, is_last: bool) -> list[Wanted]:
        """The reviews that a step's output needs before anybody may use it; none while there is no output."""
        attempt = step["accepted_attempt_id"] or step["candidate_attempt_id"]
        if attempt is None:
            return []
        wanted = []
        for gate in self.output_gates(step, is_last=is_last):
            entry = self.book.output_entry(step, attempt)
            wanted += self._each(gate, step["round"], step, subject=entry, attempt=attempt)
        return wanted

    def output_gates(self, step: Row, *, is_last: bool) -> tuple[Gate, ...]:
        """Which gates an output of this step has to pass, whether or not there are rules for them."""
        is_answer = is_last and self.run["depth"] == 0 and step["round"] + 1 >= self.run["rounds_max"]
        return ("after", "answer") if is_answer else ("after",)

    def answer(self, step: Row) -> GateVerdict:
        """Whether the run may end with this step's accepted output as its answer."""
        if self.run["depth"] != 0:
            return GateVerdict("passed")
        attempt = step["accepted_attempt_id"]
        entry = self.book.output_entry(step, attempt)
        return self.verdict(self._each("answer", step["round"], step, subject=entry, attempt=attempt))

    def wants_output_review(self, step: Row, *, is_last: bool) -> bool:
        """Whether the output that this step is about to have has to wait for a review."""
        # All of them: each draw is noted.
        gates = self.output_gates(step, is_last=is_last)
        found = [self._drawn(gate, step["round"], step["position"], step["worker"]) for gate in gates]
        return any(found)

    def _plan(self, round_number: int) -> list[Wanted]:
        return self._each("plan", round_number, None, subject=self._plan_entry(round_number)[0])

    def _before(self, step: Row) -> list[Wanted]:
        subject, _ = self._plan_entry(step["round"])
        return self._each("before", step["round"], step, subject=subject, basis=basis_of(step))

    def _each(  # the parts of what is wanted, each named
        self,
        gate: Gate,
        round_number: int,
        step: Row | None,
        *,
        subject: str,
        attempt: UUID | None = None,
        basis: Mapping[str, Any] | None = None,
    ) -> list[Wanted]:
        position, worker = (None, None) if step is None else (step["position"], step["worker"])
        return [
            Wanted(
                gate=gate,
                round=round_number,
                position=position,
                rule=draw.rule,
                reason=draw.rule.reason,
                subject=subject,
                plan=self._plan_entry(round_number)[1],
                execution=self.run["execution"],
                attempt_id=attempt,
                basis=basis,
            )
            for draw in self._drawn(gate, round_number, position, worker)
        ]

    def _drawn(self, gate: Gate, round_number: int, position: int | None, worker: str | None) -> list[Draw]:
        """The rules that a place was chosen for; what was drawn is noted, whatever came out."""
        found = list(self.gates.draws(self.run["id"], gate, round_number, position, worker))
        self.draws += [draw for draw in found if draw.rule.reason == "sample"]
        return [draw for draw in found if draw.chosen]

    def _plan_entry(self, round_number: int) -> tuple[str, str]:
        if round_number not in self.book.plans:
            raise BugError("ledger-incomplete", "the ledger does not hold the plan that is to be performed")
        return self.book.plans[round_number]

    def verdict(self, wanted: Iterable[Wanted]) -> GateVerdict:
        """Whether reviews on record satisfy all that is wanted."""
        missing: list[Wanted] = []
        held = unchecked = False
        for one in wanted:
            record = self.book.newest(one)
            if record is None:
                missing.append(one)
            elif record.id in self.book.contradicted or not one.asks_the_same(record):
                # Neither let through nor asked for anew: it was made up, and people have to look.
                return GateVerdict("held", code=REVIEW_CONTRADICTED)
            elif record.state in {"stale", "withdrawn"}:
                missing.append(replace(one, replaces=record.id))
            elif record.state == "open":
                held = True
            elif lets_through(record, self.book.persons, self.book.authors):
                shows = self.displays.get(UUID(record.id), b"")
                if shows == b"":
                    unchecked = True
                elif shows is None or shows.hex() != record.data["shown"]:
                    # What was approved is not what is there now.
                    missing.append(replace(one, replaces=record.id))
            elif record.state in {"rejected", "expired"}:
                code = REVIEW_REJECTED if record.state == "rejected" else REVIEW_EXPIRED
                return GateVerdict("failed", code=code)
            else:
                # Its approvals do not count, or not any more: somebody turned out to be an author.
                missing.append(replace(one, replaces=record.id))
        if missing or held or unchecked:
            return GateVerdict("held", tuple(missing), unchecked=unchecked)
        return GateVerdict("passed")


def basis_of(step: Row) -> dict[str, Any]:
    """What a step would be done with: who has it, and how often it began anew."""
    return {key: step[key] for key in ("worker", "model", "attempts_base", "sent_back")}


async def missing_for_output(
    database: Database, run_id: UUID, round_number: int, position: int, gates: Gates
) -> tuple[Wanted, ...]:
    """The reviews of a step's output that nobody has been asked for yet, without writing anything."""
    *answers, runs, steps = await database.fetch(
        *book_queries(run_id), (queries.READ_RUN, (run_id,)), (queries.READ_STEPS, (run_id, round_number))
    )
    check = GateCheck(runs[0], gates, review_book(answers), {})
    step = steps[position]
    return check.verdict(check.output(step, is_last=position == len(steps) - 1)).missing


async def answer_verdict(
    database: Database, run_id: UUID, gates: Gates, displays: Mapping[UUID, bytes | None]
) -> GateVerdict:
    """Whether a run may end with the answer that it has, without writing anything; a run without one may not."""
    *answers, runs, steps = await database.fetch(
        *book_queries(run_id), (queries.READ_RUN, (run_id,)), (queries.READ_ALL_STEPS, (run_id,))
    )
    if not steps or steps[-1]["accepted_attempt_id"] is None:
        return GateVerdict("held")
    return GateCheck(runs[0], gates, review_book(answers), displays).answer(steps[-1])
