"""A figure beside its bound, as a row of a table and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured row. ``bound`` is what was promised; ``detail`` says what was divided by what."""

    name: str
    value: float
    unit: str
    bound: float | None
    at_least: bool
    detail: str

    @property
    def holds(self) -> bool | None:
        """Whether the bound holds; None where there is none."""
        if self.bound is None:
            return None
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def as_json(self) -> dict[str, Any]:
        """The row for programs."""
        return {**asdict(self), "holds": self.holds}

    def line(self) -> str:
        """The row for people."""
        sign = ">=" if self.at_least else "<="
        bound = "-" if self.bound is None else f"{sign} {self.bound:g}"
        verdict = {True: "holds", False: "MISSED", None: ""}[self.holds]
        return f"{self.name:<34} {self.value:>10.3f} {self.unit:<8} {bound:>9} {verdict:<7} {self.detail}"
