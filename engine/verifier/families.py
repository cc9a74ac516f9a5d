"""What the chains of a bundle say of each other: forks, child runs, the tenant's own chain, checkpoints of the log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.verifier.bundle import Bundle
from engine.verifier.chains import Entry
from engine.verifier.faults import Findings
from engine.verifier.log import Log
from engine.verifier.records import Run, Step


def verify_families(runs: Mapping[str, Run], findings: Findings) -> None:
    """Checks forks against their sources and child runs against the steps that they were made for."""
    for run in runs.values():
        _verify_fork(run, runs, findings)
        for found in run.rounds.values():
            for step in found.steps:
                _verify_child(run, step, runs, findings)
        parent = run.created.data.get("parent")
        if parent is not None and parent not in runs:
            findings.unproven(
                f"why run {run.id} was made, and that people approved what became of its answer: run {parent} above it "
                "is not in the bundle"
            )
        elif parent is not None and run.id not in {entry.data["child"] for entry in runs[parent].begun}:
            findings.fault(str(run.created), f"run {parent}, which it names, never began it")


def _verify_fork(run: Run, runs: Mapping[str, Run], findings: Findings) -> None:
    source = run.created.data.get("source")
    if source is None:
        return
    origin = runs.get(source["run"])
    for row in source["reused"]:
        if origin is None:
            findings.unproven(
                f"where run {run.id} has outputs from that it took over: run {source['run']} is not in the bundle"
            )
            return
        # A fork of a fork takes over what its source had taken over itself.
        known = {step.accepted for found in origin.rounds.values() for step in found.steps}
        known |= {attempt.id for attempt in origin.attempts.values() if attempt.state == "succeeded"}
        if row["attempt"] not in known:
            findings.fault(str(run.created), f"step {row['step']} takes over an output that run {origin.id} never had")


def _verify_child(run: Run, step: Step, runs: Mapping[str, Run], findings: Findings) -> None:
    if step.child is None:
        return
    child = runs.get(step.child)
    if child is None:
        findings.unproven(
            f"what run {step.child} did for step {step.position} of run {run.id}: it is not in the bundle"
        )
        return
    created = child.created.data
    place = (created.get("parent"), created.get("parent_round"), created.get("parent_step"))
    if place != (run.id, step.round, step.position):
        findings.fault(str(child.created), f"it was not made for step {step.position} of run {run.id}")
    ended = step.child_ended
    if ended is None or ended.data["child_state"] != "succeeded":
        return
    last = child.last_round
    if child.state != "succeeded" or last is None:
        findings.fault(str(ended), f"run {child.id} did not succeed")
    elif ended.data.get("answer", last.steps[-1].accepted) != last.steps[-1].accepted:
        findings.fault(str(ended), f"the answer is not that of run {child.id}")


def verify_brackets(chains: Mapping[str, Sequence[Entry]], log: Log, findings: Findings) -> None:
    """An entry that names a checkpoint was written after it: it stands behind it in the log."""
    for entries in chains.values():
        for entry in entries:
            named = entry.data.get("checkpoint")
            if named is not None:
                _verify_bracket(entry, named, log, findings)


def _verify_bracket(entry: Entry, named: object, log: Log, findings: Findings) -> None:
    size, root = (named["size"], named["root"]) if isinstance(named, dict) else (named, None)
    if not isinstance(size, int) or size == 0:
        return
    index = log.index(entry)
    if index is not None and index < size:
        findings.fault(str(entry), f"it names a checkpoint of size {size}, but stands before that in the log")
    known = log.checkpoints.get(size)
    if known is None:
        findings.unproven(f"the earliest time of {entry}: the checkpoint of size {size} is not in the bundle")
    elif root is not None and known.root.hex() != root:
        findings.fault(str(entry), f"it names a checkpoint of size {size} that the log never had")


def verify_links(
    bundle: Bundle, chains: Mapping[str, Sequence[Entry]], log: Log, reviewed: Sequence[str], findings: Findings
) -> None:
    """Whether approvals are those of different people: for that, no link of an account may have been cut off.

    The tenant's own chain is complete if all leaves of the log are there, or if it holds what it held when the bundle
    was made: each run's chain says that where it records the export. ``reviewed`` are the runs with decisions.
    """
    if log.checkpoint is None or log.complete:
        return
    system = chains.get(bundle.tenant, ())
    for run in reviewed:
        if not any(_shows_system(bundle, entry, system, log) for entry in reversed(chains[run])):
            findings.undecidable(
                f"that different people reviewed run {run}: later entries of the tenant's own chain, which link "
                "accounts to persons, may have been left out"
            )


def _shows_system(bundle: Bundle, entry: Entry, system: Sequence[Entry], log: Log) -> bool:
    """Whether an entry that the log covers records this export, and the chain is at least as long as it says there."""
    if entry.type != "run.exported" or entry.data["export"] != bundle.export or "system" not in entry.data:
        return False
    if log.index(entry) is None:
        return False
    said = entry.data["system"]
    if said is None:
        return True
    count: int = said["entries"]
    head: str = said["head"]
    return 0 < count <= len(system) and system[count - 1].hash == head


def verify_system(bundle: Bundle, system: Sequence[Entry], log: Log, findings: Findings) -> None:
    """The statements of key rotation are those that the tenant's own chain records."""
    if bundle.system is None:
        findings.unproven("which accounts belong to the same person: the bundle has no chain of the tenant itself")
        return
    for entry in system:
        if entry.type == "log.restored":
            findings.unproven(
                f"what the log held before a backup was restored on {entry.at}: {entry.actor} accepted that it "
                f"went on from size {entry.data['size']}, and what stood behind that is lost"
            )
    recorded = [entry.data for entry in system if entry.type == "key.rotated"]
    stated = [(str(rotation.old), str(rotation.new), rotation.size) for rotation in log.rotations]
    if log.checkpoint is not None and [(row["old"], row["new"], row["size"]) for row in recorded] != stated:
        findings.fault("log/keys.json", "the rotations of the key are not those that the tenant's own chain records")
