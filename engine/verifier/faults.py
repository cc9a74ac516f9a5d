"""What is wrong with a bundle, collected; the one exception of the verifier."""

from __future__ import annotations

from dataclasses import dataclass, field

FAULTS_MAX = 100


class InvalidError(ValueError):
    """A part of the bundle cannot be read or breaks a rule. The message is one line."""


@dataclass(slots=True)
class Findings:
    """Faults (each makes the bundle invalid), what could not be proven, and what is missing by order.

    ``redacted`` and ``erased`` name artifacts, ``unanchored`` counts entries behind the signed checkpoint,
    ``undecided`` says that a rule could not be applied, so that the bundle is not valid without reserve.
    ``unsigned`` names runs of which the checkpoint covers nothing; ``hints`` say what to do about faults.
    """

    faults: list[str] = field(default_factory=list)
    faults_left_out: int = 0
    not_proven: dict[str, None] = field(default_factory=dict)
    redacted: list[str] = field(default_factory=list)
    erased: list[str] = field(default_factory=list)
    unanchored: int = 0
    unsigned: list[str] = field(default_factory=list)
    hints: dict[str, None] = field(default_factory=dict)
    undecided: bool = False

    def fault(self, where: str, what: str) -> None:
        """Records what is wrong; beyond the first hundred only how many more there are."""
        if len(self.faults) < FAULTS_MAX:
            self.faults.append(f"{where}: {what}")
        else:
            self.faults_left_out += 1

    def hint(self, what: str) -> None:
        """Records what to do about a fault, each once."""
        self.hints[what] = None

    def unproven(self, what: str) -> None:
        """Records what nobody may conclude from this bundle, each once."""
        self.not_proven[what] = None

    def undecidable(self, what: str) -> None:
        """As ``unproven``, of what a verdict without reserve would need."""
        self.undecided = True
        self.unproven(what)
