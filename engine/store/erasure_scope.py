"""What an erasure has to take along: not only the texts that were named, but everything that was made of them by us.

A prompt is not stored, but the salt of its manifest would let somebody check a guess of an erased text against the
prompt's commitment, so the manifests of all prompts that showed the text go too. The task of a run below is a rendered
prompt. A subtask stands in the plan as well. Other texts that quote an erased one, a fork's copies first of all, are
*copies*: whoever orders the erasure says what becomes of them. Reads only.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from engine.errors import InputError
from engine.store.artifacts import read_run_artifacts
from engine.store.ids import artifact_id, plan_id
from engine.store.states import RUN_LIVE

Scope = Literal["run", "step", "artifact"]
# Shorter texts stand in others by chance.
QUOTE_BYTES_MIN: Final = 24
MANIFEST: Final = "prompt_manifest"
REVIEW_MANIFEST: Final = "review_manifest"
_NO_TEXTS: Final = frozenset({MANIFEST, REVIEW_MANIFEST})
# Why something was erased stays when it is.
BASIS_KINDS: Final = ("basis", "basis_reason")
_PLAN_KINDS: Final = frozenset({"plan", "plan_text", "plan_remarks"})

# The whole trees of a run and of everything that was forked from them, or that they were forked from.
_RELATED = text("""
    WITH RECURSIVE related AS (
        SELECT id, parent_run_id, source_run_id FROM runs WHERE id = :run_id
        UNION
        SELECT other.id, other.parent_run_id, other.source_run_id FROM runs other JOIN related
            ON other.id = related.parent_run_id OR other.parent_run_id = related.id
            OR other.id = related.source_run_id OR other.source_run_id = related.id
    )
    SELECT runs.id, runs.parent_run_id, runs.parent_round, runs.parent_position, runs.source_run_id, runs.state,
           runs.key_epoch, runs.tenant_id
    FROM related JOIN runs ON runs.id = related.id
    ORDER BY runs.depth, runs.id
""")
_STEPS = text("SELECT id, run_id, round, position, accepted_attempt_id FROM steps WHERE run_id = ANY(:runs)")
_ATTEMPTS = text("SELECT id, run_id, round, position FROM attempts WHERE run_id = ANY(:runs)")
_ARTIFACTS = text("""
    SELECT id, run_id, owner_id, kind, byte_count, key_epoch FROM artifacts
    WHERE run_id = ANY(:runs) AND erasure_id IS NULL ORDER BY id
""")
# What each model was shown, and what the tasks of runs below were made of.
_SHOWN = text("""
    SELECT run_id, type, body FROM ledger_entries
    WHERE run_id = ANY(:runs) AND type IN ('attempt.sent', 'child.begun')
""")


@dataclass(frozen=True, slots=True)
class Target:
    """What is to be erased: a run with all below it, a step of a run, or one artifact of a run."""

    run_id: UUID
    round: int | None = None
    position: int | None = None
    artifact_id: UUID | None = None

    @property
    def scope(self) -> Scope:
        """In the words of the entry."""
        if self.artifact_id is not None:
            return "artifact"
        return "run" if self.position is None else "step"


@dataclass(frozen=True, slots=True)
class ReachedText:
    """An artifact that an erasure reaches: what it is, and where in the plan; None for what belongs to no place."""

    id: UUID
    run_id: UUID
    kind: str
    round: int | None
    position: int | None


@dataclass(frozen=True, slots=True)
class Reach:
    """How far an erasure reaches: artifacts by run, and the copies elsewhere, by run.

    ``live`` are runs that have not ended and whose texts, or the texts that they read, are among them; ``readers`` are
    steps of other runs that take their output from what is erased.
    """

    target: Target
    tenant_id: UUID
    artifacts: Mapping[UUID, frozenset[UUID]]
    copies: Mapping[UUID, frozenset[UUID]]
    live: tuple[UUID, ...]
    readers: tuple[UUID, ...]
    trees: tuple[UUID, ...]
    # Which runs have texts that are sealed, and the tree of the run that was named.
    sealed: Mapping[UUID, bool] = field(default_factory=dict)
    own_tree: frozenset[UUID] = frozenset()
    # What ``artifacts`` are, by run, place and kind.
    texts: tuple[ReachedText, ...] = ()

    @property
    def runs(self) -> tuple[UUID, ...]:
        """The runs that lose texts, in the order in which they are locked."""
        return tuple(sorted(run for run, artifacts in self.artifacts.items() if artifacts))

    @property
    def count(self) -> int:
        """How many artifacts are to be erased."""
        return sum(len(artifacts) for artifacts in self.artifacts.values())


class _Record:
    """What was read of the related runs, with the ways from one text to another."""

    def __init__(
        self, runs: Sequence[Any], steps: Sequence[Any], attempts: Sequence[Any], artifacts: Sequence[Any]
    ) -> None:
        self.runs = {row.id: row for row in runs}
        self.steps = {row.id: row for row in steps}
        self.attempts = {row.id: row for row in attempts}
        self.artifacts = {row.id: row for row in artifacts}
        self.by_owner: dict[UUID, set[UUID]] = {}
        for row in artifacts:
            self.by_owner.setdefault(row.owner_id, set()).add(row.id)
        # From an artifact to what was made of it: manifests of prompts, tasks of runs below.
        self.made_of: dict[UUID, set[UUID]] = {}

    def learn(self, entries: Iterable[Any]) -> None:
        """Takes in what the ledger says of what was shown."""
        for entry in entries:
            data = json.loads(bytes(entry.body))["data"]
            if entry.type == "attempt.sent":
                made = artifact_id(UUID(data["attempt"]), MANIFEST)
            elif "shown" in data or "artifacts" in data:
                made = artifact_id(UUID(data["child"]), "task")
            else:
                continue
            # An entry of an older version does not say it: then any text of the run may have been shown.
            shown = [UUID(one) for one in data["shown"]] if "shown" in data else self.texts_of([entry.run_id])
            for source in shown:
                self.made_of.setdefault(source, set()).add(made)

    def learn_review(self, manifest: UUID, content: bytes) -> None:
        """Takes in what was shown to reviewers: the manifest holds the salt of the commitment to it."""
        for part in json.loads(content)["parts"]:
            self.made_of.setdefault(UUID(part["artifact"]), set()).add(manifest)

    def described(self, artifacts: Iterable[UUID]) -> tuple[ReachedText, ...]:
        """What these artifacts are, in the order of runs, rounds and steps."""
        places: dict[UUID, tuple[int, int | None]] = {}
        for one in (*self.steps.values(), *self.attempts.values()):
            places[one.id] = (one.round, one.position)
            places[plan_id(one.run_id, one.round)] = (one.round, None)
        found = []
        for artifact in artifacts:
            row = self.artifacts[artifact]
            found.append(ReachedText(row.id, row.run_id, row.kind, *places.get(row.owner_id, (None, None))))
        order = {run: number for number, run in enumerate(self.runs)}
        return tuple(sorted(found, key=lambda one: (order[one.run_id], _place_key(one), one.kind, one.id)))

    def texts_of(self, runs: Collection[UUID]) -> set[UUID]:
        """All texts of these runs that are still there."""
        return {one.id for one in self.artifacts.values() if one.run_id in runs and one.kind not in BASIS_KINDS}

    def below(self, run_id: UUID) -> set[UUID]:
        """The run and all runs below it; the rows come from the top."""
        found = {run_id}
        for run in self.runs.values():
            if run.parent_run_id in found:
                found.add(run.id)
        return found

    def tree_of(self, run_id: UUID) -> set[UUID]:
        """The whole tree that a run belongs to."""
        root = run_id
        while (parent := self.runs[root].parent_run_id) is not None:
            root = parent
        return self.below(root)

    def owned(self, owners: Iterable[UUID]) -> set[UUID]:
        """The artifacts of these owners."""
        return {artifact for owner in owners for artifact in self.by_owner.get(owner, ())}

    def plan_texts(self, run_id: UUID, round_number: int) -> set[UUID]:
        """The plan of a round in all its forms, texts of planning calls that were no plan included."""
        planning = (
            one.id
            for one in self.attempts.values()
            if (one.run_id, one.round, one.position) == (run_id, round_number, None)
        )
        found = self.owned([plan_id(run_id, round_number), *planning])
        return {one for one in found if self.artifacts[one].kind in _PLAN_KINDS}

    def step_texts(self, run_id: UUID, round_number: int, position: int) -> set[UUID]:
        """A step's subtask with the plan that holds it too, all that its calls left, and the run it was given to."""
        place = (run_id, round_number, position)
        steps = [one.id for one in self.steps.values() if (one.run_id, one.round, one.position) == place]
        if not steps:
            raise InputError("step-unknown", f"run {run_id} has no step {position} in round {round_number}")
        calls = [one.id for one in self.attempts.values() if (one.run_id, one.round, one.position) == place]
        delegated = [
            run.id for run in self.runs.values() if (run.parent_run_id, run.parent_round, run.parent_position) == place
        ]
        own = self.owned([*steps, *calls]) | self.plan_texts(run_id, round_number)
        return own.union(*(self.texts_of(self.below(run)) for run in delegated))

    def with_all_made_of(self, artifacts: set[UUID]) -> set[UUID]:
        """The artifacts with everything that we made of them, to the end."""
        found, fresh = set(artifacts), set(artifacts)
        while fresh:
            fresh = {made for one in fresh for made in self._next(one)} - found
            found |= fresh
        return found

    def _next(self, artifact: UUID) -> Iterator[UUID]:
        yield from self.made_of.get(artifact, set()) & self.artifacts.keys()
        row = self.artifacts[artifact]
        if row.kind == "subtask" and row.owner_id in self.steps:
            step = self.steps[row.owner_id]
            yield from self.plan_texts(step.run_id, step.round)
        elif row.kind in _PLAN_KINDS:
            for step in self.steps.values():
                if plan_id(step.run_id, step.round) == row.owner_id:
                    yield from (one for one in self.owned([step.id]) if self.artifacts[one].kind == "subtask")


async def read_reach(
    connection: AsyncConnection, target: Target, *, with_copies: bool = False, spare: Collection[UUID] = ()
) -> Reach:
    """Finds out what an erasure has to take along; with ``with_copies`` the copies too.

    ``spare`` are artifacts that stay whatever is erased around them. Raises InputError ``run-unknown``,
    ``step-unknown``, ``artifact-unknown``.
    """
    await connection.execution_options(isolation_level="REPEATABLE READ")
    record = await _read(connection, target.run_id)
    start = _start(record, target) - set(spare)
    found = record.with_all_made_of(start) - set(spare)
    copies = await _copies(connection, record, found)
    if with_copies:
        found = record.with_all_made_of(found | copies) - set(spare)
        copies = set()
    by_run = _by_run(record, found)
    trees = set().union(*(record.tree_of(run) for run in {target.run_id, *by_run}))
    erased_outputs = {record.artifacts[one].owner_id for one in found if record.artifacts[one].kind == "output"}
    readers = {step.run_id for step in record.steps.values() if step.accepted_attempt_id in erased_outputs}
    live = [run for run in sorted(trees | readers) if record.runs[run].state in RUN_LIVE]
    return Reach(
        target=target,
        tenant_id=record.runs[target.run_id].tenant_id,
        artifacts=by_run,
        copies=_by_run(record, copies),
        live=tuple(live),
        readers=tuple(sorted(readers - set(by_run) - record.tree_of(target.run_id))),
        trees=tuple(sorted(trees)),
        sealed={run: record.runs[run].key_epoch > 0 for run in by_run},
        own_tree=frozenset(record.tree_of(target.run_id)),
        texts=record.described(found),
    )


def _place_key(one: ReachedText) -> tuple[int, int]:
    return (-1 if one.round is None else one.round, -1 if one.position is None else one.position)


async def _read(connection: AsyncConnection, run_id: UUID) -> _Record:
    runs = (await connection.execute(_RELATED, {"run_id": run_id})).all()
    if not runs:
        raise InputError("run-unknown", f"there is no run {run_id}", hint="podium list")
    where = {"runs": [row.id for row in runs]}
    steps, attempts, artifacts, shown = [
        (await connection.execute(query, where)).all() for query in (_STEPS, _ATTEMPTS, _ARTIFACTS, _SHOWN)
    ]
    record = _Record(runs, steps, attempts, artifacts)
    record.learn(shown)
    for run in record.runs:
        reviews = [one.id for one in artifacts if (one.run_id, one.kind) == (run, REVIEW_MANIFEST)]
        for one in await read_run_artifacts(connection, run, reviews) if reviews else ():
            if one.content is not None:
                record.learn_review(one.id, one.content)
    return record


def _start(record: _Record, target: Target) -> set[UUID]:
    if target.artifact_id is not None:
        named = record.artifacts.get(target.artifact_id)
        if named is None or named.run_id != target.run_id or named.kind in BASIS_KINDS:
            raise InputError(
                "artifact-unknown",
                f"run {target.run_id} has no artifact {target.artifact_id} that could be erased",
                hint=f"podium audit log {target.run_id} --json names them",
            )
        return {target.artifact_id}
    if target.position is not None:
        return record.step_texts(target.run_id, target.round or 0, target.position)
    return record.texts_of(record.below(target.run_id))


async def _copies(connection: AsyncConnection, record: _Record, erased: set[UUID]) -> set[UUID]:
    """Other texts of the related runs that hold one of the erased texts, as it stands or written in JSON."""
    others = {one.run_id for one in record.artifacts.values() if one.id not in erased}
    if not others:
        return set()
    needles: set[bytes] = set()
    for run, ids in _by_run(record, erased).items():
        for one in await read_run_artifacts(connection, run, ids):
            if one.kind not in _NO_TEXTS | _PLAN_KINDS and one.content is not None:
                needles.update(_spellings(one.content))
    found = set()
    for run in sorted(others):
        rest = [one.id for one in record.artifacts.values() if one.run_id == run and one.id not in erased]
        for other in await read_run_artifacts(connection, run, rest):
            content = other.content
            if other.kind in _NO_TEXTS or other.kind in BASIS_KINDS or content is None:
                continue
            if any(needle in content for needle in needles):
                found.add(other.id)
    return found


def _spellings(content: bytes) -> Iterator[bytes]:
    plain = content.strip()
    if len(plain) < QUOTE_BYTES_MIN:
        return
    yield plain
    words = plain.decode("utf-8", "replace")
    for ascii_only in (True, False):
        yield json.dumps(words, ensure_ascii=ascii_only)[1:-1].encode()


def _by_run(record: _Record, artifacts: Iterable[UUID]) -> dict[UUID, frozenset[UUID]]:
    found: dict[UUID, set[UUID]] = {}
    for one in artifacts:
        found.setdefault(record.artifacts[one].run_id, set()).add(one)
    return {run: frozenset(ids) for run, ids in sorted(found.items())}
