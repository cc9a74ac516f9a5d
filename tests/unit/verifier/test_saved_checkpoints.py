"""The roots of trust: the checkpoint that an auditor kept, and keys that were replaced (attacks 3, 5, 14)."""

from __future__ import annotations

from engine.verifier.verify import verify_bundle
from tests.support.bundles import RUN, PaperRun, Record, whole_record
from tests.support.verdicts import faults_of

RECORD = whole_record()
BUNDLE = RECORD.bundle()
TRUST = [RECORD.verifier]


def test_a_log_rewritten_with_the_stolen_key_contradicts_the_saved_checkpoint() -> None:
    saved = RECORD.checkpoints[0][1]
    forged = Record()
    run = PaperRun(forged, task="What was never asked.")
    run.whole()
    forged.sign(8)
    forged.sign()
    assert verify_bundle(forged.bundle(), TRUST).verdict == "valid"
    assert "contradicts the saved checkpoint" in faults_of(verify_bundle(forged.bundle(), TRUST, saved))


def test_a_shortened_log_is_smaller_than_the_saved_checkpoint() -> None:
    saved = RECORD.checkpoints[-1][1]
    short = Record()
    PaperRun(short).plan()
    short.sign()
    assert verify_bundle(short.bundle(), TRUST).verdict == "valid"
    assert "entries were removed" in faults_of(verify_bundle(short.bundle(), TRUST, saved))


def test_a_saved_checkpoint_that_the_bundle_says_nothing_of_is_no_proof() -> None:
    record = whole_record()
    saved = record.sign(11)
    record.checkpoints.pop()
    report = verify_bundle(record.bundle([RUN]), TRUST, saved)
    assert "--since" in faults_of(report)
    # With all leaves nothing needs to be said.
    assert verify_bundle(record.bundle(), TRUST, saved).verdict == "valid"


def test_a_saved_checkpoint_by_a_stranger_is_refused() -> None:
    stranger = Record(signer=5)
    PaperRun(stranger).plan()
    assert "no trusted key" in faults_of(verify_bundle(BUNDLE, TRUST, stranger.sign()))
    assert faults_of(verify_bundle(BUNDLE, TRUST, b"nothing"))


# Key rotation


def rotated_record() -> Record:
    record = whole_record()
    record.rotate(2)
    record.sign()
    return record


def test_after_a_rotation_either_key_is_a_root_of_trust() -> None:
    record = rotated_record()
    for trust in ([Record(1).verifier], [Record(2).verifier]):
        report = verify_bundle(record.bundle(), trust, RECORD.checkpoints[0][1])
        assert report.findings.faults == []
        assert report.verdict == "valid"
    assert "no trusted key" in faults_of(verify_bundle(record.bundle(), [Record(3).verifier]))


def test_the_old_key_signs_nothing_any_more_after_the_rotation() -> None:
    record = rotated_record()
    record.checkpoints.pop()
    record.sign(signer=1)
    assert "not in service" in faults_of(verify_bundle(record.bundle(), [Record(1).verifier]))


def test_a_rotation_that_no_entry_records_is_refused() -> None:
    record = rotated_record()
    record.system.bodies.pop()
    record.leaves.pop()
    record.checkpoints.pop()
    record.sign(signer=2)
    assert "are not those that the tenant's own chain records" in faults_of(
        verify_bundle(record.bundle(), [Record(1).verifier])
    )
