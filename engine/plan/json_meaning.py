"""Whether a JSON value is meant as a plan. Must never look at more than its keys.

A value with keys that are close to a plan's is meant as one, so that a mistyped plan is an error and not passed over.
"""

from __future__ import annotations

from typing import Final

from engine.plan.nodes import Mapping, Node, Sequence
from engine.plan.plan import Form

_NEAR_KEYS: Final = frozenset({"modelid", "subtask", "accesslist", "acceslist", "agent", "instruction"})
_LIST_KEYS: Final = frozenset({"modelid", "subtask"})


def near_key(key: str) -> str | None:
    """The bare form of a key that is, or is close to, a key of a plan."""
    bare = "".join(char for char in key[:40].casefold() if char.isalpha()).removesuffix("s")
    return bare if bare in _NEAR_KEYS else None


def json_form(node: Node) -> tuple[bool, Form | None]:
    """Whether a JSON value is meant as a plan, and in which form; a plan inside an unknown wrapper has none."""
    if isinstance(node, Sequence):
        meant = any(isinstance(item, Mapping) and _has_plan_key(item) for item in node.items)
        return meant, "steps-json"
    if not isinstance(node, Mapping):
        return False, None
    keys = {near_key(key.value) for key, _ in node.entries}
    steps = next((value for key, value in node.entries if key.value == "steps"), None)
    form: Form | None = None
    if keys & _LIST_KEYS:
        form = "json"
    elif isinstance(steps, Sequence):
        meant = not steps.items or any(isinstance(item, Mapping) for item in steps.items)
        return meant, "steps-json"
    elif keys & {"agent", "instruction"}:
        form = "steps-json"
    elif keys & _NEAR_KEYS:
        form = "json"
    return _has_plan_key(node), form


def meant_as_lists(keys: list[str]) -> bool:
    """Whether one of the keys is, or is close to, one of the lists form."""
    return any(near_key(key) in _LIST_KEYS for key in keys)


def _has_plan_key(node: Node) -> bool:
    if isinstance(node, Sequence):
        return any(_has_plan_key(item) for item in node.items)
    if isinstance(node, Mapping):
        return any(near_key(key.value) is not None or _has_plan_key(value) for key, value in node.entries)
    return False
