"""A run replayed from its entries: legal states, one open way for each attempt, order by access lists, totals, the end.

Every rule is checked at the entry that could break it, against what the entries before it have established.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

from engine.verifier.chains import Entry
from engine.verifier.contents import derived_id
from engine.verifier.entry_types import CLOSING, REOPENING, RUN_ENDED, may_follow_closing
from engine.verifier.faults import Findings, InvalidError
from engine.verifier.moves import (
    check_answered,
    check_changed,
    check_closed,
    check_routed,
    check_sent,
    check_substituted,
)
from engine.verifier.plan_rows import check_author, planned_steps
from engine.verifier.pools import Model, Pool
from engine.verifier.records import ACCEPTED_STATES, Attempt, Round, Run, Step
from engine.verifier.reviews import Reviews
from engine.verifier.totals import check_limits, check_nothing_open, check_totals, count, limits_of
from engine.verifier.transitions import is_legal
from engine.verifier.visibility import Visibility

# More attempts of one step than any run has; bounds what a hostile bundle can cost.
ATTEMPTS_MAX: Final = 10_000
# More steps than a pool may allow: the pool of a hostile bundle allows what it likes.
STEPS_MAX: Final = 64


class Replay:
    """Replays one run. ``run`` is what its entries say; faults are recorded with the entry that has them."""

    def __init__(
        self, entries: Sequence[Entry], pools: Mapping[str, Pool], visibility: Visibility, reviews: Reviews
    ) -> None:
        self._pools = pools
        self._visibility = visibility
        self._reviews = reviews
        first = entries[0]
        if first.type != "run.created":
            raise InvalidError(f"{first}: the first entry of a run is run.created, not {first.type}")
        self._entries = entries
        self.run = Run(first.chain, first, first.data["pool"], pools=[first.data["pool"]])
        self._before: Entry | None = None
        self._expects_plan_of: str | None = None
        self._handlers: dict[str, Callable[[Entry, dict[str, Any]], None]] = {
            "run.created": self._created,
            "run.changed": self._changed,
            CLOSING: self._closed,
            REOPENING: self._resumed,
            "run.repinned": self._repinned,
            "run.budget_changed": self._budget_changed,
            "run.paused": self._paused,
            "run.unpaused": self._unpaused,
            "run.cancel_requested": self._cancelling,
            "plan.accepted": self._planned,
            "plan.rejected": self._rejected,
            "attempt.sent": self._sent,
            "attempt.closed": self._attempt_closed,
            "step.changed": self._step_changed,
            "step.substituted": self._substituted,
            "step.routed": self._routed,
            "operator.answered": self._answered,
            "child.begun": self._child_begun,
            "child.ended": self._child_ended,
            "run.exported": lambda entry, _: self.run.exports.append(entry),
            "artifact.erased": lambda entry, _: self.run.erasures.append((entry, self.run.closed)),
        }

    def play(self, findings: Findings) -> Run:
        """Replays all entries; an entry that breaks a rule is recorded, and the replay goes on behind it."""
        before = ""
        for entry in self._entries:
            if entry.at < before:
                findings.unproven(f"the time of {entry}: it is earlier than that of the entry before it")
            before = entry.at
            try:
                self._step_over(entry)
            except InvalidError as error:
                findings.fault(str(entry), f"{entry.type}: {error}")
            self._before = entry
        self._reviews.at_the_end(self.run)
        return self.run

    def _step_over(self, entry: Entry) -> None:
        run = self.run
        if run.closed and not may_follow_closing(entry.type):
            raise InvalidError("the run had ended, and this may not follow its closing entry")
        if entry.type != "plan.accepted":
            self._plan_was_expected(entry)
        handler = self._handlers.get(entry.type)
        if handler is not None:
            handler(entry, entry.data)
        elif entry.type == "artifact.read":
            run.reads.append(entry)
        elif entry.type.startswith("review."):
            self._review(entry)

    @property
    def pool(self) -> Pool:
        """The pool that the run is pinned to at this point."""
        return self._pools[self.run.pool]

    def _plan_was_expected(self, entry: Entry) -> None:
        if self._expects_plan_of is not None:
            attempt, self._expects_plan_of = self._expects_plan_of, None
            raise InvalidError(f"the planning call {attempt} was accepted, and no plan followed before {entry.type}")

    def _review(self, entry: Entry) -> None:
        self._reviews.entry(self.run, self.pool, entry)
        if entry.type in ("review.decided", "review.commented"):
            _, number, position = self._reviews.all[entry.data["review"]].place
            self._visibility.comment(self.run.id, (number, position), entry)

    # The run

    def _created(self, entry: Entry, data: dict[str, Any]) -> None:
        if entry.seq != 1:
            raise InvalidError("a run is created once")
        if data["execution"] != 1:
            raise InvalidError("a run begins with execution 1")
        self._reviews.author(entry)
        self.run.limits = limits_of(data.get("budget"))
        parent = data.get("parent")
        if parent is None and self.run.depth:
            raise InvalidError("a run below another one names it: the one above asks for the review of its answer")
        if parent is not None:
            place = f"child/{data.get('parent_round')}/{data.get('parent_step')}"
            if entry.chain != derived_id(parent, place):
                raise InvalidError("the run's id is not that of the child run of the step that it names")

    def _changed(self, _: Entry, data: dict[str, Any]) -> None:
        if data["state"] in RUN_ENDED:
            raise InvalidError("the end of a run is a closing entry")
        self._move_run(data)

    def _move_run(self, data: Mapping[str, Any]) -> None:
        run = self.run
        if data["old"] != run.state:
            raise InvalidError(f"the run was {run.state}, not {data['old']}")
        if not is_legal("run", run.state, data["state"]):
            raise InvalidError(f"a run does not go from {run.state} to {data['state']}")
        run.state, run.reason = data["state"], data["reason"]

    def _closed(self, entry: Entry, data: dict[str, Any]) -> None:
        run = self.run
        if data["state"] not in RUN_ENDED:
            raise InvalidError(f"{data['state']} is not an end")
        if data["old"] in RUN_ENDED:
            raise InvalidError("a run that had ended ends again")
        self._move_run(data)
        run.closed = True
        run.endings.append((data["state"], data["reason"]))
        if data["entries_before"] != entry.seq - 1:
            raise InvalidError(f"it counts {data['entries_before']} entries before it, and there are {entry.seq - 1}")
        if "totals" in data:
            check_totals(run, data["totals"])
        elif "rounds_max" in run.created.data:
            # Every Podium that wrote down how many rounds a run may have wrote its totals, too.
            raise InvalidError("it does not say what the run used")
        if data["state"] == "succeeded":
            last = run.last_round
            if last is None or last.steps[-1].state not in ACCEPTED_STATES:
                raise InvalidError("the run succeeded without an accepted answer")
            check_nothing_open(run)
            self._reviews.before_answer(run, self.pool, entry)

    def _resumed(self, _: Entry, data: dict[str, Any]) -> None:
        run = self.run
        is_child = "parent" in run.created.data
        if ("order" in data) == is_child or ("parent_execution" in data) != is_child:
            raise InvalidError("a person resumes a run that has none above it; a child run is resumed by that one")
        if not run.closed:
            raise InvalidError("only a run that has ended is resumed")
        if run.state == "succeeded":
            raise InvalidError("a run that succeeded is not resumed")
        if data["execution"] != run.execution + 1:
            raise InvalidError(f"execution {data['execution']} does not follow execution {run.execution}")
        run.execution += 1
        run.closed = run.paused = run.cancelling = False

    def _repinned(self, entry: Entry, data: dict[str, Any]) -> None:
        run, before = self.run, self._before
        if data["old"] != run.pool:
            raise InvalidError("the run was not pinned to the pool that it names")
        if data["new"] not in self._pools:
            raise InvalidError("the bundle lacks the pool from now on")
        run.pool = data["new"]
        run.pools.append(run.pool)
        if "order" in data:
            self._reviews.author(entry)
        if before is None or before.type != REOPENING or before.data.get("order") != data.get("order"):
            raise InvalidError("a run gets another pool only with the order that resumes it")

    def _budget_changed(self, _: Entry, data: dict[str, Any]) -> None:
        check_limits(self.run, data)

    def _paused(self, _: Entry, __: dict[str, Any]) -> None:
        if self.run.paused:
            raise InvalidError("the run was paused already")
        self.run.paused = True

    def _unpaused(self, _: Entry, __: dict[str, Any]) -> None:
        if not self.run.paused:
            raise InvalidError("the run was not paused")
        self.run.paused = False

    def _cancelling(self, _: Entry, __: dict[str, Any]) -> None:
        self.run.cancelling = True

    # Plans

    def _planned(self, entry: Entry, data: dict[str, Any]) -> None:
        run, number = self.run, data["round"]
        expected, self._expects_plan_of = self._expects_plan_of, None
        if number in run.rounds:
            raise InvalidError(f"round {number} has a plan already")
        before = run.rounds.get(number - 1)
        if number and (before is None or not all(step.is_done for step in before.steps)):
            raise InvalidError("the round before was not finished")
        if not data["steps"] and not number:
            raise InvalidError("a first plan has steps")
        if len(data["steps"]) > min(self.pool.steps_max, STEPS_MAX) or number >= run.rounds_max:
            raise InvalidError("the pool and the run do not allow so many steps or rounds")
        if data.get("plan", derived_id(run.id, f"plan/{number}")) != derived_id(run.id, f"plan/{number}"):
            raise InvalidError("the plan's id is not that of its round")
        if data["attempt"] is not None:
            attempt = run.attempts.get(data["attempt"])
            is_ours = attempt is not None and attempt.step is None and attempt.round == number and attempt.accepted
            if not is_ours or data["attempt"] != expected:
                raise InvalidError("it is not the plan of the planning call that was accepted")
        elif expected is not None:
            raise InvalidError("it is not the plan of the planning call that was accepted")
        run.rounds[number] = Round(number, entry, planned_steps(run, self.pool, data))
        self._visibility.plan(run, run.rounds[number])
        check_author(run, self._before, data)

    def _rejected(self, _: Entry, data: dict[str, Any]) -> None:
        attempt = self.run.attempts.get(data["attempt"])
        if attempt is None or attempt.step is not None or attempt.round != data["round"] or attempt.accepted:
            raise InvalidError("it is about no planning call that gave an invalid plan")

    # Calls

    def _sent(self, entry: Entry, data: dict[str, Any]) -> None:
        run = self.run
        attempt = self._new_attempt(entry, data)
        earlier = self._siblings(attempt)
        if attempt.id in run.attempts:
            raise InvalidError("an attempt is sent once")
        run.attempts[attempt.id] = attempt
        place = "plan" if attempt.step is None else str(attempt.step)
        if attempt.id != derived_id(run.id, f"attempt/{attempt.round}/{place}/" + "/".join(map(str, attempt.fence))):
            raise InvalidError("the attempt's id does not follow from its place and fence")
        number = len(earlier) + 1
        if number > ATTEMPTS_MAX:
            raise InvalidError(f"there are more than {ATTEMPTS_MAX} attempts of one place")
        ordered = not earlier or earlier[-1].fence < attempt.fence
        earlier.append(attempt)
        if attempt.number != number:
            raise InvalidError(f"it is attempt {number} of its place, not {attempt.number}")
        if not ordered or attempt.fence[0] != run.execution:
            raise InvalidError("an older try was opened after a newer one")
        self._may_begin("planning" if attempt.step is None else "running")
        if (attempt.round, attempt.step) in run.accepted:
            raise InvalidError("there was an accepted result already")
        if attempt.step is None:
            self._check_model(attempt, self.pool.conductor)
        else:
            self._sent_for_step(attempt, data)
        self._visibility.attempt(run, self.pool, attempt)

    def _new_attempt(self, entry: Entry, data: Mapping[str, Any]) -> Attempt:
        return Attempt(
            data["attempt"],
            data["round"],
            data["step"],
            data["number"],
            data["worker"],
            data["model"],
            self.run.pool,
            entry,
            tuple(data["fence"]),
        )

    def _siblings(self, attempt: Attempt) -> list[Attempt]:
        if attempt.step is None:
            return self.run.planning.setdefault(attempt.round, [])
        return self._step(attempt.round, attempt.step).attempts

    def _sent_for_step(self, attempt: Attempt, data: Mapping[str, Any]) -> None:
        step = self._step(attempt.round, attempt.step)
        self._inputs_are_there(step)
        check_sent(step)
        if attempt.worker != step.worker:
            raise InvalidError(f"step {step.position} belongs to worker {step.worker!r}, not {attempt.worker!r}")
        self._check_model(attempt, self.pool.worker(attempt.worker))
        self._move(step, data["moved"])
        if step.state != "running":
            raise InvalidError(f"step {step.position} is {step.state} while it is called")
        self._reviews.before_step(self.run, self.pool, step, attempt.sent)

    def _check_model(self, attempt: Attempt, worker: Model | None) -> None:
        if worker is None or (worker.name, worker.model) != (attempt.worker, attempt.model) or worker.kind != "model":
            raise InvalidError(f"the pool has no worker {attempt.worker!r} with model {attempt.model!r}")

    def _may_begin(self, state: str) -> None:
        run = self.run
        if run.paused or run.cancelling:
            raise InvalidError(f"something began although the run was {'paused' if run.paused else 'being cancelled'}")
        if run.state != state:
            raise InvalidError(f"something began although the run was {run.state}")

    def _inputs_are_there(self, step: Step) -> None:
        """The rule of order: everything that a step may read has its output, or was left out."""
        for source in step.reads:
            other = self._step(step.round, source)
            if not other.is_done:
                raise InvalidError(f"step {step.position} began before step {source}, which it reads, had its output")
        if step.reads_round_before:
            before = self.run.rounds[step.round - 1]
            if not all(other.is_done for other in before.steps):
                raise InvalidError(f"step {step.position} began before the round that it reads was finished")

    def _attempt_closed(self, entry: Entry, data: dict[str, Any]) -> None:
        run = self.run
        attempt = run.attempts.get(data["attempt"])
        if attempt is None or (attempt.round, attempt.step) != (data["round"], data["step"]):
            raise InvalidError("it closes an attempt that was not sent from there")
        if (attempt.state, data["state"]) not in _CLOSINGS:
            raise InvalidError(f"an attempt that is {attempt.state} does not become {data['state']}")
        if attempt.closed is not None:
            count(run, attempt, -1)
        attempt.state, attempt.closed, attempt.accepted = data["state"], entry, data["accepted"]
        attempt.input_tokens, attempt.output_tokens = data["input_tokens"], data["output_tokens"]
        attempt.cost_usd = None if data["cost_usd"] is None else Decimal(data["cost_usd"])
        count(run, attempt, 1)
        if attempt.step is not None:
            self._step_attempt_closed(entry, attempt, data)
        elif attempt.accepted:
            self._accept(attempt, run.planning[attempt.round])
            self._expects_plan_of = attempt.id

    def _step_attempt_closed(self, entry: Entry, attempt: Attempt, data: Mapping[str, Any]) -> None:
        step = self._step(attempt.round, attempt.step)
        moved = data["moved"]
        if attempt.accepted:
            self._accept(attempt, step.attempts)
            if step.accepted is not None:
                raise InvalidError(f"step {step.position} has an accepted output already")
            if moved is None or moved["state"] != "succeeded":
                raise InvalidError("an accepted output without its step's success")
            if not any(row["kind"] == "output" for row in data["artifacts"]):
                raise InvalidError("an accepted output that is not there")
            step.accepted, step.accepted_by = attempt.id, entry
            self._reviews.accepted_at_once(self.run, self.pool, step)
        elif moved is not None and moved["state"] in ACCEPTED_STATES:
            raise InvalidError("a step succeeded by an attempt that was not accepted")
        else:
            check_closed(step, attempt, moved)
        if moved is not None and self.run.closed:
            raise InvalidError("a step moved after the run had ended")
        self._move(step, moved)

    def _accept(self, attempt: Attempt, siblings: Sequence[Attempt]) -> None:
        first = self.run.accepted.setdefault((attempt.round, attempt.step), attempt.id)
        if attempt.state != "succeeded" or self.run.closed:
            raise InvalidError("an output was accepted that cannot be")
        if siblings[-1] is not attempt or first != attempt.id:
            raise InvalidError("an output was accepted though a newer attempt, or another accepted one, was there")

    # Steps

    def _step(self, number: int, position: int | None) -> Step:
        step = None if position is None else self.run.step(number, position)
        if step is None:
            raise InvalidError(f"round {number} has no step {position}")
        return step

    def _move(self, step: Step, moved: Mapping[str, Any] | None) -> None:
        if moved is None:
            return
        if moved["old"] != step.state:
            raise InvalidError(f"step {step.position} was {step.state}, not {moved['old']}")
        if not is_legal("step", step.state, moved["state"]):
            raise InvalidError(f"step {step.position} does not go from {step.state} to {moved['state']}")
        step.state, step.reason = moved["state"], moved["reason"]
        if step.state not in ACCEPTED_STATES:
            step.accepted = step.accepted_by = None

    def _step_changed(self, entry: Entry, data: dict[str, Any]) -> None:
        step = self._step(data["round"], data["step"])
        old = step.state, step.reason
        self._move(step, data)
        if step.state == "skipped":
            self.run.left_out.append(step)
        check_changed(self.run, self.pool, step, old)
        if step.state not in ACCEPTED_STATES:
            return
        step.accepted_by = entry
        if step.state == "reused":
            reused = self.run.created.data.get("source", {}).get("reused", [])
            step.accepted = next((row["attempt"] for row in reused if row["step"] == step.position), None)
            if step.accepted is None or data.get("attempt", step.accepted) != step.accepted:
                raise InvalidError("the fork does not take this output over")
        elif data.get("attempt") in self.run.attempts:
            self._accept_reviewed(step, self.run.attempts[data["attempt"]])
        else:
            ended = step.child_ended
            if ended is None or ended.data["child_state"] != "succeeded":
                raise InvalidError("a step succeeded without an attempt and without a child run")
            step.accepted = data.get("attempt", ended.data.get("answer"))
            if step.accepted != ended.data.get("answer", step.accepted):
                raise InvalidError("the step's output is not the answer of its child run")
        self._reviews.accepted_later(self.run, self.pool, step, entry)

    def _accept_reviewed(self, step: Step, attempt: Attempt) -> None:
        """An output of a call that had to wait for people."""
        if attempt not in step.attempts or attempt.closed is None:
            raise InvalidError("the output is that of another step, or has not come")
        self._accept(attempt, step.attempts)
        if not any(row["kind"] == "output" for row in attempt.closed.data["artifacts"]):
            raise InvalidError("an accepted output that is not there")
        attempt.accepted = True
        step.accepted = attempt.id

    def _substituted(self, _: Entry, data: dict[str, Any]) -> None:
        step = self._step(data["round"], data["step"])
        check_substituted(self.pool, step, data)
        step.worker, step.model = data["worker"], data["model"]
        step.attempts_base = len(step.attempts)
        self._move(step, data["moved"])

    def _routed(self, _: Entry, data: dict[str, Any]) -> None:
        step = self._step(data["round"], data["step"])
        check_routed(self.run, self.pool, step, data)
        step.worker, step.model = data["worker"], data["model"]

    def _answered(self, entry: Entry, data: dict[str, Any]) -> None:
        step = self._step(data["round"], data["step"])
        check_answered(self.run, self.pool, step, data)
        self._move(step, data["moved"])
        if data["answer"] == "retry":
            step.worker, step.model = data.get("worker", step.worker), data.get("model", step.model)
            step.attempts_base = len(step.attempts)
        if data["answer"] == "skip" or data.get("worker") != data.get("old_worker"):
            self._reviews.author(entry)

    # Child runs

    def _child_begun(self, entry: Entry, data: dict[str, Any]) -> None:
        step = self._step(data["round"], data["step"])
        if data["child"] != derived_id(self.run.id, f"child/{step.round}/{step.position}"):
            raise InvalidError("the child run's id does not follow from its step")
        worker = self.pool.worker(step.worker)
        if worker is None or worker.kind != "conductor":
            raise InvalidError(f"step {step.position} is not for the Conductor")
        self._inputs_are_there(step)
        self._may_begin("running")
        if data["child_execution"] not in (step.child_execution, step.child_execution + 1):
            raise InvalidError(f"execution {data['child_execution']} does not follow that of the child run before")
        step.child_execution = data["child_execution"]
        step.child, step.child_ended = data["child"], None
        self.run.begun.append(entry)
        self._reviews.before_step(self.run, self.pool, step, entry)
        self._visibility.child(self.run, self.pool, step, entry)
        if step.state != "running":
            raise InvalidError(f"step {step.position} is {step.state} while it is delegated")

    def _child_ended(self, entry: Entry, data: dict[str, Any]) -> None:
        step = self._step(data["round"], data["step"])
        if step.child is None or data["child"] != step.child or data["child_state"] not in RUN_ENDED:
            raise InvalidError("it is about no child run that was begun")
        if "answer" in data and (data["answer"] is not None) != (data["child_state"] == "succeeded"):
            raise InvalidError("a child run has an answer if and only if it succeeded")
        step.child_ended = entry
        self.run.returned.append(entry)


_CLOSINGS = frozenset(
    {("sent", state) for state in ("succeeded", "refused", "failed", "cancelled", "superseded", "unknown")}
    | {("unknown", "superseded")}
)
