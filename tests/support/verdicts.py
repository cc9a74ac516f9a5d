"""What the verifier says of runs on paper."""

from __future__ import annotations

from engine.verifier.report import Report
from engine.verifier.verify import verify_bundle
from tests.support.bundles import PaperRun


def verified(run: PaperRun) -> Report:
    """Signs the log and verifies a bundle of everything in it."""
    run.record.sign()
    return verify_bundle(run.record.bundle(), [run.record.verifier])


def faults_of(report: Report) -> str:
    """What is wrong, a line each; it is invalid for a reason, not because the verifier broke down."""
    assert report.verdict == "invalid"
    assert report.exit_code == 1
    assert report.findings.faults
    assert "could not cope" not in str(report.findings.faults), report.findings.faults
    return "\n".join(report.findings.faults)


def faults(run: PaperRun) -> str:
    """What is wrong with a run."""
    return faults_of(verified(run))
