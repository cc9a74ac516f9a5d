"""What the chains of a bundle say of each other: forks, child runs, the tenant's own chain, checkpoints of the log."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, Final

from engine.verifier.bundle import Bundle
from engine.verifier.chains import Entry
from engine.verifier.contents import Contents
from engine.verifier.faults import Findings
from engine.verifier.forks import verify_fork
from engine.verifier.log import Log
from engine.verifier.records import Run, Step

# Entries that name the newest checkpoint that there was.
_NAMING: Final = frozenset({"run.created", "review.decided"})


def verify_families(runs: Mapping[str, Run], contents: Contents, log: Log, findings: Findings) -> None:
    """Checks forks against their sources and child runs against the steps that they were made for."""
    begun = {run.id: {entry.data["child"] for entry in run.begun} for run in runs.values()}
    for run in runs.values():
        verify_fork(run, runs, contents, findings)
        for found in run.rounds.values():
            for step in found.steps:
                _verify_child(run, step, runs, findings)
        for entry in run.returned:
            _verify_returned(entry, runs.get(entry.data["child"]), log, findings)
        parent = run.created.data.get("parent")
        if parent is not None and parent not in runs:
            findings.unproven(
                f"why run {run.id} was made, and that people approved what became of its answer: run {parent} above it "
                "is not in the bundle"
            )
        elif parent is not None and run.id not in begun[parent]:
            findings.fault(str(run.created), f"run {parent}, which it names, never began it")


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
    _verify_allowance(run, child, findings)
    ended = step.child_ended
    if ended is None or ended.data["child_state"] != "succeeded":
        return
    last = child.last_round
    if child.state != "succeeded" or last is None:
        findings.fault(str(ended), f"run {child.id} did not succeed")
        return
    answer = last.steps[-1].accepted
    # The step may have been given to somebody else since, with attempts of its own.
    taken = step.accepted if step.accepted not in run.attempts else None
    if ended.data.get("answer", answer) != answer or taken not in (None, answer):
        findings.fault(str(ended), f"the answer is not that of run {child.id}")


def _verify_allowance(run: Run, child: Run, findings: Findings) -> None:
    """A child run has the pool of the run above it, and what it may do only shrinks on the way down."""
    if not set(child.pools) <= set(run.pools):
        findings.fault(str(child.created), f"it has another pool than run {run.id} above it")
    if child.depth != run.depth + 1:
        findings.fault(str(child.created), f"it does not stand one level below run {run.id}")
    if "rounds_max" in run.created.data and child.rounds_max != max(run.rounds_max - 1, 1):
        findings.fault(str(child.created), f"it may have other rounds than run {run.id} can have given it")


def _verify_returned(entry: Entry, child: Run | None, log: Log, findings: Findings) -> None:
    """A child run ended as the run above it says. Its end is covered by whatever checkpoint covers that entry."""
    ending = (entry.data["child_state"], entry.data["child_reason"])
    if child is not None and log.index(entry) is not None and ending not in child.endings:
        findings.fault(str(entry), f"run {child.id} did not end so: it was not {ending[0]} with that reason")


def verify_brackets(chains: Mapping[str, Sequence[Entry]], log: Log, findings: Findings) -> None:
    """An entry that names a checkpoint was written after it: it stands behind it in the log.

    It names the newest that there was, so it names none that is older than what stood there long before.
    """
    sizes = sorted(log.checkpoints)
    for entries in chains.values():
        newest = 0
        for entry in entries:
            if entry.type in _NAMING and "checkpoint" in entry.data:
                size = _verify_bracket(entry, entry.data["checkpoint"], log, findings)
                if size < newest:
                    findings.fault(str(entry), f"an earlier entry names a checkpoint of size {newest}, this one {size}")
                newest = max(newest, size)
                _verify_newest(entry, size, log, sizes, findings)


def _verify_newest(entry: Entry, named: int, log: Log, sizes: Sequence[int], findings: Findings) -> None:
    """Says of an entry that it may be younger than it admits.

    It is younger than the checkpoint before the last one that it stands behind: when that last one was signed it was
    not there yet, and the one before it was. Only a transaction that took from one checkpoint to the next did not know.
    """
    index = log.index(entry)
    behind = 0 if index is None else bisect_right(sizes, index)
    if behind and named < sizes[behind - 1] and not named:
        findings.unproven(f"the earliest time of {entry}: it names no checkpoint, though the log had one before it")
    if behind > 1 and named < sizes[behind - 2]:
        findings.undecidable(
            f"the earliest time of {entry}: it names {f'a checkpoint of size {named}' if named else 'no checkpoint'}, "
            f"and stands behind one of size {sizes[behind - 1]}"
        )


def _verify_bracket(entry: Entry, named: Any, log: Log, findings: Findings) -> int:
    """Checks the checkpoint that an entry names; returns its size, 0 for none."""
    size, root = (named["size"], named["root"]) if isinstance(named, dict) else (named or 0, None)
    if not size:
        return 0
    index = log.index(entry)
    if index is not None and index < size:
        findings.fault(str(entry), f"it names a checkpoint of size {size}, but stands before that in the log")
    known = log.checkpoints.get(size)
    if known is None:
        findings.unproven(f"the earliest time of {entry}: the checkpoint of size {size} is not in the bundle")
    elif root is not None and known.root.hex() != root:
        findings.fault(str(entry), f"it names a checkpoint of size {size} that the log never had")
    return int(size)


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


def verify_unseen_holds(
    bundle: Bundle, runs: Mapping[str, Run], chains: Mapping[str, Sequence[Entry]], log: Log, findings: Findings
) -> None:
    """Whether texts were erased under hold: for that, no hold may have been cut off the tenant's own chain either."""
    if log.checkpoint is None or log.complete:
        return
    system = chains.get(bundle.tenant, ())
    for run in runs.values():
        if run.erasures and not any(_shows_system(bundle, entry, system, log) for entry in run.exports):
            findings.undecidable(
                f"that no hold stood when texts of run {run.id} were erased: later entries of the tenant's own chain "
                "may have been left out"
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
    for entry in system:
        index = log.index(entry) if entry.type == "key.rotated" else None
        if index is not None and index < entry.data["size"]:
            # Whoever has a key that went out of service can sign small logs with it, but put nothing behind their end.
            signed = f"the key before is said to have signed {entry.data['size']} entries"
            findings.fault(str(entry), f"it stands at place {index} of the log, and {signed}")
