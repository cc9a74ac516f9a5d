"""Reviews on record: who decided what, bound to what, and whether anything passed a gate without approval.

The rules come from the pool that the run was pinned to; approvals count by person, for exactly the entry, the rule and
the display that they were given for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from engine.verifier.chains import Entry
from engine.verifier.displays import Displays
from engine.verifier.entry_types import committed
from engine.verifier.faults import Findings, InvalidError
from engine.verifier.persons import ENGINE, Persons
from engine.verifier.pools import Pool, Rule
from engine.verifier.records import Run, Step

Place = tuple[str, int, int | None]
_BY_RULE: Final = frozenset({"policy", "label", "sample"})
_DRAWS: Final = 2**64
# More reviews than any run has; bounds what a hostile bundle can cost.
REVIEWS_MAX: Final = 10_000


@dataclass(frozen=True, slots=True)
class Decision:
    """One person's word about a review."""

    entry: Entry
    person: str

    @property
    def approves(self) -> bool:
        """Whether it is an approval."""
        return bool(self.entry.data["decision"] == "approve")

    @property
    def accounts(self) -> list[str]:
        """Who acted, and for whom."""
        return [account for account in (self.entry.actor, self.entry.on_behalf_of) if account is not None]


@dataclass(slots=True)
class Review:
    """A review by its entries. ``rule`` is None where somebody asked for it and no rule."""

    id: str
    requested: Entry
    rule: Rule | None
    excluded: frozenset[str]
    state: str = "open"
    decisions: list[Decision] = field(default_factory=list)
    opened: list[Entry] = field(default_factory=list)
    comments: list[Entry] = field(default_factory=list)
    bypassed: Entry | None = None
    closed: Entry | None = None

    @property
    def data(self) -> Mapping[str, Any]:
        """What was asked."""
        return self.requested.data

    @property
    def place(self) -> Place:
        """Gate, round and position."""
        return self.data["gate"], self.data["round"], self.data["step"]

    @property
    def holds(self) -> bool:
        """Whether something waits for it; False for one that was asked for after the fact."""
        return bool(self.data.get("holds", self.data["reason"] != "break-glass"))

    @property
    def is_rejected(self) -> bool:
        """Whether somebody rejected, whatever became of the review."""
        return any(not decision.approves for decision in self.decisions)

    def approvers(self, persons: Persons, at: Entry) -> list[str]:
        """The people whose approvals count, by the links as they stood when an entry was written."""
        own = {persons.person(account, at) for account in self.excluded} if self.data["four_eyes"] else set()
        reviewers = set(self.data.get("reviewers", []))
        found: list[str] = []
        for decision in self.decisions:
            data = decision.entry.data
            people = {persons.person(account, at) for account in decision.accounts}
            person = persons.person(decision.entry.actor, at)
            fits = decision.approves and (data["subject"], data["shown"]) == (self.data["subject"], self.data["shown"])
            asked = not reviewers or not reviewers.isdisjoint({decision.entry.actor, person})
            if fits and asked and people.isdisjoint(own) and people.isdisjoint(found):
                found.append(person)
        return found


class Reviews:
    """All reviews of one run; told of every entry that begins with ``review.``, asked at every gate."""

    def __init__(self, persons: Persons, displays: Displays, findings: Findings) -> None:
        self._persons = persons
        self._displays = displays
        self._findings = findings
        self.all: dict[str, Review] = {}
        self._draws: dict[tuple[Place, str], bool] = {}
        self._authors: set[str] = set()

    def displayed(self, review: str) -> frozenset[str]:
        """The artifacts that were displayed in a review, as far as its manifest is disclosed."""
        return self._displays.parts.get(review, frozenset())

    # Entries

    def author(self, entry: Entry) -> None:
        """Remembers who submitted, planned or edited the run: their approvals do not count."""
        self._authors |= _accounts(entry)

    def entry(self, run: Run, pool: Pool, entry: Entry) -> None:
        """Takes an entry about reviews. Raises InvalidError."""
        if entry.type == "review.requested":
            self._requested(run, pool, entry)
            return
        if entry.type == "review.sampled":
            self._sampled(pool, entry)
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
        handler = {
            "review.decided": self._decided,
            "review.closed": self._closed,
            "review.bypassed": self._bypassed,
        }[entry.type]
        handler(review, entry)

    def _speaks_for_themselves(self, entry: Entry) -> None:
        """Who looks, comments and decides are people, under their own names."""
        person = entry.data.get("person")
        if person is None:
            return
        if ENGINE in (entry.actor, entry.on_behalf_of, person):
            raise InvalidError("the engine is not a person")
        if person not in self._persons.names(entry.actor, entry):
            raise InvalidError(f"the account {entry.actor!r} does not belong to {person!r}")

    def _requested(self, run: Run, pool: Pool, entry: Entry) -> None:
        data = entry.data
        if data["review"] in self.all or len(self.all) >= REVIEWS_MAX:
            raise InvalidError("a review is asked for once, and not too many are")
        rule = pool.rule(data["policy"])
        said = frozenset(data.get("excluded", []))
        excluded = said | self._authors | _planners(run) | self._breakers(data)
        review = Review(data["review"], entry, rule, excluded)
        self.all[review.id] = review
        if not self._authors <= said and data["four_eyes"] and "excluded" in data:
            raise InvalidError("it does not exclude everybody whose run it is")
        if data["approvals"] < 1:
            raise InvalidError("a review takes at least one approval")
        # Whatever the reason: by naming a rule it could pass for a review that the rule asked for.
        if rule is not None or data["reason"] in _BY_RULE:
            self._follows_rule(review, rule)
        _expires_properly(review)
        if review.holds and not data.get("level", 0) and data.get("execution", run.execution) != run.execution:
            raise InvalidError("it is about another execution of the run")
        if data["gate"] in ("after", "answer") and data.get("attempt") is None:
            raise InvalidError("it does not say which output is to be reviewed")
        subject = self._subject(run, data)
        if subject is None or data["subject"] != subject.hash:
            raise InvalidError("its subject is not the entry that is to be reviewed")
        plan = run.rounds[data["round"]].entry
        commitments = [row["commitment"] for row in committed(plan.data) if row["kind"] == "plan"]
        if data.get("plan") is not None and data["plan"] not in commitments:
            raise InvalidError("it speaks of another plan")
        self._displays.check(run, entry)

    def _follows_rule(self, review: Review, rule: Rule | None) -> None:
        data = review.data
        level = data.get("level", 0)
        if rule is None or rule.gate != data["gate"] or level >= len(rule.groups):
            raise InvalidError("the pool has no rule that asks for it")
        approvals, reviewers = rule.groups[level]
        if "reviewers" not in data:
            raise InvalidError("it does not say who is asked")
        asked = (data["approvals"], tuple(data["reviewers"]), data["four_eyes"])
        if asked != (approvals, reviewers, rule.four_eyes):
            raise InvalidError("it does not ask for what the pool's rule wants")
        if level and not any(_escalates_to(other, review) for other in self.all.values()):
            raise InvalidError("others are asked only when a review by those before them has expired")
        if data.get("on_expiry") == "escalate" and level + 1 >= len(rule.groups):
            raise InvalidError("the pool's rule names nobody who would be asked next")

    def _breakers(self, data: Mapping[str, Any]) -> set[str]:
        """Who let the same thing through by breaking the glass: they do not review it afterwards."""
        if data["reason"] != "break-glass":
            return set()
        broken = [other.bypassed for other in self.all.values() if other.data["subject"] == data["subject"]]
        return {account for entry in broken if entry is not None for account in _accounts(entry)}

    def _subject(self, run: Run, data: Mapping[str, Any]) -> Entry | None:
        """The entry that a review of this place is about."""
        plan = run.rounds.get(data["round"])
        if plan is None:
            return None
        if data["gate"] in ("plan", "before"):
            return plan.entry
        step = None if data["step"] is None else run.step(data["round"], data["step"])
        if step is None:
            return None
        return output_entry(run, step, data.get("attempt", step.accepted))

    def _sampled(self, pool: Pool, entry: Entry) -> None:
        data = entry.data
        rule = pool.rule(data["policy"])
        if rule is None or rule.gate != data["gate"] or rule.percent != data["percent"]:
            raise InvalidError("the pool has no rule that draws here")
        chosen = int(data["draw"][:16], 16) * 100 < data["percent"] * _DRAWS
        if self._persons.sampling_salts and data["salt"] not in self._persons.sampling_salts:
            raise InvalidError("it was drawn with another secret than the one that was made for it")
        if data["chosen"] != chosen:
            raise InvalidError("what was drawn does not follow from the number that was drawn")
        place = (data["gate"], data["round"], data["step"])
        if self._draws.setdefault((place, rule.digest), chosen) != chosen:
            raise InvalidError("it was drawn twice, with different results")

    def _decided(self, review: Review, entry: Entry) -> None:
        data = entry.data
        decision = Decision(entry, data["person"])
        expires_at = review.data.get("expires_at")
        if expires_at is not None and entry.at > expires_at:
            raise InvalidError("the decision came when the review had expired")
        if (data["subject"], data["shown"]) != (review.data["subject"], review.data["shown"]):
            raise InvalidError("the decision was given for something else than what was asked")
        people = {self._persons.person(account, entry) for account in decision.accounts}
        self._may_decide(review, entry, people)
        for other in review.decisions:
            if not people.isdisjoint(self._persons.person(account, entry) for account in other.accounts):
                raise InvalidError(f"{data['person']} decided twice")
        review.decisions.append(decision)

    def _may_decide(self, review: Review, entry: Entry, people: set[str]) -> None:
        own = {self._persons.person(account, entry) for account in review.excluded}
        if review.data["four_eyes"] and not people.isdisjoint(own):
            raise InvalidError(f"{entry.data['person']} decided on a run of their own")
        reviewers = set(review.data.get("reviewers", []))
        if reviewers and reviewers.isdisjoint({entry.actor, self._persons.person(entry.actor, entry)}):
            raise InvalidError(f"{entry.data['person']} was not asked to decide")

    def _closed(self, review: Review, entry: Entry) -> None:
        state = entry.data["state"]
        if state == "approved":
            approvers = review.approvers(self._persons, entry)
            if len(approvers) < review.data["approvals"]:
                raise InvalidError(f"{len(approvers)} of {review.data['approvals']} approvals are on record")
            if review.is_rejected:
                raise InvalidError("it was rejected")
        if state == "rejected" and all(decision.approves for decision in review.decisions):
            raise InvalidError("nobody rejected it")
        expires_at = review.data.get("expires_at")
        if state == "expired" and (expires_at is None or entry.at < expires_at):
            raise InvalidError("it had not expired")
        review.state, review.closed = state, entry

    def _bypassed(self, review: Review, entry: Entry) -> None:
        people = {self._persons.person(account, entry) for account in (entry.actor, entry.on_behalf_of) if account}
        allowed = "others" if review.rule is None else review.rule.bypass
        own = {self._persons.person(account, entry) for account in review.excluded}
        if allowed == "never" or (allowed == "others" and not people.isdisjoint(own)):
            raise InvalidError("the pool's rule does not let them break the glass")
        review.state, review.bypassed = "bypassed", entry

    # Gates

    def before_step(self, run: Run, pool: Pool, step: Step, entry: Entry) -> None:
        """Checks the gates that a step passes when it is called. Raises InvalidError."""
        plan = run.rounds[step.round].entry
        for rule in self._chosen(pool, "plan", step.round, None, None):
            self._passes(run, rule, ("plan", step.round, None), plan.hash, entry)
        for rule in self._chosen(pool, "before", step.round, step, step.worker):
            self._passes(run, rule, ("before", step.round, step.position), plan.hash, entry, worker=step.worker)
        for source in step.reads:
            other = run.rounds[step.round].steps[source]
            if other.accepted is not None:
                self._output(run, pool, other, entry, ("after",))

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
            if review.bypassed is None:
                continue
            follows = [
                other
                for other in self.all.values()
                if other.data["reason"] == "break-glass"
                and other.data["subject"] == review.data["subject"]
                and other.requested.seq > review.bypassed.seq
            ]
            if not follows:
                self._findings.fault(str(review.bypassed), "the glass was broken, and no later review was asked for")
            elif all(other.state == "open" for other in follows):
                self._findings.unproven(
                    f"that anybody looked at what {review.bypassed.data['person']} let through in run {run.id} "
                    "by breaking the glass: the later review is open"
                )

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
        worker: str | None = None,
        attempt: str | None = None,
    ) -> None:
        """Raises InvalidError unless the newest review of exactly this lets it through."""
        gate, number, position = place
        where = f"the gate `{gate}` of " + (f"round {number}" if position is None else f"step {position}")
        about = [
            review
            for review in self.all.values()
            if review.holds
            and review.data["reason"] in _BY_RULE
            and review.place == place
            and review.data.get("attempt") == attempt
            and (review.data["policy"], review.data["subject"]) == (rule.digest, subject)
            and _counts_for(review, run.execution, worker)
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
        elif len(review.approvers(self._persons, entry)) < review.data["approvals"]:
            raise InvalidError(f"{where} was passed with approvals that did not count any more")


def _accounts(entry: Entry) -> set[str]:
    """Who acted, and for whom, the engine itself left out."""
    return {account for account in (entry.actor, entry.on_behalf_of) if account not in (None, ENGINE)}


def _planners(run: Run) -> set[str]:
    """Who planned a round by hand."""
    return {account for planned in run.rounds.values() for account in _accounts(planned.entry)}


def _escalates_to(before: Review, review: Review) -> bool:
    """Whether a review expired so that the people of another one's level are asked."""
    old, new = before.data, review.data
    same = before.place == review.place and (old["policy"], old["subject"]) == (new["policy"], new["subject"])
    follows = old.get("level", 0) + 1 == new.get("level", 0) and old.get("on_expiry") == "escalate"
    in_time = not review.holds or old.get("execution") == new.get("execution")
    return same and follows and in_time and before.state == "expired"


def _expires_properly(review: Review) -> None:
    """Raises InvalidError for an expiry that no rule could have set."""
    expires_at, on_expiry = review.data.get("expires_at"), review.data.get("on_expiry")
    if (expires_at is None) != (on_expiry is None):
        raise InvalidError("it expires if and only if it says what follows")
    if expires_at is not None and expires_at <= review.requested.at:
        raise InvalidError("it had expired before it was asked for")


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


def _counts_for(review: Review, execution: int, worker: str | None) -> bool:
    """Whether a review is about this execution and, at the gate `before`, about this worker.

    A new execution is a new decision to spend, and may ask again what was rejected before.
    """
    renewed = review.place[0] in ("plan", "before") or review.state in ("rejected", "expired")
    if renewed and review.data.get("execution", execution) != execution:
        return False
    basis = review.data.get("basis")
    return worker is None or not isinstance(basis, dict) or basis.get("worker", worker) == worker


def output_entry(run: Run, step: Step, attempt: str | None) -> Entry:
    """The entry by which an output came into a run: its call, its child's end, or the fork that took it over."""
    own = None if attempt is None else run.attempts.get(attempt)
    if own is not None and own.closed is not None:
        return own.closed
    return step.child_ended or run.created
