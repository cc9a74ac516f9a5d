"""What a provider said of a call, in a bundle's entries: there or not yet there, but never a text."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.bundles import PaperRun, Record
from tests.support.verdicts import faults, verified


def planned() -> PaperRun:
    run = PaperRun(Record())
    run.plan()
    return run


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"provider_request_id": None, "provider_model": None},
        {"provider_request_id": "req_7", "provider_model": "org/alpha-1:free@2026"},
    ],
)
def test_an_entry_may_say_what_the_provider_said_or_be_older(said: dict[str, Any]) -> None:
    run = planned()
    run.close(0, run.send(0), "one", **said)
    run.perform(1)
    run.perform(2)
    run.end()
    report = verified(run)
    assert (report.findings.faults, report.verdict) == ([], "valid")


@pytest.mark.parametrize("field", ["provider_request_id", "provider_model"])
@pytest.mark.parametrize("said", ["", "a b", "a\n", "a" * 129, 7, ["a"], "\u0430"])
def test_a_text_in_place_of_the_providers_words_is_found(field: str, said: object) -> None:
    run = planned()
    run.close(0, run.send(0), "one", **{field: said})
    assert "attempt.closed" in faults(run)
