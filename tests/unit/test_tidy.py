"""Habits that a machine can hold us to. The lists of exceptions are ratchets: they may become shorter, never longer."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
PACKAGES = ("engine", "activities", "worker_pools", "migrations", "benchmarks")
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 500

# Path and function: why it may be longer. An entry that is no longer needed fails the test.
LONG_FUNCTIONS = {
    "migrations/versions/0001_first.py upgrade": "a migration is a list of statements, read from top to bottom",
}
# Path: why it may be longer.
LONG_FILES: dict[str, str] = {}

_DIRECTIVE = re.compile(r"#\s*(?:type:\s*ignore|(?:ruff:\s*)?noqa)\b")
_SUPPRESSION = re.compile(
    r"#\s*(?:type:\s*ignore\[[a-z, -]+\]|(?:ruff:\s*)?noqa:\s*[A-Z]+[0-9]+(?:,\s*[A-Z]+[0-9]+)*)(?=\s|$)",
)
# These switch off more than one named rule, and then nobody sees what else they hide.
_TOO_WIDE = re.compile(r"#\s*(?:flake8:\s*noqa|mypy:|pyright:|fmt:\s*off)")


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (CHECKOUT / folder).rglob("*.py"))


def name(path: Path) -> str:
    return path.relative_to(CHECKOUT).as_posix()


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end; decorators and the docstring do not count, they are read differently."""
    assert function.end_lineno is not None
    count = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        assert first.end_lineno is not None
        count -= first.end_lineno - first.lineno + 1
    return count


def unexplained(source: str) -> list[int]:
    """Lines whose comment silences a linter without naming the rule or without saying why."""
    found = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        comment = token.string
        left = _SUPPRESSION.sub("", comment)
        nameless = bool(_DIRECTIVE.search(left) or _TOO_WIDE.search(comment))
        silent = left != comment and re.search(r"[^\W_]{2,}", left) is None
        if nameless or silent:
            found.append(token.start[0])
    return found


def test_functions_have_at_most_70_lines() -> None:
    long = {
        f"{name(path)} {function.name}": lines_of(function)
        for path in sources(*PACKAGES)
        for function in functions(ast.parse(path.read_text()))
        if lines_of(function) > FUNCTION_LINES_MAX
    }
    assert {key: lines for key, lines in long.items() if key not in LONG_FUNCTIONS} == {}
    assert LONG_FUNCTIONS.keys() - long.keys() == set(), "an exception that nothing needs any more: take it out"


def test_files_have_at_most_500_lines() -> None:
    long = {
        name(path): lines
        for path in sources(*PACKAGES, "tests")
        if (lines := len(path.read_text().splitlines())) > FILE_LINES_MAX
    }
    assert {key: lines for key, lines in long.items() if key not in LONG_FILES} == {}
    assert LONG_FILES.keys() - long.keys() == set(), "an exception that nothing needs any more: take it out"


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        name(path)
        for path in sources(*PACKAGES, "tests")
        if path.stat().st_size and ast.get_docstring(ast.parse(path.read_text())) is None
    ]
    assert silent == []


def test_every_silenced_linter_has_its_rule_and_its_reason_on_the_line() -> None:
    found = [f"{name(path)}:{line}" for path in sources(*PACKAGES, "tests") for line in unexplained(path.read_text())]
    assert found == []


def test_there_is_no_module_for_what_has_no_name() -> None:
    nameless = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert [name(path) for path in sources(*PACKAGES, "tests") if path.stem in nameless] == []


@pytest.mark.parametrize(
    ("line", "is_fault"),
    [
        ("x = 1  # noqa: S311  # not a secret", False),
        ("x = 1  # type: ignore[union-attr]  # psycopg's own", False),
        ("x = 1  # noqa: S311, S312  # not a secret", False),
        ("x = 1  # a comment about something", False),
        ("x = '# noqa'", False),
        ("x = 1  # noqa: S311", True),
        ("x = 1  # noqa", True),
        ("x = 1  # noqa  # because", True),
        ("x = 1  # type: ignore", True),
        ("x = 1  # type: ignore  # because", True),
        ("x = 1  # type: ignore[arg-type]", True),
        ("# ruff: noqa: RUF001  # the look-alikes are the point here", False),
        ("# ruff: noqa: S311", True),
        ("# ruff: noqa", True),
        ("# mypy: ignore-errors", True),
    ],
)
def test_the_check_of_silenced_linters_can_fail(line: str, *, is_fault: bool) -> None:
    assert bool(unexplained(line + "\n")) is is_fault


def test_the_measure_of_functions_counts_lines_but_not_the_docstring() -> None:
    tree = ast.parse('@property\ndef f():\n    """One.\n\n    Two.\n    """\n    a = 1\n    return a\n')
    assert [lines_of(function) for function in functions(tree)] == [3]
