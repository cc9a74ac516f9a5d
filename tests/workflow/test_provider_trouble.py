"""What a run makes of providers that answer badly: waits, single calls, nothing half used (public cases G2 and G3-12)."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from email.utils import format_datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from engine import contracts
from engine.cli.diagnosis import blame
from engine.store.snapshots import RunSnapshot
from tests.support.provider import Provider
from tests.support.runs import ended, lists_plan, submit_plan
from tests.support.stored import texts_of
from tests.support.workflows import history_events, pool_of, provider_reaches
from worker_pools.process import WorkerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

PRICE = {"input_usd_per_mtok": "1", "output_usd_per_mtok": "2"}
TWO_STEPS = lists_plan(["First.", "Second."], [[], [0]], [0, 1])


async def run_two(  # each says what it is in a call
    process: WorkerProcess, provider: Provider, folder: Path, first: str, second: str, **options: Any
) -> RunSnapshot:
    """A run of two steps; the second reads the first."""
    pool = pool_of(folder, provider.base_url, first, second, **options)
    return await ended(process.database, await submit_plan(process, pool, TWO_STEPS), timeout_s=60)


def pauses(provider: Provider, model: str) -> list[float]:
    """Seconds from the end of each answer to the next request for a model."""
    seen = [request for request in provider.requests if request["model"] == model]
    return [later["started_at"] - earlier["ended_at"] for earlier, later in pairwise(seen)]


@pytest.mark.slow
async def test_each_pause_follows_the_latest_advice_and_holds_no_slot(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    """G2-01, Retry-After in every form; a date by the answer's own clock, which is a year off."""
    clock = datetime(2025, 11, 30, 12, 0, 0, tzinfo=UTC)

    def limited(advice: str | None, **more: str) -> dict[str, Any]:
        date = {"Date": format_datetime(clock, usegmt=True)}
        return {"status": 429, "headers": date | ({} if advice is None else {"Retry-After": advice}) | more}

    http_date = format_datetime(clock + timedelta(seconds=3), usegmt=True)
    scripts = {
        "good": [limited("2"), limited(http_date), limited("1.5")],
        "bad": [limited("-5"), limited("soon")],
        "none": [limited(""), limited(None)],
        "milliseconds": [limited(None, **{"retry-after-ms": "2500"})],
        "reset": [limited("soon", **{"x-ratelimit-reset-requests": "2s", "x-ratelimit-remaining-requests": "0"})],
        "moment": [limited(None, **{"anthropic-ratelimit-tokens-reset": "2025-11-30T12:00:03Z"})],
        "hours": [limited("999999")],
    }
    for model, answers in scripts.items():
        provider.script(*answers, model=model)
    runs = [
        asyncio.create_task(run_two(process, provider, tmp_path, "plain", model, worker={"attempts_max": 5}))
        for model in scripts
    ]
    await provider_reaches(provider, 2 * len(runs))
    await asyncio.sleep(0.6)
    # Every run waits for its second call now, and the wait is Temporal's.
    assert process.context.pace.in_flight == 0
    found = dict(zip(scripts, await asyncio.gather(*runs), strict=True))
    least = {
        "good": [2, 3, 1.5],
        "bad": [1, 2],
        "none": [1, 2],
        "milliseconds": [2.5],
        "reset": [2],
        "moment": [3],
        "hours": [],
    }
    for model, expected in least.items():
        measured = pauses(provider, model)
        assert len(measured) == len(expected), model
        assert all(pause > at_least - 0.1 for pause, at_least in zip(measured, expected, strict=True)), model
        assert all(pause < at_least + 4 for pause, at_least in zip(measured, expected, strict=True)), model
    assert {model: run.state for model, run in found.items() if model != "hours"} == dict.fromkeys(
        [model for model in scripts if model != "hours"], "succeeded"
    )
    assert (found["hours"].state, found["hours"].reason) == ("failed", "retry-after-too-long")
    # Nothing before the limited step was repeated.
    assert sum(request["model"] == "plain" for request in provider.requests) == len(scripts)


async def test_a_pool_may_allow_a_longer_wait_or_a_shorter_one(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    """G2-01: the ceiling is the worker's."""
    provider.script({"status": 429, "headers": {"Retry-After": "3"}}, model="odd", times=None)
    run = await run_two(process, provider, tmp_path, "odd", "plain", worker={"retry_after_max_s": 2})
    assert (run.state, run.reason, provider.count) == ("failed", "retry-after-too-long", 1)


async def test_overload_is_waited_out_before_and_in_the_middle_of_an_answer(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    """G2-03."""
    overloaded = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    provider.script({"status": 529, "body": overloaded}, {"status": 529, "body": overloaded}, model="before")
    provider.script({"text": "HALF of an answer", "pieces": 3, "error_event": overloaded}, model="middle")
    provider.script({"status": 503, "body": {"error": {"message": "throttled"}}}, model="throttled")
    models = ("before", "middle", "throttled")
    runs = await asyncio.gather(*(run_two(process, provider, tmp_path, model, "plain") for model in models))
    for model, run in zip(models, runs, strict=True):
        states = [(attempt.state, attempt.error_code) for attempt in run.steps[0].attempts]
        again = 2 if model == "before" else 1
        assert (run.state, states) == ("succeeded", [("failed", "overloaded")] * again + [("succeeded", None)])
        # What the failed attempts cost nobody said, so it is unknown and not zero.
        assert [attempt.cost_usd for attempt in run.steps[0].attempts[:-1]] == [None] * again
        assert not run.cost_complete
    assert "HALF" not in str([request["body"] for request in provider.requests])
    assert "HALF" not in str([run.steps[0].output for run in runs])


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 8192 tokens.",
        "prompt is too long: 9 > 8",
        "The decoder prompt (length 9000) is longer than the maximum model length of 8192",
        "max_tokens must be at least 1, got -808",
    ],
)
async def test_a_prompt_that_is_too_long_is_sent_once(
    process: WorkerProcess, provider: Provider, tmp_path: Path, message: str
) -> None:
    """G2-04."""
    provider.script({"status": 400, "body": {"error": {"message": message}}}, model="odd", times=None)
    run = await run_two(process, provider, tmp_path, "plain", "odd")
    assert (run.state, run.reason, provider.count) == ("failed", "context-too-long", 2)
    (attempt,) = run.steps[1].attempts
    assert (attempt.state, attempt.cost_usd, run.steps[1].access) == ("failed", 0, (0,))
    assert message in (attempt.message or "")
    # Which outputs made the prompt so long is said with the failure.
    assert "it holds the outputs of step 0; let the step read fewer steps" in blame(run, None)


async def test_a_prompt_of_everything_names_the_steps_that_it_is_made_of(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    """G2-04: a step that sees "all" is checked against the model's window before the call."""
    provider.script({"text_bytes": 60_000}, model="wordy", times=None)
    window = {"context_tokens": 10_000, "output_tokens_max": 1_000}
    pool = pool_of(tmp_path, provider.base_url, "wordy", "plain", worker=window)
    plan = lists_plan(["a", "b", "c", "d"], [[], [], [], ["all"]], [0, 0, 0, 1])
    run = await ended(process.database, await submit_plan(process, pool, plan))
    assert (run.state, run.reason, provider.count) == ("failed", "context-too-long", 3)
    assert "it holds the outputs of steps 0, 1, 2;" in blame(run, pool)


async def test_a_prompt_that_cannot_fit_the_window_is_not_sent_at_all(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    """G2-04: nothing that a step may see is cut silently."""
    provider.script({"text_bytes": 200_000}, model="wordy")
    window = {"context_tokens": 10_000, "output_tokens_max": 1_000}
    run = await run_two(process, provider, tmp_path, "wordy", "plain", worker=window)
    assert (run.state, run.reason, provider.count) == ("failed", "context-too-long", 1)
    (attempt,) = run.steps[1].attempts
    assert (attempt.state, attempt.cost_usd, run.cost_complete) == ("failed", 0, True)
    assert "cannot fit a window of 10,000 tokens" in (attempt.message or "")


@pytest.mark.parametrize(
    ("behaviour", "code"),
    [
        ({"text": "", "reasoning": "VAULT-7"}, "empty-answer"),
        ({"text": "   \n"}, "empty-answer"),
        ({"text": "", "reasoning": "so " * 2000, "finish_reason": "length"}, "truncated-thinking"),
        ({"text": "I cannot help.", "finish_reason": "content_filter"}, "content-filtered"),
    ],
)
async def test_a_last_step_without_an_answer_is_no_success_and_borrows_no_other_answer(  # see above
    process: WorkerProcess, provider: Provider, tmp_path: Path, behaviour: dict[str, Any], code: str
) -> None:
    """G2-05, G2-07."""
    provider.script(behaviour, model="odd", times=None)
    run = await run_two(process, provider, tmp_path, "plain", "odd")
    assert (run.state, run.reason, run.answer) == ("failed", code, None)
    assert run.steps[0].output is not None
    assert provider.count == 2


async def test_what_a_refusal_cost_is_counted_before_the_step_goes_to_a_substitute(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    """G2-05: the declined text goes to nobody, the tokens of it are billed all the same."""
    refusal = {"text": "I cannot help.", "finish_reason": "content_filter", "usage": [100, 26]}
    provider.script(refusal, model="odd", times=None)
    provider.script({"text": "Gladly.", "usage": [10, 4]}, model="good", times=None)
    each = {"base_url": provider.base_url, "queue": "stand-in", "price": PRICE, "description": "answers"}
    more = [
        {**each, "name": "first", "model": "odd", "fallbacks": ["second"]},
        {**each, "name": "second", "model": "good"},
    ]
    pool = pool_of(tmp_path, provider.base_url, more=more, policy={"on_failed_step": "fallback"})
    run = await ended(process.database, await submit_plan(process, pool, lists_plan(["a", "b"], [[], [0]], [0, 1])))
    assert (run.state, run.steps[0].output, run.answer) == ("succeeded", "Gladly.", "Gladly.")
    declined, answered = run.steps[0].attempts
    assert (declined.worker, declined.state, declined.error_code) == ("first", "refused", "content-filtered")
    assert (declined.input_tokens, declined.output_tokens, declined.cost_usd) == (100, 26, Decimal("0.000152"))
    assert (answered.worker, answered.state) == ("second", "succeeded")
    # Neither tried again on the model that declined, nor left out of the sums.
    assert [request["model"] for request in provider.requests] == ["odd", "good", "good"]
    assert (run.input_tokens, run.output_tokens) == (120, 34)
    assert (run.cost_usd, run.cost_complete) == (Decimal("0.000188"), True)
    assert "I cannot help." not in str([request["body"] for request in provider.requests])
    assert await texts_of(process.database, run.id, "declined_output") == [b"I cannot help."]


async def test_reasoning_is_kept_for_the_operator_and_shown_to_no_other_step(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    """G2-07: beside an answer, inside of it, and where there is no answer."""
    provider.script({"text": "First answer.", "reasoning": "VAULT-1 beside"}, model="beside")
    provider.script({"text": "<think>VAULT-2 inside</think>Second answer."}, model="inside")
    provider.script({"text": "", "reasoning": "VAULT-3 alone"}, model="alone", times=None)
    pool = pool_of(tmp_path, provider.base_url, "beside", "inside", "alone")
    plan = lists_plan(["a", "b", "c"], [[], [0], ["all"]], [0, 1, 2])
    run = await ended(process.database, await submit_plan(process, pool, plan))
    assert (run.state, run.reason, run.answer) == ("failed", "empty-answer", None)
    assert [step.output for step in run.steps] == ["First answer.", "Second answer.", None]
    kept = await texts_of(process.database, run.id, "reasoning")
    assert sorted(kept) == [b"VAULT-1 beside", b"VAULT-2 inside", b"VAULT-3 alone"]
    bodies = str([request["body"] for request in provider.requests])
    assert "First answer." in bodies
    assert "Second answer." in bodies
    assert "VAULT" not in bodies


async def test_a_filter_that_refuses_with_a_status_declines_like_one_that_refuses_in_the_reply(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    """G2-05."""
    provider.script({"status": 400, "body": {"error": {"code": "content_filter", "message": "no"}}}, times=None)
    run = await run_two(process, provider, tmp_path, "plain", "plain")
    (attempt,) = run.steps[0].attempts
    assert (run.state, attempt.state, attempt.error_code) == ("failed", "refused", "content-filtered")
    assert provider.count == 1


async def test_every_request_is_such_as_claude_takes_whatever_the_steps_before_it_wrote(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    """G2-09: an answer that ends in blanks, a subtask that does, one that is shown to the next step."""
    provider.script({"strict_messages": True, "text": "an answer with blanks  \n\n "}, times=None)
    pool = pool_of(tmp_path, provider.base_url, "one", "two")
    plan = lists_plan(["First. \n", "Second.\n\n  "], [[], ["all"]], [0, 1])
    run = await ended(process.database, await submit_plan(process, pool, plan, "What is gravity?  \n"))
    assert (run.state, provider.count) == ("succeeded", 2)
    assert [message["role"] for request in provider.requests for message in request["body"]["messages"]].count(
        "assistant"
    ) == 0


async def test_what_is_sent_is_what_the_pinned_pool_says_and_a_refused_parameter_is_not_tried_again(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    """G2-10."""
    refusal = {"status": 400, "body": {"error": {"message": "Unsupported value: 'temperature'"}}}
    provider.script(refusal, model="odd", times=None)
    run = await run_two(process, provider, tmp_path, "plain", "odd", worker={"parameters": {"temperature": 0.2}})
    assert (run.state, run.reason, provider.count) == ("failed", "parameter-refused", 2)
    assert [request["body"]["temperature"] for request in provider.requests] == [0.2, 0.2]
    # The record of each attempt, of the refused one too, says what was really sent beside the messages.
    manifests = await texts_of(process.database, run.id, "prompt_manifest")
    sent = [
        {name: value for name, value in request["body"].items() if name != "messages"} for request in provider.requests
    ]
    assert len(sent[0]) > 1
    in_order = sorted((json.loads(manifest)["parameters"] for manifest in manifests), key=lambda one: one["model"])
    assert in_order == sorted(sent, key=lambda one: one["model"])


async def test_an_unknown_model_ends_its_own_run_after_one_call_and_no_other(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    """G2-12."""
    gone = {"status": 404, "body": {"error": {"message": "model does not exist or you do not have access"}}}
    provider.script(gone, model="no-such-thing", times=None)
    bad, good = await asyncio.gather(
        run_two(process, provider, tmp_path, "no-such-thing", "plain"),
        run_two(process, provider, tmp_path, "plain", "plain"),
    )
    assert (bad.state, bad.reason, good.state) == ("failed", "model-not-found", "succeeded")
    (attempt,) = bad.steps[0].attempts
    assert (bad.steps[0].position, attempt.worker, attempt.model) == (0, "w0", "no-such-thing")
    assert sum(request["model"] == "no-such-thing" for request in provider.requests) == 1


async def test_a_call_that_is_given_up_is_closed_before_it_is_made_again(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    """G2-15: a server that still computes the first answer is not asked for a second one beside it."""
    provider.script({"delay_first_s": 60}, model="slow", times=None)
    limits = {"call_s": 20, "first_token_s": 0.5, "idle_s": 5}
    run = await run_two(process, provider, tmp_path, "slow", "plain", worker={"timeouts": limits, "attempts_max": 2})
    assert (run.state, run.reason) == ("failed", "first-token-timeout")
    first, second = provider.requests
    assert first["disconnected"]
    assert first["ended_at"] < second["started_at"]
    (event, *_) = [
        event.activity_task_scheduled_event_attributes
        for event in await history_events(process.client, run.id)
        if event.HasField("activity_task_scheduled_event_attributes")
    ]
    # Temporal's own limit for one attempt lies above the worker's, so that our error comes first.
    assert event.start_to_close_timeout.ToTimedelta() == timedelta(seconds=20 + contracts.CALL_MARGIN_S)
    assert event.retry_policy.maximum_attempts == 0


@pytest.mark.slow
async def test_what_blocks_one_call_stops_no_other_calls_heartbeats(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    """G3-12, G2-15: twenty calls that outlast the heartbeat timeout, one of which dribbles, with every thread stuck.

    A name that takes 30 s to resolve is a thread of the default executor that is stuck for 30 s; here all of them are.
    """
    hold_s = contracts.HEARTBEAT_TIMEOUT.total_seconds() + 2
    pieces = int(hold_s / 0.5)
    provider.script({"text": "x" * pieces, "pieces": pieces, "delay_piece_s": 0.5}, model="dribble")
    models = ["dribble", *[f"sleep-{hold_s * 1000:.0f}ms"] * 19]
    limits = {"call_s": 60, "first_token_s": 40, "idle_s": 5}
    pool = pool_of(tmp_path, provider.base_url, *models, worker={"timeouts": limits}, policy={"steps_max": 20})
    plan = lists_plan(["Go."] * 20, [[]] * 20, list(range(20)))
    run_id = await submit_plan(process, pool, plan)
    await provider_reaches(provider, 20)
    start = time.monotonic()
    loop = asyncio.get_running_loop()
    stuck = [loop.run_in_executor(None, time.sleep, hold_s / 2) for _ in range(64)]
    lags = []
    while provider.stats["in_flight"]:
        before = time.monotonic()
        await asyncio.sleep(0.1)
        lags.append(time.monotonic() - before - 0.1)
        if time.monotonic() - start > hold_s / 2:
            for thread in stuck:
                thread.cancel()
    run = await ended(process.database, run_id, timeout_s=60)
    assert run.state == "succeeded"
    # All at once, each exactly once: no heartbeat was missed, or Temporal would have had it called again.
    assert (provider.count, provider.stats["in_flight_max"]) == (20, 20)
    assert {len(step.attempts) for step in run.steps} == {1}
    assert max(lags) < 1.0
    assert time.monotonic() - start < hold_s + 10
    await asyncio.gather(*stuck, return_exceptions=True)
