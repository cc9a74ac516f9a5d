"""The JSON schema that lets a Conductor write only plans that can be read and run.

Pure. The n-th step may refer to earlier positions only, so neither a forward reference nor a list of the wrong length
can be written. One branch for each length, because llama.cpp refuses `items: false` after `prefixItems` (status 400).
Key order matters: constrained servers write the keys in the order in which the schema gives them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# With one branch a length the schema grows with the cube of the steps; beyond this many it is looser, and the
# parser finds what the schema lets through.
EXACT_STEPS_MAX = 8


def plan_schema(
    *,
    workers: Sequence[int],
    steps_max: int,
    subtask_chars_max: int | None = None,
    last_step_reads: bool = False,
    may_keep: bool = False,
) -> dict[str, Any]:
    """The schema for plans of 1 to `steps_max` steps over these worker numbers, in the paper's three lists.

    `subtask_chars_max` bounds each subtask (small models ramble); `last_step_reads` demands at least two steps, the
    last of which reads an earlier one (small models forget it); `may_keep` also allows three empty lists, which a
    later round means as "keep the answer".
    """
    shortest = 2 if last_step_reads and steps_max > 1 else 1
    if steps_max > EXACT_STEPS_MAX:
        return _loose(workers, 0 if may_keep else shortest, steps_max, subtask_chars_max)
    branches = [
        _exact(workers, length, subtask_chars_max, last_step_reads) for length in range(shortest, steps_max + 1)
    ]
    if may_keep:
        branches.append(_exact(workers, 0, subtask_chars_max, last_step_reads))
    return branches[0] if len(branches) == 1 else {"anyOf": branches}


def _exact(workers: Sequence[int], length: int, subtask_chars_max: int | None, last_step_reads: bool) -> dict[str, Any]:
    access: list[dict[str, Any]] = [_positions(position, position) for position in range(length)]
    if last_step_reads and length > 1:
        access[-1]["minItems"] = 1
    lists = _lists(workers, subtask_chars_max, length, length)
    lists["access_list"] = {"type": "array", "prefixItems": access, "minItems": length, "maxItems": length}
    return _object(lists)


def _loose(workers: Sequence[int], shortest: int, steps_max: int, subtask_chars_max: int | None) -> dict[str, Any]:
    lists = _lists(workers, subtask_chars_max, shortest, steps_max)
    lists["access_list"] = {
        "type": "array",
        "items": _positions(steps_max - 1, steps_max - 1),
        "minItems": shortest,
        "maxItems": steps_max,
    }
    return _object(lists)


def _lists(workers: Sequence[int], subtask_chars_max: int | None, shortest: int, longest: int) -> dict[str, Any]:
    bounds = {"minItems": shortest, "maxItems": longest}
    subtask: dict[str, Any] = {"type": "string", "minLength": 1}
    if subtask_chars_max is not None:
        subtask["maxLength"] = subtask_chars_max
    return {
        "model_id": {"type": "array", "items": {"enum": list(workers)}, **bounds},
        "subtasks": {"type": "array", "items": subtask, **bounds},
    }


def _positions(below: int, items_max: int) -> dict[str, Any]:
    """A list of positions smaller than `below`. Position 0 may read nothing."""
    if below == 0:
        return {"type": "array", "items": {"type": "integer"}, "maxItems": 0}
    return {"type": "array", "items": {"enum": list(range(below))}, "maxItems": items_max}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
