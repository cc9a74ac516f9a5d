"""What is wrong with a bundle, collected; the one exception of the verifier."""

from __future__ import annotations

from dataclasses import dataclass, field

FAULTS_MAX = 100


class InvalidError(ValueError):
    """A part of the bundle cannot be read or breaks a rule. The message is one line."""


@dataclass(slots=True)
class Findings:
    """Faults (each makes the bundle invalid), what could not be proven, and what is missing by order.

    ``redacted`` and ``erased`` name artifacts, ``unanchored`` counts entries behind the signed checkpoint.
    """

    faults: list[str] = field(default_factory=list)
    faults_left_out: int = 0
    not_proven: dict[str, None] = field(default_factory=dict)
    redacted: list[str] = field(default_factory=list)
    erased: list[str] = field(default_factory=list)
    unanchored: int = 0

    def fault(self, where: str, what: str) -> None:
        """Records what is wrong; beyond the first hundred only how many more there are."""
        if len(self.faults) < FAULTS_MAX:
            self.faults.append(f"{where}: {what}")
        else:
            self.faults_left_out += 1

    def unproven(self, what: str) -> None:
        """Records what nobody may conclude from this bundle, each once."""
        self.not_proven[what] = None
