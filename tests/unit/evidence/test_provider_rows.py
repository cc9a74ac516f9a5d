"""What the bundle's page says of the provider's own words about a call."""

from __future__ import annotations

from typing import Any

import pytest

from engine.evidence.page_run import _provider_rows

NOTE = "not the name that was asked for"


@pytest.mark.parametrize(
    ("asked", "answered", "differs"),
    [
        ("gpt-4o", "gpt-4o-2024-08-06", True),
        ("gpt-4o", "gpt-4o", False),
        ("openai/gpt-4o", "gpt-4o", False),
        ("openai/my-gpt-4o", "gpt-4o", True),
    ],
)
def test_another_model_than_the_one_asked_for_is_noted(asked: str, answered: str, differs: bool) -> None:
    rows = dict(_provider_rows(asked, {"provider_model": answered, "provider_request_id": "req_1"}))
    assert answered in rows["Answered by"]
    assert (NOTE in rows["Answered by"]) == differs
    assert rows["Provider's request"] == "req_1"


@pytest.mark.parametrize("closed", [{}, {"provider_model": None, "provider_request_id": None}])
def test_nothing_is_said_where_nothing_was_recorded(closed: dict[str, Any]) -> None:
    assert list(_provider_rows("gpt-4o", closed)) == []


def test_it_is_escaped() -> None:
    assert "<b>" not in dict(_provider_rows("m", {"provider_model": "<b>"}))["Answered by"]
