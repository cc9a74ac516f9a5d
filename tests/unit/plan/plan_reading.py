"""Short ways to read a plan in the tests of the parser."""

from __future__ import annotations

from engine.plan import ParseOptions, ParseResult, parse_plan

POOL = ("alpha", "beta", "gamma", "fast-model")
THREE = POOL[:3]


def read(text: str, *, workers: tuple[str, ...] = POOL, **options) -> ParseResult:
    result = parse_plan(text, ParseOptions(workers=workers, **options))
    assert (result.plan is None) == bool(result.errors)
    assert result.valid == (result.plan is not None)
    if result.plan is not None:
        assert result.form == result.plan.form
        assert result.notes == result.plan.notes
    return result


def lists(model_id: str, subtasks: str, access_list: str) -> str:
    return f"model_id = {model_id}\nsubtasks = {subtasks}\naccess_list = {access_list}"


def steps(result: ParseResult) -> list[tuple[str, str, object]]:
    """Worker, subtask and access of each step of a plan that must be valid."""
    assert result.plan is not None, result.errors
    assert [step.position for step in result.plan.steps] == list(range(len(result.plan.steps)))
    return [(step.worker, step.subtask, step.access) for step in result.plan.steps]


def codes(result: ParseResult) -> list[str]:
    """The error codes of a text that must be rejected."""
    assert result.plan is None, result.plan
    return [error.code for error in result.errors]


def notes(result: ParseResult) -> list[str]:
    return [note.code for note in result.notes]


def places(result: ParseResult, code: str) -> list[tuple[str | None, int | None, int | None]]:
    return [(error.field, error.line, error.column) for error in result.errors if error.code == code]
