"""docs/ledger.md describes every type of entry that the code writes, and no other; what may follow a closing entry."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.ledger.after_closing import AFTER_CLOSING, may_follow_closing
from engine.verifier import entry_types
from tests.support.ledger_page import Described, described, ledger_page

CHECKOUT = Path(__file__).parents[3]


def written_types(path: Path) -> Iterator[str]:
    """The types of the entries that a module writes: ``x.entry(TYPE, ...)``, ``order_entry(writer, TYPE, ...)``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Attribute) and node.func.attr == "entry" and node.args:
            yield from values_of(node.args[0], path)
        elif isinstance(node.func, ast.Name) and node.func.id in {"order_entry", "_entry"}:
            yield from values_of(node.args[1], path)


def values_of(argument: ast.expr, path: Path) -> Iterator[str]:
    """The texts that an argument can be: a constant, written here or named, or one of two."""
    if isinstance(argument, ast.Constant):
        yield str(argument.value)
    elif isinstance(argument, ast.IfExp):
        yield from values_of(argument.body, path)
        yield from values_of(argument.orelse, path)
    elif ast.unparse(argument).rpartition(".")[2].isupper():
        # A constant of the module, or of one that it imports.
        found: Any = importlib.import_module(".".join(path.relative_to(CHECKOUT).with_suffix("").parts))
        for part in ast.unparse(argument).split("."):
            found = getattr(found, part)
        assert isinstance(found, str)
        yield found


def all_written() -> set[str]:
    paths = [path for package in ("engine", "activities") for path in (CHECKOUT / package).rglob("*.py")]
    return {type_ for path in paths for type_ in written_types(path)}


def test_the_page_describes_exactly_the_types_that_are_written() -> None:
    written = all_written()
    assert len(written) > 20
    assert written - ledger_page().keys() == set(), "describe them in docs/ledger.md"
    assert ledger_page().keys() - written == set(), "nothing writes them"


def test_a_page_is_read_by_its_headings_and_rows() -> None:
    page = described(["### `a.b`", "| field | meaning |", "| `one` | x |", "| *`two`* | y |", "## Other", "| `no` | |"])
    assert page == {"a.b": Described({"one"}, {"two"})}
    assert page["a.b"].faults({"one": 1}) == set()
    assert page["a.b"].faults({"two": 1, "three": 2}) == {"one", "three"}


@pytest.mark.parametrize(
    "type_", ["attempt.closed", "run.exported", "run.resumed", "review.decided", "artifact.erased"]
)
def test_what_may_follow_a_closing_entry(type_: str) -> None:
    assert may_follow_closing(type_)


@pytest.mark.parametrize(
    "type_", ["attempt.sent", "run.closed", "run.changed", "step.changed", "plan.accepted", "review"]
)
def test_what_may_not_follow_a_closing_entry(type_: str) -> None:
    assert not may_follow_closing(type_)


def test_the_verifier_has_the_same_list() -> None:
    assert set(entry_types.AFTER_CLOSING) == set(AFTER_CLOSING)
    assert all_written() - entry_types.SHAPES.keys() == set(), "the verifier refuses bundles with these"


def test_the_page_names_all_that_may_follow() -> None:
    text = (CHECKOUT / "docs" / "ledger.md").read_text()
    paragraph = text[text.index("After `run.closed` only these may follow") :].split("\n\n")[0]
    assert [allowed for allowed in AFTER_CLOSING if f"`{allowed}`" not in paragraph] == []
