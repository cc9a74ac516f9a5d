"""What an export leaves out by order: whole kinds of text, those of a step, or single artifacts. Pure.

A rule is ``KIND``, ``KIND@STEP``, ``KIND@ROUND.STEP``, ``all``, ``all@STEP`` or the id of an artifact. What quotes a
text that is left out is left out too, as far as the record knows it: the plan that holds a subtask, the task of a child
run that was made of it. Must never leave out a manifest, which holds no text: without it nobody could check who was
shown what.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID, uuid5

from engine.errors import InputError
from engine.store.log import KEY_ROTATED
from engine.verifier.entry_types import committed

# They name texts and hold none; without them nobody could check who was shown what.
MANIFEST_KINDS: Final = frozenset({"prompt_manifest", "review_manifest"})
ALL: Final = "all"
KINDS: Final = (
    "task",
    "subtask",
    "output",
    "declined_output",
    "reasoning",
    "plan",
    "plan_text",
    "plan_remarks",
    "provider_message",
    "reason",
    "comment",
    "meaning",
    "basis",
    "basis_reason",
)
# A plan in any form holds its subtasks.
_PLAN_KINDS: Final = frozenset({"plan", "plan_text", "plan_remarks"})
_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_RULE = re.compile(r"([a-z_]{1,40})(?:@(?:(\d{1,3})\.)?(\d{1,3}))?")


@dataclass(frozen=True, slots=True)
class Rule:
    """A kind of text (or all), perhaps of one step, perhaps of one round; or one artifact."""

    kind: str | None = None
    round: int | None = None
    step: int | None = None
    artifact: str | None = None

    def fits(self, kind: str, place: tuple[int | None, int | None]) -> bool:
        """Whether the rule leaves out a text of this kind at this place (round and step, None for none)."""
        if self.artifact is not None or (self.kind not in {ALL, kind}):
            return False
        if self.step is not None and place[1] != self.step:
            return False
        return self.round is None or place[0] == self.round

    def __str__(self) -> str:
        """The rule as it was given."""
        if self.artifact is not None:
            return self.artifact
        if self.step is None:
            return str(self.kind)
        return f"{self.kind}@{'' if self.round is None else f'{self.round}.'}{self.step}"


def read_rules(texts: Iterable[str]) -> tuple[Rule, ...]:
    """The rules that were asked for; raises InputError ``redaction-invalid``."""
    return tuple(_rule(text.strip()) for text in texts)


def _rule(text: str) -> Rule:
    if _ID.fullmatch(text):
        return Rule(artifact=text)
    found = _RULE.fullmatch(text)
    if found is None or found[1] not in {ALL, *KINDS}:
        raise InputError(
            "redaction-invalid",
            f"--redact {text!r} says nothing that could be left out",
            hint=f"{ALL}, or one of {', '.join(KINDS)}; each alone, or of a step: output@0; or an artifact's id",
        )
    return Rule(found[1], None if found[2] is None else int(found[2]), None if found[3] is None else int(found[3]))


@dataclass(slots=True)
class Committed:
    """An artifact as entries commit to it, and where it belongs: its entry's round and step, None where it has none."""

    id: str
    run: str
    kind: str
    size: int
    commitment: str
    place: tuple[int | None, int | None]
    # Whose it can be: the ids that its entry names.
    owners: tuple[str, ...]


@dataclass(slots=True)
class Collected:
    """What the entries of a bundle say of texts, collected chain by chain."""

    artifacts: dict[str, Committed] = field(default_factory=dict)
    # The task of a child run, and what it was made of.
    quotes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # By run: what its models were shown, and the outputs that it took over from other runs.
    shown: dict[str, set[str]] = field(default_factory=dict)
    erased: set[str] = field(default_factory=set)
    pools: set[str] = field(default_factory=set)
    checkpoints: set[int] = field(default_factory=set)
    # Notes in which the log's old and new key state a change of keys.
    rotations: list[str] = field(default_factory=list)
    _reviews: dict[str, tuple[int | None, int | None]] = field(default_factory=dict)
    # Subtasks by the plan that holds them: (run, round) to artifact ids.
    _plans: dict[tuple[str, int | None], list[str]] = field(default_factory=dict)

    def take(self, entry: Mapping[str, Any]) -> None:
        """Looks at one entry, in the order of its chain."""
        run, data = entry["run"], entry["data"]
        owners = _owners(entry)
        where = (data.get("round"), data.get("step"))
        if "review" in data:
            # Only the first entry of a review says what it is about.
            where = self._reviews.setdefault(data["review"], where)
        for row in committed(data):
            place = where
            if row["kind"] == "subtask":
                place = (data.get("round"), _step_of(data, row["artifact"]))
            if row["kind"] in {*_PLAN_KINDS, "subtask"}:
                self._plans.setdefault((run, data.get("round")), []).append(row["artifact"])
            self.artifacts[row["artifact"]] = Committed(
                row["artifact"], run, row["kind"], row["bytes"], row["commitment"], place, owners
            )
        self._note(run, entry["type"], data)

    def _note(self, run: str, type_: str, data: Mapping[str, Any]) -> None:
        shown = data.get("shown")
        if isinstance(shown, list):
            self.shown.setdefault(run, set()).update(shown)
            if "child" in data:
                self.quotes[artifact_of(data["child"], "task")] = tuple(shown)
        if type_ == "step.changed" and "attempt" in data:
            self.shown.setdefault(run, set()).add(artifact_of(data["attempt"], "output"))
        elif type_ == "run.created":
            self.pools.add(data["pool"])
        elif type_ == "run.repinned":
            self.pools.update((data["old"], data["new"]))
        elif type_ == "artifact.erased":
            self.erased.update(_named(data))
        elif type_ == KEY_ROTATED:
            self.rotations.append(data["note"])
        if isinstance(data.get("checkpoint"), int):
            self.checkpoints.add(data["checkpoint"])

    def redacted(self, rules: Sequence[Rule], *, disclosed_only: Mapping[str, Collection[str]]) -> set[str]:
        """The artifacts that are left out by the rules.

        ``disclosed_only`` names, for runs that are in the bundle only because others take outputs over from them, the
        artifacts that may be disclosed.
        """
        by_id = {rule.artifact for rule in rules if rule.artifact is not None}
        if missing := by_id - self.artifacts.keys():
            raise InputError(
                "redaction-unknown", f"the runs have no artifact {min(missing)}", hint="`podium audit log RUN --json`"
            )
        out = {
            each.id
            for each in self.artifacts.values()
            if each.id in by_id
            or any(rule.fits(each.kind, each.place) for rule in rules)
            or each.id not in disclosed_only.get(each.run, (each.id,))
        }
        return {id_ for id_ in self._quoting(out) if self.artifacts[id_].kind not in MANIFEST_KINDS}

    def _quoting(self, out: set[str]) -> set[str]:
        """These artifacts and all that the record knows to quote one of them."""
        for ids in self._plans.values():
            if any(id_ in out and self.artifacts[id_].kind == "subtask" for id_ in ids):
                out.update(id_ for id_ in ids if self.artifacts[id_].kind in _PLAN_KINDS)
        grows = True
        while grows:
            more = {task for task, shown in self.quotes.items() if task in self.artifacts and not out.isdisjoint(shown)}
            grows = not more <= out
            out |= more
        return out


def artifact_of(owner: str, kind: str, ordinal: int = 0) -> str:
    """The id of an artifact of an owner."""
    return str(uuid5(UUID(owner), f"artifact/{kind}/{ordinal}"))


def _step_of(data: Mapping[str, Any], artifact: str) -> int | None:
    """The step whose subtask an artifact of ``plan.accepted`` is."""
    for step in data.get("steps", []):
        if "id" in step and artifact_of(step["id"], "subtask") == artifact:
            return int(step["step"])
    return None


def _owners(entry: Mapping[str, Any]) -> tuple[str, ...]:
    data = entry["data"]
    names = ("attempt", "plan", "order", "child", "review", "erasure")
    named = [data[name] for name in names if isinstance(data.get(name), str) and _ID.fullmatch(data[name])]
    steps = [step["id"] for step in data.get("steps", []) if isinstance(step, dict) and "id" in step]
    return (entry["run"], *named, *steps)


def _named(data: Mapping[str, Any]) -> list[str]:
    """The artifacts that an erasure names."""
    return [id_ for id_ in data.get("erased", []) if isinstance(id_, str)]
