"""The result of a verification: a verdict with its exit code, what was checked, and what is not proven."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final, Literal

from engine.verifier.bundle import PAGE, Bundle, ListedArtifact
from engine.verifier.chains import Entry
from engine.verifier.contents import Contents, derived_id
from engine.verifier.faults import Findings
from engine.verifier.log import Log
from engine.verifier.pools import Pool
from engine.verifier.records import Run
from engine.verifier.review_records import Review
from engine.verifier.reviews import Reviews
from engine.verifier.words import one_line

Verdict = Literal["valid", "invalid", "incomplete", "erased"]
EXIT_CODES: Final[Mapping[Verdict, int]] = {"valid": 0, "invalid": 1, "incomplete": 3, "erased": 4}
USAGE: Final = 2
_WORDS: Final[Mapping[Verdict, str]] = {
    "valid": "VALID",
    "invalid": "INVALID",
    "incomplete": "VALID AS FAR AS IT GOES",
    "erased": "VALID, WITH ERASED CONTENTS",
}
_UNSIGNED: Final = (
    "UNSIGNED: nothing in {runs} was checked against a key, and anybody can have written it; the rest is valid"
)
_LINES_MAX: Final = 40


@dataclass(slots=True)
class Report:
    """Everything that a verification found. ``bundle`` and ``log`` are None if it did not come so far."""

    findings: Findings = field(default_factory=Findings)
    bundle: Bundle | None = None
    log: Log | None = None
    contents: Contents | None = None
    entries: int = 0
    runs: dict[str, Run] = field(default_factory=dict)
    reviews: dict[str, Reviews] = field(default_factory=dict)
    pools: dict[str, Pool] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """The verdict in one word."""
        findings = self.findings
        if findings.faults or self.bundle is None:
            return "invalid"
        if findings.unanchored or findings.redacted or findings.undecided:
            return "incomplete"
        return "erased" if findings.erased else "valid"

    @property
    def exit_code(self) -> int:
        """0 valid, 1 invalid, 3 unanchored, redacted or undecided, 4 with erasures."""
        return EXIT_CODES[self.verdict]

    @property
    def not_proven(self) -> list[str]:
        """What nobody may conclude from the bundle, the particular first."""
        return [] if self.verdict == "invalid" else [*self.findings.not_proven, *self._never_proven()]

    def _never_proven(self) -> list[str]:
        log = self.log
        lines: list[str] = []
        if log is None or log.checkpoint is None:
            lines.append("that the entries were not written all at once and later: no signed checkpoint covers them")
        elif log.saved is None:
            lines.append(
                "that the holder of the signing key has not rewritten the whole log: compare it with a checkpoint that "
                "you kept (--checkpoint)"
            )
        lines += (
            f"that run {run} ever took place: no signed checkpoint covers any of it" for run in self.findings.unsigned
        )
        if self.findings.unanchored:
            lines.append(
                f"that the entries which no signed checkpoint covers ({self.findings.unanchored}) are genuine: anybody "
                "can have written them"
            )
        if log is None or not log.complete:
            lines.append("that the runs have no later entries than those in the bundle, and the log no other runs")
        lines += (
            "events that were never recorded, and whether what was recorded was true",
            "that nobody else read the stored texts: reads are recorded only where the pool asks (`reads: recorded`)",
            "what a provider did with a prompt, and which model really answered",
            "the exact times: they are the database's; checkpoints only say what came before and after",
            "the page index.html, what the bundle says of its own making, and who the people behind the accounts are",
        )
        return lines

    @property
    def reads_unrecorded(self) -> list[str]:
        """The runs of whose pools one does not ask that reads by people are recorded."""
        return [
            run.id for run in self.runs.values() if not all(self.pools[digest].reads_recorded for digest in run.pools)
        ]

    def as_json(self) -> dict[str, Any]:
        """The report for programs."""
        findings, log = self.findings, self.log
        checkpoint = None if log is None else log.checkpoint
        return {
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "faults": findings.faults,
            "faults_left_out": findings.faults_left_out,
            "not_proven": self.not_proven,
            "entries": self.entries,
            "unanchored": findings.unanchored,
            "undecided": findings.undecided,
            "redacted": findings.redacted,
            "erased": findings.erased,
            "tenant": None if self.bundle is None else self.bundle.tenant,
            "log": None
            if log is None or checkpoint is None
            else {
                "origin": checkpoint.origin,
                "size": checkpoint.size,
                "root": checkpoint.root.hex(),
                "key": None if log.signer is None else log.signer.key_id,
                "complete": log.complete,
                "checkpoints": len(log.checkpoints),
                "saved_size": None if log.saved is None else log.saved.size,
            },
            "runs": [_run_json(run, self.reviews.get(run.id)) for run in self.runs.values()],
        }

    def as_text(self) -> str:
        """The report for people."""
        findings = self.findings
        lines = [self._headline()]
        if self.verdict != "invalid" and self.bundle is not None and PAGE in self.bundle.archive.names:
            lines.append(f"{PAGE} was not checked: it is for reading")
        lines.append("")
        if findings.faults:
            lines += [f"  {fault}" for fault in findings.faults]
            if findings.faults_left_out:
                lines.append(f"  ... and {findings.faults_left_out} more")
            lines += [f"hint: {hint}" for hint in findings.hints]
            lines.append("")
        if self.bundle is not None:
            lines += self._checked()
        if self.verdict != "invalid":
            lines += self._listed("withheld by order of the exporter (redacted)", findings.redacted)
            lines += self._listed("erased by an order on record", findings.erased)
            lines += ["Not proven:", *(f"  - {_shortened(line)}" for line in self.not_proven[:_LINES_MAX])]
            if len(self.not_proven) > _LINES_MAX:
                lines.append(f"  ... and {len(self.not_proven) - _LINES_MAX} more; --json has all of them")
        return "\n".join(map(one_line, lines)) + "\n"

    def _listed(self, what: str, artifacts: Sequence[str]) -> list[str]:
        if not artifacts:
            return []
        lines = [f"{len(artifacts)} contents {what}:", *(f"  {self._named(one)}" for one in artifacts[:_LINES_MAX])]
        if len(artifacts) > _LINES_MAX:
            lines.append(f"  ... and {len(artifacts) - _LINES_MAX} more; --json has all of them")
        return [*lines, ""]

    def _named(self, artifact: str) -> str:
        """An artifact with its kind and, where its entry says it, its step: `ID  output of step 0`."""
        row = None if self.bundle is None else self.bundle.artifacts.get(artifact)
        if row is None:
            return artifact
        entry = None if self.contents is None else self.contents.committed_by.get(artifact)
        step = None if entry is None else _step_of(row, entry)
        return f"{artifact}  {row.kind.replace('_', ' ')}{'' if step is None else f' of step {step}'}"

    def _headline(self) -> str:
        unsigned = self.findings.unsigned
        if self.verdict != "incomplete" or not unsigned:
            return _WORDS[self.verdict]
        return _UNSIGNED.format(runs=f"run {unsigned[0]}" if len(unsigned) == 1 else f"{len(unsigned)} of the runs")

    def _checked(self) -> list[str]:
        bundle, log, findings = self.bundle, self.log, self.findings
        assert bundle is not None
        made = f"made {bundle.created_at} by {bundle.producer}"
        lines = [f"bundle for tenant {bundle.tenant}; by the exporter's own word {made}"]
        checkpoint = None if log is None else log.checkpoint
        if log is not None and checkpoint is not None:
            key = "" if log.signer is None else f", signed by key {log.signer.key_id}"
            lines.append(f"log of {checkpoint.size} entries, root {checkpoint.root.hex()}{key}")
            if log.complete:
                lines.append("  all entries of the log are in the bundle: none was left out")
            if log.saved is not None:
                lines.append(f"  consistent with the saved checkpoint of size {log.saved.size}")
        if self.verdict == "invalid":
            # What was not looked at any more because of the faults would read like a finding.
            return [*lines, ""]
        lines.append(f"{self.entries} entries, {counted(len(self.runs), 'run')}")
        if findings.unanchored:
            lines.append(f"  {findings.unanchored} of them are not covered by a signed checkpoint")
        lines += [_run_line(run, self.reviews.get(run.id)) for run in list(self.runs.values())[:_LINES_MAX]]
        return [*lines, ""]


def counted(count: int, noun: str) -> str:
    """A number with its noun."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _step_of(row: ListedArtifact, entry: Entry) -> int | None:
    """The position of the step that a text belongs to; an accepted plan commits to the subtasks of all its steps."""
    if row.kind == "subtask" and entry.type == "plan.accepted":
        number = entry.data["round"]
        owners = (derived_id(entry.chain, f"step/{number}/{at}") for at in range(len(entry.data["steps"])))
        return next((at for at, owner in enumerate(owners) if owner == row.owner), None)
    step = entry.data.get("step")
    return step if type(step) is int else None


def _shortened(line: str) -> str:
    return line if len(line) <= 300 else line[:299] + "…"  # noqa: PLR2004  # as much as a person reads


def _cost(run: Run) -> tuple[Decimal, int]:
    closed = run.closed_attempts
    return (
        sum((attempt.cost_usd or Decimal(0) for attempt in closed), Decimal(0)),
        sum(attempt.cost_usd is None for attempt in closed),
    )


def _run_line(run: Run, reviews: Reviews | None) -> str:
    cost, unknown = _cost(run)
    steps = sum(len(found.steps) for found in run.rounds.values())
    rendered = sum(attempt.rendered for attempt in run.attempts.values())
    return (
        f"run {run.id}: {run.state}, {steps} steps, {len(run.attempts)} calls ({rendered} prompts rendered again), "
        f"{cost.normalize():f} USD{f' and {unknown} of unknown cost' if unknown else ''}" + _reviewed(_all(reviews))
    )


def _reviewed(reviews: Sequence[Review]) -> str:
    """Who reviewed a run; what went through without enough of them is said as loud."""
    later = [review for review in reviews if review.data["reason"] == "break-glass"]
    people = _deciders(review for review in reviews if review not in later)
    said = [f"reviewed by {people}"] if people else []
    broke = sorted({str(review.bypassed.data["person"]) for review in reviews if review.bypassed is not None})
    if broke:
        said.append(f"BYPASSED by {', '.join(broke)}")
    for review in later:
        who = _deciders([review])
        if review.state == "open":
            said.append("the later review is open" + (f" (so far decided by {who})" if who else ""))
        else:
            said.append(f"later reviewed by {who} ({review.outcome})" if who else f"the later review: {review.outcome}")
    passed = [review for review in reviews if review.was_let_pass]
    said += dict.fromkeys(f"gate `{review.place[0]}` {review.outcome.upper()}" for review in passed)
    return "".join(f", {words}" for words in said)


def _deciders(reviews: Iterable[Review]) -> str:
    return ", ".join(sorted({decision.person for review in reviews for decision in review.decisions}))


def _all(reviews: Reviews | None) -> list[Review]:
    return [] if reviews is None else list(reviews.all.values())


def _run_json(run: Run, reviews: Reviews | None) -> dict[str, Any]:
    cost, unknown = _cost(run)
    return {
        "run": run.id,
        "state": run.state,
        "reason": run.reason,
        "execution": run.execution,
        "steps": [
            {
                "round": step.round,
                "step": step.position,
                "worker": step.worker,
                "state": step.state,
                "reads": list(step.reads),
                "accepted": step.accepted,
                "attempts": len(step.attempts),
            }
            for found in run.rounds.values()
            for step in found.steps
        ],
        "attempts": len(run.attempts),
        "prompts_rendered": sum(attempt.rendered for attempt in run.attempts.values()),
        "cost_usd": f"{cost.normalize():f}",
        "attempts_unpriced": unknown,
        "reviews": [
            {
                "review": review.id,
                "gate": review.place[0],
                "round": review.place[1],
                "step": review.place[2],
                "state": review.state,
                "decisions": [
                    {"person": decision.person, "decision": decision.entry.data["decision"], "at": decision.entry.at}
                    for decision in review.decisions
                ],
            }
            for review in _all(reviews)
        ],
    }
