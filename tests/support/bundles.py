"""Evidence bundles made from pure data: a small record of runs, its log, its keys, and every way to forge them.

Entries, prompts and ids come from the engine's own pure functions; archive and proofs from the formats' modules. So a
test can let a run go wrong in one place and have everything else consistent and signed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid5

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from activities.prompts import Prompt, render_plan_request, render_step
from engine.contracts import attempt_id
from engine.ledger.commitment import ARTIFACT_DOMAIN, PROMPT_DOMAIN, commitment
from engine.ledger.entry import GENESIS, EntryPlace, Event, entry_bytes, entry_hash
from engine.store.ids import artifact_id, plan_id, step_id
from engine.store.inputs import Part, PlanInputs, StepInputs, VisibleStep
from engine.verifier import note
from engine.verifier.archive import pack
from engine.verifier.canonical import canonical
from engine.verifier.checkpoint import origin_of
from engine.verifier.checkpoint import text as checkpoint_text
from engine.verifier.merkle import consistency_path, leaf_hash, missing_subtrees, root_of
from engine.verifier.rotation import Rotation, rotation_text
from worker_pools.pool import Pool, pool_digest, pool_document
from worker_pools.pool.file import parse_pool

TENANT = UUID("0192f000-0000-7000-8000-00000000aaaa")
RUN = UUID("0192f000-0000-7000-8000-000000000001")
BEGIN = datetime(2026, 11, 30, 12, tzinfo=UTC)
ENGINE = "podium-engine"
NONCE = "00112233aabbccdd"
POOL = """
name: paper
conductor: {base_url: http://127.0.0.1:9/v1, model: planner-1}
workers:
  - {name: alpha, description: writes, base_url: http://127.0.0.1:9/v1, model: alpha-1}
  - {name: beta, description: checks, base_url: http://127.0.0.1:9/v1, model: beta-1}
  - {name: gamma, description: never asked, base_url: http://127.0.0.1:9/v1, model: gamma-1}
"""
PLAN = (("alpha", "Draft it.", ()), ("beta", "Check it.", (0,)), ("alpha", "Write the answer.", (1,)))


def key(number: int) -> Ed25519PrivateKey:
    """A private key that is the same in every test."""
    return Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)


def pool_of(policy: str = "") -> Pool:
    """The pool, with a policy in YAML flow style."""
    return parse_pool(POOL + (f"policy: {policy}\n" if policy else ""), label="pool.yaml")


@dataclass
class Stored:
    """An artifact of the record."""

    id: UUID
    chain: UUID
    owner: UUID
    kind: str
    content: bytes
    salt: bytes
    said: dict[str, Any]
    state: str = "disclosed"


@dataclass
class Chain:
    """A run's chain, or the tenant's own."""

    record: Record
    id: UUID
    bodies: list[bytes] = field(default_factory=list)

    def add(
        self, type_: str, *, by: str = ENGINE, on_behalf_of: str | None = "ann", for_: str | None = None, **data: Any
    ) -> str:
        """Appends an entry to chain and log; returns its hash. A person acts ``for_`` somebody or for nobody."""
        prev = entry_hash(self.bodies[-1]) if self.bodies else GENESIS
        place = EntryPlace(TENANT, self.id, len(self.bodies) + 1, prev)
        event = Event(type_, by, on_behalf_of if by == ENGINE else for_, data)
        body = entry_bytes(place, event, self.record.now())
        self.bodies.append(body)
        self.record.leaves.append((self.id, leaf_hash(body)))
        return entry_hash(body).hex()

    def commit(self, owner: UUID, kind: str, content: bytes | str) -> dict[str, Any]:
        """Stores an artifact; returns what an entry says of it."""
        content = content.encode() if isinstance(content, str) else content
        salt = hashlib.sha256(f"salt/{owner}/{kind}".encode()).digest()
        own = artifact_id(owner, kind)
        said = {
            "artifact": str(own),
            "kind": kind,
            "bytes": len(content),
            "commitment": commitment(salt, ARTIFACT_DOMAIN, f"{owner}/{kind}/0", content).hex(),
        }
        self.record.artifacts[own] = Stored(own, self.id, owner, kind, content, salt, said)
        return said

    def hash(self, number: int) -> str:
        """The hash of an entry, from 1, or from the end."""
        return entry_hash(self.bodies[number - 1 if number > 0 else number]).hex()


class Record:
    """Everything of one tenant: chains, artifacts, pools, the log in the order of writing, and its checkpoints."""

    def __init__(self, signer: int = 1) -> None:
        self.signer = signer
        self.leaves: list[tuple[UUID, bytes]] = []
        self.artifacts: dict[UUID, Stored] = {}
        self.pools: dict[str, bytes] = {}
        self.checkpoints: list[tuple[int, bytes]] = []
        self.rotations: list[bytes] = []
        self.system = Chain(self, TENANT)
        self.chains: dict[UUID, Chain] = {}
        self._ticks = 0

    def now(self) -> datetime:
        """A second later each time."""
        self._ticks += 1
        return BEGIN + timedelta(seconds=self._ticks)

    def last(self) -> datetime:
        """The time of the newest entry."""
        return BEGIN + timedelta(seconds=self._ticks)

    def wait(self, seconds: int) -> None:
        """Lets time pass."""
        self._ticks += seconds

    @property
    def verifier(self) -> note.Verifier:
        """The public side of the present key."""
        return note.verifier_of(key(self.signer), origin_of(str(TENANT)))

    def chain(self, run: UUID) -> Chain:
        """The chain of a run."""
        return self.chains.setdefault(run, Chain(self, run))

    def hashes(self) -> list[bytes]:
        """The leaf hashes in order."""
        return [leaf for _, leaf in self.leaves]

    def sign(self, size: int | None = None, signer: int | None = None) -> bytes:
        """Signs a checkpoint and remembers it."""
        size = len(self.leaves) if size is None else size
        origin = origin_of(str(TENANT))
        written = checkpoint_text(origin, size, root_of(self.hashes()[:size]))
        signed = note.sign(written, origin, key(signer or self.signer))
        self.checkpoints.append((size, signed))
        return signed

    def rotate(self, new: int) -> None:
        """Puts another key into service, by entry and statement."""
        origin, old = origin_of(str(TENANT)), self.signer
        size = len(self.leaves)
        verifiers = [note.verifier_of(key(number), origin) for number in (old, new)]
        statement = note.sign(rotation_text(Rotation(origin, *verifiers, size)), origin, key(old))
        self.rotations.append(note.add_signature(statement, origin, key(new)))
        self.system.add("key.rotated", old=str(verifiers[0]), new=str(verifiers[1]), size=size, by="root")
        self.signer = new

    def members(self, runs: Sequence[UUID] | None = None) -> dict[str, bytes]:
        """The bundle's members but the manifest, covered by the newest checkpoint."""
        chosen = [self.chains[run] for run in sorted(self.chains if runs is None else runs)]
        chains = [*chosen, *([self.system] if self.system.bodies else [])]
        members = {
            ("system" if chain is self.system else f"runs/{chain.id}") + "/entries.jsonl": b"".join(
                body + b"\n" for body in chain.bodies
            )
            for chain in chains
        }
        members["index.html"] = b"<!doctype html><title>evidence</title>\n"
        members |= {f"pools/{digest}.json": document for digest, document in self.pools.items()}
        ids = {chain.id for chain in chains}
        stored = [one for one in self.artifacts.values() if one.chain in ids]
        members |= {f"artifacts/{one.id}": one.content for one in stored if one.state == "disclosed"}
        members["artifacts.json"] = canonical(
            {"artifacts": sorted(map(_listed, stored), key=lambda row: str(row["artifact"]))}
        )
        if self.checkpoints:
            members |= self._log(chains)
        return members

    def _log(self, chains: Sequence[Chain]) -> dict[str, bytes]:
        size, signed = self.checkpoints[-1]
        leaves = self.hashes()[:size]
        places: dict[str, list[int]] = {str(chain.id): [] for chain in chains}
        for at, (own, _) in enumerate(self.leaves[:size]):
            if str(own) in places:
                places[str(own)].append(at)
        indexes = sorted(index for found in places.values() for index in found)
        proof = {
            "leaves": places,
            "nodes": [root_of(leaves[start:end]).hex() for start, end in missing_subtrees(indexes, size)],
            "root": root_of(leaves).hex(),
            "size": size,
        }
        earlier = [
            {"consistency": [one.hex() for one in consistency_path(leaves, before)], "note": written.decode()}
            for before, written in self.checkpoints[:-1]
        ]
        return {
            "log/checkpoint": signed,
            "log/proof.json": canonical(proof),
            "log/history.json": canonical({"checkpoints": earlier}),
            "log/keys.json": canonical({"rotations": [{"note": one.decode()} for one in self.rotations]}),
        }

    def bundle(
        self, runs: Sequence[UUID] | None = None, change: Callable[[dict[str, bytes]], None] | None = None
    ) -> bytes:
        """The bundle; ``change`` may forge members before the manifest is written over them."""
        members = self.members(runs)
        if change is not None:
            change(members)
        return sealed(members)


def _listed(one: Stored) -> dict[str, Any]:
    return {
        "artifact": str(one.id),
        "bytes": one.said["bytes"],
        "commitment": one.said["commitment"],
        "kind": one.kind,
        "media_type": "text/plain;charset=utf-8",
        "ordinal": 0,
        "owner": str(one.owner),
        "role": "text",
        "run": str(one.chain),
        "salt": one.salt.hex() if one.state == "disclosed" else None,
        "state": one.state,
    }


def manifest_of(members: Mapping[str, bytes]) -> dict[str, Any]:
    """The manifest that fits these members."""

    def chain(name: str) -> dict[str, Any]:
        bodies = members[name].split(b"\n")[:-1]
        return {"entries": len(bodies), "head": hashlib.sha256(bodies[-1]).hexdigest()}

    log = None
    if "log/proof.json" in members:
        proof = json.loads(members["log/proof.json"])
        log = {"root": proof["root"], "size": proof["size"]}
    runs = sorted(name.split("/")[1] for name in members if name.startswith("runs/"))
    return {
        "created_at": "2026-11-30T12:30:00.000000Z",
        "export": None,
        "files": [
            {"bytes": len(members[name]), "path": name, "sha256": hashlib.sha256(members[name]).hexdigest()}
            for name in sorted(members)
        ],
        "format": "podium-bundle/1",
        "log": log,
        "producer": "podium test",
        "runs": [{**chain(f"runs/{run}/entries.jsonl"), "run": run} for run in runs],
        "system": chain("system/entries.jsonl") if "system/entries.jsonl" in members else None,
        "tenant": str(TENANT),
    }


def sealed(members: Mapping[str, bytes]) -> bytes:
    """The archive of these members with a manifest that fits them."""
    return pack({**members, "manifest.json": canonical(manifest_of(members))})


class PaperRun:
    """A run on paper: writes the entries that the engine would write, step by step, right or wrong."""

    def __init__(self, record: Record, pool: Pool | None = None, run: UUID = RUN, **created: Any) -> None:
        self.record = record
        self.id = run
        self.chain = record.chain(run)
        self.pool = pool or pool_of()
        document = pool_document(self.pool)
        self.digest = pool_digest(document)
        record.pools[self.digest] = document
        self.steps: list[tuple[str, str, Any]] = []
        self.outputs: dict[int, tuple[UUID, str]] = {}
        self.numbers: dict[int | None, int] = {}
        self.totals = {"attempts": 0, "input_tokens": 0, "output_tokens": 0, "cost_usd": "0", "unpriced": 0}
        self.states: dict[int, str] = {}
        self.state = "created"
        self.task = created.pop("task", "Say something about gravity.")
        said = {
            "origin": "file",
            "pool": self.digest,
            "execution": 1,
            "deadline": None,
            "rounds_max": 1,
            "depth": 0,
            "budget": None,
            "artifacts": [self.chain.commit(run, "task", self.task)],
        }
        self.chain.add("run.created", by="ann", **{**said, **created})

    def plan(self, steps: Sequence[tuple[str, str, Any]] = PLAN, *, attempt: UUID | None = None, **more: Any) -> str:
        """The plan's entry with all artifacts."""
        self.steps = list(steps)
        own = plan_id(self.id, 0)
        access = ["all" if reads == "all" else list(reads) for _, _, reads in steps]
        document = canonical(
            {
                "version": 1,
                "steps": [
                    {"access": access[at], "subtask": subtask, "worker": worker}
                    for at, (worker, subtask, _) in enumerate(steps)
                ],
            }
        )
        committed = [self.chain.commit(own, "plan_text", b"{}"), self.chain.commit(own, "plan", document)]
        rows = []
        for at, (worker, subtask, _) in enumerate(steps):
            committed.append(self.chain.commit(self._step(at), "subtask", subtask))
            rows.append(
                {
                    "step": at,
                    "id": str(self._step(at)),
                    "worker": worker,
                    "model": self.pool.worker(worker).model,
                    "access": access[at],
                    "reads": self._reads(at),
                    "round_before": False,
                    "skipped": False,
                }
            )
            self.states[at] = "pending"
        said = {"round": 0, "plan": str(own), "form": "json", "attempt": None if attempt is None else str(attempt)}
        return self.chain.add("plan.accepted", **{**said, "steps": rows, "notes": [], "artifacts": committed, **more})

    def _step(self, position: int) -> UUID:
        return step_id(self.id, 0, position)

    def _reads(self, position: int) -> list[int]:
        reads = self.steps[position][2]
        return list(range(position)) if reads == "all" else list(reads)

    def move(self, state: str) -> None:
        """Moves the run, if it is not there already."""
        if self.state != state:
            self.chain.add("run.changed", state=state, reason=None, old=self.state)
            self.state = state

    def attempt(self, position: int | None) -> UUID:
        """The id of the next attempt of a place."""
        number = self.numbers.get(position, 0) + 1
        return attempt_id(self.id, round=0, position=position, execution=1, dispatch=0, attempt=number)

    def prompt(self, position: int, reads: Sequence[int] | None = None) -> Prompt:
        """The prompt as the engine renders it; ``reads`` shows other steps than the access list opens."""
        worker, subtask, _ = self.steps[position]
        inputs = StepInputs(
            tenant_id=TENANT,
            pool_digest=self.digest,
            worker=worker,
            step_id=self._step(position),
            is_last=position == len(self.steps) - 1,
            task=Part(artifact_id(self.id, "task"), self.task),
            subtask=Part(artifact_id(self._step(position), "subtask"), subtask),
            visible=tuple(
                VisibleStep(
                    other,
                    Part(artifact_id(self._step(other), "subtask"), self.steps[other][1]),
                    Part(artifact_id(self.outputs[other][0], "output"), self.outputs[other][1]),
                )
                for other in (self._reads(position) if reads is None else reads)
                if other in self.outputs
            ),
        )
        return render_step(self.pool, inputs, NONCE)

    def plan_prompt(self) -> Prompt:
        """The prompt of a planning call."""
        task = Part(artifact_id(self.id, "task"), self.task)
        inputs = PlanInputs(TENANT, self.digest, plan_id(self.id, 0), planned=False, task=task, failed=())
        return render_plan_request(self.pool, inputs, NONCE)

    def send(self, position: int | None, prompt: Prompt | None = None, **more: Any) -> UUID:
        """An attempt is sent; returns its id. ``more`` overrides fields of the entry."""
        own = self.attempt(position)
        self.numbers[position] = self.numbers.get(position, 0) + 1
        if prompt is None:
            prompt = self.plan_prompt() if position is None else self.prompt(position)
        manifest = self.chain.commit(own, "prompt_manifest", prompt.manifest)
        salt = self.record.artifacts[artifact_id(own, "prompt_manifest")].salt
        self.move("planning" if position is None else "running")
        worker = self.pool.conductor if position is None else self.pool.worker(self.steps[position][0])
        moved = None
        if position is not None and self.states[position] != "running":
            moved = {"state": "running", "reason": None, "old": self.states[position]}
            self.states[position] = "running"
        said = {
            "attempt": str(own),
            "round": 0,
            "step": position,
            "number": self.numbers[position],
            "worker": worker.name,
            "model": worker.model,
            "fence": [1, 0, self.numbers[position]],
            "prompt": commitment(salt, PROMPT_DOMAIN, str(own), prompt.rendered).hex(),
            "shown": [str(one) for one in prompt.shown],
            "reserved": None,
            "artifacts": [manifest],
            "moved": moved,
        }
        self.chain.add("attempt.sent", **{**said, **more})
        self.totals["attempts"] += 1
        return own

    def close(self, position: int | None, own: UUID, text: str | None = "An answer.", **more: Any) -> str:
        """An attempt is closed; with a text it has succeeded. ``more`` overrides fields of the entry."""
        accepted = more.get("accepted", text is not None)
        committed = (
            [] if text is None else [self.chain.commit(own, "output" if position is not None else "plan_text", text)]
        )
        moved = None
        if accepted and position is not None:
            moved = {"state": "succeeded", "reason": None, "old": self.states[position]}
            self.states[position] = "succeeded"
            self.outputs[position] = (own, text or "")
        said = {
            "attempt": str(own),
            "round": 0,
            "step": position,
            "state": "failed" if text is None else "succeeded",
            "code": "server-error" if text is None else None,
            "notes": [],
            "accepted": accepted,
            "input_tokens": 10,
            "output_tokens": 5,
            "cost_usd": "0.25",
            "artifacts": committed,
            "moved": moved,
        }
        self.totals["input_tokens"] += 10
        self.totals["output_tokens"] += 5
        self.totals["cost_usd"] = format(float(self.totals["cost_usd"]) + 0.25, "g")
        return self.chain.add("attempt.closed", **{**said, **more})

    def perform(self, position: int, text: str | None = None) -> UUID:
        """Sends and closes."""
        own = self.send(position)
        self.close(position, own, text or f"Output of step {position}.")
        return own

    def end(self, state: str = "succeeded", **more: Any) -> str:
        """The closing entry."""
        said = {
            "state": state,
            "reason": None,
            "old": self.state,
            "entries_before": len(self.chain.bodies),
            "totals": dict(self.totals),
        }
        self.state = state
        return self.chain.add("run.closed", **{**said, **more})

    def whole(self) -> PaperRun:
        """Plan, all steps, the end."""
        self.plan()
        for position in range(len(self.steps)):
            self.perform(position)
        self.end()
        return self


def whole_record(pool: Pool | None = None) -> Record:
    """A record with one whole run, a second one beside it in the log, persons, and two signed checkpoints."""
    record = Record()
    record.system.add("person.linked", actor="ann-2", person="ann")
    run = PaperRun(record, pool)
    other = PaperRun(record, pool, run=uuid5(RUN, "other"), task="Another task.")
    run.plan()
    run.perform(0)
    other.plan()
    record.sign()
    own = run.send(1)
    other.perform(0)
    run.close(1, own, None)
    run.perform(1)
    run.perform(2)
    run.end()
    record.sign()
    return record
