"""What chains say of each other, of the log and of the bundle, signed with the trusted key and untrue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid5

import pytest

from engine.store.ids import artifact_id, step_id
from engine.verifier import holds, note
from engine.verifier.checkpoint import origin_of
from engine.verifier.report import Report
from engine.verifier.rotation import Rotation, rotation_text
from engine.verifier.verify import verify_bundle
from tests.support import bundles
from tests.support.bundles import PLAN, RUN, TENANT, PaperRun, Record, key, pool_of
from tests.support.paper_children import delegated
from tests.support.paper_reviews import Reviewing, propose
from tests.support.verdicts import faults, faults_of, verified

FORK = uuid5(RUN, "fork")
EXPORT = str(uuid5(RUN, "export"))
HOLD = str(uuid5(RUN, "hold"))

# Forks


def fork_of(source: PaperRun, *taken: dict[str, Any], plan: Any = PLAN, **said: Any) -> PaperRun:
    """A fork that takes over what is named; the rest of it is done anew."""
    origin = {"run": str(RUN), "round": 0, "task_edited": False, "edited": [], "reused": list(taken), **said}
    run = PaperRun(source.record, source.pool, run=FORK, origin="fork", source=origin)
    run.plan(plan)
    for row in taken:
        position = row["step"]
        run.chain.add(
            "step.changed", round=0, step=position, state="reused", reason=None, old="pending", attempt=row["attempt"]
        )
        run.states[position] = "reused"
        run.outputs[position] = (UUID(row["attempt"]), source.outputs.get(position, (None, "x"))[1])
    return run


def row(source: PaperRun, position: int, attempt: UUID | None = None, **more: Any) -> dict[str, Any]:
    return {
        "step": position,
        "source_step": str(step_id(RUN, 0, position)),
        "attempt": str(attempt or source.outputs[position][0]),
        "model": source.pool.worker(source.steps[position][0]).model,
        **more,
    }


def finished(run: PaperRun) -> PaperRun:
    for position, state in list(run.states.items()):
        if state == "pending":
            run.perform(position)
    run.end()
    return run


def test_a_fork_that_takes_over_what_was_accepted_is_no_fault() -> None:
    source = PaperRun(Record()).whole()
    assert verified(finished(fork_of(source, row(source, 0), row(source, 1)))).findings.faults == []


def test_a_rejected_output_is_not_taken_over() -> None:
    source = PaperRun(Record(), pool_of("{reviews: [{gate: after, approvals: 1}]}"))
    source.plan()
    own = propose(source, 0)
    Reviewing(source, "after", 0).decide("bob", "reject").close("rejected")
    source.chain.add("step.changed", round=0, step=0, state="failed", reason="review-rejected", old="waiting")
    source.end("failed")
    assert "step 0 takes over an output that run" in faults(fork_of(source, row(source, 0, own)))


def other_step(source: PaperRun) -> PaperRun:
    return fork_of(source, row(source, 0, source.outputs[2][0]))


def other_name(source: PaperRun) -> PaperRun:
    return fork_of(source, row(source, 0, source_step=str(step_id(RUN, 0, 2))))


def other_model(source: PaperRun) -> PaperRun:
    return fork_of(source, row(source, 0, model="audited-1"))


def edited(source: PaperRun) -> PaperRun:
    return fork_of(source, row(source, 0), edited=[{"step": 0, "fields": ["subtask"]}])


def edited_task(source: PaperRun) -> PaperRun:
    return fork_of(source, row(source, 0), task_edited=True)


def other_question(source: PaperRun) -> PaperRun:
    return fork_of(source, row(source, 0), plan=(("alpha", "Entirely another question.", ()), *PLAN[1:]))


def other_worker(source: PaperRun) -> PaperRun:
    return fork_of(source, row(source, 0), plan=(("gamma", *PLAN[0][1:]), *PLAN[1:]))


def other_reads(source: PaperRun) -> PaperRun:
    return fork_of(source, row(source, 0), row(source, 1), plan=(PLAN[0], (*PLAN[1][:2], ()), PLAN[2]))


def input_anew(source: PaperRun) -> PaperRun:
    return fork_of(source, row(source, 1))


def left_out_there(source: PaperRun) -> PaperRun:
    run = fork_of(source)
    run.chain.add("step.changed", round=0, step=0, state="skipped", reason="operator", old="pending")
    return run


@pytest.mark.parametrize(
    ("forge", "reason"),
    [
        (other_step, "never accepted there"),
        (other_name, "of another step than the one that it names"),
        (other_model, "takes over an output of model 'alpha-1' as one of 'audited-1'"),
        (edited, "although what it was asked was edited"),
        (edited_task, "although what it was asked was edited"),
        (other_question, "takes over the answer to another question"),
        (other_worker, "of another worker"),
        (other_reads, "read something else"),
        (input_anew, "although what it read is made anew"),
        (left_out_there, "did not leave it out"),
    ],
)
def test_what_a_fork_cannot_have_taken_over_is_found(forge: Callable[[PaperRun], PaperRun], reason: str) -> None:
    assert reason in faults(forge(PaperRun(Record()).whole()))


def test_a_fork_with_another_task_says_so() -> None:
    def fork(*, is_edited: bool) -> PaperRun:
        record = PaperRun(Record()).whole().record
        said = {"run": str(RUN), "round": 0, "task_edited": is_edited, "edited": [], "reused": []}
        return PaperRun(record, run=FORK, origin="fork", source=said, task="Another task.").whole()

    assert verified(fork(is_edited=True)).findings.faults == []
    assert "its task is not that of run" in faults(fork(is_edited=False))


def test_a_fork_keeps_left_out_what_an_operator_left_out() -> None:
    source = PaperRun(Record())
    source.plan()
    source.close(0, source.send(0), None, moved={"state": "waiting", "reason": "operator", "old": "running"})
    moved = {"state": "skipped", "reason": "operator", "old": "waiting"}
    source.chain.add(
        "operator.answered", by="ann", order=HOLD, answer="skip", round=0, step=0, artifacts=[], moved=moved
    )
    source.states[0] = "skipped"
    finished(source)
    run = fork_of(source)
    run.chain.add("step.changed", round=0, step=0, state="skipped", reason="operator", old="pending")
    run.states[0] = "skipped"
    assert verified(finished(run)).findings.faults == []


# The export


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest names the export."""
    plain = bundles.manifest_of
    monkeypatch.setattr(bundles, "manifest_of", lambda *given: {**plain(*given), "export": EXPORT})


def export(run: PaperRun, *asked: UUID, **more: Any) -> PaperRun:
    said = {"export": EXPORT, "runs": [str(one) for one in asked or (run.id,)], "redacted": [], "system": None}
    run.chain.add("run.exported", by="aud", **{**said, **more})
    return run


@pytest.mark.usefixtures("exported")
def test_the_bundle_is_the_export_that_its_runs_record() -> None:
    assert verified(export(PaperRun(Record()).whole())).exit_code == 0
    assert "no entry records the export" in faults(PaperRun(Record()).whole())
    assert "no entry records the export" in faults(export(PaperRun(Record()).whole(), export=HOLD))
    assert "the bundle does not hold it" in faults(export(PaperRun(Record()).whole(), RUN, FORK))


@pytest.mark.usefixtures("exported")
def test_all_runs_of_an_export_record_the_same_one() -> None:
    record = Record()
    run, other = PaperRun(record).whole(), PaperRun(record, run=FORK).whole()
    export(run, RUN)
    export(other, FORK)
    assert "as another run does, with other runs" in faults(run)


def test_a_bundle_that_hides_which_export_it_is_is_not_valid_without_reserve() -> None:
    report = verified(export(PaperRun(Record()).whole(), FORK))
    assert (report.findings.faults, report.exit_code) == ([], 3)
    assert any("it does not say which" in line for line in report.not_proven)


@pytest.mark.usefixtures("exported")
def test_the_tenants_own_chain_is_the_one_that_the_export_saw() -> None:
    def said(entries: int, head: str | None = None) -> Report:
        run = PaperRun(Record()).whole()
        run.record.system.add("person.linked", by="root", actor="q", person="z")
        head = head or run.record.system.hash(1)
        return verified(export(run, system={"entries": entries, "head": head}))

    assert said(1).exit_code == 0
    assert "was another one when it was exported" in faults_of(said(1, "0" * 64))
    assert "was another one when it was exported" in faults_of(said(0))
    cut = said(2)
    assert (cut.findings.faults, cut.exit_code) == ([], 3)
    assert any("it had 2 entries" in line for line in cut.not_proven)


# Checkpoints and keys


def behind_checkpoints(count: int, checkpoint: Any) -> Report:
    record = Record()
    for number in range(count):
        record.system.add("person.linked", by="root", actor=f"q{number}", person="z")
        record.sign()
    return verified(PaperRun(record, checkpoint=checkpoint).whole())


def test_an_entry_that_denies_the_checkpoints_before_it_is_noticed() -> None:
    assert not any("earliest time" in line for line in behind_checkpoints(1, 1).not_proven)
    once = behind_checkpoints(1, None)
    assert any("it names no checkpoint, though the log had one" in line for line in once.not_proven)
    assert behind_checkpoints(2, 1).exit_code == 0
    for count, named in ((2, None), (3, 1)):
        denied = behind_checkpoints(count, named)
        assert (denied.findings.faults, denied.exit_code) == ([], 3)
        assert any(f"stands behind one of size {count}" in line for line in denied.not_proven)


@pytest.mark.parametrize("later", [None, 1])
def test_no_entry_knows_less_than_one_before_it(later: int | None) -> None:
    record = Record()
    for number in range(2):
        record.system.add("person.linked", by="root", actor=f"q{number}", person="z")
        record.sign()
    run = PaperRun(record, pool_of("{reviews: [{gate: plan, approvals: 1}]}"), checkpoint=2)
    run.plan()
    Reviewing(run, "plan", None).decide("eve", checkpoint=later).close()
    assert "an earlier entry names a checkpoint of size 2" in faults(run)


def test_a_rotation_stands_behind_what_the_old_key_signed() -> None:
    """A retired key and the public statement of its rotation: enough to sign any log that is small enough."""
    record, origin = Record(1), origin_of(str(TENANT))
    old, new = (note.verifier_of(key(number), origin) for number in (1, 2))
    statement = note.sign(rotation_text(Rotation(origin, old, new, 500)), origin, key(1))
    record.rotations.append(note.add_signature(statement, origin, key(2)))
    record.system.add("key.rotated", by="root", old=str(old), new=str(new), size=500)
    PaperRun(record).whole()
    record.sign()
    assert "it stands at place 0 of the log" in faults_of(verify_bundle(record.bundle(), [new]))


# Erasures and holds


def erase(run: PaperRun, *artifacts: UUID, erasure: str = str(uuid5(RUN, "erasure")), **more: Any) -> PaperRun:
    said = {"erasure": erasure, "cause": "order", "scope": "artifact", "key_epoch": 1, "restored": False}
    named = [str(one) for one in artifacts]
    run.chain.add("artifact.erased", by="dpo", **{**said, "erased": named, "artifacts": [], **more})
    for one in artifacts:
        if one in run.record.artifacts:
            run.record.artifacts[one].state = "erased"
    return run


def output(run: PaperRun, position: int = 1) -> UUID:
    return artifact_id(run.outputs[position][0], "output")


def hold(run: PaperRun, type_: str = "hold.placed", by: str = "counsel", **more: Any) -> None:
    said: dict[str, Any] = {"hold": HOLD, "matter": "2026-0042", "artifacts": []}
    if type_ in ("hold.placed", "hold.widened"):
        said |= {"runs": [str(RUN)], "all_runs": False}
    run.record.system.add(type_, by=by, **{**said, **more})


def test_what_was_not_written_yet_is_not_erased() -> None:
    run = PaperRun(Record())
    run.plan()
    run.perform(0)
    own = run.attempt(1)
    erase(run, artifact_id(own, "output"))
    run.perform(1)
    run.perform(2)
    run.end()
    run.record.artifacts[artifact_id(own, "output")].state = "erased"
    assert "was erased before it was written" in faults(run)
    assert "was erased before it was written" in faults(erase(PaperRun(Record()).whole(), FORK))


def test_texts_of_a_run_that_has_not_ended_are_not_erased() -> None:
    def live(*, restored: bool) -> PaperRun:
        run = PaperRun(Record())
        run.plan()
        run.perform(0)
        return erase(run, output(run, 0), restored=restored)

    assert "texts were erased that a run needed which had not ended" in faults(live(restored=False))
    assert verified(live(restored=True)).exit_code == 4


@pytest.mark.parametrize("more", [{}, {"runs": [], "all_runs": True}])
def test_texts_under_hold_are_not_erased(more: dict[str, Any]) -> None:
    run = PaperRun(Record()).whole()
    hold(run, **more)
    assert "texts were erased that were under hold for 2026-0042" in faults(erase(run, output(run)))


def test_a_hold_on_a_part_of_a_tree_holds_all_of_it() -> None:
    run = delegated()
    child = next(chain for chain in run.record.chains if chain != RUN)
    hold(run, runs=[str(child)])
    assert "under hold" in faults(erase(run, artifact_id(RUN, "task")))


def test_a_hold_that_came_later_or_holds_others_or_was_released_is_no_fault() -> None:
    run = PaperRun(Record()).whole()
    erase(run, output(run))
    hold(run)
    assert verified(run).exit_code == 4
    run = PaperRun(Record()).whole()
    hold(run, runs=[str(FORK)])
    assert verified(erase(run, output(run))).exit_code == 4
    run = PaperRun(Record()).whole()
    hold(run)
    hold(run, "hold.release_asked", "ann")
    hold(run, "hold.released", "bob", asked_by="ann")
    assert verified(erase(run, output(run))).exit_code == 4


def withheld(run: PaperRun, *types: str, **more: Any) -> Report:
    """The verdict on a bundle without the reasons of these entries of a hold."""
    for place, type_ in enumerate(types):
        reason = run.record.system.commit(uuid5(RUN, f"reason/{place}"), "reason", "It is wanted.")
        run.record.artifacts[UUID(reason["artifact"])].state = "redacted"
        asks = {"asked_by": "p0"} if type_ == "hold.released" else {}
        hold(run, type_, f"p{place - 1}", artifacts=[reason], **asks, **(more if place == 0 else {}))
    return verified(run)


def test_reasons_of_holds_on_other_runs_are_no_lack_of_a_bundle() -> None:
    report = withheld(
        PaperRun(Record()).whole(), "hold.placed", "hold.release_asked", "hold.released", runs=[str(FORK)]
    )
    assert (report.findings.faults, report.exit_code, report.findings.redacted) == ([], 0, [])
    assert any("about other runs are not in this bundle (3)" in line for line in report.not_proven)
    assert "withheld by order" not in report.as_text()
    # What is withheld of the runs themselves is as before.
    run = PaperRun(Record()).whole()
    run.record.artifacts[output(run)].state = "redacted"
    report = withheld(run, "hold.placed", runs=[str(FORK)])
    assert (report.exit_code, report.findings.redacted) == (3, [str(output(run))])


@pytest.mark.parametrize("more", [{}, {"runs": [str(FORK), str(RUN)]}, {"runs": [], "all_runs": True}])
def test_reasons_of_a_hold_on_a_run_of_the_bundle_are_missed(more: dict[str, Any]) -> None:
    report = withheld(PaperRun(Record()).whole(), "hold.placed", "hold.release_asked", "hold.released", **more)
    assert (report.findings.faults, report.exit_code, len(report.findings.redacted)) == ([], 3, 3)
    assert not any("about other runs" in line for line in report.not_proven)


def test_a_hold_that_was_widened_to_a_run_of_the_bundle_or_holds_a_part_of_its_tree_is_one_on_it() -> None:
    report = withheld(PaperRun(Record()).whole(), "hold.placed", "hold.widened", runs=[str(FORK)])
    assert (report.findings.faults, report.exit_code, len(report.findings.redacted)) == ([], 3, 2)
    run = delegated()
    child = next(chain for chain in run.record.chains if chain != RUN)
    assert withheld(run, "hold.placed", runs=[str(child)]).exit_code == 3


def test_a_backdated_erasure_is_noticed_if_a_checkpoint_covers_the_hold_alone() -> None:
    run = PaperRun(Record()).whole()
    hold(run)
    run.record.sign()
    run.record._ticks = 0
    report = verified(erase(run, output(run)))
    assert (report.findings.faults, report.exit_code) == ([], 3)
    assert any("had begun before 2026-0042" in line for line in report.not_proven)


def test_an_erasure_that_may_have_begun_before_the_hold_leaves_the_verdict_open() -> None:
    run = PaperRun(Record()).whole()
    hold(run)
    began = int((bundles.BEGIN.timestamp() + 1) * 1000)
    digits = f"{began:012x}"
    report = verified(erase(run, output(run), erasure=f"{digits[:8]}-{digits[8:]}-7000-8000-000000000001"))
    assert (report.findings.faults, report.exit_code) == ([], 3)
    assert any("had begun before 2026-0042" in line for line in report.not_proven)
    run = PaperRun(Record()).whole()
    hold(run)
    assert verified(erase(run, output(run), restored=True)).exit_code == 3


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        ([("hold.placed", {}), ("hold.placed", {})], "placed already"),
        ([("hold.placed", {}), ("hold.placed", {"hold": EXPORT})], "has a hold already"),
        ([("hold.widened", {})], "no such hold"),
        ([("hold.placed", {}), ("hold.widened", {"matter": "another"})], "no such hold"),
        (
            [("hold.placed", {}), ("hold.release_asked", {}), ("hold.release_asked", {})],
            "asked for its release already",
        ),
        (
            [("hold.placed", {}), ("hold.release_asked", {}), ("hold.widened", {}), ("hold.released", {"by": "bob"})],
            "without the wish",
        ),
        (
            [("hold.placed", {}), ("hold.release_asked", {}), ("hold.released", {"by": "bob", "asked_by": "zed"})],
            "without the wish",
        ),
    ],
)
def test_a_hold_that_does_not_follow_from_its_entries_is_found(
    steps: list[tuple[str, dict[str, Any]]], reason: str
) -> None:
    run = PaperRun(Record()).whole()
    for type_, more in steps:
        hold(run, type_, **more)
    assert reason in faults(run)


def test_an_erasure_beside_a_chain_whose_end_may_be_missing_leaves_the_verdict_open() -> None:
    record = Record()
    record.system.add("person.linked", by="root", actor="q", person="z")
    PaperRun(record, run=FORK).whole()
    run = PaperRun(record).whole()
    erase(run, output(run))
    record.sign()
    report = verify_bundle(record.bundle([RUN]), [record.verifier])
    assert (report.findings.faults, report.exit_code) == ([], 3)
    assert any("no hold stood when texts" in line for line in report.not_proven)


def test_more_holds_and_erasures_than_can_be_compared_leave_the_verdict_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holds, "_COMPARED_MAX", 0)
    run = PaperRun(Record()).whole()
    hold(run)
    report = verified(erase(run, output(run)))
    assert (report.findings.faults, report.exit_code) == ([], 3)
    assert any("too many erasures and holds" in line for line in report.not_proven)
