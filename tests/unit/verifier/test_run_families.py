"""What chains say of each other and of the log: forks, and entries that name checkpoints."""

from __future__ import annotations

from uuid import UUID, uuid5

from engine.store.ids import step_id
from engine.verifier.merkle import root_of
from engine.verifier.verify import verify_bundle
from tests.support.bundles import RUN, PaperRun, Record
from tests.support.verdicts import faults, verified

OTHER = uuid5(RUN, "other")


def test_a_fork_takes_over_what_its_source_had_and_nothing_else() -> None:
    record = Record()
    source = PaperRun(record).whole()
    attempt = source.outputs[0][0]

    def fork(run_id: UUID, taken: UUID) -> PaperRun:
        reused = [{"step": 0, "source_step": str(step_id(RUN, 0, 0)), "attempt": str(taken), "model": "alpha-1"}]
        said = {"run": str(RUN), "round": 0, "task_edited": False, "edited": [], "reused": reused}
        run = PaperRun(record, run=run_id, origin="fork", source=said)
        run.plan()
        run.chain.add("step.changed", round=0, step=0, state="reused", reason=None, old="pending", attempt=str(taken))
        run.states[0], run.outputs[0] = "reused", (taken, source.outputs[0][1])
        run.perform(1)
        run.perform(2)
        run.end()
        return run

    fine = fork(OTHER, attempt)
    report = verified(fine)
    assert report.findings.faults == []
    assert all(one.rendered for one in report.runs[str(OTHER)].attempts.values())
    alone = verify_bundle(record.bundle([OTHER]), [record.verifier])
    assert alone.verdict == "valid"
    assert any("took over" in line for line in alone.not_proven)
    forged = fork(uuid5(RUN, "third"), uuid5(RUN, "made up"))
    assert "that run" in faults(forged)


def test_an_entry_that_names_a_checkpoint_stands_behind_it() -> None:
    record = Record()
    PaperRun(record).whole()
    size = len(record.leaves)
    record.sign()
    fine = PaperRun(record, run=OTHER, checkpoint={"size": size, "root": root_hex(record, size)})
    assert verified(fine).verdict == "valid"
    backdated = PaperRun(record, run=uuid5(RUN, "third"), checkpoint={"size": 10_000, "root": "0" * 64})
    assert "stands before that in the log" in faults(backdated)
    record = Record()
    PaperRun(record)
    record.sign()
    other = PaperRun(record, run=OTHER, checkpoint={"size": 1, "root": "0" * 64})
    assert "a checkpoint of size 1 that the log never had" in faults(other)


def root_hex(record: Record, size: int) -> str:
    return root_of(record.hashes()[:size]).hex()
