"""The verification of a bundle, from its bytes to a report. Reads no file, no clock, no network. Never raises."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence

from engine.verifier.archive import open_archive
from engine.verifier.bundle import Bundle, read_bundle
from engine.verifier.chains import Entry, read_chains
from engine.verifier.contents import Contents, verify_contents
from engine.verifier.displays import Displays
from engine.verifier.exports import verify_exports
from engine.verifier.families import verify_brackets, verify_families, verify_links, verify_system, verify_unseen_holds
from engine.verifier.faults import Findings, InvalidError
from engine.verifier.holds import note_other_runs, read_holds, verify_erasures
from engine.verifier.log import verify_log, verify_signed
from engine.verifier.note import Verifier
from engine.verifier.persons import Persons, read_persons
from engine.verifier.pools import Pool, read_pool
from engine.verifier.replay import Replay
from engine.verifier.report import Report
from engine.verifier.review_records import authors_before
from engine.verifier.reviews import Reviews
from engine.verifier.visibility import Visibility, child_task_fault, owners


def verify_bundle(data: bytes, trust: Sequence[Verifier], saved: bytes | None = None) -> Report:
    """Verifies the bytes of a bundle against trusted keys and, if given, a checkpoint that was saved earlier."""
    report = Report()
    collects = gc.isenabled()
    # Nothing in here is garbage before the end, and looking for it would take half of the time.
    gc.disable()
    try:
        _verify(report, data, trust, saved)
    except InvalidError as error:
        report.findings.fault("bundle", str(error))
    except (Exception, MemoryError) as error:  # noqa: BLE001  # whatever a hostile file can do, it is not valid
        report.findings.fault("bundle", f"the verifier could not cope with it ({type(error).__name__})")
    finally:
        if collects:
            gc.enable()
    return report


def _verify(report: Report, data: bytes, trust: Sequence[Verifier], saved: bytes | None) -> None:
    findings = report.findings
    bundle = report.bundle = read_bundle(open_archive(data))
    chains = read_chains(bundle, findings)
    report.entries = sum(map(len, chains.values()))
    if findings.faults:
        # What follows would only repeat in other words that a chain is broken.
        return
    log = report.log = verify_log(bundle, chains, trust, saved, findings)
    contents = report.contents = verify_contents(bundle, chains, findings)
    _check_owners(contents, findings)
    system = chains.get(bundle.tenant, [])
    verify_system(bundle, system, log, findings)
    verify_brackets(chains, log, findings)
    pools = report.pools = _pools(bundle, chains, findings)
    if not findings.faults:
        persons = read_persons(system, findings, log, chains, bundle.created_at)
        _replay(report, chains, contents, pools, persons)
        verify_families(report.runs, contents, log, findings)
        verify_exports(bundle, report.runs, system, findings)
        held = read_holds(system, findings)
        verify_erasures(report.runs, held, contents, log, findings)
        note_other_runs(report.runs, system, held, findings)
        verify_unseen_holds(bundle, report.runs, chains, log, findings)
        decided = [run for run, found in report.reviews.items() if any(one.decisions for one in found.all.values())]
        verify_links(bundle, chains, log, decided, findings)
    verify_signed(bundle, log, findings)


def _check_owners(contents: Contents, findings: Findings) -> None:
    """Each artifact belongs to what its entry is about."""
    for artifact, entry in contents.committed_by.items():
        allowed, row = owners(entry), contents.listed(artifact)
        if allowed is not None and row is not None and row.owner not in allowed:
            findings.fault(str(entry), f"artifact {artifact} ({row.kind}) belongs to something else")


def _pools(bundle: Bundle, chains: Mapping[str, Sequence[Entry]], findings: Findings) -> dict[str, Pool]:
    """The pools that entries name, no more and no less."""
    named: set[str] = set()
    for entries in chains.values():
        for entry in entries:
            if entry.type == "run.created":
                named.add(entry.data["pool"])
            elif entry.type == "run.repinned":
                named |= {entry.data["old"], entry.data["new"]}
    pools = {}
    for digest in sorted(named | bundle.pools.keys()):
        if digest not in bundle.pools:
            findings.fault(f"pools/{digest}.json", "an entry names this pool, and the bundle lacks it")
        elif digest not in named:
            findings.fault(f"pools/{digest}.json", "no entry names this pool")
        else:
            try:
                pools[digest] = read_pool(digest, bundle.pools[digest])
            except InvalidError as error:
                findings.fault(f"pools/{digest}.json", str(error))
    return pools


def _replay(
    report: Report,
    chains: Mapping[str, Sequence[Entry]],
    contents: Contents,
    pools: Mapping[str, Pool],
    persons: Persons,
) -> None:
    findings = report.findings
    visibility = Visibility(contents, findings)
    for head in report.bundle.runs if report.bundle is not None else ():
        authors = authors_before(chains, head.chain)
        reviews = Reviews(persons, Displays(contents, findings), findings, authors)
        try:
            replay = Replay(chains[head.chain], pools, visibility, reviews)
        except InvalidError as error:
            findings.fault(head.member, str(error))
            continue
        report.runs[head.chain] = replay.play(findings)
        report.reviews[head.chain] = reviews
    for run in report.runs.values():
        fault = child_task_fault(run, visibility, contents)
        if fault is not None:
            findings.fault(str(run.created), fault)
