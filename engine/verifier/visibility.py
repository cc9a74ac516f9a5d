"""What each model was shown: the manifest against the access list, the prompt rendered again against its commitment.

Whatever a prompt is made of is named in its entry and its manifest. So that a model was never shown a text is a
statement about these names, and the rendered bytes prove that the names tell the truth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from engine.verifier.canonical import parse
from engine.verifier.chains import Entry
from engine.verifier.contents import PROMPT_DOMAIN, Contents, artifact_id, commitment, derived_id
from engine.verifier.entry_types import committed
from engine.verifier.faults import Findings, InvalidError
from engine.verifier.inert import make_inert
from engine.verifier.pools import Pool
from engine.verifier.records import ACCEPTED_STATES, Attempt, Round, Run, Step
from engine.verifier.rendering import Manifest, TextMissingError, UnknownRendererError, messages, read_manifest, render

MANIFEST = "prompt_manifest"
# What a hostile bundle may cost: bytes of prompts rendered, characters of texts that are made inert for them, and
# brackets in these texts. Each bracket may begin a mark, and looking costs a hundred times as much as a letter does.
RENDERED_BYTES_MAX: Final = 4 * 2**30
INERT_CHARS_MAX: Final = 128 * 2**20
INERT_BRACKETS_MAX: Final = 4 * 2**20
_CACHE_CHARS_MAX: Final = 64 * 2**20


class TooMuchError(Exception):
    """The bundle has more text than prompts are rendered of."""


class Visibility:
    """Checks plans and prompts of one bundle."""

    def __init__(self, contents: Contents, findings: Findings) -> None:
        self._contents = contents
        self._findings = findings
        # Comments of reviewers by run, round and position: a step that was sent back may be shown them.
        self._comments: dict[tuple[str, int, int | None], set[str]] = {}
        # The task of each child run as its parent's entries give it.
        self.child_tasks: dict[str, str] = {}
        # The inert forms of texts, made once for all prompts that show them.
        self._inert: dict[str, str] = {}
        # What the calls of a place made, by run, round and position, with how many calls that covers: a place may have
        # thousands, and each of them may have been shown what those before it made.
        self._made: dict[tuple[str, int, int | None], tuple[int, set[str]]] = {}
        # The remarks that belong to each text of a planning call, by run and text.
        self._remarks_of: dict[tuple[str, str], str] = {}
        self._cached = self._made_inert = self._brackets = self._rendered = 0

    def comment(self, run: str, place: tuple[int, int | None], entry: Entry) -> None:
        """Remembers what reviewers wrote about a place."""
        kinds = self._comments.setdefault((run, *place), set())
        kinds.update(row["artifact"] for row in committed(entry.data))

    # Plans

    def plan(self, run: Run, plan: Round) -> None:
        """Compares the canonical plan, if it is disclosed, with what its entry says. Raises InvalidError."""
        owner = derived_id(run.id, f"plan/{plan.number}")
        rows = {row["artifact"]: row["kind"] for row in committed(plan.entry.data)}
        expected = {artifact_id(owner, "plan")} | {
            artifact_id(self._step_id(run, step), "subtask") for step in plan.steps
        }
        if not expected <= rows.keys():
            raise InvalidError("it does not commit to the plan and to each subtask")
        content = self._contents.content(artifact_id(owner, "plan"))
        if content is None:
            return
        document = parse(content)
        steps = [
            {"access": row["access"], "worker": row["worker"], "subtask": self._subtask(run, step)}
            for row, step in zip(plan.entry.data["steps"], plan.steps, strict=True)
        ]
        if any(step["subtask"] is None for step in steps):
            # Redacted subtasks stand in the plan, so it is redacted with them; if not, compare what can be.
            self._findings.unproven(
                f"that the plan of round {plan.number} of run {run.id} has the subtasks it commits to"
            )
            return
        if document != {"version": 1, "steps": steps}:
            raise InvalidError("the canonical plan says something else than the entry")

    def _step_id(self, run: Run, step: Step) -> str:
        return derived_id(run.id, f"step/{step.round}/{step.position}")

    def _subtask(self, run: Run, step: Step) -> str | None:
        content = self._contents.content(artifact_id(self._step_id(run, step), "subtask"))
        return None if content is None else content.decode("utf-8", "replace")

    # Prompts

    def attempt(self, run: Run, pool: Pool, attempt: Attempt) -> None:
        """Checks what an attempt was shown. Raises InvalidError."""
        name = artifact_id(attempt.id, MANIFEST)
        if name not in {row["artifact"] for row in committed(attempt.sent.data)}:
            raise InvalidError("it does not commit to its prompt's manifest")
        manifest = self._manifest(name, f"attempt {attempt.id}")
        attempt.shown = self._shown(run, attempt.sent, manifest)
        if attempt.shown is None:
            return
        step = None if attempt.step is None else run.step(attempt.round, attempt.step)
        allowed = self._planning_inputs(run, attempt) if step is None else self._step_inputs(run, step)
        self._only(attempt.shown, allowed, "the model was shown")
        if manifest is None:
            return
        if manifest.kind != ("plan" if step is None else "step") or manifest.pool != pool.digest:
            raise InvalidError("the prompt's manifest is of another kind of call, or of another pool")
        if step is not None:
            self._names_its_steps(run, step, manifest)
        self._compare(attempt, pool, manifest, name)

    def child(self, run: Run, pool: Pool, step: Step, entry: Entry) -> None:
        """Checks what the task of a child run is made of. Raises InvalidError."""
        if "shown" not in entry.data or step.child is None:
            # Begun again, or by a Podium that did not write it down.
            return
        name = artifact_id(step.child, MANIFEST)
        manifest = self._manifest(name, f"the task of run {step.child}")
        shown = self._shown(run, entry, manifest)
        if shown is None:
            return
        self._only(shown, self._step_inputs(run, step), "the child run's task is made of")
        if manifest is None:
            return
        self._names_its_steps(run, step, manifest)
        try:
            rendered = messages(manifest, pool, self._inert_text, self._remarks, is_inert=True)
        except TextMissingError:
            return
        except TooMuchError:
            self._findings.undecidable(f"the task of run {step.child}: there is too much text to render it again")
            return
        self._rendered += sum(len(content) for _, content in rendered)
        self.child_tasks[step.child] = "\n\n".join(content for _, content in rendered)

    def _manifest(self, name: str, whose: str) -> Manifest | None:
        content = self._contents.content(name)
        if content is None:
            self._findings.unproven(f"the exact prompt of {whose}: its manifest is not disclosed")
            return None
        try:
            return read_manifest(content)
        except UnknownRendererError:
            self._findings.unproven(f"the exact prompt of {whose}: a newer verifier is needed to render it")
            return None

    def _shown(self, run: Run, entry: Entry, manifest: Manifest | None) -> frozenset[str] | None:
        """The artifacts that a prompt is made of, by its entry and by its manifest."""
        said = entry.data.get("shown")
        if manifest is None:
            return None if said is None else frozenset(said)
        parts = set(manifest.parts)
        if manifest.kind == "plan":
            # What the parser had to say about a plan's text belongs to it.
            parts |= {self._remarks_id(run, entry.data["round"], repair) for repair in manifest.document["repairs"]}
        if said is not None and set(said) != parts:
            raise InvalidError("the entry names other artifacts as shown than the prompt's manifest")
        return frozenset(parts)

    def _remarks_id(self, run: Run, number: int, repair: str) -> str:
        self._made_by(run, (number, None), run.planning.get(number, []))
        remarks = self._remarks_of.get((run.id, repair))
        if remarks is None:
            raise InvalidError("the prompt shows a plan's text that is not one of this run's round")
        return remarks

    def _made_by(self, run: Run, place: tuple[int, int | None], attempts: Sequence[Attempt]) -> set[str]:
        """The outputs, or the plans' texts, that the calls of a place may have made."""
        count, made = self._made.get((run.id, *place), (0, set()))
        for attempt in attempts[count:]:
            if attempt.step is None:
                text, remarks = (artifact_id(attempt.id, kind) for kind in ("plan_text", "plan_remarks"))
                self._remarks_of[run.id, text] = remarks
                made |= {text, remarks}
            else:
                made.add(artifact_id(attempt.id, "output"))
        self._made[(run.id, *place)] = (len(attempts), made)
        return made

    def _only(self, shown: frozenset[str], allowed: Sequence[set[str]], words: str) -> None:
        for one in allowed:
            # As costly as what was shown is long, however much is allowed.
            shown -= one
        for artifact in sorted(shown):
            row = self._contents.listed(artifact)
            kind = "a text" if row is None else f"the {row.kind}"
            raise InvalidError(f"{words} {kind} {artifact}, which its access list does not open")

    def _step_inputs(self, run: Run, step: Step) -> list[set[str]]:
        """Everything that the prompt of a step may be made of."""
        allowed = {artifact_id(run.id, "task"), artifact_id(self._step_id(run, step), "subtask")}
        for other in self._readable(run, step):
            allowed.add(artifact_id(self._step_id(run, other), "subtask"))
            if other.accepted is not None:
                allowed.add(artifact_id(other.accepted, "output"))
        if step.child_ended is not None and step.child_ended.data.get("answer") is not None:
            allowed.add(artifact_id(step.child_ended.data["answer"], "output"))
        place = (step.round, step.position)
        return [allowed, self._made_by(run, place, step.attempts), self._comments.get((run.id, *place), set())]

    def _readable(self, run: Run, step: Step) -> list[Step]:
        """The steps that a step may read and that have an output."""
        found = [run.rounds[step.round].steps[source] for source in step.reads]
        if step.reads_round_before:
            found = [*run.rounds[step.round - 1].steps, *found]
        return [other for other in found if other.state in ACCEPTED_STATES]

    def _planning_inputs(self, run: Run, attempt: Attempt) -> list[set[str]]:
        allowed = {artifact_id(run.id, "task")}
        before = run.rounds.get(attempt.round - 1)
        if before is not None:
            allowed.add(artifact_id(derived_id(run.id, f"plan/{attempt.round - 1}"), "plan"))
            if before.steps and before.steps[-1].accepted is not None:
                allowed.add(artifact_id(before.steps[-1].accepted, "output"))
        return [allowed, self._made_by(run, (attempt.round, None), run.planning[attempt.round])]

    def _names_its_steps(self, run: Run, step: Step, manifest: Manifest) -> None:
        """A step's prompt names every step that it may read, once, with its own texts."""
        document = manifest.document
        expected = [
            (
                other.position,
                None if other.round == step.round else other.round,
                artifact_id(self._step_id(run, other), "subtask"),
                None if other.accepted is None else artifact_id(other.accepted, "output"),
            )
            for other in self._readable(run, step)
        ]
        named = [(row["step"], row.get("round"), row["asked"], row["answer"]) for row in document["steps"]]
        is_last = step.position == len(run.rounds[step.round].steps) - 1
        own = (document["task"], document["subtask"], document["final"])
        if named != expected or own != (
            artifact_id(run.id, "task"),
            artifact_id(self._step_id(run, step), "subtask"),
            is_last,
        ):
            raise InvalidError("the prompt was not made of exactly the steps that the access list opens")

    def _compare(self, attempt: Attempt, pool: Pool, manifest: Manifest, name: str) -> None:
        try:
            rendered = render(manifest, pool, self._inert_text, self._remarks, is_inert=True)
            self._rendered += len(rendered)
        except TooMuchError:
            self._findings.undecidable(f"the prompt of attempt {attempt.id}: there is too much text to render it again")
            return
        except TextMissingError:
            self._findings.unproven(f"the exact prompt of attempt {attempt.id}: a text of it is not in the bundle")
            return
        salt = self._contents.salt(name) or b""
        if commitment(salt, PROMPT_DOMAIN, attempt.id, rendered) != attempt.sent.data["prompt"]:
            raise InvalidError("the prompt, rendered again, is not the one that was committed to")
        attempt.rendered = True

    def _inert_text(self, artifact: str) -> str:
        """The text as prompts show it. Raises TextMissingError, and TooMuchError where the bundle's share is used."""
        if self._rendered > RENDERED_BYTES_MAX:
            raise TooMuchError("too much text")
        known = self._inert.get(artifact)
        if known is not None:
            return known
        text = self._spent(self._text(artifact))
        inert = make_inert(text)
        if self._cached + len(inert) <= _CACHE_CHARS_MAX:
            self._inert[artifact] = inert
            self._cached += len(inert)
        return inert

    def _spent(self, text: str) -> str:
        """The text, which is about to be made inert. Raises TooMuchError where the bundle's share is used."""
        self._made_inert += len(text)
        self._brackets += text.count("<") + text.count("[") + text.count("]")
        if self._made_inert > INERT_CHARS_MAX or self._brackets > INERT_BRACKETS_MAX:
            raise TooMuchError("too much text")
        return text

    def _text(self, artifact: str) -> str:
        content = self._contents.content(artifact)
        if content is None:
            raise TextMissingError("a text is missing")
        return content.decode("utf-8", "replace")

    def _remarks(self, plan_text: str) -> str:
        row = self._contents.listed(plan_text)
        if row is None:
            raise TextMissingError("a text is missing")
        # What it quotes is made inert by the renderer, each time anew.
        return self._spent(self._text(artifact_id(row.owner, "plan_remarks")))


def child_task_fault(run: Run, visibility: Visibility, contents: Contents) -> str | None:
    """What is wrong with a child run's task, if its parent's entries say what it is; None if nothing is."""
    expected = visibility.child_tasks.get(run.id)
    content = contents.content(artifact_id(run.id, "task"))
    if expected is None or content is None or content == expected.encode("utf-8", "replace"):
        return None
    return "the task is not the prompt of the step that the run was made for"


def owners(entry: Entry) -> set[str] | None:
    """Whom the artifacts of an entry may belong to; None where that does not follow from the entry."""
    data: Mapping[str, Any] = entry.data
    if entry.type == "plan.accepted":
        places = [(data["round"], row["step"]) for row in data["steps"]]
        steps = {derived_id(entry.chain, f"step/{number}/{position}") for number, position in places}
        return {derived_id(entry.chain, f"plan/{data['round']}"), *steps}
    if entry.type == "run.created":
        return {entry.chain}
    name = {"child.begun": "child", "review.requested": "review", "review.commented": "comment"}.get(entry.type)
    if entry.type.startswith("attempt."):
        name = "attempt"
    elif "order" in data:
        name = "order"
    return {data[name]} if name is not None and name in data else None
