"""What must hold when the dust has settled: the record against itself and against the provider's own count.

Every check returns what is wrong in sentences, so that one failure does not hide another. For reviews see `reviewed`.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any
from uuid import UUID

from engine.ledger.entry import chain_faults, entry_hash
from engine.store.states import RUN_ENDED, STEP_HAS_OUTPUT
from tests.support.crash.books import Books, Fault
from tests.support.crash.endpoint import ANSWER_USD, INPUT_TOKENS, OUTPUT_TOKENS, Request
from tests.support.crash.reviewed import review_faults
from tests.support.crash.shapes import Shape

# A call that failed before anything was sent leaves no request; all others without one have lost their outcome.
NOT_SENT = frozenset({"connection-failed"})
# Nobody read the answer to the end, though the provider may have written it.
OUTCOME_LOST = frozenset({"unknown", "cancelled"})


def find_faults(books: Books, requests: Sequence[Request], submitted: Mapping[UUID, Shape]) -> list[Fault]:
    """All that is wrong. ``submitted`` are the runs that were asked for, with what each is."""
    faults = [*_strangers(books, submitted), *_requests(books, requests), *_budgets(books)]
    faults += _orphaned_calls(books, requests)
    faults += [Fault(None, text) for text in _grand_total(books, requests)]
    for run_id in books.runs:
        own = [*_end(books, run_id, submitted.get(run_id)), *_steps(books, run_id), *_totals(books, run_id)]
        own += [*_ledger(books, run_id), *_calls_after_acceptance(books, run_id, requests)]
        own += [*_reused(books, run_id, submitted.get(run_id)), *review_faults(books, run_id, submitted.get(run_id))]
        faults += [Fault(run_id, text) for text in own]
    return faults


def summary(books: Books, requests: Sequence[Request]) -> str:
    """The figures of a whole test, in one line each."""
    states = Counter(run["state"] for run in books.runs.values())
    attempts = Counter(attempt["state"] for own in books.attempts.values() for attempt in own)
    billed, lost = _bill(books, requests)
    return "\n".join(
        (
            f"runs: {_words(states)}",
            f"attempts: {_words(attempts)}",
            f"requests at the endpoint: {len(requests)}, of which {billed} were answered to the end",
            f"of these {lost} were lost on the way: their attempts are on record as unknown or cancelled",
            f"cost on record: ${_recorded(books):f}",
            f"the endpoint's count without the lost ones: {billed - lost} answers, ${(billed - lost) * ANSWER_USD:f}",
        )
    )


def _recorded(books: Books) -> Decimal:
    return sum((run["cost_usd"] for run in books.runs.values()), Decimal(0))


def _bill(books: Books, requests: Sequence[Request]) -> tuple[int, int]:
    """How many answers the endpoint will bill, and how many of them are on record as unknown."""
    lost = {str(one["id"]) for own in books.attempts.values() for one in own if one["state"] in OUTCOME_LOST}
    billed = [request for request in requests if request.billed]
    return len(billed), sum(request.attempt_id in lost for request in billed)


def _grand_total(books: Books, requests: Sequence[Request]) -> Iterable[str]:
    billed, lost = _bill(books, requests)
    if _recorded(books) != (billed - lost) * ANSWER_USD:
        yield f"the runs' totals make {_recorded(books)}, the endpoint counts {billed - lost} answers at {ANSWER_USD}"


def _strangers(books: Books, submitted: Mapping[UUID, Shape]) -> Iterable[Fault]:
    roots = {run_id for run_id, run in books.runs.items() if run["parent_run_id"] is None}
    for run_id in roots - set(submitted):
        yield Fault(run_id, "is a run that nobody asked for, or that was created twice for one request")
    for run_id in set(submitted) - roots:
        yield Fault(None, f"run {run_id} was promised and is not on record")


def _end(books: Books, run_id: UUID, shape: Shape | None) -> Iterable[str]:
    run = books.runs[run_id]
    if run["state"] not in RUN_ENDED:
        yield f"has not ended: {run['state']}, reason {run['reason']}"
        return
    if run["state"] != "succeeded" and not run["reason"]:
        yield f"{run['state']} without a reason"
    if shape is not None and (run["state"], run["reason"]) != (shape.ends, shape.reason):
        yield f"should be {shape.ends} ({shape.reason}) and is {run['state']} ({run['reason']})"
    if shape is not None and run["execution"] != shape.executions:
        yield f"should have {shape.executions} executions and has {run['execution']}"
    yield from (f"attempt {one['id']} is still open" for one in books.attempts[run_id] if one["state"] == "sent")


def _steps(books: Books, run_id: UUID) -> Iterable[str]:
    accepted: dict[Any, list[UUID]] = defaultdict(list)
    for attempt in books.attempts[run_id]:
        if attempt["accepted"]:
            accepted[attempt["round"], attempt["position"]].append(attempt["id"])
    for place, ids in accepted.items():
        if len(ids) > 1:
            yield f"step {place} has {len(ids)} accepted outputs"
    for step in books.steps[run_id]:
        place = (step["round"], step["position"])
        # A step whose worker is the Conductor takes its output from its child run, and has no attempt.
        has_output = step["accepted_attempt_id"] in accepted[place] or _has_child(books, run_id, place)
        if step["state"] == "succeeded" and not has_output:
            yield f"step {place} has succeeded without an accepted output"
        if step["state"] != "succeeded" and accepted[place]:
            yield f"step {place} has an accepted output and is {step['state']}"
    if books.runs[run_id]["state"] == "succeeded":
        newest = books.runs[run_id]["round"]
        left = [step["position"] for step in books.steps[run_id] if step["round"] == newest and not _is_over(step)]
        if left:
            yield f"has succeeded with steps {left} left"


def _reused(books: Books, run_id: UUID, shape: Shape | None) -> Iterable[str]:
    """What a fork takes over is an accepted output of its source, and is not called for once more."""
    source = books.runs[run_id]["source_run_id"]
    reused = [step for step in books.steps[run_id] if step["state"] == "reused"]
    if shape is not None and [step["position"] for step in reused] != list(shape.reused):
        yield f"reuses {[step['position'] for step in reused]}, it should {list(shape.reused)}"
    outputs = {one["id"] for one in books.attempts.get(source, ()) if one["accepted"]}
    for step in reused:
        place = (step["round"], step["position"])
        if step["accepted_attempt_id"] not in outputs:
            yield f"step {place} reuses what its source {source} has not accepted"
        if any((one["round"], one["position"]) == place for one in books.attempts[run_id]):
            yield f"step {place} is reused and was called"


def _totals(books: Books, run_id: UUID) -> Iterable[str]:
    run, attempts = books.runs[run_id], books.attempts[run_id]
    sums = {
        "attempts_count": len(attempts),
        "attempts_unpriced": sum(one["state"] != "sent" and one["cost_usd"] is None for one in attempts),
        "cost_usd": sum((one["cost_usd"] or Decimal(0) for one in attempts), Decimal(0)),
        "input_tokens": sum(one["input_tokens"] or 0 for one in attempts),
        "output_tokens": sum(one["output_tokens"] or 0 for one in attempts),
    }
    for column, value in sums.items():
        if run[column] != value:
            yield f"{column} is {run[column]}, its attempts make {value}"


def _ledger(books: Books, run_id: UUID) -> Iterable[str]:
    bodies, head = books.bodies[run_id], books.heads[run_id]
    yield from (f"ledger: {fault}" for fault in chain_faults(bodies))
    if (head["seq"], head["hash"]) != (len(bodies), entry_hash(bodies[-1])):
        yield "the ledger's head does not fit its entries"
    said: dict[Any, str] = {}
    for entry in map(json.loads, bodies):
        data, kind = entry["data"], entry["type"]
        if kind in {"run.changed", "run.closed"}:
            said["run"] = data["state"]
        elif kind == "attempt.sent":
            said[data["attempt"]] = "sent"
        elif kind == "attempt.closed":
            said[data["attempt"]] = data["state"]
    true = {"run": books.runs[run_id]["state"]} | {str(one["id"]): one["state"] for one in books.attempts[run_id]}
    for subject in true.keys() | said.keys():
        if said.get(subject) != true.get(subject):
            yield f"the ledger's last word on {subject} is {said.get(subject)}, its row says {true.get(subject)}"


def _calls_after_acceptance(books: Books, run_id: UUID, requests: Sequence[Request]) -> Iterable[str]:
    accepted: dict[Any, int] = {}
    for number, entry in enumerate(map(json.loads, books.bodies[run_id])):
        data = entry["data"]
        place = (data.get("round"), data.get("step"))
        if entry["type"] == "attempt.closed" and data["step"] is not None and data["state"] == "succeeded":
            # Accepted, or proposed to people, who in no shape send anything back.
            accepted[place] = number
        elif entry["type"] == "attempt.sent" and place in accepted:
            yield f"step {place} was opened again by entry {number} after entry {accepted[place]} accepted its output"
    ends = {
        (one["round"], one["position"]): one["ended_at"].timestamp()
        for one in books.attempts[run_id]
        if one["accepted"]
    }
    places = {str(one["id"]): (one["round"], one["position"]) for one in books.attempts[run_id]}
    for request in requests:
        called = places.get(request.attempt_id or "")
        if called in ends and request.started_at > ends[called]:
            late_s = request.started_at - ends[called]
            yield f"step {called} was called by attempt {request.attempt_id} {late_s:.3f} s after its output was accepted"


def _requests(books: Books, requests: Sequence[Request]) -> Iterable[Fault]:
    attempts = {str(one["id"]): one for own in books.attempts.values() for one in own}
    by_id = Counter(request.attempt_id for request in requests)
    for attempt_id, count in by_id.items():
        attempt = attempts.get(attempt_id or "")
        if attempt is None:
            yield Fault(None, f"{count} requests came with the id {attempt_id}, of which the record knows nothing")
        elif count > 1:
            yield Fault(attempt["run_id"], f"{count} requests came with the id of attempt {attempt_id}")
    for request in requests:
        if attempt := attempts.get(request.attempt_id or ""):
            for text in _cost_faults(attempt, request):
                yield Fault(attempt["run_id"], text)
    for attempt_id, attempt in attempts.items():
        not_sent = attempt["error_code"] in NOT_SENT or (attempt["state"] == "cancelled" and attempt["cost_usd"] == 0)
        if attempt_id not in by_id and attempt["state"] != "unknown" and not not_sent:
            yield Fault(attempt["run_id"], f"attempt {attempt_id} is {attempt['state']} and the endpoint never saw it")


def _cost_faults(attempt: Mapping[str, Any], request: Request) -> Iterable[str]:
    """The attempt's cost is what the endpoint will bill, or unknown where the outcome was lost."""
    cost, where = attempt["cost_usd"], f"attempt {attempt['id']} ({attempt['state']}, {attempt['error_code']})"
    if attempt["state"] in OUTCOME_LOST:
        if cost is not None:
            yield f"{where} has lost its outcome and a cost of {cost}"
        return
    bills: dict[str | None, tuple[Decimal | None, ...]] = {
        "answered": (ANSWER_USD,),
        "refused": (Decimal(0),),
        "broken": (None,),
        None: (None,),
    }
    if cost not in bills[request.outcome]:
        yield f"{where} has the cost {cost}, the endpoint has it as {request.outcome}"
    if request.billed and (attempt["input_tokens"], attempt["output_tokens"]) != (INPUT_TOKENS, OUTPUT_TOKENS):
        yield f"{where} has other tokens than the endpoint reported"


def _budgets(books: Books) -> Iterable[Fault]:
    """Nothing stays reserved, and what is spent is what the attempts of the tree make."""
    for budget in books.budgets:
        run_id = budget["run_id"]
        left = {name: value for name, value in budget.items() if name.endswith("_reserved") and value}
        if left:
            yield Fault(run_id, f"something is still reserved: {left}")
        calls = [one for own in _tree(books, run_id) for one in books.attempts[own]]
        usd = sum((one["cost_usd"] or Decimal(0) for one in calls), Decimal(0))
        if budget["usd_spent"] != usd:
            yield Fault(run_id, f"the budget has ${budget['usd_spent']} spent, the calls of the tree make ${usd}")
        counted = budget["calls_spent"] + budget["calls_assumed"]
        if counted != len(calls):
            yield Fault(run_id, f"the budget counts {counted} calls, the tree has {len(calls)}")


def _orphaned_calls(books: Books, requests: Sequence[Request]) -> Iterable[Fault]:
    """No run calls anything once a run above it has ended."""
    owners = {str(one["id"]): run_id for run_id, own in books.attempts.items() for one in own}
    for request in requests:
        run_id = owners.get(request.attempt_id or "")
        if run_id is None:
            continue
        for above in _ancestors(books, run_id):
            ended_at = books.runs[above]["ended_at"]
            if ended_at is not None and request.started_at > ended_at.timestamp():
                late_s = request.started_at - ended_at.timestamp()
                yield Fault(run_id, f"called something {late_s:.3f} s after the end of {above}, which it belongs to")


def _ancestors(books: Books, run_id: UUID) -> Iterable[UUID]:
    above = books.runs[run_id]["parent_run_id"]
    while above is not None:
        yield above
        above = books.runs[above]["parent_run_id"]


def _tree(books: Books, root: UUID) -> list[UUID]:
    return [run_id for run_id in books.runs if run_id == root or root in _ancestors(books, run_id)]


def _has_child(books: Books, parent: UUID, place: tuple[int, int]) -> bool:
    parents = ((run["parent_run_id"], run["parent_round"], run["parent_position"]) for run in books.runs.values())
    return (parent, *place) in parents


def _is_over(step: Mapping[str, Any]) -> bool:
    return step["state"] in {*STEP_HAS_OUTPUT, "skipped"}


def _words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"
