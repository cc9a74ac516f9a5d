"""Reviews on paper: the entries that the engine would write about them, right or wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid5

from engine.ledger.commitment import commitment
from engine.ledger.entry import timestamp
from engine.ledger.reviews import REVIEW_DOMAIN
from engine.operations.meanings import usual_meaning
from engine.store.gates import GateRule
from engine.store.ids import artifact_id, plan_id, step_id
from engine.verifier.canonical import canonical
from tests.support.bundles import RUN, PaperRun, Record, pool_of
from worker_pools.pool.reviews import Escalation, ReviewRule


def paper(*rules: str) -> PaperRun:
    """A run whose pool has these rules for reviews."""
    return PaperRun(Record(), pool_of(f"{{reviews: [{', '.join(rules)}]}}"))


class Reviewing:
    """Writes the entries of one review."""

    def __init__(self, run: PaperRun, gate: str, position: int | None, *, rule: int = 0, **more: Any) -> None:
        self.run, self.chain = run, run.chain
        self.id = uuid5(RUN, f"review/{len(run.chain.bodies)}")
        self.gate = gate
        said = run.pool.policy.reviews[rule]
        attempt = None
        if gate in {"after", "answer"} and position is not None:
            attempt = more.pop("attempt", None) or UUID(self.last("attempt.closed", position)["attempt"])
        self.subject = more.pop("subject", None) or self._subject(gate, position)
        self.shown, manifest = self._display(
            gate, position, attempt, more.pop("text", None), more.pop("manifest", None)
        )
        plan = next(row for row in self.last("plan.accepted", None)["artifacts"] if row["kind"] == "plan")
        asked = {
            "review": str(self.id),
            "gate": gate,
            "round": 0,
            "step": position,
            "holds": True,
            "subject": self.subject,
            "plan": plan["commitment"],
            "policy": said.digest,
            "shown": self.shown,
            "reason": GateRule(said.document).reason,
            "execution": 1,
            "level": 0,
            "approvals": said.approvals,
            "four_eyes": said.four_eyes,
            "reviewers": list(said.reviewers),
            "excluded": ["ann"],
            "bypass": said.bypass,
            "expires_at": None,
            "on_expiry": None,
            "attempt": None if attempt is None else str(attempt),
            "basis": None if gate != "before" or position is None else self._basis(position),
            "artifacts": [manifest],
        }
        asked = {**asked, **more}
        if "expires_at" not in more:
            asked = {**asked, **self._expiry(said, asked["level"], holds=asked["holds"])}
        self.chain.add("review.requested", **{**asked, **more})

    def _expiry(self, rule: ReviewRule, level: int, *, holds: bool) -> dict[str, Any]:
        """When the review expires by its rule, and what follows then."""
        part: ReviewRule | Escalation = rule if level == 0 or rule.escalate is None else rule.escalate
        if part.expires_s is None or not holds:
            return {}
        # The entry is written at the next tick.
        at = self.run.record.last() + timedelta(seconds=1 + part.expires_s)
        return {"expires_at": timestamp(at), "on_expiry": part.on_expiry}

    def _basis(self, position: int) -> dict[str, Any]:
        worker = self.run.pool.worker(self.run.steps[position][0])
        return {"worker": worker.name, "model": worker.model, "attempts_base": 0, "sent_back": 0}

    def last(self, type_: str, position: int | None) -> dict[str, Any]:
        """The data of the newest entry of a type, for a step."""
        return self._entry(type_, position)[0]

    def _entry(self, type_: str, position: int | None) -> tuple[dict[str, Any], str]:
        for number in range(len(self.chain.bodies), 0, -1):
            entry = json.loads(self.chain.bodies[number - 1])
            if entry["type"] == type_ and (position is None or entry["data"]["step"] == position):
                return entry["data"], self.chain.hash(number)
        raise AssertionError(type_)

    def _subject(self, gate: str, position: int | None) -> str:
        return (
            self._entry("plan.accepted", None)[1]
            if gate in {"plan", "before"}
            else self._entry("attempt.closed", position)[1]
        )

    def _display(
        self,
        gate: str,
        position: int | None,
        attempt: UUID | None,
        text: str | None,
        change: Callable[[dict[str, Any]], None] | None,
    ) -> tuple[str, dict[str, Any]]:
        """What is shown, as the engine renders it: the commitment, and the manifest's artifact.

        The last part may have another ``text`` than is stored; ``change`` may forge facts and parts.
        """
        owners: list[tuple[str, int | None, UUID, str]] = [("task", None, RUN, "task")]
        if position is None:
            owners.append(("plan", None, plan_id(RUN, 0), "plan"))
        else:
            owners.append(("subtask", position, step_id(RUN, 0, position), "subtask"))
        if gate == "before" and position is not None:
            reads = [other for other in self.run.steps[position][2] if other in self.run.outputs]
            owners += [("input", other, self.run.outputs[other][0], "output") for other in reads]
        if attempt is not None:
            owners.append(("output", position, attempt, "output"))
        parts = [
            {"role": role, "step": step, "owner": str(owner), "kind": kind, "artifact": str(artifact_id(owner, kind))}
            for role, step, owner, kind in owners
        ]
        facts = {
            "run": str(RUN),
            "gate": gate,
            "round": 0,
            "step": position,
            "pool": self.run.digest,
            "steps": [
                {"step": at, "worker": worker, "model": self.run.pool.worker(worker).model, "reads": list(reads)}
                for at, (worker, _, reads) in enumerate(self.run.steps)
                if position in {None, at}
            ],
            "version": 1,
        }
        said: dict[str, Any] = {**facts, "parts": parts}
        if change is not None:
            change(said)
        found = [self.run.record.artifacts[UUID(part["artifact"])].content.decode() for part in said["parts"]]
        if text is not None:
            found[-1] = text
        texts = [{**part, "text": one} for part, one in zip(said["parts"], found, strict=True)]
        shown = canonical({**said, "parts": texts})
        salt = bytes(32)
        manifest = canonical({**said, "salt": salt.hex()})
        stored = self.chain.commit(self.id, "review_manifest", manifest)
        return commitment(salt, REVIEW_DOMAIN, str(self.id), shown).hex(), stored

    def decide(self, by: str, decision: str = "approve", *, words: str = "I checked it.", **more: Any) -> Reviewing:
        """Somebody decides."""
        order = uuid5(self.id, f"decision/{by}/{len(self.chain.bodies)}")
        said: dict[str, Any] = {
            "review": str(self.id),
            "order": str(order),
            "decision": decision,
            "meaning": usual_meaning(self.gate, decision, None)[0],
            "person": by,
            "subject": self.subject,
            "shown": self.shown,
            "checkpoint": 0,
        }
        if "artifacts" not in more:
            said["artifacts"] = [self.chain.commit(order, "meaning", words)]
            if decision != "approve":
                said["artifacts"].append(self.chain.commit(order, "reason", "because"))
        self.chain.add("review.decided", by=by, **{**said, **more})
        return self

    def close(self, state: str = "approved", *, sent_back: bool = False) -> Reviewing:
        """The review ends."""
        self.chain.add("review.closed", review=str(self.id), state=state, sent_back=sent_back, moved=None)
        return self

    def break_glass(self, by: str, **more: Any) -> Reviewing:
        """Somebody lets the run go on without it."""
        order = uuid5(self.id, f"broken/{by}")
        said: dict[str, Any] = {"review": str(self.id), "order": str(order), "person": by}
        if "artifacts" not in more:
            texts = (("meaning", "Later."), ("reason", "because"))
            said["artifacts"] = [self.chain.commit(order, kind, text) for kind, text in texts]
        self.chain.add("review.bypassed", by=by, **{**said, **more})
        return self

    def approve(self, *people: str) -> Reviewing:
        """These people approve, and it ends."""
        for person in people:
            self.decide(person)
        return self.close()


def propose(run: PaperRun, position: int, text: str = "An output to be reviewed.") -> UUID:
    """An output that waits for people."""
    own = run.send(position)
    run.close(position, own, text, accepted=False, moved={"state": "waiting", "reason": "review", "old": "running"})
    run.states[position] = "waiting"
    return own


def accept(run: PaperRun, position: int, own: UUID, text: str = "An output to be reviewed.") -> None:
    """The output is accepted after its reviews."""
    run.chain.add(
        "step.changed", round=0, step=position, state="succeeded", reason=None, old="waiting", attempt=str(own)
    )
    run.states[position] = "succeeded"
    run.outputs[position] = (own, text)


def finish(run: PaperRun, *positions: int) -> None:
    for position in positions:
        run.perform(position)
    run.end()
