"""Pool documents, as far as rules look at them: workers and their models, templates, what has to be reviewed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from engine.verifier.canonical import canonical
from engine.verifier.faults import InvalidError
from engine.verifier.shapes import (
    Shape,
    exactly,
    fields,
    is_any,
    is_count,
    is_flag,
    is_text,
    list_of,
    one_of,
    optional,
    require,
)

POOL_FORMAT: Final = "podium-pool/1"
# More rules and reviewers than any pool has; bounds what a hostile bundle can cost.
RULES_MAX: Final = 256
REVIEWERS_MAX: Final = 256
_ALL: Final = 100

_LONG_TEXT = Shape(str)
_MODEL = fields(
    {"name": is_text, "model": is_text, "description": is_text, "kind": one_of("model", "conductor")},
    {"clearance": optional(is_text), "fallbacks": list_of(is_text)},
)
_TEMPLATES = fields({"conductor": _LONG_TEXT, "repair": _LONG_TEXT, "worker": _LONG_TEXT}, {"revise": _LONG_TEXT})
_EXPIRY = {"expires_s": optional(is_count), "on_expiry": one_of("reject", "escalate", "approve")}
_GROUP = fields({"approvals": is_count, "reviewers": list_of(is_text)}, _EXPIRY)
_RULE = fields(
    {"gate": one_of("plan", "before", "after", "answer"), "approvals": is_count, "four_eyes": is_flag},
    {
        "workers": list_of(is_text),
        "clearance": list_of(is_text),
        "reviewers": list_of(is_text),
        "sample_percent": is_count,
        "escalate": optional(_GROUP),
        "bypass": one_of("never", "others", "anyone"),
        "meaning": optional(is_text),
        "on_reject": one_of("fail", "wait"),
        **_EXPIRY,
    },
)
_POLICY = fields(
    {"steps_max": is_count},
    {
        "depth_max": is_count,
        "reads": is_text,
        "reviews": list_of(_RULE),
        "unread_steps": one_of("run", "skip", "reject"),
    },
)
_POOL = fields(
    {"name": is_text, "conductor": _MODEL, "workers": list_of(_MODEL), "templates": _TEMPLATES, "policy": _POLICY}
)
_DOCUMENT = exactly({"format": is_text, "pool": is_any})


@dataclass(frozen=True, slots=True)
class Model:
    """A worker or the Conductor."""

    name: str
    model: str
    kind: str
    description: str
    clearance: str | None
    fallbacks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Who is asked, and what follows if they have not decided in ``expires_s`` seconds (None: it never expires)."""

    approvals: int
    reviewers: tuple[str, ...]
    expires_s: int | None
    on_expiry: str


@dataclass(frozen=True, slots=True)
class Rule:
    """A gate of the pool's policy. A review names ``digest`` as its policy; ``percent`` of the places are drawn.

    ``groups`` are those who are asked first, and those who are asked when these have let it expire; ``meaning`` is what
    an approval says, where the pool has words of its own for it; ``ends`` says that the run fails with a rejection.
    """

    digest: str
    gate: str
    approvals: int
    four_eyes: bool
    workers: tuple[str, ...]
    clearance: tuple[str, ...]
    groups: tuple[Group, ...]
    percent: int
    bypass: str
    meaning: str | None
    ends: bool

    @property
    def is_for_all(self) -> bool:
        """Whether nothing is drawn."""
        return self.percent >= _ALL

    @property
    def reason(self) -> str:
        """Why a review by this rule is asked for."""
        if not self.is_for_all:
            return "sample"
        return "label" if self.workers or self.clearance else "policy"

    def is_for(self, worker: Model | None) -> bool:
        """Whether steps of this worker pass the gate."""
        if self.workers and (worker is None or worker.name not in self.workers):
            return False
        return not self.clearance or (worker is not None and worker.clearance in self.clearance)


@dataclass(frozen=True, slots=True)
class Pool:
    """A pinned pool."""

    digest: str
    conductor: Model
    workers: tuple[Model, ...]
    templates: Mapping[str, str]
    steps_max: int
    depth_max: int
    rules: tuple[Rule, ...]
    reads_recorded: bool = False
    # Whether steps that nobody reads are left out.
    skips_unread: bool = False

    def worker(self, name: str) -> Model | None:
        """The worker of this name."""
        return next((worker for worker in self.workers if worker.name == name), None)

    def rule(self, digest: str | None) -> Rule | None:
        """The review rule with this digest."""
        return next((rule for rule in self.rules if rule.digest == digest), None)


def read_pool(digest: str, document: bytes) -> Pool:
    """Reads a pool document; raises InvalidError for one that this verifier cannot understand."""
    what = f"pools/{digest}.json is not a pool document that this verifier knows"
    try:
        content = json.loads(document)
        canonical(content)
    except (ValueError, RecursionError):
        raise InvalidError(what) from None
    require(content, _DOCUMENT, what)
    if content["format"] != POOL_FORMAT:
        raise InvalidError(what)
    pool = require(content["pool"], _POOL, what)
    policy = pool["policy"]
    if len(policy.get("reviews", [])) > RULES_MAX:
        raise InvalidError(f"pools/{digest}.json has more rules for reviews than any pool has")
    return Pool(
        digest=digest,
        conductor=_model(pool["conductor"]),
        workers=tuple(map(_model, pool["workers"])),
        templates=pool["templates"],
        steps_max=policy["steps_max"],
        depth_max=policy.get("depth_max", 0),
        rules=tuple(map(_rule, policy.get("reviews", []))),
        reads_recorded=policy.get("reads", "unrecorded") != "unrecorded",
        skips_unread=policy.get("unread_steps") == "skip",
    )


def _model(row: Mapping[str, Any]) -> Model:
    return Model(
        row["name"],
        row["model"],
        row["kind"],
        row["description"],
        row.get("clearance"),
        tuple(row.get("fallbacks", [])),
    )


def _rule(row: Mapping[str, Any]) -> Rule:
    groups = [_group(row)]
    if row.get("escalate") is not None:
        groups.append(_group(row["escalate"]))
    return Rule(
        # The rule holds no floats, so this is RFC 8785.
        digest=hashlib.sha256(canonical(row)).hexdigest(),
        gate=row["gate"],
        approvals=row["approvals"],
        four_eyes=row["four_eyes"],
        workers=tuple(row.get("workers", [])),
        clearance=tuple(row.get("clearance", [])),
        groups=tuple(groups),
        percent=row.get("sample_percent", _ALL),
        bypass=row.get("bypass", "others"),
        meaning=row.get("meaning"),
        ends=row.get("on_reject", "fail") == "fail",
    )


def _group(row: Mapping[str, Any]) -> Group:
    reviewers = tuple(row.get("reviewers", []))
    if len(reviewers) > REVIEWERS_MAX:
        raise InvalidError("a rule for reviews names more reviewers than any pool has")
    return Group(row["approvals"], reviewers, row.get("expires_s"), row.get("on_expiry", "reject"))
