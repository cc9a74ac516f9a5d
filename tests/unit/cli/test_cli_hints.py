"""Every error about what a user handed in, files above all, says what to do."""

from __future__ import annotations

import ast
from pathlib import Path

CHECKOUT = Path(__file__).parents[3]
KINDS = {"InputError", "UnavailableError", "RefusedError", "WaitingError"}
PLACES = ("engine/cli", "engine/keeper", "engine/service.py", "engine/temporal_client.py", "worker_pools/pool")


def test_every_error_of_the_command_line_and_the_keeper_has_a_hint():
    files = [file for place in PLACES for file in _files(CHECKOUT / place)]
    calls = [(file, call) for file in files for call in ast.walk(ast.parse(file.read_text())) if _makes_error(call)]
    assert len(calls) > 50
    bare = [f"{file.name}:{call.lineno}" for file, call in calls if "hint" not in {word.arg for word in call.keywords}]
    assert bare == []


def _files(place: Path) -> list[Path]:
    return sorted(place.rglob("*.py")) if place.is_dir() else [place]


def _makes_error(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS
