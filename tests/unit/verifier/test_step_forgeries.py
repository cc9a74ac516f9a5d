"""Moves of steps that are legal by the table of states, and that nobody ordered: signed, in order, and untrue."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from uuid import uuid5

import pytest

from engine.verifier.contents import derived_id
from tests.support.bundles import POOL, RUN, PaperRun, Record, pool_of
from tests.support.paper_children import delegated, recursive_pool
from tests.support.verdicts import faults, verified
from worker_pools.pool import Pool
from worker_pools.pool.file import parse_pool

ORDER = str(uuid5(RUN, "order"))
PENDING = {"state": "pending", "reason": None}
WAITING = {"state": "waiting", "reason": "operator", "old": "running"}


def with_substitute() -> Pool:
    return parse_pool(
        POOL.replace("model: beta-1}", "model: beta-1, fallbacks: [gamma]}") + "policy: {on_failed_step: fallback}\n",
        label="pool.yaml",
    )


def planned(pool: Pool | None = None) -> PaperRun:
    """A run whose first step is done."""
    run = PaperRun(Record(), pool)
    run.plan()
    run.perform(0)
    return run


def waiting(position: int = 1) -> PaperRun:
    """A run whose step failed and waits for an operator."""
    run = planned()
    for done in range(1, position):
        run.perform(done)
    run.close(position, run.send(position), None, moved=WAITING)
    return run


def answer(run: PaperRun, answer_: str, moved: dict[str, Any] | None, position: int = 1, **more: Any) -> None:
    said = {"order": ORDER, "answer": answer_, "round": 0, "step": position, "artifacts": [], "moved": moved}
    run.chain.add("operator.answered", by="ann", **{**said, **more})
    if moved is not None:
        run.states[position] = moved["state"]


def retry(run: PaperRun, **more: Any) -> None:
    said = {"worker": "gamma", "model": "gamma-1", "old_worker": "beta", "attempts_base": 1}
    answer(run, "retry", {**PENDING, "old": "waiting"}, **{**said, **more})
    run.steps[1] = ("gamma", *run.steps[1][1:])


def substitute(run: PaperRun, **more: Any) -> None:
    """The call of step 1 fails, and another worker has the step."""
    run.close(1, run.send(1), None)
    said = {"round": 0, "step": 1, "worker": "gamma", "model": "gamma-1", "old_worker": "beta", "attempts_base": 1}
    run.chain.add("step.substituted", **{**said, "moved": {**PENDING, "old": "running"}, **more})
    run.states[1] = "pending"
    run.steps[1] = ("gamma", *run.steps[1][1:])


def reopened(*, routed: dict[str, Any] | None = None, pool: Pool | None = None) -> PaperRun:
    """A run that failed at step 1 and gets another execution."""
    run = planned(pool)
    run.close(1, run.send(1), None, moved={"state": "failed", "reason": "server-error", "old": "running"})
    run.end("failed")
    run.chain.add("run.resumed", by="ann", execution=2, order=ORDER, deadline=None, artifacts=[])
    if routed is not None:
        run.chain.add("step.routed", round=0, step=1, queue="q", **routed)
    run.chain.add("step.changed", round=0, step=1, **PENDING, old="failed")
    run.chain.add("run.changed", state="created", reason=None, old="failed")
    return run


def finished(run: PaperRun) -> PaperRun:
    for position in (1, 2):
        if run.states[position] == "pending":
            run.perform(position)
    run.end()
    return run


def test_an_answer_that_has_a_step_tried_again_is_no_fault() -> None:
    run = waiting()
    retry(run)
    assert verified(finished(run)).findings.faults == []


def test_an_answer_that_leaves_a_step_out_is_no_fault() -> None:
    run = waiting()
    answer(run, "skip", {"state": "skipped", "reason": "operator", "old": "waiting"})
    assert verified(finished(run)).findings.faults == []


def test_a_substitute_is_no_fault() -> None:
    run = planned(with_substitute())
    substitute(run)
    assert verified(finished(run)).findings.faults == []


def test_a_new_execution_that_sends_a_step_elsewhere_is_no_fault() -> None:
    assert verified(reopened(routed={"worker": "beta", "model": "beta-1"})).findings.faults == []


SUCCEEDED = {"state": "succeeded", "reason": None, "old": "waiting"}


@pytest.mark.parametrize(
    ("forge", "reason"),
    [
        (lambda run: answer(run, "retry", SUCCEEDED), "the answer retry does not move a step there"),
        (lambda run: answer(run, "skip", SUCCEEDED), "the answer skip does not move a step there"),
        (lambda run: answer(run, "abort", {**PENDING, "old": "waiting"}), "the answer abort does not move"),
        (lambda run: answer(run, "retry", None), "the answer retry does not move a step there"),
        (lambda run: retry(run, model="cheaper-1"), "no worker 'gamma' with model 'cheaper-1'"),
        (lambda run: retry(run, worker="nobody"), "no worker 'nobody'"),
        (lambda run: retry(run, old_worker="alpha"), "belonged to worker 'beta', not 'alpha'"),
        (lambda run: retry(run, attempts_base=0), "forgives other attempts"),
        (
            lambda run: run.chain.add("step.changed", round=0, step=1, **PENDING, old="waiting"),
            "waited for an operator, and nobody answered",
        ),
        (lambda run: run.send(1), "was called while it waited for an operator"),
    ],
)
def test_what_no_operator_can_have_answered_is_found(forge: Callable[[PaperRun], Any], reason: str) -> None:
    run = waiting()
    forge(run)
    assert reason in faults(run)


def test_the_step_that_gives_the_answer_is_not_left_out() -> None:
    run = waiting(2)
    answer(run, "skip", {"state": "skipped", "reason": "operator", "old": "waiting"}, 2)
    assert "cannot be left out" in faults(run)


def test_an_answer_to_a_step_that_waits_for_something_else_is_found() -> None:
    run = planned()
    run.chain.add("step.changed", round=0, step=1, state="waiting", reason="budget-usd", old="pending")
    answer(run, "skip", {"state": "skipped", "reason": "operator", "old": "waiting"})
    assert "did not wait for an operator" in faults(run)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"moved": {"state": "succeeded", "reason": None, "old": "running"}}, "begins anew"),
        ({"moved": {"state": "skipped", "reason": "unread", "old": "running"}}, "begins anew"),
        ({"moved": None}, "begins anew"),
        ({"model": "cheaper-1"}, "no worker 'gamma' with model 'cheaper-1'"),
        ({"attempts_base": 0}, "forgives other attempts"),
    ],
)
def test_a_substitute_that_the_engine_cannot_have_written_is_found(more: dict[str, Any], reason: str) -> None:
    run = planned(with_substitute())
    substitute(run, **more)
    assert reason in faults(run)


@pytest.mark.parametrize(
    ("routed", "reason"),
    [
        ({"worker": "gamma", "model": "gamma-1"}, "to nobody but the worker"),
        ({"worker": "beta", "model": "cheaper-1"}, "no worker 'beta' with model 'cheaper-1'"),
    ],
)
def test_a_new_execution_gives_steps_to_nobody_else(routed: dict[str, Any], reason: str) -> None:
    assert reason in faults(reopened(routed=routed))


def test_a_step_is_sent_elsewhere_by_a_new_execution_only() -> None:
    run = planned()
    run.chain.add("step.routed", round=0, step=1, worker="beta", model="beta-1", queue="q")
    assert "only a new execution sends steps elsewhere" in faults(run)


@pytest.mark.parametrize("reason", [None, "operator", "unread"])
def test_a_step_that_nobody_left_out_is_found(reason: str | None) -> None:
    run = planned()
    run.chain.add("step.changed", round=0, step=1, state="skipped", reason=reason, old="pending")
    run.states[1] = "skipped"
    run.perform(2)
    run.end()
    assert "step 1 was left out, and nobody left it out" in faults(run)


@pytest.mark.parametrize(
    ("state", "old", "reason"),
    [("pending", "running", "nobody had it begin anew"), ("running", "pending", "runs without a call")],
)
def test_a_step_that_moves_by_nothing_is_found(state: str, old: str, reason: str) -> None:
    run = planned()
    if old == "running":
        run.send(1)
    run.chain.add("step.changed", round=0, step=1, state=state, reason=None, old=old)
    assert reason in faults(run)


@pytest.mark.parametrize(
    ("state", "moved", "reason"),
    [
        ("failed", {"state": "skipped", "reason": "operator", "old": "running"}, "does not move its step to skipped"),
        ("failed", {"state": "waiting", "reason": "review", "old": "running"}, "does not move its step to waiting"),
        ("succeeded", {"state": "failed", "reason": "server-error", "old": "running"}, "does not move its step"),
        ("succeeded", None, "neither accepted nor held for a review"),
    ],
)
def test_the_end_of_a_call_moves_its_step_as_it_ended(state: str, moved: dict[str, Any] | None, reason: str) -> None:
    run = planned()
    run.close(1, run.send(1), "Good.", state=state, accepted=False, moved=moved)
    assert reason in faults(run)


# Plans

SIDE = [("alpha", "One.", ()), ("beta", "For nobody.", ()), ("alpha", "The answer.", (0,))]


def with_rows(pool: Pool, *skipped: int, model: str | None = None) -> PaperRun:
    """A run whose plan's rows say that these steps are left out, and that step 1 is done with a model."""
    run = PaperRun(Record(), pool)
    add = run.chain.add

    def changed(type_: str, **data: Any) -> str:
        for position in skipped:
            data["steps"][position]["skipped"] = True
        if model is not None:
            data["steps"][1]["model"] = model
        return add(type_, **data)

    run.chain.add = changed  # type: ignore[method-assign]  # the forger
    run.plan(SIDE)
    run.chain.add = add  # type: ignore[method-assign]  # as it was
    for position in range(3):
        if position not in skipped:
            run.perform(position)
    run.end()
    return run


def test_the_pool_says_which_steps_are_left_out() -> None:
    skips = "{unread_steps: skip}"
    assert verified(with_rows(pool_of(skips), 1)).findings.faults == []
    assert verified(with_rows(pool_of())).findings.faults == []
    assert "step 1 is left out, which the pool does not ask for" in faults(with_rows(pool_of(), 1))
    assert "step 0 is left out, which the pool does not ask for" in faults(with_rows(pool_of(skips), 0, 1))
    assert "step 1 is not left out, though nobody reads it" in faults(with_rows(pool_of(skips)))


def test_the_pool_says_which_model_a_worker_has() -> None:
    assert "worker 'beta' has another model than 'audited-1'" in faults(with_rows(pool_of(), model="audited-1"))


def test_a_plan_that_nobody_gave_is_found() -> None:
    """The Conductor is to plan, and a plan of people stands there: its author would not be left out of reviews."""
    run = PaperRun(Record(), origin="conductor")
    run.plan()
    assert "the plan came neither with the run nor in place of one that was rejected" in faults(run)
    run = PaperRun(Record())
    run.chain.add("run.changed", state="waiting", reason="secret-missing", old="created")
    run.plan()
    assert "the plan came neither with the run" in faults(run)


def test_a_template_in_place_of_a_rejected_plan_is_no_fault() -> None:
    run = PaperRun(Record(), origin="conductor")
    own = run.send(None)
    run.close(None, own, None)
    run.chain.add("plan.rejected", round=0, attempt=str(own), number=1, form=None, codes=["no-plan"])
    run.plan()
    assert verified(run).findings.faults == []


# Pools, limits, executions


def test_a_run_gets_another_pool_with_the_order_that_resumes_it_and_never_else() -> None:
    def repinned(order: str | None, *, resumed: bool) -> PaperRun:
        run = planned()
        other = PaperRun(run.record, pool_of("{steps_max: 4}"), run=uuid5(RUN, "other")).digest
        if resumed:
            run.end("failed")
            run.chain.add("run.resumed", by="ann", execution=2, order=ORDER, deadline=None, artifacts=[])
        said = {} if order is None else {"order": order}
        run.chain.add("run.repinned", by="ann", old=run.digest, new=other, **said)
        return run

    assert verified(repinned(ORDER, resumed=True)).findings.faults == []
    wrong = "a run gets another pool only with the order that resumes it"
    assert wrong in faults(repinned(None, resumed=True))
    assert wrong in faults(repinned(str(uuid5(RUN, "another")), resumed=True))
    assert wrong in faults(repinned(None, resumed=False))
    assert wrong in faults(repinned(ORDER, resumed=False))


@pytest.mark.parametrize("more", [{}, {"order": ORDER, "parent_execution": 1}])
def test_a_run_at_the_top_is_resumed_by_a_person(more: dict[str, Any]) -> None:
    run = planned()
    run.end("failed")
    run.chain.add("run.resumed", by="ann", execution=2, artifacts=[], **more)
    assert "a person resumes a run that has none above it" in faults(run)


def test_limits_are_changed_from_what_they_were() -> None:
    limits = {"usd": "1.50", "tokens": None, "calls": 9}

    def changed(old: dict[str, Any] | None) -> PaperRun:
        run = PaperRun(Record(), budget=limits)
        run.chain.add("run.budget_changed", by="ann", order=ORDER, budget=None, old=old, artifacts=[])
        run.chain.add("run.budget_changed", by="ann", order=ORDER, budget=limits, old=None, artifacts=[])
        return run

    assert verified(changed({**limits, "usd": "1.5"})).findings.faults == []
    assert "other limits than those that it names" in faults(changed({**limits, "calls": 10}))
    assert "other limits than those that it names" in faults(changed(None))


# Delegated steps


def test_a_delegated_step_takes_the_answer_of_its_child_run_and_no_other_output() -> None:
    assert verified(delegated()).findings.faults == []
    assert verified(delegated(answer_=None)).findings.faults == []
    assert "the answer is not that of run" in faults(delegated(answer_=None, accepted="first"))
    assert "the answer is not that of run" in faults(delegated(answer_="first", accepted="first"))


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"depth": 2}, "does not stand one level below"),
        ({"rounds_max": 5}, "may have other rounds"),
        ({"pool": pool_of()}, "has another pool than run"),
    ],
)
def test_a_child_run_may_do_what_the_run_above_it_lets_it(more: dict[str, Any], reason: str) -> None:
    assert reason in faults(delegated(**more))


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"child_state": "failed", "child_reason": "server-error", "answer": None}, "did not end so"),
        ({"child_state": "failed", "child_reason": None}, "has an answer if and only if it succeeded"),
        ({"answer": None}, "has an answer if and only if it succeeded"),
    ],
)
def test_what_became_of_a_child_run_is_what_its_own_chain_says(more: dict[str, Any], reason: str) -> None:
    run = delegated()
    bodies = run.chain.bodies
    run.chain.record.leaves = [leaf for leaf in run.record.leaves if leaf[0] != RUN]
    kept, run.chain.bodies = bodies, []
    for body in kept:
        entry = json.loads(body)
        data = entry["data"] | (more if entry["type"] == "child.ended" else {})
        run.chain.add(entry["type"], by=entry["actor"], **data)
    assert reason in faults(run)


def test_executions_of_a_child_run_count_from_1() -> None:
    run = PaperRun(
        Record(),
        recursive_pool(),
    )
    run.plan([("self", "Split it up.", ())])
    run.chain.add("step.changed", round=0, step=0, state="running", reason=None, old="pending")
    run.move("running")
    child = derived_id(str(RUN), "child/0/0")
    run.chain.add("child.begun", round=0, step=0, child=child, child_execution=2)
    assert "execution 2 does not follow that of the child run before" in faults(run)
