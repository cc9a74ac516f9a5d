"""Verifying evidence: entries a second on one core, and what a step costs in a bundle."""

from __future__ import annotations

import gc
import time
from uuid import uuid5

from benchmarks.results import Figure
from engine.verifier.archive import open_archive
from engine.verifier.bundle import read_bundle
from engine.verifier.chains import read_chains
from engine.verifier.faults import Findings
from engine.verifier.log import verify_log
from engine.verifier.verify import verify_bundle
from tests.support.bundles import RUN, PaperRun, Record, pool_of

ENTRIES = 100_000
WHOLE_ENTRIES = 20_000
PER_SECOND_MIN = 20_000
STEPS_A_RUN = 3
OUTPUT = "An output of about one hundred bytes, which is what a small model says to a question of this kind."


def record(entries: int) -> tuple[Record, int]:
    """A record with runs of three steps until there are so many entries; also the number of steps."""
    made = Record()
    pool = pool_of()
    number = steps = 0
    while len(made.leaves) < entries:
        run = PaperRun(made, pool, run=uuid5(RUN, str(number)))
        run.plan()
        for position in range(STEPS_A_RUN):
            run.perform(position, OUTPUT)
        run.end()
        number += 1
        steps += STEPS_A_RUN
    made.sign()
    return made, steps


async def verification(entries: int = ENTRIES, whole: int = WHOLE_ENTRIES) -> list[Figure]:
    """Entries a second: form, chains, tree and signature; then everything, prompts included. Bytes a step."""
    chains_s = _chains_s(*_record_only(entries))
    made, steps = record(whole)
    bundle = made.bundle()
    began = time.process_time()
    report = verify_bundle(bundle, [made.verifier])
    whole_s = time.process_time() - began
    assert report.verdict == "valid", report.findings.faults
    return [
        Figure(
            "verification of entries",
            entries / chains_s,
            "entries/s",
            PER_SECOND_MIN,
            at_least=True,
            detail=f"{entries:,} entries: form, types, chains, root, signature, in {chains_s:.1f} s of CPU",
        ),
        Figure(
            "verification of a whole bundle",
            report.entries / whole_s,
            "entries/s",
            None,
            at_least=False,
            detail=f"with replay, all texts and prompts of {len(report.runs):,} runs, in {whole_s:.1f} s of CPU",
        ),
        Figure(
            "bundle size a step",
            len(bundle) / steps,
            "bytes",
            None,
            at_least=False,
            detail=f"{len(bundle):,} bytes for {steps:,} steps with outputs of {len(OUTPUT)} bytes",
        ),
    ]


def _record_only(entries: int) -> tuple[bytes, Record]:
    """A bundle of so many entries with its texts withheld: with them it would have too many members."""
    made, _ = record(entries)
    for stored in made.artifacts.values():
        stored.state = "redacted"
    return made.bundle(), made


def _chains_s(bundle: bytes, made: Record) -> float:
    """Seconds of CPU for what does not depend on texts; the members are unpacked before."""
    findings = Findings()
    opened = read_bundle(open_archive(bundle))
    gc.disable()
    try:
        began = time.process_time()
        verify_log(opened, read_chains(opened, findings), [made.verifier], None, findings)
        took_s = time.process_time() - began
    finally:
        gc.enable()
    assert (findings.faults, findings.unanchored) == ([], 0)
    return took_s
