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
from engine.verifier.shapes import fields, is_count, is_id, is_text, list_of, optional

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
        "parts": list_of(fields({"role": is_text, "step": optional(is_count), "artifact": is_id})),
    }
)


class Displays:
    """Checks displays of one bundle. ``parts`` says by review which artifacts were displayed."""

    def __init__(self, contents: Contents, findings: Findings) -> None:
        self._contents = contents
        self._findings = findings
        self.parts: dict[str, frozenset[str]] = {}

    def check(self, run: Run, requested: Entry) -> None:
        """Checks the display of a review that is asked for. Raises InvalidError."""
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
        if subject is not None and subject not in parts:
            raise InvalidError("what is to be decided on was not displayed")
        display = self._render(manifest)
        if display is None:
            self._findings.unproven(f"{unknown}: a text of it is not in the bundle")
            return
        salt = hex_bytes(manifest["salt"], _SALT_BYTES)
        if salt is None or commitment(salt, REVIEW_DOMAIN, review, display) != data["shown"]:
            raise InvalidError("the display, rendered again, is not the one that was committed to")

    def _subject(self, run: Run, data: Mapping[str, Any]) -> str | None:
        """The artifact that a reviewer must have seen."""
        if data["gate"] == "plan":
            return artifact_id(derived_id(run.id, f"plan/{data['round']}"), "plan")
        if data["gate"] == "before":
            return artifact_id(derived_id(run.id, f"step/{data['round']}/{data['step']}"), "subtask")
        attempt = data.get("attempt")
        return None if attempt is None else artifact_id(attempt, "output")

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


def _read(content: bytes) -> Mapping[str, Any]:
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError):
        raise InvalidError("the review's manifest cannot be read") from None
    if not _MANIFEST(manifest):
        raise InvalidError("the review's manifest does not have the fields of one")
    return dict(manifest)
