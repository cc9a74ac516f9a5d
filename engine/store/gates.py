"""Gates: which reviews a run's pool asks for, as the store needs them. Pure; activities make them from the pool."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any, Final, Literal
from uuid import UUID

from engine.ledger.reviews import is_drawn, sampling_draw

Gate = Literal["plan", "before", "after", "answer"]
ReviewReason = Literal["policy", "label", "sample", "order", "break-glass"]
REVIEW: Final = "review"
REVIEW_REJECTED: Final = "review-rejected"
REVIEW_EXPIRED: Final = "review-expired"
REVIEW_MISSING: Final = "review-missing"
# What would have to be reviewed cannot be shown to anybody: a text of it is damaged or not stored any more.
REVIEW_UNSHOWABLE: Final = "review-unshowable"
# The ledger and the tables say different things of a review that something waits for: whoever made up one of them is
# not believed, and nothing goes on before somebody has looked.
REVIEW_CONTRADICTED: Final = "review-contradicted"
_ALL = 100


@dataclass(frozen=True)
class GateRule:
    """A rule of the pool's policy: its canonical bytes, and what they say."""

    document: bytes

    @cached_property
    def said(self) -> Mapping[str, Any]:
        """The rule's fields as the pool file names them."""
        fields: dict[str, Any] = json.loads(self.document)
        return fields

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the document."""
        return sha256(self.document).digest()

    @property
    def reason(self) -> ReviewReason:
        """Why a review by this rule is asked for."""
        if self.said["sample_percent"] < _ALL:
            return "sample"
        return "label" if self.said["workers"] or self.said["clearance"] else "policy"

    def terms(self, level: int) -> dict[str, Any] | None:
        """What a review asks that something waits for: of the first people (level 0), or of those behind them (1).

        None where the rule asks nobody else.
        """
        part = {0: self.said, 1: self.said["escalate"]}.get(level)
        if part is None:
            return None
        return {
            "level": level,
            "approvals": part["approvals"],
            "four_eyes": self.said["four_eyes"],
            "reviewers": list(part["reviewers"]),
            "bypass": self.said["bypass"],
            "on_expiry": None if part["expires_s"] is None else part["on_expiry"],
        }

    def is_for(self, worker: str | None, clearance: str | None) -> bool:
        """Whether the rule is for steps of this worker; a plan or an answer has none."""
        workers, labels = self.said["workers"], self.said["clearance"]
        return (not workers or worker in workers) and (not labels or clearance in labels)


@dataclass(frozen=True, slots=True)
class Draw:
    """What a sampling rule decided about a place."""

    gate: str
    round: int
    position: int | None
    rule: GateRule
    draw: bytes
    chosen: bool


@dataclass(frozen=True, slots=True)
class Gates:
    """All rules of a pool, the clearances of its workers, and the salt for sampling (None where nothing is sampled)."""

    rules: tuple[GateRule, ...] = ()
    clearances: Mapping[str, str | None] | None = None
    salt: bytes | None = None

    def __bool__(self) -> bool:
        """Whether there is anything to review at all."""
        return bool(self.rules)

    def draws(
        self, run_id: UUID, gate: Gate, round_number: int, position: int | None, worker: str | None
    ) -> Iterator[Draw]:
        """Every rule that is for this place, and whether it was drawn; a rule that samples nothing always is."""
        clearance = None if worker is None or self.clearances is None else self.clearances.get(worker)
        for rule in self.rules:
            if rule.said["gate"] != gate or not rule.is_for(worker, clearance):
                continue
            draw, chosen = b"", True
            if rule.reason == "sample":
                place = (gate, round_number, position)
                draw = sampling_draw(self.salt or b"", str(run_id), place, rule.digest.hex())
                chosen = is_drawn(draw, rule.said["sample_percent"])
            yield Draw(gate, round_number, position, rule, draw, chosen)

    def has(self, *gates: Gate) -> bool:
        """Whether there is a rule for one of these gates."""
        return any(rule.said["gate"] in gates for rule in self.rules)


NO_GATES: Final = Gates()
