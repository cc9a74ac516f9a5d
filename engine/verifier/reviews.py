"""Reviews on record: who decided what, bound to what, and whether anything passed a gate without approval.

The rules come from the pool that the run was pinned to; approvals count by person, for exactly the entry, the rule and
the display that they were given for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

from engine.verifier.chains import Entry
from engine.verifier.displays import Displays
from engine.verifier.entry_types import committed
from engine.verifier.faults import Findings, InvalidError
from engine.verifier.persons import ENGINE, Links, Persons
from engine.verifier.pools import Pool, Rule
from engine.verifier.records import Run, Step
from engine.verifier.review_records import Decision, Matter, Place, Review, accounts_of
from engine.verifier.review_requests import BY_RULE, PEOPLE_MAX, check_request, output_entry

_DRAWS: Final = 2**64
# More reviews of a run and of one matter, and decisions about one, than there ever are; bounds what a hostile bundle
# can cost.
REVIEWS_MAX: Final = 10_000
SAME_MAX: Final = 1_000
DECISIONS_MAX: Final = 100
# The code of a decision at each gate that is given in the usual words, or in those of the pool.
_MEANINGS: Final[Mapping[str, Mapping[str, str]]] = {
    "approve": {
        "plan": "plan-checked",
        "before": "call-checked",
        "after": "output-checked",
        "answer": "answer-checked",
    },
    "reject": {
        "plan": "plan-rejected",
        "before": "call-rejected",
        "after": "output-rejected",
        "answer": "answer-rejected",
    },
}
_OWN_WORDS: Final = "own-words"
_IN_DOUBT: Final = "an account was linked to a person by an entry that log and times place differently from {}"
# How links count where log and times disagree.
IN_DOUBT: Final[tuple[Links, ...]] = ("most", "least")


class Reviews:
    """All reviews of one run; told of every entry that begins with ``review.``, asked at every gate.

    ``authors`` are accounts of the runs above and before it, whose people may not decide on this one either.
    """

    def __init__(
        self, persons: Persons, displays: Displays, findings: Findings, authors: frozenset[str] = frozenset()
    ) -> None:
        self._persons = persons
        self._displays = displays
        self._findings = findings
        self.all: dict[str, Review] = {}
        self._about: dict[Matter, list[Review]] = {}
        self._draws: dict[tuple[Place, str], bool] = {}
        self._authors: set[str] = set(authors)
        # How many rounds' planners are among them.
        self._rounds = 0
        # How often a step was sent back, by round and position.
        self._sent_back: Counter[tuple[int, int | None]] = Counter()
        # The execution that was to fail with a rejection, by round and position.
        self._given_up: dict[tuple[int, int | None], int] = {}

    def displayed(self, review: str) -> frozenset[str]:
        """The artifacts that were displayed in a review, as far as its manifest is disclosed."""
        return self._displays.parts.get(review, frozenset())

    # Entries

    def author(self, entry: Entry) -> None:
        """Remembers who submitted, planned or edited the run: their approvals do not count."""
        if len(self._authors) > PEOPLE_MAX:
            raise InvalidError("more people had a hand in the run than ever have")
        self._authors |= accounts_of(entry)

    def entry(self, run: Run, pool: Pool, entry: Entry) -> None:
        """Takes an entry about reviews. Raises InvalidError."""
        if entry.type == "review.requested":
            self._requested(run, pool, entry)
            return
        if entry.type == "review.sampled":
            self._sampled(run, pool, entry)
            return
        review = self.all.get(entry.data["review"])
        if review is None:
            raise InvalidError("it is about no review that was asked for")
        self._speaks_for_themselves(entry)
        if entry.type == "review.commented":
            review.comments.append(entry)
            return
        if entry.type == "review.opened":
            if entry.data["shown"] != review.data["shown"]:
                raise InvalidError("something else was displayed than what is to be decided on")
            review.opened.append(entry)
            return
        if review.state != "open" and not _goes_stale(review, entry):
            raise InvalidError(f"the review was {review.state} already")
        if entry.type == "review.closed":
            self._closed(run, review, entry)
        elif entry.type == "review.decided":
            self._decided(run, review, entry)
        else:
            self._bypassed(run, review, entry)

    def _speaks_for_themselves(self, entry: Entry) -> None:
        """Who looks, comments and decides are people, under their own names."""
        person = entry.data.get("person")
        if person is None:
            return
        if ENGINE in (entry.actor, entry.on_behalf_of, person):
            raise InvalidError("the engine is not a person")
        # A look or a comment is dated before it is read whose account it is.
        when = entry if entry.type in ("review.decided", "review.bypassed") else None
        if person not in self._persons.names(entry.actor, when, "most"):
            raise InvalidError(f"the account {entry.actor!r} does not belong to {person!r}")

    def _requested(self, run: Run, pool: Pool, entry: Entry) -> None:
        data = entry.data
        if data["review"] in self.all or len(self.all) >= REVIEWS_MAX:
            raise InvalidError("a review is asked for once, and not too many are")
        review = Review(data["review"], entry, pool.rule(data["policy"]), frozenset(data.get("excluded", [])))
        same = self._about.setdefault(review.matter, [])
        if len(same) >= SAME_MAX:
            raise InvalidError("the same is not reviewed so often")
        review.excluded |= _breakers(review, same)
        before = tuple(same)
        self.all[review.id] = review
        same.append(review)
        check_request(review, run, frozenset(self._authors_of(run)), before)
        self._displays.check(run, entry, holds=review.holds)

    def _authors_of(self, run: Run) -> set[str]:
        """The accounts whose run it is by now: of who submitted or edited it, or planned a round by hand."""
        while self._rounds in run.rounds:
            self.author(run.rounds[self._rounds].entry)
            self._rounds += 1
        return self._authors

    def _sampled(self, run: Run, pool: Pool, entry: Entry) -> None:
        data = entry.data
        rule = pool.rule(data["policy"])
        if rule is None or rule.gate != data["gate"] or rule.percent != data["percent"] or rule.is_for_all:
            raise InvalidError("the pool has no rule that draws here")
        chosen = int(data["draw"][:16], 16) * 100 < data["percent"] * _DRAWS
        if data["chosen"] != chosen:
            raise InvalidError("what was drawn does not follow from the number that was drawn")
        place = (data["gate"], data["round"], data["step"])
        if (place, rule.digest) in self._draws:
            raise InvalidError("it was drawn twice")
        self._draws[place, rule.digest] = chosen
        here = (run.id, place, rule.digest)
        if self._persons.drawn.setdefault((data["salt"], data["draw"]), here) != here:
            raise InvalidError("the same number was drawn for something else")
        self._secret_is_known(run, data["salt"])

    def _secret_is_known(self, run: Run, salt: str) -> None:
        """The secret is the one on record; nobody without it can tell whether a number follows from it."""
        if salt not in self._persons.sampling_salts:
            if self._persons.sampling_salts or self._persons.log.complete:
                raise InvalidError("it was drawn with another secret than the one that was made for it")
            self._findings.undecidable(
                f"that the secret which decided what was sampled in run {run.id} was made before: "
                "the bundle does not hold the entry of the tenant's own chain that says so"
            )
        self._findings.unproven(
            f"that exactly those places of run {run.id} were reviewed which its secret drew: what was drawn, and what "
            "passed because it was not, is the record's word until somebody who is given the secret draws again"
        )

    def _decided(self, run: Run, review: Review, entry: Entry) -> None:
        data = entry.data
        if len(review.decisions) >= DECISIONS_MAX:
            raise InvalidError("there are more decisions than a review ever has")
        decision = Decision(entry, data["person"])
        _is_in_time(run, review, entry)
        if (data["subject"], data["shown"]) != (review.data["subject"], review.data["shown"]):
            raise InvalidError("the decision was given for something else than what was asked")
        self._may_decide(run, review, entry)
        self._means_something(review, entry)
        review.decisions.append(decision)

    def _may_decide(self, run: Run, review: Review, entry: Entry) -> None:
        accounts = accounts_of(entry)
        people = self._persons.people(accounts, entry)
        authors = self._authors_of(run)
        if not people.isdisjoint(review.own(authors, self._persons, entry)):
            raise InvalidError(f"{entry.data['person']} decided on a run of their own")
        if not review.asks(entry.actor, self._persons.person(entry.actor, entry)):
            raise InvalidError(f"{entry.data['person']} was not asked to decide")
        before = {account for other in review.decisions for account in other.accounts}
        if not people.isdisjoint(self._persons.people(before, entry)):
            raise InvalidError(f"{entry.data['person']} decided twice")

    def _means_something(self, review: Review, entry: Entry) -> None:
        """A decision is given in the words of the pool, the usual ones for the gate, or the reviewer's own."""
        kinds = {row["kind"] for row in committed(entry.data)}
        if "meaning" not in kinds:
            raise InvalidError("it does not commit to what the decision means")
        kind = "bypass" if entry.type == "review.bypassed" else entry.data["decision"]
        if kind != "approve" and "reason" not in kinds:
            raise InvalidError("it is given without a reason")
        if kind == "bypass":
            return
        code = entry.data["meaning"]
        if code not in (_MEANINGS[kind][review.place[0]], _OWN_WORDS):
            raise InvalidError("the decision means something else than what was asked")
        wanted = None if review.rule is None or code == _OWN_WORDS or kind != "approve" else review.rule.meaning
        if wanted is not None and self._displays.words(entry, "meaning") not in (None, wanted):
            raise InvalidError("the approval does not say what the pool's rule makes approvals say")

    def _closed(self, run: Run, review: Review, entry: Entry) -> None:
        state = entry.data["state"]
        if state == "bypassed":
            raise InvalidError("nobody broke the glass")
        if state == "approved":
            self._enough(run, review, entry, "{} of {} approvals are on record")
            if review.is_rejected:
                raise InvalidError("it was rejected")
        if state == "rejected" and not review.is_rejected:
            raise InvalidError("nobody rejected it")
        expires_at = review.data.get("expires_at")
        if state == "expired" and (expires_at is None or entry.at < expires_at):
            raise InvalidError("it had not expired")
        is_over = state == "rejected" or (state == "expired" and review.data.get("on_expiry") == "reject")
        if entry.data.get("sent_back"):
            self._is_sent_back(run, review, state)
        elif is_over and review.holds and review.rule is not None and review.rule.ends:
            self._given_up[review.place[1:]] = run.execution
        review.state, review.closed = state, entry

    def _is_sent_back(self, run: Run, review: Review, state: str) -> None:
        gate, number, position = review.place
        if state != "rejected" or gate not in ("after", "answer") or not review.holds:
            raise InvalidError("only an output that was rejected, and that the run waits with, is sent back")
        step = None if position is None else run.step(number, position)
        if step is not None and (step.state, step.reason) == ("waiting", "review"):
            self._sent_back[number, position] += 1

    def _enough(self, run: Run, review: Review, entry: Entry, too_few: str) -> None:
        """Raises InvalidError unless enough approvals count when an entry is written."""
        needed = review.data["approvals"]
        count = len(review.approvers(self._authors_of(run), self._persons, entry))
        if count < needed:
            raise InvalidError(too_few.format(count, needed))

    def _say_doubt(self, run: Run, review: Review, entry: Entry) -> None:
        """Says where it depends on when a link was made that enough approvals count."""
        authors, needed = self._authors_of(run), review.data["approvals"]
        if any(len(review.approvers(authors, self._persons, entry, links)) < needed for links in IN_DOUBT):
            who = f"enough people who may do so approved review {review.id} of run {run.id}"
            self._findings.undecidable(f"that {who}: {_IN_DOUBT.format(entry)}")

    def _bypassed(self, run: Run, review: Review, entry: Entry) -> None:
        if not self._may_break(run, review, entry, "stated"):
            raise InvalidError("the pool's rule does not let them break the glass")
        before = {account for other in review.decisions for account in other.accounts}
        people = self._persons.people(accounts_of(entry), entry)
        if not people.isdisjoint(self._persons.people(before, entry)):
            raise InvalidError(f"{entry.data['person']} decided before")
        _is_in_time(run, review, entry)
        self._means_something(review, entry)
        if not all(self._may_break(run, review, entry, links) for links in IN_DOUBT):
            who = f"somebody who may do so broke the glass of review {review.id} of run {run.id}"
            self._findings.undecidable(f"that {who}: {_IN_DOUBT.format(entry)}")
        review.state, review.bypassed = "bypassed", entry

    def _may_break(self, run: Run, review: Review, entry: Entry, links: Links) -> bool:
        """Whether the rule lets them break the glass."""
        allowed = review.data.get("bypass")
        if allowed != "others":
            return bool(allowed == "anyone")
        people = self._persons.people(accounts_of(entry), entry, links)
        asked = review.asks(entry.actor, self._persons.person(entry.actor, entry, links))
        return asked and people.isdisjoint(review.own(self._authors_of(run), self._persons, entry, links))

    # Gates

    def before_step(self, run: Run, pool: Pool, step: Step, entry: Entry) -> None:
        """Checks the gates that a step passes when it is called. Raises InvalidError."""
        plan = run.rounds[step.round].entry
        for rule in self._chosen(pool, "plan", step.round, None, None):
            self._passes(run, rule, ("plan", step.round, None), plan.hash, entry)
        for rule in self._chosen(pool, "before", step.round, step, step.worker):
            basis = self._basis(pool, step)
            self._passes(run, rule, ("before", step.round, step.position), plan.hash, entry, basis=basis)
        for source in step.reads:
            other = run.rounds[step.round].steps[source]
            if other.accepted is not None:
                self._output(run, pool, other, entry, ("after",))
        if run.execution in (self._given_up.get((step.round, at)) for at in (None, step.position)):
            raise InvalidError("it was called though a review had ended in a rejection, with which the run had to fail")

    def accepted_at_once(self, run: Run, pool: Pool, step: Step) -> None:
        """Checks that an output which was accepted when it came had no gate to pass. Raises InvalidError."""
        for gate in self._output_gates(run, step):
            if self._chosen(pool, gate, step.round, step, step.worker):
                raise InvalidError("the output was accepted before anybody reviewed it, which the pool's rules demand")

    def accepted_later(self, run: Run, pool: Pool, step: Step, entry: Entry) -> None:
        """Checks the gates of an output that is accepted now. Raises InvalidError."""
        self._output(run, pool, step, entry, self._output_gates(run, step))

    def before_answer(self, run: Run, pool: Pool, entry: Entry) -> None:
        """Checks the gate that a run passes when it succeeds. Raises InvalidError."""
        last = run.last_round
        if last is not None and run.depth == 0:
            self._output(run, pool, last.steps[-1], entry, ("answer",))

    def at_the_end(self, run: Run) -> None:
        """Checks what must have followed; says who let things through that nobody approved."""
        for review in self.all.values():
            if review.state == "approved" and not review.holds and review.closed is not None:
                self._say_doubt(run, review, review.closed)
            if review.bypassed is None:
                continue
            follows = [
                other
                for other in self._about[review.matter]
                if other.data["reason"] == "break-glass" and other.requested.seq > review.bypassed.seq
            ]
            if not follows:
                self._findings.fault(str(review.bypassed), "the glass was broken, and no later review was asked for")
            elif all(other.state == "open" for other in follows):
                self._findings.unproven(
                    f"that anybody looked at what {review.bypassed.data['person']} let through in run {run.id} "
                    "by breaking the glass: the later review is open"
                )

    def _basis(self, pool: Pool, step: Step) -> dict[str, Any]:
        """What a step is done with, as the engine compares it with what was approved."""
        worker = pool.worker(step.worker)
        return {
            "worker": step.worker,
            "model": None if worker is None else worker.model,
            "attempts_base": step.attempts_base,
            "sent_back": self._sent_back[step.round, step.position],
        }

    def _output_gates(self, run: Run, step: Step) -> tuple[str, ...]:
        is_last = step.position == len(run.rounds[step.round].steps) - 1
        is_answer = is_last and run.depth == 0 and step.round + 1 >= run.rounds_max
        return ("after", "answer") if is_answer else ("after",)

    def _output(self, run: Run, pool: Pool, step: Step, entry: Entry, gates: Iterable[str]) -> None:
        subject = output_entry(run, step, step.accepted)
        for gate in gates:
            for rule in self._chosen(pool, gate, step.round, step, step.worker):
                place = (gate, step.round, step.position)
                self._passes(run, rule, place, subject.hash, entry, attempt=step.accepted)

    def _chosen(self, pool: Pool, gate: str, round_number: int, step: Step | None, worker: str | None) -> list[Rule]:
        """The rules that a place has to pass."""
        position = None if step is None else step.position
        found = []
        for rule in pool.rules:
            if rule.gate != gate or not rule.is_for(None if worker is None else pool.worker(worker)):
                continue
            chosen: bool | None = True
            if not rule.is_for_all:
                chosen = self._draws.get(((gate, round_number, position), rule.digest))
            if chosen is None:
                raise InvalidError(f"the pool samples at the gate `{gate}`, and no draw is on record")
            if chosen:
                found.append(rule)
        return found

    def _passes(  # what passes what, each named
        self,
        run: Run,
        rule: Rule,
        place: Place,
        subject: str,
        entry: Entry,
        *,
        basis: Mapping[str, Any] | None = None,
        attempt: str | None = None,
    ) -> None:
        """Raises InvalidError unless the newest review of exactly this lets it through."""
        gate, number, position = place
        where = f"the gate `{gate}` of " + (f"round {number}" if position is None else f"step {position}")
        about = [
            review
            for review in self._about.get((place, rule.digest, subject, attempt), ())
            if review.holds and review.data["reason"] in BY_RULE and _counts_for(review, run.execution, basis)
        ]
        if not about:
            raise InvalidError(f"{where} was passed without a review of what passed it")
        review = about[-1]
        if review.state in ("approved", "bypassed", "expired") and any(_rejects(other, review) for other in about):
            raise InvalidError(f"{where} was passed although somebody had rejected what passed it")
        if review.state == "bypassed" and review.bypassed is not None:
            person = review.bypassed.data["person"]
            self._findings.unproven(f"that anybody reviewed {where} of run {run.id} first: {person} broke the glass")
        elif review.state == "expired" and review.data.get("on_expiry") == "approve":
            self._findings.unproven(
                f"that anybody reviewed {where} of run {run.id}: it expired and the rule let it pass"
            )
        elif review.state != "approved":
            raise InvalidError(f"{where} was passed although its review was {review.state}")
        else:
            self._enough(run, review, entry, f"{where} was passed with approvals that did not count any more")
            self._say_doubt(run, review, entry)


def _breakers(review: Review, same: Iterable[Review]) -> frozenset[str]:
    """Who let the same thing through by breaking the glass last: they do not review it afterwards."""
    if review.data["reason"] != "break-glass":
        return frozenset()
    broken = [other.bypassed for other in same if other.bypassed is not None]
    return frozenset(accounts_of(broken[-1])) if broken else frozenset()


def _is_in_time(run: Run, review: Review, entry: Entry) -> None:
    """Raises InvalidError for a decision that comes when there is nothing to decide any more."""
    data, expires_at = review.data, review.data.get("expires_at")
    if expires_at is not None and entry.at >= expires_at:
        raise InvalidError("the decision came when the review had expired")
    if not review.holds:
        return
    if run.cancelling:
        raise InvalidError("the decision came when the run was being cancelled")
    gate, number, position = review.place
    if gate in ("plan", "before") and data.get("execution") != run.execution:
        raise InvalidError("the decision came when the run had been resumed")
    step = None if position is None else run.step(number, position)
    own = run.attempts.get(data.get("attempt") or "")
    if step is not None and own is not None and not (step.attempts and step.attempts[-1] is own):
        raise InvalidError("the decision came when the step had been called again")


def _rejects(earlier: Review, review: Review) -> bool:
    """Whether a review was rejected that another one asks for again: same execution, same worker and tries."""
    old, new = earlier.data, review.data
    renewed = review.place[0] == "before" and old.get("basis") != new.get("basis")
    executions = {old.get("execution"), new.get("execution")} - {None}
    return earlier.is_rejected and not renewed and len(executions) <= 1


def _goes_stale(review: Review, entry: Entry) -> bool:
    """Whether what was decided does not count any more, because its subject is gone."""
    is_end = entry.type == "review.closed" and entry.data["state"] == "stale"
    return is_end and review.state in ("approved", "bypassed")


def _counts_for(review: Review, execution: int, basis: Mapping[str, Any] | None) -> bool:
    """Whether a review is about this execution and, at the gate `before`, about a call on this basis.

    A new execution is a new decision to spend, and may ask again what was rejected before.
    """
    renewed = review.place[0] in ("plan", "before") or review.state in ("rejected", "expired")
    if renewed and review.data.get("execution") != execution:
        return False
    return basis is None or review.data.get("basis") == basis
