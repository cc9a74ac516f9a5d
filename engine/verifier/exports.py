"""What the chains say of the bundle that holds them: an export is on record in each of its runs before it is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.verifier.bundle import Bundle
from engine.verifier.chains import Entry
from engine.verifier.faults import Findings
from engine.verifier.records import Run


def verify_exports(bundle: Bundle, runs: Mapping[str, Run], system: Sequence[Entry], findings: Findings) -> None:
    """Compares what ``run.exported`` entries say with the manifest and the tenant's own chain; records faults."""
    for run in runs.values():
        for entry in run.exports:
            _verify_head(entry, system, findings)
    if bundle.export is not None:
        _verify_own(bundle, runs, findings)
    elif any(run.exports for run in runs.values()):
        findings.undecidable("that the bundle is one of the exports on record: it does not say which")


def _verify_own(bundle: Bundle, runs: Mapping[str, Run], findings: Findings) -> None:
    """Every run of a bundle says that it is exported with it, and for which runs somebody asked."""
    asked: list[str] | None = None
    for run in runs.values():
        own = [entry for entry in run.exports if entry.data["export"] == bundle.export]
        if not own:
            findings.fault(f"run {run.id}", f"no entry records the export {bundle.export} that the manifest names")
        for entry in own:
            asked = entry.data["runs"] if asked is None else asked
            if entry.data["runs"] != asked:
                findings.fault(str(entry), "it records the same export as another run does, with other runs")
            for missing in sorted(set(entry.data["runs"]) - runs.keys()):
                findings.fault(str(entry), f"somebody asked for run {missing}, and the bundle does not hold it")


def _verify_head(entry: Entry, system: Sequence[Entry], findings: Findings) -> None:
    """The tenant's own chain is the one that an export saw. One that is shorter than it was then may be cut off."""
    said = entry.data.get("system")
    if said is None:
        return
    count: int = said["entries"]
    if count > len(system):
        findings.undecidable(
            f"that the tenant's own chain is whole: it had {count} entries when {entry} was written, and the bundle "
            f"holds {len(system)}"
        )
    elif count == 0 or system[count - 1].hash != said["head"]:
        findings.fault(str(entry), "the tenant's own chain was another one when it was exported")
