"""Three parallel lists become steps, for model text and the JSON object. Must never pair lists of unequal length."""

from __future__ import annotations

from collections.abc import Mapping as Lookup
from typing import Final

from engine.plan.access import AccessReader, StepNumbers
from engine.plan.findings import Findings, quoted
from engine.plan.limits import STEPS_SCANNED_MAX
from engine.plan.nodes import Node, Sequence, Text, Word
from engine.plan.plan import Step
from engine.plan.workers import StepPlace, WorkerNames

MODEL_ID: Final = "model_id"
SUBTASKS: Final = "subtasks"
ACCESS_LIST: Final = "access_list"
LIST_NAMES: Final = (MODEL_ID, SUBTASKS, ACCESS_LIST)

_FROM_ONE: Final = "the plan looks counted from 1; workers and steps are counted from 0"


def read_lists(values: Lookup[str, Node], workers: WorkerNames, findings: Findings) -> tuple[Step, ...] | None:
    """Steps from the values of the three lists, or None after recording every fault.

    All three must be there; a value that is no list in brackets is a fault. Entries are checked one by one even if
    the lengths differ, so that one answer names everything.
    """
    lists: dict[str, list[Node]] = {}
    for name in LIST_NAMES:
        value = values[name]
        if isinstance(value, Sequence):
            lists[name] = value.items
        elif not (isinstance(value, Word) and value.kind == "void"):
            shown = (
                quoted(value.value if isinstance(value, Text) else value.text)
                if isinstance(value, Text | Word)
                else "{"
            )
            findings.error(
                "list-expected", f"{name} must be a list in brackets, not {shown}", at=value.start, field=name
            )
    count = max((len(items) for items in lists.values()), default=0)
    _compare_lengths(lists, values, findings)
    from_one = _FROM_ONE if _looks_counted_from_one(lists, len(workers.names)) else None
    names = [
        workers.resolve(node, StepPlace(position, f"step {position}", MODEL_ID), findings, from_one)
        for position, node in enumerate(lists.get(MODEL_ID, []))
    ]
    subtasks = [
        read_subtask(node, StepPlace(position, f"step {position}", SUBTASKS), findings)
        for position, node in enumerate(lists.get(SUBTASKS, []))
    ]
    reader = AccessReader(StepNumbers(tuple(range(count)), from_one), ACCESS_LIST, findings)
    access = [reader.resolve(node, position) for position, node in enumerate(lists.get(ACCESS_LIST, []))]
    steps = []
    if not findings.faults:
        for position, (worker, subtask, visible) in enumerate(zip(names, subtasks, access, strict=True)):
            if worker is not None and subtask is not None and visible is not None:
                steps.append(Step(position, worker, subtask, visible))
    return None if findings.faults else tuple(steps)


def read_subtask(node: Node, place: StepPlace, findings: Findings) -> str | None:
    """The text of one subtask or instruction, word for word; notes say what cleaning and TeX changed or kept."""
    if isinstance(node, Word) and node.kind == "void":
        return None
    if not isinstance(node, Text):
        shown = quoted(node.text) if isinstance(node, Word) else "a bracketed value"
        code = "yaml-ambiguous" if isinstance(node, Word) and node.kind == "ambiguous" else "subtask-not-text"
        hint = "put the text in quotes"
        findings.error(code, f"{place.name}: {shown} is not a text", at=node.start, field=place.field, hint=hint)
        return None
    if node.comment_at is not None:
        findings.error(
            "yaml-comment",
            f"{place.name}: YAML takes what follows for a comment, the worker would not see it",
            at=node.comment_at,
            field=place.field,
            hint="put the text in quotes",
        )
    if not node.value.strip():
        findings.error("subtask-empty", f"{place.name}: the text is empty", at=node.start, field=place.field)
        return None
    if node.cleaned.changed:
        findings.note("text-cleaned", node.cleaned.describe(), field=place.field, position=place.position)
    if node.tex_kept:
        kept = quoted(", ".join("\\" + command for command in node.tex_kept))
        findings.note("tex-kept", f"kept as written: {kept}", field=place.field, position=place.position)
    return node.value


def _compare_lengths(lists: dict[str, list[Node]], values: Lookup[str, Node], findings: Findings) -> None:
    lengths = {name: len(items) for name, items in lists.items()}
    if len(set(lengths.values())) <= 1:
        return
    counts = list(lengths.values())
    odd = [name for name, length in lengths.items() if counts.count(length) == 1]
    field = odd[0] if len(odd) == 1 else None
    said = ", ".join(f"{name} {length}" for name, length in lengths.items())
    at = values[field or next(iter(lengths))].start
    findings.error("length-mismatch", f"the lists have different lengths: {said}", at=at, field=field)


def _looks_counted_from_one(lists: dict[str, list[Node]], workers_count: int) -> bool:
    """Whether the plan fails as it stands and would hold if workers, or steps, were counted from 1.

    Only for a hint: nothing is ever shifted.
    """
    workers = _integers(lists.get(MODEL_ID, []))
    references = [
        (number, position)
        for position, entry in enumerate(lists.get(ACCESS_LIST, [])[:STEPS_SCANNED_MAX])
        for number in _integers(entry.items if isinstance(entry, Sequence) else [entry])
    ]
    workers_fit = all(1 <= number <= workers_count for number in workers)
    references_fit = all(1 <= number <= position for number, position in references)
    failing = workers_count in workers or any(number == position for number, position in references)
    return failing and workers_fit and references_fit


def _integers(nodes: list[Node]) -> list[int]:
    return [int(node.text) for node in nodes if isinstance(node, Word) and node.kind == "integer"]
