"""Entries in plain words: each type that the ledger has, and none left out because it is not known."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.evidence.timeline import _REVIEW_WORDS, _WORDS, timeline_line
from tests.support.ledger_page import ledger_page

CLOSED = {
    "round": 0,
    "step": 1,
    "state": "succeeded",
    "code": None,
    "accepted": True,
    "input_tokens": 1,
    "output_tokens": 2,
    "cost_usd": "3",
}


def line(type_: str, data: dict[str, Any], *, actor: str = "anna", on_behalf_of: str | None = None) -> Any:
    entry = {"run": "r", "seq": 3, "at": "2026-11-30T12:00:00.000000Z", "type": type_, "actor": actor}
    return timeline_line(json.dumps({**entry, "on_behalf_of": on_behalf_of, "data": data}).encode())


def test_every_type_of_a_run_has_words() -> None:
    of_tenants = {"key", "keys", "person", "sampling", "signer", "log", "retention", "hold", "policy"}
    types = {type_ for type_ in ledger_page() if type_.partition(".")[0] not in of_tenants}
    assert types - _WORDS.keys() - _REVIEW_WORDS.keys() == set()


@pytest.mark.parametrize(
    ("type_", "data", "words"),
    [
        ("run.paused", {"order": "o", "artifacts": [{}]}, "paused: nothing new starts, with a reason"),
        (
            "step.changed",
            {"round": 0, "step": 2, "state": "waiting", "reason": "operator"},
            "step 2 is now waiting (operator)",
        ),
        ("step.changed", {"round": 1, "step": 2, "state": "reused", "reason": None}, "step 2 of round 1 is now reused"),
        ("plan.rejected", {"codes": ["no-plan", "too-long"]}, "the Conductor's text was no plan: no-plan, too-long"),
        (
            "attempt.closed",
            {**CLOSED, "provider_request_id": "req_7", "provider_model": "alpha-2"},
            "step 1: succeeded, accepted, 1 + 2 tokens, $3, answered by alpha-2, the provider's request req_7",
        ),
        (
            "attempt.closed",
            {**CLOSED, "provider_request_id": None, "provider_model": None},
            "step 1: succeeded, accepted, 1 + 2 tokens, $3",
        ),
        ("attempt.closed", CLOSED, "step 1: succeeded, accepted, 1 + 2 tokens, $3"),
        ("artifact.read", {"command": "show", "read": ["a", "b"]}, "read 2 stored texts (podium show)"),
        ("what.comes_next", {"step": 1, "why": "x" * 100, "list": [1]}, f"what comes next (step 1, why {'x' * 79}…)"),
    ],
)
def test_an_entry_in_words(type_: str, data: dict[str, Any], words: str) -> None:
    assert line(type_, data).text == words


def test_who_acted() -> None:
    assert line("run.unpaused", {}).who == "anna"
    assert line("run.unpaused", {}, on_behalf_of="berta").who == "anna for berta"
    assert line("run.unpaused", {}, actor="podium-engine", on_behalf_of="berta").who == "podium"
