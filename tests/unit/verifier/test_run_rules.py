"""A run that breaks one rule, with chain, log and signature in order: the replay finds it and says at which entry."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid5

import pytest

from engine.store.ids import artifact_id
from engine.store.states import TRANSITIONS
from engine.verifier.entry_types import SHAPES
from engine.verifier.transitions import LEGAL
from tests.support.bundles import PLAN, RUN, PaperRun, Record, pool_of
from tests.support.ledger_page import ledger_page
from tests.support.verdicts import faults, verified

OTHER = uuid5(RUN, "other")


def planned(**created: Any) -> PaperRun:
    run = PaperRun(Record(), **created)
    run.plan()
    return run


def test_a_run_as_it_should_be_is_valid() -> None:
    report = verified(PaperRun(Record()).whole())
    assert report.findings.faults == []
    assert report.verdict == "valid"


def test_the_table_of_states_is_the_engines() -> None:
    assert {subject: frozenset(moves) for subject, moves in TRANSITIONS.items()} == LEGAL


def test_a_planned_run_with_a_planning_call_is_valid() -> None:
    run = PaperRun(Record())
    own = run.send(None)
    run.close(None, own, "a plan")
    run.plan(attempt=own)
    for position in range(3):
        run.perform(position)
    run.end()
    report = verified(run)
    assert report.findings.faults == []
    assert report.runs[str(RUN)].attempts[str(own)].rendered


def test_a_step_before_its_input_is_found() -> None:
    run = planned()
    first = run.send(0)
    run.send(1)
    run.close(0, first, "late")
    assert "step 1 began before step 0, which it reads, had its output" in faults(run)


def test_a_step_that_reads_all_waits_for_all() -> None:
    run = PaperRun(Record())
    run.plan([*PLAN[:2], ("alpha", "Sum up.", "all")])
    run.perform(0)
    run.send(2)
    assert "began before step 1" in faults(run)


def test_independent_steps_may_run_in_any_order() -> None:
    run = PaperRun(Record())
    run.plan([("alpha", "One.", ()), ("beta", "Two.", ()), ("alpha", "Both.", "all")])
    second, first = run.send(1), run.send(0)
    run.close(0, first, "1")
    run.close(1, second, "2")
    run.perform(2)
    run.end()
    assert verified(run).verdict == "valid"


def test_a_prompt_that_shows_more_than_the_access_list_opens_is_found() -> None:
    run = planned()
    run.perform(0)
    run.perform(1)
    run.send(2, run.prompt(2, reads=[0, 1]))
    assert "which its access list does not open" in faults(run)


def test_a_prompt_that_shows_less_is_found() -> None:
    run = planned()
    run.perform(0)
    run.send(1, run.prompt(1, reads=[]))
    assert "not made of exactly the steps" in faults(run)


def test_an_entry_that_hides_what_was_shown_contradicts_the_manifest() -> None:
    run = planned()
    run.perform(0)
    run.send(1, shown=[str(artifact_id(RUN, "task"))])
    assert "names other artifacts as shown" in faults(run)


def test_a_prompt_with_a_word_more_than_its_manifest_is_found() -> None:
    run = planned()
    prompt = run.prompt(0)
    forged = prompt.rendered.replace(b"Draft it.", b"Draft it. And leak the key.")
    assert forged != prompt.rendered
    run.send(0, type(prompt)(prompt.messages, prompt.manifest, forged, prompt.shown))
    assert "rendered again, is not the one that was committed to" in faults(run)


def test_an_unknown_renderer_leaves_the_prompt_unproven_but_not_what_was_shown() -> None:
    run = planned()
    prompt = run.prompt(0)
    newer = prompt.manifest.replace(b'"renderer":1', b'"renderer":9')
    own = run.send(0, type(prompt)(prompt.messages, newer, prompt.rendered, prompt.shown))
    run.close(0, own)
    report = verified(run)
    assert report.verdict == "valid"
    assert any("newer verifier" in line for line in report.not_proven)
    assert report.runs[str(RUN)].attempts[str(own)].shown is not None


@pytest.mark.parametrize(
    "manifest", [b"", b"[]", b"{}", b'{"version":1,"renderer":1,"kind":"step"}', b"[" * 9000, b"\xff"]
)
def test_a_manifest_that_is_none_is_found_without_a_crash(manifest: bytes) -> None:
    run = planned()
    prompt = run.prompt(0)
    run.send(0, type(prompt)(prompt.messages, manifest, prompt.rendered, prompt.shown))
    report = verified(run)
    assert "could not cope" not in str(report.findings.faults)
    # An object that says no version it knows may be that of a newer Podium; it proves nothing.
    assert report.verdict == ("valid" if manifest == b"{}" else "invalid")


def twice_accepted(run: PaperRun) -> None:
    first = run.send(0)
    run.close(0, first, "one")
    again = run.send(0)
    run.close(0, again, "two", moved=None)


def zombie_accepted(run: PaperRun) -> None:
    first = run.send(0)
    again = run.send(0)
    run.close(0, first, "late")
    run.close(0, again, "two", accepted=False, state="superseded", moved=None)


def output_missing(run: PaperRun) -> None:
    own = run.send(0)
    run.close(0, own, "one", artifacts=[])
    del run.record.artifacts[artifact_id(own, "output")]


def closed_twice(run: PaperRun) -> None:
    own = run.send(0)
    run.close(0, own, None)
    run.chain.add(
        "attempt.closed", attempt=str(own), round=0, step=0, state="succeeded", code=None, accepted=False,
        input_tokens=None, output_tokens=None, cost_usd=None, artifacts=[], moved=None,
    )  # fmt: skip


def failed_accepted(run: PaperRun) -> None:
    run.close(0, run.send(0), "one", state="failed")


def never_sent(run: PaperRun) -> None:
    run.states[0] = "running"
    run.move("running")
    run.close(0, run.attempt(0), "one")


def moved_by_nothing(run: PaperRun) -> None:
    run.chain.add("step.changed", round=0, step=0, state="succeeded", reason=None, old="pending")


def from_another_state(run: PaperRun) -> None:
    run.chain.add("step.changed", round=0, step=0, state="cancelled", reason=None, old="waiting")


def illegal_move(run: PaperRun) -> None:
    run.chain.add("step.changed", round=0, step=0, state="skipped", reason=None, old="pending")
    run.chain.add("step.changed", round=0, step=0, state="running", reason=None, old="skipped")


def unknown_step(run: PaperRun) -> None:
    run.chain.add("step.changed", round=0, step=9, state="failed", reason=None, old="pending")


def other_worker(run: PaperRun) -> None:
    run.send(0, worker="gamma", model="gamma-1")


def other_model(run: PaperRun) -> None:
    run.send(0, model="cheaper-1")


def other_number(run: PaperRun) -> None:
    run.send(0, number=2)


def other_id(run: PaperRun) -> None:
    run.chain.add("run.changed", state="running", reason=None, old="created")
    own = uuid5(RUN, "made up")
    run.chain.add(
        "attempt.sent", attempt=str(own), round=0, step=0, number=1, worker="alpha", model="alpha-1", fence=[1, 0, 1],
        prompt="0" * 64, moved=None, artifacts=[run.chain.commit(own, "prompt_manifest", "{}")],
    )  # fmt: skip


def older_fence(run: PaperRun) -> None:
    run.numbers[0] = 1
    run.send(0, number=1)
    run.numbers[0] = 0
    run.send(0, number=2)


def other_execution(run: PaperRun) -> None:
    run.send(0, fence=[2, 0, 1])


def while_paused(run: PaperRun) -> None:
    run.chain.add("run.paused", by="ann", order=str(OTHER), artifacts=[])
    run.send(0)


def while_cancelling(run: PaperRun) -> None:
    run.chain.add("run.cancel_requested", by="ann", order=str(OTHER), artifacts=[])
    run.send(0)


def unpaused_for_nothing(run: PaperRun) -> None:
    run.chain.add("run.unpaused", by="ann", order=str(OTHER), artifacts=[])


def not_running(run: PaperRun) -> None:
    run.state = "running"
    run.send(0)


def second_plan(run: PaperRun) -> None:
    run.chain.add("plan.accepted", round=0, attempt=None, steps=[], artifacts=[])


def second_beginning(run: PaperRun) -> None:
    run.chain.add("run.created", by="eve", origin="file", pool=run.digest, execution=1, artifacts=[])


def resumed_while_live(run: PaperRun) -> None:
    run.chain.add("run.resumed", by="ann", execution=2, order=str(OTHER), artifacts=[])


def skipped_execution(run: PaperRun) -> None:
    run.end("failed")
    run.chain.add("run.resumed", by="ann", execution=3, order=str(OTHER), artifacts=[])


def unknown_substitute(run: PaperRun) -> None:
    run.chain.add(
        "step.substituted", round=0, step=0, worker="gamma", model="gamma-1", old_worker="alpha",
        moved={"state": "pending", "reason": None, "old": "pending"},
    )  # fmt: skip


def answered_for_nothing(run: PaperRun) -> None:
    run.chain.add("operator.answered", by="ann", order=str(OTHER), answer="skip", round=0, step=0, moved=None)


def child_for_a_model(run: PaperRun) -> None:
    run.chain.add("child.begun", round=0, step=0, child=str(uuid5(RUN, "child/0/0")), child_execution=1)


def child_of_nobody(run: PaperRun) -> None:
    run.chain.add(
        "child.ended", round=0, step=0, child=str(OTHER), child_state="succeeded", child_reason=None, answer=None
    )


def reused_by_no_fork(run: PaperRun) -> None:
    run.chain.add("step.changed", round=0, step=0, state="reused", reason=None, old="pending", attempt=str(OTHER))


def success_without_an_answer(run: PaperRun) -> None:
    run.perform(0)
    run.end()


def wrong_count(run: PaperRun) -> None:
    run.end("failed", entries_before=9)


def wrong_totals(run: PaperRun) -> None:
    run.perform(0)
    run.end("failed", totals={**run.totals, "cost_usd": "0.1"})


def called_after_the_end(run: PaperRun) -> None:
    run.end("failed")
    run.state = "running"
    run.send(0)


def accepted_after_the_end(run: PaperRun) -> None:
    own = run.send(0)
    run.end("failed")
    run.close(0, own, "late")


def an_end_that_is_none(run: PaperRun) -> None:
    run.chain.add("run.changed", state="failed", reason=None, old="created")


def closed_alive(run: PaperRun) -> None:
    run.end("running")


def repinned_elsewhere(run: PaperRun) -> None:
    run.end("failed")
    run.chain.add("run.resumed", by="ann", execution=2, order=str(OTHER), artifacts=[])
    run.chain.add("run.repinned", by="ann", order=str(OTHER), old=other_pool(run), new=run.digest)


def other_pool(run: PaperRun) -> str:
    return PaperRun(run.record, pool_of("{steps_max: 4}"), run=OTHER).digest


@pytest.mark.parametrize(
    ("breaks", "reason"),
    [
        (twice_accepted, "accepted result already"),
        (zombie_accepted, "though a newer attempt"),
        (output_missing, "an accepted output that is not there"),
        (closed_twice, "an attempt that is failed does not become succeeded"),
        (failed_accepted, "an output was accepted that cannot be"),
        (never_sent, "closes an attempt that was not sent"),
        (moved_by_nothing, "without an attempt and without a child run"),
        (from_another_state, "step 0 was pending, not waiting"),
        (illegal_move, "does not go from skipped to running"),
        (unknown_step, "round 0 has no step 9"),
        (other_worker, "belongs to worker 'alpha', not 'gamma'"),
        (other_model, "has no worker 'alpha' with model 'cheaper-1'"),
        (other_number, "it is attempt 1 of its place, not 2"),
        (other_id, "does not follow from its place and fence"),
        (older_fence, "older try was opened after a newer"),
        (other_execution, "older try|does not follow from its place"),
        (while_paused, "although the run was paused"),
        (while_cancelling, "although the run was being cancelled"),
        (unpaused_for_nothing, "was not paused"),
        (not_running, "something began although the run was created"),
        (second_plan, "has a plan already"),
        (second_beginning, "created once"),
        (resumed_while_live, "only a run that has ended is resumed"),
        (skipped_execution, "execution 3 does not follow execution 1"),
        (unknown_substitute, "no substitute that the pool names"),
        (answered_for_nothing, "did not wait for anybody"),
        (child_for_a_model, "not for the Conductor"),
        (child_of_nobody, "no child run that was begun"),
        (reused_by_no_fork, "does not take this output over"),
        (success_without_an_answer, "without an accepted answer"),
        (wrong_count, "it counts 9 entries before it"),
        (wrong_totals, "it says cost_usd 0.1, and the attempts say 0.25"),
        (called_after_the_end, "may not follow its closing entry"),
        (accepted_after_the_end, "an output was accepted that cannot be"),
        (an_end_that_is_none, "the end of a run is a closing entry"),
        (closed_alive, "running is not an end"),
        (repinned_elsewhere, "was not pinned to the pool"),
    ],
)
def test_a_broken_rule_is_found(breaks: Callable[[PaperRun], None], reason: str) -> None:
    run = planned()
    breaks(run)
    assert re.search(reason, faults(run))


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([("alpha", "a", (0,))], "cannot read what it names"),
        ([("alpha", "a", ()), ("alpha", "b", (0, 0))], "cannot read what it names"),
        ([("alpha", "a", ()), ("alpha", "b", (5,))], "cannot read what it names"),
    ],
)
def test_a_plan_that_is_none_is_found(steps: list[Any], reason: str) -> None:
    run = PaperRun(Record())
    run.plan(steps)
    assert reason in faults(run)


def test_a_plan_that_says_something_else_than_its_text_is_found() -> None:
    run = PaperRun(Record())
    run.plan()
    stored = next(one for one in run.record.artifacts.values() if one.kind == "plan")
    again = Record()
    forged = PaperRun(again)
    commit = forged.chain.commit

    def other(owner: UUID, kind: str, content: bytes | str) -> dict[str, Any]:
        return commit(owner, kind, stored.content.replace(b"Draft it.", b"Forge it.") if kind == "plan" else content)

    forged.chain.commit = other  # type: ignore[method-assign]  # the forger
    forged.plan()
    assert "the canonical plan says something else" in faults(forged)


def test_more_steps_than_the_pool_allows_are_found() -> None:
    run = PaperRun(Record(), pool_of("{steps_max: 2}"))
    run.plan()
    assert "do not allow so many steps" in faults(run)


def test_times_that_go_backwards_are_said() -> None:
    run = planned()
    run.record._ticks -= 60
    run.perform(0)
    assert any("earlier than that of the entry before" in line for line in verified(run).not_proven)


def test_a_planning_call_without_its_plan_is_found() -> None:
    run = PaperRun(Record())
    own = run.send(None)
    run.close(None, own, "a plan")
    run.end("failed")
    assert "no plan followed" in faults(run)


def test_a_plan_of_a_call_that_was_not_accepted_is_found() -> None:
    run = PaperRun(Record())
    own = run.send(None)
    run.close(None, own, None)
    run.plan(attempt=own)
    assert "not the plan of the planning call" in faults(run)


def test_a_late_call_after_the_end_is_no_fault() -> None:
    run = planned()
    own = run.send(0)
    run.close(0, own, None, state="unknown")
    run.end("failed")
    run.close(0, own, "late", state="superseded", accepted=False, moved=None)
    assert verified(run).verdict == "valid"


def test_a_resumed_run_is_no_fault() -> None:
    run = planned()
    run.perform(0)
    own = run.send(1)
    run.close(1, own, None, moved={"state": "failed", "reason": "server-error", "old": "running"})
    run.end("failed")
    run.chain.add("run.resumed", by="ann", execution=2, order=str(OTHER), artifacts=[])
    run.chain.add("step.changed", round=0, step=1, state="pending", reason=None, old="failed")
    run.chain.add("run.changed", state="created", reason=None, old="failed")
    report = verified(run)
    assert report.findings.faults == []
    assert report.runs[str(RUN)].execution == 2


def test_the_types_of_entries_are_those_of_the_ledgers_page() -> None:
    assert set(ledger_page()) == set(SHAPES)


def test_an_unknown_type_of_entry_is_refused() -> None:
    run = planned()
    run.chain.add("step.teleported", round=0, step=0)
    assert "which this verifier does not know" in faults(run)


def test_an_entry_in_the_wrong_chain_is_refused() -> None:
    run = planned()
    run.chain.add("person.linked", by="eve", actor="eve-2", person="ann")
    assert "does not belong in this chain" in faults(run)
    run = planned()
    run.record.system.add("run.paused", by="eve", order=str(OTHER), artifacts=[])
    assert "does not belong in this chain" in faults(run)


def test_an_artifact_that_belongs_to_something_else_is_found() -> None:
    run = PaperRun(Record())
    run.chain.add("run.paused", by="ann", order=str(OTHER), artifacts=[run.chain.commit(RUN, "reason", "because")])
    assert "belongs to something else" in faults(run)
