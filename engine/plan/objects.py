"""Step objects become steps; shared by JSON and YAML. Must never drop a key that it does not know.

References mean the `step` numbers where these are given, and otherwise count from 1; workers are counted from 0.
"""

from __future__ import annotations

import difflib
from typing import Final

from engine.plan.access import AccessReader, StepNumbers
from engine.plan.findings import Findings, quoted
from engine.plan.lists import LIST_NAMES, read_lists, read_subtask
from engine.plan.nodes import Mapping, Node, Sequence, Text, Word
from engine.plan.plan import Step
from engine.plan.workers import StepPlace, WorkerNames

AGENT: Final = "agent"
INSTRUCTION: Final = "instruction"
ACCESS: Final = "access_list"
STEP: Final = "step"
STEPS: Final = "steps"
REQUIRED_KEYS: Final = (AGENT, INSTRUCTION, ACCESS)
STEP_KEYS: Final = (*REQUIRED_KEYS, STEP)

_FROM_ZERO: Final = "the references look counted from 0; in this form steps count from 1 or by their step numbers"


def read_list_object(node: Mapping, workers: WorkerNames, findings: Findings) -> tuple[Step, ...] | None:
    """Steps from a JSON object with the three list keys, and no other key."""
    _check_keys(node, LIST_NAMES, LIST_NAMES, "the plan", findings)
    values: dict[str, Node] = {}
    for key, value in node.entries:
        values.setdefault(key.value, value)
    void = Word("", node.start, node.start, "void")
    return read_lists({name: values.get(name, void) for name in LIST_NAMES}, workers, findings)


def read_steps(node: Node, workers: WorkerNames, findings: Findings) -> tuple[Step, ...] | None:
    """Steps from a list of step objects or a `steps:` wrapper round it, or None after recording every fault."""
    if isinstance(node, Mapping):
        keys = {key.value for key, _ in node.entries}
        if STEPS not in keys:
            _no_steps(node, alone=bool(keys & set(STEP_KEYS)), findings=findings)
            return None
        _check_keys(node, (STEPS,), (STEPS,), "the plan", findings)
        node = next(value for key, value in node.entries if key.value == STEPS)
    if not isinstance(node, Sequence) or node.bracket == "(":
        findings.error("list-expected", "steps must be a list of step objects", at=node.start, field=STEPS)
        return None
    numbers = _step_numbers(node.items, findings)
    reader = AccessReader(numbers, ACCESS, findings)
    steps = [
        _read_step(item, StepPlace(position, numbers.name(position), STEPS), workers, reader, findings)
        for position, item in enumerate(node.items)
    ]
    return None if findings.faults else tuple(step for step in steps if step is not None)


def complete_steps(node: Node | None) -> bool:
    """Whether a value is a plan by its keys alone: step objects with all of their keys and no others."""
    if isinstance(node, Mapping):
        if [key.value for key, _ in node.entries] != [STEPS]:
            return False
        node = node.entries[0][1]
    return (
        isinstance(node, Sequence)
        and bool(node.items)
        and all(
            isinstance(item, Mapping) and set(REQUIRED_KEYS) <= {key.value for key, _ in item.entries} <= set(STEP_KEYS)
            for item in node.items
        )
    )


def _no_steps(node: Mapping, *, alone: bool, findings: Findings) -> None:
    if alone:
        code, said = "steps-not-a-list", "a step object stands alone; steps must be in a list"
    else:
        code, said = "unknown-key", "the plan must be a list of step objects, or an object with the one key steps"
    findings.error(code, said, at=node.start, field=STEPS, hint="put all steps into one list, in order")


def _read_step(
    node: Node, place: StepPlace, workers: WorkerNames, reader: AccessReader, findings: Findings
) -> Step | None:
    name, position = place.name, place.position
    if not isinstance(node, Mapping):
        if not (isinstance(node, Word) and node.kind == "void"):
            findings.error("object-expected", f"{name} must be an object with keys", at=node.start, field=STEPS)
        return None
    _check_keys(node, STEP_KEYS, REQUIRED_KEYS, name, findings)
    worker = subtask = access = None
    # A repeated key is a fault already; each of its values is still checked, so that one answer names everything.
    for key, value in node.entries:
        if key.value == AGENT:
            worker = workers.resolve(value, StepPlace(position, name, AGENT), findings, None)
        elif key.value == INSTRUCTION:
            subtask = read_subtask(value, StepPlace(position, name, INSTRUCTION), findings)
        elif key.value == ACCESS:
            access = reader.resolve(value, position)
    if worker is None or subtask is None or access is None:
        return None
    return Step(position, worker, subtask, access)


def _check_keys(
    node: Mapping, known: tuple[str, ...], required: tuple[str, ...], name: str, findings: Findings
) -> None:
    written = [key.value for key, _ in node.entries]
    for key, _ in node.entries:
        if key.value not in known:
            findings.error(
                "unknown-key",
                f"{name}: unknown key {quoted(key.value)}",
                at=key.start,
                field=key.value[:80],
                hint=_key_hint(key, known),
            )
    for wanted in required:
        if wanted not in written:
            findings.error("missing-key", f"{name}: the key {wanted} is missing", at=node.start, field=wanted)


def _key_hint(key: Text, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(key.value[:40].casefold(), known, n=1)
    return f"did you mean {close[0]}?" if close else f"known keys: {', '.join(known)}"


def _step_numbers(items: list[Node], findings: Findings) -> StepNumbers:
    """The numbers by which the objects refer to each other."""
    given = [
        [value for key, value in item.entries if key.value == STEP] if isinstance(item, Mapping) else []
        for item in items
    ]
    counted = tuple(range(1, len(items) + 1))
    hint = _FROM_ZERO if _looks_counted_from_zero(items) else None
    if not any(given):
        return StepNumbers(counted, hint)
    numbers: list[int] = []
    for item, values in zip(items, given, strict=True):
        fault: tuple[str, int] | None = None
        if not values:
            fault = "a step has no number while others do", item.start
        for value in values:
            if isinstance(value, Word) and value.kind == "void":
                continue
            number = int(value.text) if isinstance(value, Word) and value.kind == "integer" else 0
            if number < 1:
                shown = value.value if isinstance(value, Text) else value.text if isinstance(value, Word) else "[...]"
                fault = f"{quoted(shown)} is no step number; they are whole numbers from 1", value.start
            elif numbers and number <= numbers[-1]:
                fault = f"step number {number} does not come after {numbers[-1]}", value.start
            numbers.append(max(number, 1))
        if fault is not None:
            hint_text = "number all steps in ascending order, or none"
            findings.error("step-number", fault[0], at=fault[1], field=STEP, hint=hint_text)
    usable = len(numbers) == len(items) and sorted(set(numbers)) == numbers
    return StepNumbers(tuple(numbers) if usable else counted, hint)


def _looks_counted_from_zero(items: list[Node]) -> bool:
    for item in items:
        for key, value in item.entries if isinstance(item, Mapping) else []:
            listed = value.items if isinstance(value, Sequence) else [value]
            if key.value == ACCESS and any(isinstance(entry, Word) and entry.text == "0" for entry in listed):
                return True
    return False
