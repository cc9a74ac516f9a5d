"""What reviewers had before their eyes: rendered again from the review's manifest and compared with its commitment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from engine.verifier.canonical import canonical, hex_bytes
from engine.verifier.chains import Entry
from engine.verifier.contents import Contents, artifact_id, commitment, derived_id
from engine.verifier.entry_types import committed
from engine.verifier.faults import Findings, InvalidError
from engine.verifier.records import Run
from engine.verifier.shapes import fields, is_count, is_hash, is_id, is_text, list_of, optional

REVIEW_DOMAIN: Final = b"podium/review/1/"
MANIFEST: Final = "review_manifest"
_SALT_BYTES: Final = 32
_MANIFEST = fields(
    {
        "version": is_count,
        "run": is_id,
        "gate": is_text,
        "round": is_count,
        "step": optional(is_count),
        "salt": is_text,
        "pool": is_hash,
        "steps": list_of(fields({"step": is_count, "worker": is_text, "model": is_text, "reads": list_of(is_count)})),
        "parts": list_of(fields({"role": is_text, "step": optional(is_count), "artifact": is_id})),
    }
)
# What a part of a display is: its role, the step that it is of, and the artifact.
Part = tuple[str, int | None, str]


class Displays:
    """Checks displays of one bundle. ``parts`` says by review which artifacts were displayed."""

    def __init__(self, contents: Contents, findings: Findings) -> None:
        self._contents = contents
        self._findings = findings
        self.parts: dict[str, frozenset[str]] = {}

    def check(self, run: Run, requested: Entry, *, holds: bool) -> None:
        """Checks the display of a review that is asked for. Raises InvalidError.

        Where something waits for it (``holds``) the run cannot change between the display and the request.
        """
        data = requested.data
        review = data["review"]
        is_committed = any(row["artifact"] == artifact_id(review, MANIFEST) for row in committed(data))
        if data["shown"] is None or not is_committed:
            raise InvalidError("it does not commit to what is displayed")
        unknown = f"what exactly was displayed in review {review}"
        content = self._contents.content(artifact_id(review, MANIFEST))
        if content is None:
            self._findings.unproven(f"{unknown}: its manifest is not disclosed")
            return
        manifest = _read(content)
        if manifest["version"] != 1:
            self._findings.unproven(f"{unknown}: a newer verifier is needed to render it")
            return
        place = (manifest["run"], manifest["gate"], manifest["round"], manifest["step"])
        if place != (run.id, data["gate"], data["round"], data["step"]):
            raise InvalidError("the display is that of another review")
        parts = frozenset(part["artifact"] for part in manifest["parts"])
        self.parts[review] = parts
        subject = self._subject(run, data)
        if subject not in parts:
            raise InvalidError("what is to be decided on was not displayed")
        self._check_parts(run, data, manifest)
        if holds:
            _check_facts(run, data, manifest)
        display = self._render(manifest)
        if display is None:
            self._findings.unproven(f"{unknown}: a text of it is not in the bundle")
            return
        salt = hex_bytes(manifest["salt"], _SALT_BYTES)
        if salt is None or commitment(salt, REVIEW_DOMAIN, review, display) != data["shown"]:
            raise InvalidError("the display, rendered again, is not the one that was committed to")

    def words(self, entry: Entry, kind: str) -> str | None:
        """The text of a kind that an entry commits to, if the bundle discloses it."""
        for row in committed(entry.data):
            content = self._contents.content(row["artifact"]) if row["kind"] == kind else None
            if content is not None:
                return content.decode("utf-8", "replace")
        return None

    def _subject(self, run: Run, data: Mapping[str, Any]) -> str:
        """The artifact that a reviewer must have seen."""
        if data["gate"] == "plan":
            return artifact_id(derived_id(run.id, f"plan/{data['round']}"), "plan")
        if data["gate"] == "before":
            return artifact_id(derived_id(run.id, f"step/{data['round']}/{data['step']}"), "subtask")
        return artifact_id(data["attempt"], "output")

    def _check_parts(self, run: Run, data: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
        """What is displayed is exactly what the engine displays at this gate: nothing beside it could mislead."""
        shown: list[Part] = [(part["role"], part["step"], part["artifact"]) for part in manifest["parts"]]
        number, position, subject = data["round"], data["step"], self._subject(run, data)
        parts: list[Part] = [("task", None, artifact_id(run.id, "task"))]
        if position is None:
            parts.append(("plan", None, subject))
        else:
            subtask = artifact_id(derived_id(run.id, f"step/{number}/{position}"), "subtask")
            parts.append(("subtask", position, subtask))
        if data["gate"] == "before":
            steps = run.rounds[number].steps
            sources = [steps[source] for source in steps[position].reads]
            parts += [
                ("input", step.position, artifact_id(step.accepted, "output"))
                for step in sources
                if step.accepted is not None
            ]
        elif position is not None:
            parts.append(("output", position, subject))
        if shown != parts:
            raise InvalidError("the display has other parts than what is reviewed at this gate")

    def _render(self, manifest: Mapping[str, Any]) -> bytes | None:
        parts = []
        for part in manifest["parts"]:
            content = self._contents.content(part["artifact"])
            if content is None:
                return None
            parts.append({**part, "text": content.decode("utf-8", "replace")})
        facts = {key: value for key, value in manifest.items() if key not in ("salt", "parts")}
        try:
            return canonical({**facts, "parts": parts})
        except (ValueError, RecursionError):
            raise InvalidError("the review's manifest cannot be rendered") from None


def _check_facts(run: Run, data: Mapping[str, Any], manifest: Mapping[str, Any]) -> None:
    """The display names the pool, and the workers that have the steps."""
    steps = run.rounds[data["round"]].steps
    shown = steps if data["step"] is None else [steps[data["step"]]]
    workers = [(step.position, step.worker, list(step.reads)) for step in shown]
    named = [(row["step"], row["worker"], row["reads"]) for row in manifest["steps"]]
    if manifest["pool"] != run.pool or named != workers:
        raise InvalidError("the display names another pool, or other workers, than those that have the steps")
    basis = data["basis"] if data["gate"] == "before" else None
    if basis is not None and any(
        (row["worker"], row["model"]) != (basis["worker"], basis["model"]) for row in manifest["steps"]
    ):
        raise InvalidError("the display names another worker than the request")


def _read(content: bytes) -> Mapping[str, Any]:
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError):
        raise InvalidError("the review's manifest cannot be read") from None
    if not _MANIFEST(manifest):
        raise InvalidError("the review's manifest does not have the fields of one")
    return dict(manifest)
