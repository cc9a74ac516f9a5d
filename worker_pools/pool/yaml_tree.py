"""YAML as plain data that remembers where each key and value stood.

Safe by construction: values come from the safe scalar rules only, a repeated key is an error, aliases are refused
(they are how a small file becomes a huge tree), and depth and size are bounded. Errors never quote a value, because a
value may be a secret.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

POOL_BYTES_MAX = 262_144
DEPTH_MAX = 16

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a file: line (from 1), where in the tree, and what."""

    line: int
    path: Path
    text: str


@dataclass(frozen=True)
class Tree:
    """Plain data, the line (from 1) of each path in it, and what was wrong with the file itself."""

    data: Any
    lines: dict[Path, int]
    problems: list[Problem]

    def line(self, path: Path) -> int:
        """The line of a path, or of its nearest known ancestor."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.lines:
                return self.lines[path[:length]]
        return 1


def read_tree(text: str) -> Tree:
    """Reads one YAML document. Never raises for what stands in the text: see `Tree.problems`."""
    reader = _Reader()
    try:
        # The C reader gives the same marks at a quarter of the time.
        node = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 1
        return Tree(None, {}, [Problem(line, (), f"not readable as YAML: {error.problem or 'syntax error'}")])
    except yaml.YAMLError:
        return Tree(None, {}, [Problem(1, (), "not readable as YAML: it holds characters that YAML does not allow")])
    except RecursionError:
        return Tree(None, {}, [Problem(1, (), "nested too deeply")])
    data = None if node is None else reader.build(node, ())
    return Tree(data, reader.lines, reader.problems)


_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Reader:
    def __init__(self) -> None:
        self.lines: dict[Path, int] = {}
        self.problems: list[Problem] = []
        self._seen: set[int] = set()
        self._scalars = yaml.SafeLoader("")

    def build(self, node: yaml.Node, path: Path) -> Any:
        line = node.start_mark.line + 1
        self.lines.setdefault(path, line)
        if id(node) in self._seen:
            return self._problem(line, path, "aliases (`*name`) are not allowed here; repeat the value")
        self._seen.add(id(node))
        if len(path) > DEPTH_MAX:
            return self._problem(line, path, "nested too deeply")
        if isinstance(node, yaml.MappingNode):
            return dict(self._pairs(node, path))
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._scalar(node, path)

    def _pairs(self, node: yaml.MappingNode, path: Path) -> Iterator[tuple[str, Any]]:
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(line, path, "a key must be a word")
                continue
            key = str(key_node.value)
            if not _is_text(key):
                self._problem(line, path, "a key with a character that JSON cannot hold")
                continue
            if key in seen:
                self._problem(line, (*path, key), f"stands twice (first on line {seen[key]})")
                continue
            seen[key] = line
            self.lines[*path, key] = line
            yield key, self.build(value_node, (*path, key))

    def _scalar(self, node: yaml.Node, path: Path) -> Any:
        try:
            value = self._scalars.construct_object(node)
        except (yaml.YAMLError, ValueError, OverflowError, AttributeError, TypeError, LookupError):
            # PyYAML fails in all these ways on a value that does not fit its explicit tag (`!!timestamp x`).
            return self._problem(node.start_mark.line + 1, path, "a value that YAML's safe rules do not allow")
        if (isinstance(value, int | float) and not _in_json(value)) or not _is_text(str(node.value)):
            return self._problem(node.start_mark.line + 1, path, "a number or a character that JSON cannot hold")
        if not _means_what_it_says(value, str(node.value)):
            return self._problem(node.start_mark.line + 1, path, _OWN_READING)
        # Dates and byte strings are YAML's own idea; nothing in a pool is one, and JSON cannot hold them.
        return value if value is None or isinstance(value, str | bool | int | float) else str(node.value)

    def _problem(self, line: int, path: Path, text: str) -> None:
        self.problems.append(Problem(line, path, text))


# Numbers as JSON writes them, and the decimal point at either end. YAML 1.1 also reads 1_0 as 10, 010 as 8, 1:30 as 90.
_OWN_READING = "YAML reads this as a number or truth value in its own way; write plain digits, true, false, or quotes"
_PLAIN_NUMBER = re.compile(r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")


def _means_what_it_says(value: Any, written: str) -> bool:
    """Whether people read a scalar as YAML does."""
    if isinstance(value, bool):
        return written.lower() in {"true", "false"}
    return not isinstance(value, int | float) or bool(_PLAIN_NUMBER.fullmatch(written))


def _in_json(value: float) -> bool:
    # The canonical form (RFC 8785) holds numbers as IEEE doubles.
    return math.isfinite(value) if isinstance(value, float) else abs(value) < 2**53


def _is_text(value: str) -> bool:
    """Whether a text can be stored everywhere: no NUL and no half of a surrogate pair (YAML can escape both)."""
    return "\x00" not in value and not any("\ud800" <= character <= "\udfff" for character in value)
