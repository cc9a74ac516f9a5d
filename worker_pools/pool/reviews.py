"""Which plans, steps and answers people have to review before a run of this pool goes on, and by which rules.

Pure data. The rules are part of the pinned pool, so a run keeps those it began with; a decision names the digest of the
rule that it was given under.
"""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Literal, Self

import rfc8785
from pydantic import AfterValidator, Field, model_validator

from worker_pools.pool.fields import Count, Flag, Frozen, WorkerName

REVIEWERS_MAX = 64
RULES_MAX = 32
_PERSON = re.compile(r"[A-Za-z0-9._:@+-]{1,128}")


def _person(name: str) -> str:
    if not _PERSON.fullmatch(name):
        raise ValueError("a reviewer is an account or a person: letters, digits and . _ : @ + - (at most 128)")
    return name


Person = Annotated[str, AfterValidator(_person)]
Label = Annotated[str, Field(min_length=1, max_length=64)]
Approvals = Annotated[Count, Field(ge=1, le=16)]
# Whole seconds, at most a year.
ExpirySeconds = Annotated[Count, Field(ge=1, le=31_536_000)]


class Escalation(Frozen):
    """Who is asked when nobody of the first group has decided in time."""

    reviewers: tuple[Person, ...] = Field(
        default=(), max_length=REVIEWERS_MAX, description="Who may decide now; empty: anybody who may review at all."
    )
    approvals: Approvals = Field(default=1, description="How many different people have to approve.")
    expires_s: ExpirySeconds | None = Field(default=None, description="Seconds until this review expires, too.")
    on_expiry: Literal["reject", "approve"] = Field(
        default="reject", description="What becomes of it then; `approve` lets the run go on though nobody looked."
    )


class ReviewRule(Frozen):
    """A gate: what has to be reviewed, by whom, by how many, and what happens when nobody does."""

    gate: Literal["plan", "before", "after", "answer"] = Field(
        description="`plan`: before the first worker of a round is called. `before`: before a step is called. `after`: "
        "before anybody may use a step's output. `answer`: before the run ends with its answer."
    )
    workers: tuple[WorkerName, ...] = Field(
        default=(), description="For `before` and `after`: only steps of these workers."
    )
    clearance: tuple[Label, ...] = Field(
        default=(), description="For `before` and `after`: only steps of workers with one of these clearances."
    )
    sample_percent: Annotated[Count, Field(ge=1, le=100)] = Field(
        default=100,
        description="Share of what the rule is for that is reviewed. The draw follows from the run and a secret of "
        "the installation, and every draw is on record.",
    )
    approvals: Approvals = Field(default=1, description="How many different people have to approve.")
    four_eyes: Flag = Field(
        default=True,
        description="Nobody reviews a run that is their own: submitted by them or on their behalf, planned or edited "
        "by them. `false` lets them.",
    )
    reviewers: tuple[Person, ...] = Field(
        default=(), max_length=REVIEWERS_MAX, description="Accounts or persons who may decide; empty: anybody else."
    )
    expires_s: ExpirySeconds | None = Field(default=None, description="Seconds until a review expires; absent: never.")
    on_expiry: Literal["reject", "escalate", "approve"] = Field(
        default="reject",
        description="What becomes of an expired review: `reject`, `escalate` (others are asked), or `approve`, which "
        "lets the run go on though nobody looked.",
    )
    escalate: Escalation | None = Field(default=None, description="For `on_expiry: escalate`: who is asked then.")
    on_reject: Literal["fail", "wait"] = Field(
        default="fail",
        description="What a rejected step does if it is not sent back: `fail` ends the run with `review-rejected`, "
        "`wait` lets it wait for an operator (retry, another worker, skip, abort).",
    )
    bypass: Literal["never", "others", "anyone"] = Field(
        default="others",
        description="Who may break the glass and let the run go on at once, which forces a later review: nobody, "
        "those who may review, or anyone.",
    )
    meaning: Annotated[str, Field(min_length=1, max_length=1000)] | None = Field(
        default=None, description="What an approval says, for example `I checked the output against the task`."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.gate in {"plan", "answer"} and (self.workers or self.clearance):
            raise ValueError("`workers` and `clearance` select steps, so they are for `before` and `after` only")
        if (self.on_expiry == "escalate") != (self.escalate is not None):
            raise ValueError("`on_expiry: escalate` and `escalate` belong together")
        for group, approvals in self._groups():
            if group and len(set(group)) < approvals:
                raise ValueError(f"{approvals} approvals cannot come from {len(set(group))} reviewers")
        return self

    def _groups(self) -> list[tuple[tuple[str, ...], int]]:
        groups = [(self.reviewers, self.approvals)]
        if self.escalate is not None:
            groups.append((self.escalate.reviewers, self.escalate.approvals))
        return groups

    @property
    def document(self) -> bytes:
        """The rule as canonical JSON (RFC 8785), as it stands in the pinned pool; it holds no floats.

        A field that is added later must stay out of it while it has its default: a changed digest makes reviews stale.
        """
        return rfc8785.dumps(self.model_dump(mode="json"))

    @property
    def digest(self) -> str:
        """SHA-256 of the document, in hex: what a decision names as the policy that it was given under."""
        return hashlib.sha256(self.document).hexdigest()
