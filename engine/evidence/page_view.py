"""What the page needs of a bundle's members: stories of the runs, texts with their states, prompts rendered again.

Prompts are rendered by the verifier's own renderer and held against the commitment that was made before the call, so
the page says of a prompt what the verifier will say of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from engine.evidence.redaction import artifact_of
from engine.evidence.spool import Spool
from engine.evidence.story import AttemptStory, RunStory, run_story
from engine.verifier.contents import PROMPT_DOMAIN, commitment
from engine.verifier.faults import InvalidError
from engine.verifier.pools import Pool, read_pool
from engine.verifier.rendering import read_manifest, render

# A longer text is shown up to here, and named by its file.
TEXT_CHARS_MAX: Final = 100_000
_WORDS: Final = {"redacted": "withheld at export", "erased": "erased"}


@dataclass(frozen=True, slots=True)
class ShownText:
    """A stored text as the page shows it: ``text`` or, where it is not there, why."""

    id: str
    kind: str
    size: int
    state: str
    text: str | None
    cut: bool = False

    @property
    def missing_words(self) -> str:
        """Why it is not shown."""
        return _WORDS.get(self.state, "not in this bundle")


@dataclass(frozen=True, slots=True)
class ShownPrompt:
    """A prompt rendered again: ``messages`` (role and text), or None with what is missing. ``proven`` is the check."""

    messages: tuple[tuple[str, str], ...] | None
    proven: bool
    why: str


@dataclass(slots=True)
class PageView:
    """A bundle on its way, as far as its page needs it."""

    spool: Spool
    described: Mapping[str, Any]
    artifacts: Mapping[str, Mapping[str, Any]]
    runs: Mapping[str, RunStory]
    unanchored: int
    # Who was shown an artifact: run and attempt, in the order of the entries.
    shown_to: dict[str, list[tuple[str, AttemptStory]]] = field(default_factory=dict)
    _read_pools: dict[str, Pool] = field(default_factory=dict)

    @classmethod
    def of(cls, spool: Spool, described: Mapping[str, Any]) -> PageView:
        """Reads the members that are there by now."""
        rows = {row["artifact"]: row for row in json.loads(spool.read("artifacts.json"))["artifacts"]}
        runs = {}
        for head in described["runs"]:
            lines = spool.read(f"runs/{head['run']}/entries.jsonl").split(b"\n")
            runs[head["run"]] = run_story(lines[:-1])
        entries = sum(head["entries"] for head in described["runs"])
        covered = 0
        if described["log"] is not None:
            leaves = json.loads(spool.read("log/proof.json"))["leaves"]
            covered = sum(len(leaves.get(head["run"], [])) for head in described["runs"])
        view = cls(spool, described, rows, runs, entries - covered)
        for run_id, story in runs.items():
            for attempt in story.attempts.values():
                for artifact in attempt.shown:
                    view.shown_to.setdefault(artifact, []).append((run_id, attempt))
        return view

    @property
    def counts(self) -> dict[str, int]:
        """How many stored texts are disclosed, redacted, erased."""
        found = {"disclosed": 0, "redacted": 0, "erased": 0}
        for row in self.artifacts.values():
            found[row["state"]] += 1
        return found

    @property
    def pools(self) -> list[str]:
        """The digests of the pools, sorted."""
        return sorted(
            {run.pool for run in self.runs.values()} | {str(run.created["pool"]) for run in self.runs.values()}
        )

    def pool(self, digest: str) -> Any:
        """A pool document; None if the bundle lacks it."""
        try:
            return json.loads(self.spool.read(f"pools/{digest}.json"))
        except KeyError:
            return None

    def ordered_runs(self) -> list[str]:
        """The runs, each followed by those below it."""
        below: dict[str, list[str]] = {}
        tops: list[str] = []
        for run_id, story in self.runs.items():
            parent = str(story.created.get("parent"))
            (below.setdefault(parent, []) if parent in self.runs else tops).append(run_id)
        ordered: list[str] = []
        stack = sorted(tops, reverse=True)
        while stack:
            run_id = stack.pop()
            ordered.append(run_id)
            stack += sorted(below.get(run_id, []), reverse=True)
        return ordered

    def role_of(self, run_id: str) -> str:
        """What a run is here for."""
        created = self.runs[run_id].created
        if "parent" in created:
            return f"made for step {created['parent_step']} of run {created['parent']}"
        if created.get("source"):
            return f"a fork of run {created['source']['run']}"
        return self.runs[run_id].state

    def text(self, artifact: str) -> ShownText:
        """A stored text."""
        row = self.artifacts.get(artifact)
        if row is None:
            return ShownText(artifact, "", 0, "absent", None)
        kind, size, state = row["kind"], row["bytes"], row["state"]
        if state != "disclosed":
            return ShownText(artifact, kind, size, state, None)
        content = self.spool.read(f"artifacts/{artifact}").decode("utf-8", "replace")
        return ShownText(artifact, kind, size, state, content[:TEXT_CHARS_MAX], len(content) > TEXT_CHARS_MAX)

    def output_of(self, attempt: str) -> str:
        """The artifact that is the output of an attempt."""
        return artifact_of(attempt, "output")

    def prompt(self, attempt: AttemptStory) -> ShownPrompt:
        """The prompt of an attempt, rendered again and compared with its commitment."""
        row = None if attempt.manifest is None else self.artifacts.get(attempt.manifest)
        if row is None or row["state"] != "disclosed":
            return ShownPrompt(None, proven=False, why="its manifest is not in this bundle")
        for artifact in attempt.shown:
            shown = self.artifacts.get(artifact)
            if shown is None or shown["state"] != "disclosed":
                words = _WORDS.get("absent" if shown is None else shown["state"], "not in this bundle")
                kind = "text" if shown is None else shown["kind"].replace("_", " ")
                return ShownPrompt(None, proven=False, why=f"a {kind} that it quotes is {words}")
        try:
            manifest = read_manifest(self.spool.read(f"artifacts/{attempt.manifest}"))
            rendered = render(manifest, self._pool(manifest.pool), self._whole, self._remarks)
        except (InvalidError, KeyError):
            return ShownPrompt(None, proven=False, why="this version cannot render it")
        said = commitment(bytes.fromhex(row["salt"]), PROMPT_DOMAIN, attempt.id, rendered)
        messages = tuple((message["role"], message["content"]) for message in json.loads(rendered))
        if said != attempt.sent["prompt"]:
            return ShownPrompt(messages, proven=False, why="it is not the prompt that was committed to before the call")
        return ShownPrompt(messages, proven=True, why="")

    def _pool(self, digest: str) -> Pool:
        if digest not in self._read_pools:
            self._read_pools[digest] = read_pool(digest, self.spool.read(f"pools/{digest}.json"))
        return self._read_pools[digest]

    def _whole(self, artifact: str) -> str:
        return self.spool.read(f"artifacts/{artifact}").decode("utf-8", "replace")

    def _remarks(self, plan_text: str) -> str:
        return self._whole(artifact_of(str(self.artifacts[plan_text]["owner"]), "plan_remarks"))
