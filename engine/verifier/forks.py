"""Forks against the runs that they were made from: what a fork takes over was accepted there, of the very same step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.verifier.contents import Contents, artifact_id, derived_id
from engine.verifier.faults import Findings, InvalidError
from engine.verifier.records import ACCEPTED_STATES, Run, Step


def verify_fork(run: Run, runs: Mapping[str, Run], contents: Contents, findings: Findings) -> None:
    """Checks a fork against its source, as far as that is in the bundle; records faults. Other runs pass."""
    source = run.created.data.get("source")
    if source is None:
        return
    origin = runs.get(source["run"])
    if origin is None:
        if source["reused"] or run.left_out:
            findings.unproven(
                f"where run {run.id} has outputs from that it took over: run {source['run']} is not in the bundle"
            )
        return
    fork = _Fork(run, origin, source, contents)
    for row in source["reused"]:
        try:
            fork.takes_over(row)
        except InvalidError as error:
            findings.fault(str(run.created), f"step {row['step']} {error}")
    for step in run.left_out:
        before = fork.source_step(step.position)
        if before is None or before.state != "skipped":
            findings.fault(
                str(run.created), f"step {step.position} is left out, and run {origin.id} did not leave it out"
            )
    if source.get("task_edited") is False and fork.differ((run.id, "task"), (origin.id, "task")):
        findings.fault(str(run.created), f"its task is not that of run {origin.id}, though it says so")


class _Fork:
    """A fork and its source. ``source`` is what the fork's first entry says."""

    def __init__(self, run: Run, origin: Run, source: Mapping[str, Any], contents: Contents) -> None:
        self._run, self._origin, self._source, self._contents = run, origin, source, contents
        self._round: int = source.get("round", 0)
        self._taken = {row["step"] for row in source["reused"]}
        self._edited = {row["step"] for row in source.get("edited", [])}

    def source_step(self, position: int) -> Step | None:
        """The step of the source at a position: a fork's plan has those of the source, in their places."""
        return self._origin.step(self._round, position)

    def differ(self, one: tuple[str, str], other: tuple[str, str]) -> bool:
        """Whether two texts, by owner and kind, are both disclosed and not the same."""
        texts = [self._contents.content(artifact_id(*name)) for name in (one, other)]
        return None not in texts and texts[0] != texts[1]

    def takes_over(self, row: Mapping[str, Any]) -> None:
        """Checks an output that is taken over. Raises InvalidError."""
        origin, position = self._origin, row["step"]
        before = self.source_step(position)
        if before is None or before.state not in ACCEPTED_STATES or before.accepted != row["attempt"]:
            raise InvalidError(f"takes over an output that run {origin.id} never accepted there")
        id_ = derived_id(origin.id, f"step/{self._round}/{position}")
        if row.get("source_step", id_) != id_:
            raise InvalidError("takes over the output of another step than the one that it names")
        made = origin.attempts.get(row["attempt"])
        if row["model"] not in (before.model, None if made is None else made.model):
            raise InvalidError(f"takes over an output of model {before.model!r} as one of {row['model']!r}")
        if position in self._edited or self._source.get("task_edited"):
            raise InvalidError("takes over an output although what it was asked was edited")
        own = self._run.step(0, position)
        if own is not None:
            self._same_question(own, before)

    def _same_question(self, own: Step, before: Step) -> None:
        if (own.planned_worker, own.reads) != (before.worker, before.reads):
            raise InvalidError("takes over an output of another worker, or of a step that read something else")
        names = [derived_id(run.id, f"step/{step.round}/{step.position}") for run, step in self._pairs(own, before)]
        if self.differ((names[0], "subtask"), (names[1], "subtask")):
            raise InvalidError("takes over the answer to another question")
        steps = self._run.rounds[0].steps
        if any(source not in self._taken and steps[source].state != "skipped" for source in own.reads):
            raise InvalidError("takes over an output although what it read is made anew")

    def _pairs(self, own: Step, before: Step) -> tuple[tuple[Run, Step], tuple[Run, Step]]:
        return (self._run, own), (self._origin, before)
