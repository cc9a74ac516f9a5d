"""docs/ledger.md as data: the fields of each type of entry, so that tests can hold the code to the page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "ledger.md"
_HEADING = re.compile(r"^#+ `([a-z_]+\.[a-z_]+)`\s*$")
_FIELD = re.compile(r"^\| (\*?)`([a-z0-9_]+)`\*? \|")


@dataclass(frozen=True, slots=True)
class Described:
    """The fields that an entry of a type always has, and those that it may have."""

    required: set[str] = field(default_factory=set)
    optional: set[str] = field(default_factory=set)

    def faults(self, data: Mapping[str, Any]) -> set[str]:
        """Fields that are missing from an entry's data, or are not described."""
        return (self.required - data.keys()) | (data.keys() - self.required - self.optional)


def described(lines: Iterable[str]) -> dict[str, Described]:
    """The types of a page, by name."""
    found: dict[str, Described] = {}
    current: Described | None = None
    for line in lines:
        heading = _HEADING.match(line)
        if heading is not None:
            current = found.setdefault(heading[1], Described())
        elif line.startswith("#"):
            current = None
        elif current is not None and (row := _FIELD.match(line)) is not None:
            (current.optional if row[1] else current.required).add(row[2])
    return found


@cache
def ledger_page() -> dict[str, Described]:
    """The types that docs/ledger.md describes."""
    return described(PAGE.read_text().splitlines())


def check_entry(entry: Mapping[str, Any]) -> None:
    """An entry of a type that the page describes has the fields that it says."""
    kind = ledger_page().get(entry["type"])
    if kind is not None:
        assert kind.faults(entry["data"]) == set(), f"{entry['type']}: docs/ledger.md says otherwise"
