"""The provider's request id and the model that it names: in the row and in the entry, whatever became of the call."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal
from uuid import UUID

import pytest

from engine.store.attempts import open_attempt
from engine.store.closing import close_step_attempt
from engine.store.database import Database
from engine.store.run_writer import AttemptResult
from engine.store.snapshots import read_run
from tests.support.stored import LOST, answered, check_invariants, ended_with, opening, record, stored_run

SAID = {"provider_request_id": "req_7", "provider_model": "plain-2026-11-01"}


def with_words(result: AttemptResult) -> AttemptResult:
    return replace(result, provider_request_id=SAID["provider_request_id"], provider_model=SAID["provider_model"])


async def said(database: Database, run_id: UUID) -> list[tuple[str, dict[str, str | None]]]:
    """State and words of each closing, as the entries have them; the last of each attempt is also the row's."""
    kept = await record(database.url, run_id)
    check_invariants(kept)
    entries = [entry["data"] for entry in kept.entries("attempt.closed")]
    last = {data["attempt"]: {name: data[name] for name in SAID} for data in entries}
    assert {str(row["id"]): {name: row[name] for name in SAID} for row in kept.attempts} == last
    return [(data["state"], {name: data[name] for name in SAID}) for data in entries]


async def test_an_answer(database: Database) -> None:
    run_id = await stored_run(database, [[]])
    opened = opening(run_id)
    await open_attempt(database, opened)
    closing = answered(opened)
    await close_step_attempt(database, replace(closing, result=with_words(closing.result)))
    assert await said(database, run_id) == [("succeeded", SAID)]
    run = await read_run(database, run_id)
    assert run is not None
    shown = run.steps[0].attempts[0]
    assert (shown.provider_request_id, shown.provider_model) == ("req_7", "plain-2026-11-01")


@pytest.mark.parametrize("state", ["failed", "refused"])
async def test_a_call_without_an_answer(database: Database, state: Literal["failed", "refused"]) -> None:
    run_id = await stored_run(database, [[]])
    opened = opening(run_id)
    await open_attempt(database, opened)
    result = with_words(AttemptResult(state, "auth-failed", provider_status=401))
    await close_step_attempt(database, ended_with(opened, result))
    assert await said(database, run_id) == [(state, SAID)]


async def test_a_call_that_was_given_up_and_reports_after_all(database: Database) -> None:
    run_id = await stored_run(database, [[]])
    opened = opening(run_id)
    await open_attempt(database, opened)
    await close_step_attempt(database, ended_with(opened, LOST, retry=True))
    closing = answered(opened)
    await close_step_attempt(database, replace(closing, result=with_words(closing.result)))
    nothing = dict.fromkeys(SAID)
    assert await said(database, run_id) == [("unknown", nothing), ("superseded", SAID)]
