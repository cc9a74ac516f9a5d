"""What becomes of a step whose call fails: how often it is called, what is on record, and how the run ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.store.snapshots import RunSnapshot
from tests.support.provider import Provider
from tests.support.runs import ended, lists_plan, submit_plan
from tests.support.workflows import pool_of
from worker_pools.process import WorkerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

TWO_STEPS = lists_plan(["First.", "Second."], [[], [0]], [0, 1])


async def run_two(process: WorkerProcess, provider: Provider, folder: Path, **options: Any) -> RunSnapshot:
    """A run of two steps; the model of the first is called `odd`."""
    pool = pool_of(folder, provider.base_url, "odd", "plain", **options)
    return await ended(process.database, await submit_plan(process, pool, TWO_STEPS))


@pytest.mark.parametrize(
    ("behaviour", "code"),
    [
        ({"status": 500}, "server-error"),
        ({"end": "refuse"}, "connection-lost"),
        ({"text": "half an answer", "end": "cut"}, "stream-cut"),
    ],
)
async def test_a_call_that_always_fails_is_made_exactly_as_often_as_the_pool_says(
    process: WorkerProcess, provider: Provider, tmp_path: Path, behaviour: dict[str, Any], code: str
) -> None:
    provider.script(behaviour, model="odd", times=None)
    run = await run_two(process, provider, tmp_path)
    assert provider.count == 3
    assert (run.state, run.reason) == ("failed", code)
    attempts = run.steps[0].attempts
    assert [(attempt.state, attempt.error_code) for attempt in attempts] == [("failed", code)] * 3
    assert {str(attempt.id) for attempt in attempts} == {request["attempt_id"] for request in provider.requests}
    starts = [attempt.started_at for attempt in attempts]
    assert starts == sorted(set(starts))
    assert [step.state for step in run.steps] == ["failed", "cancelled"]
    assert run.answer is None


@pytest.mark.parametrize(
    ("behaviour", "state", "code"),
    [
        ({"status": 401, "body": {"error": {"message": "no"}}}, "failed", "auth-failed"),
        ({"status": 404, "body": {"error": {"message": "no such model"}}}, "failed", "model-not-found"),
        ({"text": "", "finish_reason": "content_filter"}, "refused", "content-filtered"),
        ({"text": "I cannot help.", "finish_reason": "content_filter"}, "refused", "content-filtered"),
        ({"text": "", "refusal": "I will not."}, "refused", "refused"),
        ({"text": "", "usage": [9, 126]}, "failed", "empty-answer"),
        ({"text": "   \n"}, "failed", "empty-answer"),
        ({"text": "", "reasoning": "VAULT-7"}, "failed", "empty-answer"),
        ({"text": "", "reasoning": "so " * 2000, "finish_reason": "length"}, "failed", "truncated-thinking"),
    ],
)
async def test_a_reply_that_is_no_answer_is_called_once_and_stops_the_run(  # noqa: PLR0917  # pytest passes names
    process: WorkerProcess, provider: Provider, tmp_path: Path, behaviour: dict[str, Any], state: str, code: str
) -> None:
    provider.script(behaviour, model="odd", times=None)
    run = await run_two(process, provider, tmp_path)
    assert [request["model"] for request in provider.requests] == ["odd"]
    assert (run.state, run.reason) == ("failed", code)
    (attempt,) = run.steps[0].attempts
    assert (attempt.state, attempt.error_code) == (state, code)
    assert run.steps[0].output is None
    assert run.answer is None
    if behaviour.get("usage"):
        assert attempt.output_tokens == 126
        assert run.output_tokens == 126


async def test_a_half_answer_is_never_used(process: WorkerProcess, provider: Provider, tmp_path: Path) -> None:
    provider.script({"text": "HALF of it", "end": "cut"}, {"text": "The whole."}, model="odd")
    run = await run_two(process, provider, tmp_path)
    assert run.state == "succeeded"
    assert [attempt.state for attempt in run.steps[0].attempts] == ["failed", "succeeded"]
    assert run.steps[0].output == "The whole."
    last = provider.requests[-1]
    assert last["model"] == "plain"
    assert "HALF" not in str(last["body"])


async def test_the_providers_advice_on_when_to_come_back_is_kept(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"status": 429, "headers": {"Retry-After": "2.5"}}, model="odd")
    run = await run_two(process, provider, tmp_path)
    assert run.state == "succeeded"
    first, second, _ = provider.requests
    assert 2.4 < second["started_at"] - first["ended_at"] < 4.5


async def test_advice_to_wait_for_hours_fails_the_step_at_once(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"status": 429, "headers": {"Retry-After": "86400"}}, model="odd", times=None)
    run = await run_two(process, provider, tmp_path)
    assert (run.state, run.reason, provider.count) == ("failed", "retry-after-too-long", 1)


@pytest.mark.parametrize(
    ("text", "kept", "note"),
    [
        ("ok \x00 done", "ok \ufffd done", "nul-replaced"),
        ("half \ud83d emoji", "half \ufffd emoji", "surrogate-replaced"),
        ("whole \U0001f600 emoji", "whole \U0001f600 emoji", None),
    ],
)
async def test_what_no_database_takes_is_replaced_once_and_seen_alike_by_all(  # noqa: PLR0917  # pytest passes names
    process: WorkerProcess, provider: Provider, tmp_path: Path, text: str, kept: str, note: str | None
) -> None:
    # Escaped as JSON, because no HTTP client sends half an emoji as it stands.
    event = json.dumps({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}]})
    provider.script({"raw_events": [event, "[DONE]"]}, model="odd")
    run = await run_two(process, provider, tmp_path)
    assert run.state == "succeeded"
    assert provider.count == 2
    assert run.steps[0].output == kept
    assert run.steps[0].attempts[0].notes == (() if note is None else (note,))
    assert f"\n{kept}\n" in provider.requests[1]["body"]["messages"][-1]["content"]


async def test_a_subtask_with_half_an_emoji_reaches_the_worker_replaced(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    pool = pool_of(tmp_path, provider.base_url, "plain")
    plan = 'model_id = [0]\nsubtasks = ["ok \\u0000 and \\ud83d end"]\naccess_list = [[]]\n'
    run = await ended(process.database, await submit_plan(process, pool, plan))
    assert run.state == "succeeded"
    subtask = run.steps[0].subtask
    assert subtask is not None
    assert "\x00" not in subtask
    assert subtask in provider.requests[0]["body"]["messages"][-1]["content"]


async def test_an_output_of_3_mb_passes_by_reference(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"text_bytes": 3_000_000, "pieces": 50}, model="odd")
    run = await run_two(process, provider, tmp_path)
    assert run.state == "succeeded"
    assert provider.count == 2
    assert len(run.steps[0].output or "") == 3_000_000
    assert "x" * 3_000_000 in provider.requests[1]["body"]["messages"][-1]["content"]


async def test_an_output_of_30_mb_fails_for_good_after_one_call(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"text_bytes": 30_000_000, "pieces": 300}, model="odd", times=None)
    run = await run_two(process, provider, tmp_path)
    assert (run.state, run.reason, provider.count) == ("failed", "output-too-large", 1)
    assert not run.cost_complete


async def test_a_task_of_3_mb_is_worked_on(process: WorkerProcess, provider: Provider, tmp_path: Path) -> None:
    pool = pool_of(tmp_path, provider.base_url, "plain", "plain")
    task = "Sum up. " + "word " * 600_000
    run = await ended(process.database, await submit_plan(process, pool, TWO_STEPS, task))
    assert run.state == "succeeded"
    assert task in provider.requests[1]["body"]["messages"][-1]["content"]


async def test_a_key_that_a_provider_repeats_in_its_complaint_is_not_stored(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    process.secrets.put("REPEATED_KEY", "sk-canary-0123456789")
    complaint = {"status": 401, "body": {"error": {"message": "Incorrect API key provided: sk-canary-0123456789."}}}
    provider.script(complaint, model="odd", times=None)
    run = await run_two(process, provider, tmp_path, worker={"api_key": {"env": "REPEATED_KEY"}})
    message = run.steps[0].attempts[0].message or ""
    assert "Incorrect API key provided: [key]" in message
    assert "canary" not in message
