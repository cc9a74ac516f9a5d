"""Prompt templates: a text with sections for each role and named places to fill.

A template has a line `=== system ===` and a line `=== user ===`; what stands under them becomes the two messages.
Places are written `{{name}}`. Filling is one pass over the template, so a value that itself contains `{{name}}` is
never filled again. Rendering knows nothing of tasks or steps: making values inert is the renderer's duty.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

TEMPLATE_BYTES_MAX = 262_144

CONDUCTOR_PLACES = frozenset({"task", "workers", "steps_max", "nonce"})
REPAIR_PLACES = frozenset({"plan", "errors"})
REVISE_PLACES = frozenset({"plan", "answer"})
WORKER_PLACES = frozenset({"task", "steps", "subtask", "final", "nonce"})

# Places that may be filled with nothing: a first step reads no other, and only the last one is final.
MAY_BE_EMPTY = frozenset({"steps", "final"})

_PLACE = re.compile(r"\{\{([a-z_]+)\}\}")
_SECTION = re.compile(r"^=== (system|user) ===[ \t]*\r?$", re.MULTILINE)


@dataclass(frozen=True)
class Section:
    """One message of a template, not yet filled."""

    role: Literal["system", "user"]
    text: str


def sections(template: str) -> list[Section]:
    """The messages of a template in order. A template without section lines is one user message.

    Raises ValueError for text before the first section line, a repeated section, or a missing user section.
    """
    marks = list(_SECTION.finditer(template))
    if not marks:
        return [Section("user", template.strip())]
    if template[: marks[0].start()].strip():
        raise ValueError("text before the first section line")
    ends = [mark.start() for mark in marks[1:]] + [len(template)]
    found = [
        Section("system" if mark[1] == "system" else "user", template[mark.end() : end].strip())
        for mark, end in zip(marks, ends, strict=True)
    ]
    roles = [section.role for section in found]
    if roles not in (["user"], ["system", "user"]):
        raise ValueError("sections must be `system` then `user`, or `user` alone")
    return found


def places(template: str) -> set[str]:
    """The names of all places in a template."""
    return set(_PLACE.findall(template))


def fill(text: str, values: Mapping[str, str]) -> str:
    """The text with each place replaced by its value, in one pass. KeyError where a value is missing."""
    return _PLACE.sub(lambda match: values[match[1]], text)


def check_template(template: str, *, allowed: frozenset[str], required: frozenset[str]) -> None:
    """Raises ValueError, in words for the template's author, where the template cannot be used."""
    for section in sections(template):
        filled = _PLACE.sub(lambda match: "" if match[1] in MAY_BE_EMPTY else match[1], section.text)
        if not filled.strip():
            # Some providers refuse a request with an empty message.
            raise ValueError(f"the {section.role} section can be empty")
    found = places(template)
    unknown = sorted(found - allowed)
    if unknown:
        raise ValueError(f"unknown place {{{{{unknown[0]}}}}}; known are {', '.join(sorted(allowed))}")
    missing = sorted(required - found)
    if missing:
        raise ValueError(f"the place {{{{{missing[0]}}}}} is missing")
