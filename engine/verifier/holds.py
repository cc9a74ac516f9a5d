"""Legal holds, from the tenant's own chain: which runs were held when, and erasures that a hold did not let happen."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from engine.verifier.chains import Entry
from engine.verifier.contents import Contents
from engine.verifier.entry_types import committed
from engine.verifier.faults import Findings, InvalidError
from engine.verifier.log import Log
from engine.verifier.records import Run

# What a run cannot be resumed without: from the moment at which an erasure of one has begun, its run stays ended.
_NEEDED_KINDS: Final = frozenset({"task", "subtask", "output", "plan"})
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_TIME_ORDERED: Final = "7"
# How many erasures are held against how many holds: bounds what a hostile bundle can cost.
_COMPARED_MAX: Final = 2_000_000


@dataclass(slots=True)
class Hold:
    """A hold of a matter. ``runs`` says from which entry on each was held; ``all_since`` the same of every run."""

    id: str
    matter: str
    runs: dict[str, Entry] = field(default_factory=dict)
    all_since: Entry | None = None
    asked: Entry | None = None
    released: Entry | None = None

    def take(self, entry: Entry) -> None:
        """Takes in what is held from this entry on."""
        for run in entry.data["runs"]:
            self.runs.setdefault(run, entry)
        if entry.data["all_runs"] and self.all_since is None:
            self.all_since = entry

    def since(self, tree: frozenset[str]) -> list[Entry]:
        """The entries from which on one of these runs is held."""
        found = [self.runs[run] for run in sorted(tree & self.runs.keys())]
        return found if self.all_since is None else [*found, self.all_since]


def read_holds(system: Sequence[Entry], findings: Findings) -> list[Hold]:
    """All holds, released or not. An entry that does not follow from those before it is recorded as a fault."""
    holds: dict[str, Hold] = {}
    matters: dict[str, Hold] = {}
    for entry in system:
        if entry.type.startswith("hold."):
            try:
                _read(holds, matters, entry)
            except InvalidError as error:
                findings.fault(str(entry), f"{entry.type}: {error}")
    return list(holds.values())


def _read(holds: dict[str, Hold], matters: dict[str, Hold], entry: Entry) -> None:
    data = entry.data
    hold = holds.get(data["hold"])
    if entry.type == "hold.placed":
        if hold is not None:
            raise InvalidError("it is placed already")
        if data["matter"] in matters:
            raise InvalidError("its matter has a hold already")
        hold = holds[data["hold"]] = matters[data["matter"]] = Hold(data["hold"], data["matter"])
        hold.take(entry)
        return
    if hold is None or hold.released is not None or data.get("matter", hold.matter) != hold.matter:
        raise InvalidError("there is no such hold of the matter")
    if entry.type == "hold.widened":
        hold.take(entry)
        hold.asked = None
    elif entry.type == "hold.release_asked":
        if hold.asked is not None:
            raise InvalidError("somebody had asked for its release already")
        hold.asked = entry
    else:
        if hold.asked is None or data.get("asked_by", hold.asked.actor) != hold.asked.actor:
            raise InvalidError("it is released without the wish of the one who is said to have asked")
        hold.released = entry
        del matters[hold.matter]


def verify_erasures(
    runs: Mapping[str, Run], holds: Sequence[Hold], contents: Contents, log: Log, findings: Findings
) -> None:
    """Checks every ``artifact.erased``: what it names was written and its run had ended, and nothing held it."""
    order = _Order(log)
    trees = _trees(runs) if holds else {}
    compared = 0
    for run in runs.values():
        for entry, had_ended in run.erasures:
            _verify_named(entry, contents, had_ended=had_ended, findings=findings)
            compared += len(holds)
            if compared > _COMPARED_MAX:
                findings.undecidable("that nothing was erased under hold: there are too many erasures and holds")
            elif holds:
                _verify_unheld(entry, trees[run.id], holds, order, findings)


def note_other_runs(
    runs: Mapping[str, Run], system: Sequence[Entry], holds: Sequence[Hold], findings: Findings
) -> None:
    """Takes the withheld texts of holds that hold none of these runs out of what the verdict depends on.

    Nobody ordered that they be withheld: they are here only because the tenant's own chain is whole in every bundle.
    """
    if not holds or not findings.redacted:
        return
    known = frozenset(runs).union(*_trees(runs).values())
    others = {hold.id for hold in holds if not hold.since(known)}
    texts = {
        said["artifact"]
        for entry in system
        if entry.type.startswith("hold.") and entry.data["hold"] in others
        for said in committed(entry.data)
    }
    left = [artifact for artifact in findings.redacted if artifact not in texts]
    count = len(findings.redacted) - len(left)
    if count:
        findings.redacted = left
        findings.unproven(
            f"why other runs are or were held: texts of the tenant's own chain about other runs are not in this bundle "
            f"({count})"
        )


def _verify_named(entry: Entry, contents: Contents, *, had_ended: bool, findings: Findings) -> None:
    kinds: set[Any] = set()
    for artifact in entry.data["erased"]:
        by = contents.committed_by.get(artifact)
        if by is None or by.chain != entry.chain or by.seq >= entry.seq:
            findings.fault(str(entry), f"artifact {artifact} was erased before it was written, or in another run")
            continue
        row = contents.listed(artifact)
        kinds.add(None if row is None else row.kind)
    # A restored database may not know yet that a run had ended whose texts had been erased.
    if not had_ended and not entry.data.get("restored", False) and kinds & _NEEDED_KINDS:
        findings.fault(str(entry), "texts were erased that a run needed which had not ended")


def _verify_unheld(
    entry: Entry, tree: frozenset[str], holds: Sequence[Hold], order: _Order, findings: Findings
) -> None:
    for hold in holds:
        if hold.released is not None and not order.is_after(hold.released, entry):
            continue
        since = [held for held in hold.since(tree) if order.is_after(entry, held)]
        if not since:
            continue
        if not entry.data.get("restored", False) and any(_begun(entry) > held.at for held in since):
            findings.fault(str(entry), f"texts were erased that were under hold for {hold.matter}")
        else:
            # An erasure that had begun before is carried out, whatever comes between.
            findings.undecidable(
                f"that {entry} carried out an erasure which had begun before {hold.matter} held the run"
            )


def _begun(entry: Entry) -> str:
    """When an erasure began at the earliest: its id is made first, and holds the time."""
    own = entry.data.get("erasure", "")
    if own[14:15] != _TIME_ORDERED:
        return entry.at
    try:
        at = _EPOCH + timedelta(milliseconds=int(own[:8] + own[9:13], 16))
    except OverflowError:
        return entry.at
    return at.isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"


class _Order:
    """Which of two entries of different chains was written later, by their times or by a checkpoint between them."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._sizes = sorted(log.checkpoints)

    def is_after(self, entry: Entry, other: Entry) -> bool:
        """Whether an entry says that it is later than another one, or was not there when that one was signed."""
        if entry.at > other.at:
            return True
        index, before = self._log.index(entry), self._log.index(other)
        if index is None or before is None:
            return False
        place = bisect_right(self._sizes, before)
        return place < len(self._sizes) and self._sizes[place] <= index


def _trees(runs: Mapping[str, Run]) -> dict[str, frozenset[str]]:
    """The whole tree of each run, as far as the bundle knows it: what holds a part of it holds all."""
    tops: dict[str, str] = {}
    for run in runs:
        way: dict[str, None] = {}
        top = run
        while top not in tops and top not in way:
            way[top] = None
            above = runs[top].created.data.get("parent") if top in runs else None
            top = top if above is None else above
        tops.update(dict.fromkeys(way, tops.get(top, top)))
    members: dict[str, set[str]] = {}
    for run, top in tops.items():
        members.setdefault(top, set()).add(run)
    found = {top: frozenset(of) for top, of in members.items()}
    return {run: found[top] for run, top in tops.items()}
