"""Reviews as people do them: find one, have it displayed, decide it, comment, ask for one, look at how they are done.

A decision goes on record, then the run's workflow is woken. What somebody decides about is what is displayed now; if
that is not what was asked, nothing is decided. Must never change a run whose decision it refuses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from uuid import UUID, uuid4

from engine.errors import BugError, InputError, RefusedError
from engine.operations.cancelling import Given
from engine.operations.meanings import usual_meaning
from engine.operations.waking import Connect, wake_when_connected
from engine.service import TENANT, resolve_run
from engine.store.database import Database
from engine.store.gates import GateRule
from engine.store.inputs import read_assignment, read_pool_document
from engine.store.orders import Order
from engine.store.review_decisions import Decided, DecisionKind, Verdict, decide, read_wanted
from engine.store.review_display import Display, display_erased, read_display
from engine.store.review_requests import display_of
from engine.store.review_views import ReviewLine, ReviewSnapshot, find_reviews, open_reviews, read_review
from engine.store.review_words import comment as write_comment
from engine.store.review_words import note_opening, request_after_the_fact, wanted_after_the_fact
from worker_pools.pool import ReviewRule, pool_from_document

BYPASS_MEANING: Final = ("glass-broken", "I let the run go on without this review; it has to be done later.")
OWN_MEANING: Final = "own-words"
MEANING_CHARS_MAX: Final = 1000
_ID_PREFIX = re.compile(r"[0-9a-f-]{4,36}")


@dataclass(frozen=True, slots=True)
class DecisionGiven:
    """A decision as it stands, the review it is about, and whether the workflow was told."""

    review: ReviewLine
    decided: Decided
    delivered: bool

    @property
    def given(self) -> Given:
        """The same as an order like any other."""
        return Given(self.decided.ordered, self.delivered)


@dataclass(frozen=True, slots=True)
class ShownReview:
    """A review with what it displays; None where a text is not stored any more. ``is_intact``: it is what was asked."""

    snapshot: ReviewSnapshot
    display: Display | None
    # Whether a text is missing because it was erased.
    erased: bool = False

    @property
    def is_intact(self) -> bool:
        """Whether what is displayed is what the review was asked for."""
        return self.display is not None and self.display.shown == self.snapshot.line.shown


async def resolve_review(database: Database, reference: str) -> UUID:
    """A review by its id, the beginning of one, or a run (id, beginning, ``last``) with exactly one that is open.

    Reviews of runs below it count, too.

    Raises InputError ``review-unknown``, ``review-ambiguous``, and what `resolve_run` does.
    """
    text = reference.strip().lower()
    found = await find_reviews(database, TENANT, text) if _ID_PREFIX.fullmatch(text) else []
    if len(found) > 1:
        raise InputError("review-ambiguous", f"more than one review begins with {text}", hint="give more of the id")
    if found:
        return found[0]
    try:
        run_id = await resolve_run(database, reference)
    except InputError as error:
        if error.code not in {"run-unknown", "run-id-invalid"}:
            raise
        raise InputError(
            "review-unknown", f"there is no review {reference!r}", hint="`podium review list` shows what is open"
        ) from None
    waiting = await open_reviews(database, run_id)
    if not waiting:
        raise RefusedError("review-closed", f"no review of run {run_id} is open", hint=f"podium show {run_id}")
    if len(waiting) > 1:
        places = ", ".join(str(review) for review in waiting)
        raise InputError("review-ambiguous", f"several reviews of run {run_id} are open: {places}", hint="say which")
    return waiting[0]


async def fetch_review(database: Database, review_id: UUID) -> ReviewSnapshot:
    """One review; raises InputError ``review-unknown``."""
    snapshot = await read_review(database, review_id)
    if snapshot is None:
        raise InputError("review-unknown", f"there is no review {review_id}", hint="podium review list")
    return snapshot


async def show_review(database: Database, review_id: UUID, actor_id: str, on_behalf_of: str | None) -> ShownReview:
    """What a reviewer is shown; that it was displayed to this person goes on record the first time."""
    snapshot = await fetch_review(database, review_id)
    display = await _display(database, review_id)
    shown = ShownReview(snapshot, display, display is None and await display_erased(database, review_id))
    if display is not None and shown.is_intact and snapshot.line.state == "open":
        await note_opening(database, Order(snapshot.line.run_id, actor_id, on_behalf_of), display)
        # With the look that has just been noted.
        shown = ShownReview(await fetch_review(database, review_id), display)
    return shown


async def decide_review(
    database: Database,
    connect: Connect,
    review_id: UUID,
    kind: DecisionKind,
    *,
    actor_id: str,
    on_behalf_of: str | None = None,
    reason: str | None = None,
    meaning: str | None = None,
    send_back: bool = False,
) -> DecisionGiven:
    """Decides a review. Raises what `engine.store.review_decisions.decide` does, InputError ``meaning-invalid``."""
    line = (await fetch_review(database, review_id)).line
    order = Order(line.run_id, actor_id, on_behalf_of, reason)
    code, text = _meaning(line, kind, meaning)
    display = await _display(database, review_id)
    later = None
    if kind == "bypass":
        later = await display_of(database, line.run_id, await read_wanted(database, review_id), uuid4())
    verdict = Verdict(
        review_id=review_id,
        kind=kind,
        meaning=code,
        meaning_text=text,
        shown=None if display is None or (kind == "bypass" and later is None) else display.shown,
        send_back=send_back,
        later=later,
        attempts_max=await _attempts_max(database, line) if send_back else None,
    )
    decided = await decide(database, order, verdict)
    delivered = await wake_when_connected(database, connect, line.run_id) if line.holds else True
    return DecisionGiven(line, decided, delivered)


async def comment_review(
    database: Database, review_id: UUID, *, actor_id: str, on_behalf_of: str | None, text: str
) -> ReviewLine:
    """Puts a comment beside a review. Raises InputError as `Order` does for the text, and ``comment-empty``."""
    if not text.strip():
        raise InputError("comment-empty", "the comment is empty", hint="say something")
    line = (await fetch_review(database, review_id)).line
    await write_comment(database, Order(line.run_id, actor_id, on_behalf_of, text), review_id)
    return line


async def request_review(
    database: Database, run_id: UUID, *, actor_id: str, on_behalf_of: str | None, round_number: int | None,
    position: int | None, approvals: int = 1,
) -> ReviewLine:  # fmt: skip
    """Asks for a review of a step's accepted output, or (None) of the run's answer, whatever its pool asks for.

    Nothing waits for it. Raises what `wanted_after_the_fact` and `request_after_the_fact` do.
    """
    rule = GateRule(ReviewRule(gate="answer" if position is None else "after", approvals=approvals).document)
    wanted = await wanted_after_the_fact(database, run_id, round_number, position, rule)
    display = await display_of(database, run_id, wanted, uuid4())
    if display is None:
        raise RefusedError(
            "text-missing", "a text that would have to be shown is not stored any more", hint=f"podium show {run_id}"
        )
    await request_after_the_fact(database, Order(run_id, actor_id, on_behalf_of), wanted, display)
    return (await fetch_review(database, display.review_id)).line


def _meaning(line: ReviewLine, kind: DecisionKind, given: str | None) -> tuple[str, str]:
    """What a decision says: in the reviewer's own words, else the pool's, else the usual ones for the gate."""
    if given is not None:
        if not given.strip() or len(given) > MEANING_CHARS_MAX or "\0" in given:
            raise InputError(
                "meaning-invalid",
                f"a meaning is one to {MEANING_CHARS_MAX} characters of text",
                hint='for example --meaning "I checked the output against the task"',
            )
        return OWN_MEANING, given
    if kind == "bypass":
        return BYPASS_MEANING
    return usual_meaning(line.gate, kind, line.meaning)


async def _display(database: Database, review_id: UUID) -> Display | None:
    try:
        return await read_display(database, review_id)
    except RefusedError:
        # Damaged where it is stored: it is not what was asked, and nobody can be shown it.
        return None


async def _attempts_max(database: Database, line: ReviewLine) -> int | None:
    if line.step is None:
        return None
    assigned = await read_assignment(database, line.run_id, line.round, line.step)
    try:
        pool = pool_from_document(await read_pool_document(database, assigned.pool_digest))
    except BugError:
        return None
    return pool.worker(assigned.worker).attempts_max
