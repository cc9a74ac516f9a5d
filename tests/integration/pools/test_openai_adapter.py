"""The thin client against a real HTTP server that misbehaves in every way that providers do."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import pytest

from worker_pools.adapters import CallFailed, Message, ModelCall, judge
from worker_pools.adapters.openai import OpenAiAdapter
from worker_pools.pool import Worker

# Long where a test is not about limits, so that a busy machine changes nothing.
LONG = {"call_s": 60, "first_token_s": 60, "idle_s": 60}
SHORT = {"call_s": 30, "first_token_s": 1.0, "idle_s": 0.5}


@pytest.fixture
async def adapter():
    made = OpenAiAdapter()
    yield made
    await made.aclose()


def a_call(base_url: str, **changes) -> ModelCall:
    fields = {"name": "w", "description": "d", "base_url": base_url, "model": "m", "timeouts": LONG}
    messages = changes.pop("messages", [Message("system", "be brief"), Message("user", "hello")])
    extra = {name: changes.pop(name) for name in ("response_schema", "api_key") if name in changes}
    return ModelCall(Worker.model_validate(fields | changes), messages, "attempt-1", **extra)


async def failure(adapter: OpenAiAdapter, call: ModelCall) -> CallFailed:
    with pytest.raises(CallFailed) as caught:
        await adapter.call(call, lambda _: None)
    assert str(caught.value) == caught.value.code
    return caught.value


async def test_a_streamed_answer_arrives_with_usage_and_times(adapter, provider):
    seen = []
    provider.script({"text": "one two three", "pieces": 3, "delay_piece_s": 0.01, "headers": {"x-request-id": "r7"}})
    reply = await adapter.call(a_call(provider.base_url, parameters={"temperature": 0.2}), seen.append)
    assert (reply.text, reply.content, reply.reasoning, reply.refusal) == ("one two three", "one two three", "", None)
    assert (reply.finish_reason, reply.provider_model, reply.provider_request_id, reply.output_tokens) == (
        "stop",
        "m",
        "r7",
        3,
    )
    assert reply.input_tokens > 0
    assert 0 < reply.first_token_s < reply.duration_s
    assert [one.pieces for one in seen] == [1, 2, 3]
    assert seen[-1].text_chars == len("one two three")
    (sent,) = provider.requests
    assert {name: value for name, value in sent["body"].items() if name != "messages"} == {
        "temperature": 0.2,
        "model": "m",
        "max_tokens": 8192,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert judge(reply).failure is None


async def test_the_request_carries_the_attempt_and_the_key_and_ends_with_the_user(adapter, provider):
    await adapter.call(
        a_call(provider.base_url, api_key="k-1", max_tokens_parameter="max_completion_tokens", output_tokens_max=99),
        lambda _: None,
    )
    (sent,) = provider.requests
    headers = sent["headers"]
    assert sent["attempt_id"] == headers["x-request-id"] == headers["idempotency-key"] == "attempt-1"
    assert headers["authorization"] == "Bearer k-1"
    assert sent["body"]["messages"][-1] == {"role": "user", "content": "hello"}
    assert sent["body"]["max_completion_tokens"] == 99
    assert "max_tokens" not in sent["body"]


async def test_a_schema_is_sent_as_a_strict_json_schema(adapter, provider):
    schema = {"type": "object"}
    await adapter.call(a_call(provider.base_url, response_schema=schema), lambda _: None)
    wanted = {"type": "json_schema", "json_schema": {"name": "plan", "schema": schema, "strict": True}}
    assert provider.requests[0]["body"]["response_format"] == wanted


@pytest.mark.parametrize(
    ("behaviour", "code", "sent"),
    [
        ({"end": "cut"}, "stream-cut", True),
        ({"end": "break"}, "stream-cut", True),
        ({"end": "reset"}, "stream-cut", True),
        ({"end": "refuse"}, "connection-lost", True),
        ({"end": "hang"}, "idle-timeout", True),
        ({"end": "drip"}, "idle-timeout", True),
        ({"delay_headers_s": 3}, "first-token-timeout", True),
        ({"delay_first_s": 3}, "first-token-timeout", True),
        ({"text": "", "end": "drip"}, "first-token-timeout", True),
        ({"raw_events": ['{"choices": [{"delta": {"content": "half']}, "reply-unreadable", True),
        ({"raw_events": ["[" * 100_000]}, "reply-unreadable", True),
        ({"raw_events": ["17"]}, "reply-unreadable", True),
        ({"raw_body": "<html>busy</html>"}, "reply-unreadable", True),
        ({"status": 302, "headers": {"Location": "http://127.0.0.1:1/"}}, "redirected", True),
        ({"error_event": {"error": {"type": "overloaded_error", "message": "Overloaded"}}}, "overloaded", True),
        ({"error_event": {"type": "error", "error": {"type": "overloaded_error"}}}, "overloaded", True),
        ({"error_event": {"error": {"code": 429, "message": "slow down"}}}, "rate-limited", True),
        ({"error_event": {"error": {"message": "prompt is too long: 9 > 8"}}}, "context-too-long", True),
        ({"error_event": {"error": {"message": "something broke"}}}, "server-error", True),
    ],
)
async def test_a_reply_without_a_proper_end_is_a_failure(adapter, provider, behaviour, code, sent):
    provider.script(behaviour)
    limits = SHORT if "timeout" in code else LONG
    caught = await failure(adapter, a_call(provider.base_url, timeouts=limits))
    assert (caught.code, caught.sent) == (code, sent)
    assert provider.count == 1


async def test_partial_text_is_counted_and_never_returned(adapter, provider):
    provider.script({"text": "half an answer", "end": "cut"})
    caught = await failure(adapter, a_call(provider.base_url))
    assert caught.output_chars == len("half an answer")
    assert "half" not in repr(vars(caught))


async def test_an_answer_whose_end_was_told_survives_the_loss_of_the_tail(adapter, provider):
    event = '{"choices": [{"index": 0, "delta": {"content": "done"}, "finish_reason": "stop"}]}'
    for end in ("break", "reset", "hang", "no-done"):
        provider.script({"raw_events": [event], "end": end})
        reply = await adapter.call(a_call(provider.base_url, timeouts=SHORT), lambda _: None)
        assert (reply.text, reply.output_tokens) == ("done", None)


@pytest.mark.parametrize("advice", ["7", "1.5", "-5", "soon", "", "999999", "Mon, 30 Nov 2026 10:00:20 GMT"])
async def test_retry_advice_is_handed_on_raw_with_the_date_of_the_answer(adapter, provider, advice):
    date = "Mon, 30 Nov 2026 10:00:00 GMT"
    provider.script({"status": 429, "headers": {"Retry-After": advice, "Date": date}})
    caught = await failure(adapter, a_call(provider.base_url))
    assert (caught.code, caught.status, caught.retry_after, caught.date) == ("rate-limited", 429, advice, date)
    assert not caught.billable


async def test_a_429_without_advice_has_none(adapter, provider):
    provider.script({"status": 429})
    assert (await failure(adapter, a_call(provider.base_url))).retry_after is None


async def test_usage_that_is_missing_stays_unknown(adapter, provider):
    provider.script({"usage": None}, {"usage": None, "stream": False})
    for _ in range(2):
        reply = await adapter.call(a_call(provider.base_url), lambda _: None)
        assert (reply.input_tokens, reply.output_tokens) == (None, None)


async def test_a_server_that_does_not_stream_is_understood(adapter, provider):
    provider.script({"stream": False, "text": "whole", "reasoning": "thought"})
    reply = await adapter.call(a_call(provider.base_url), lambda _: None)
    assert (reply.text, reply.reasoning, reply.finish_reason) == ("whole", "thought", "stop")


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
async def test_reasoning_is_kept_apart_from_the_answer(adapter, provider, field):
    provider.script({"reasoning": "secret thought", "reasoning_field": field, "text": "answer"})
    reply = await adapter.call(a_call(provider.base_url), lambda _: None)
    assert (reply.text, reply.reasoning) == ("answer", "secret thought")


async def test_a_think_block_at_the_start_is_reasoning(adapter, provider):
    provider.script({"text": "<think>\nhm\n</think>\n\nanswer", "pieces": 9})
    reply = await adapter.call(a_call(provider.base_url), lambda _: None)
    assert (reply.text, reply.reasoning) == ("answer", "hm")
    assert reply.content == "<think>\nhm\n</think>\n\nanswer"


async def test_replies_without_an_answer_are_told_apart(adapter, provider):
    cases = [
        ({"text": "", "finish_reason": "content_filter"}, "content-filtered"),
        ({"text": "I cannot help.", "finish_reason": "content_filter"}, "content-filtered"),
        ({"text": "", "usage": [9, 126]}, "empty-answer"),
        ({"text": "", "reasoning": "hm " * 2000, "finish_reason": "length"}, "truncated-thinking"),
        ({"text": "<think>hm", "finish_reason": "length"}, "truncated-thinking"),
        ({"text": "", "reasoning": "VAULT-7"}, "empty-answer"),
        ({"text": "   \n"}, "empty-answer"),
        ({"text": "", "refusal": "No."}, "refused"),
    ]
    provider.script(*[behaviour for behaviour, _ in cases])
    for _, expected in cases:
        reply = await adapter.call(a_call(provider.base_url), lambda _: None)
        assert judge(reply).failure == expected


async def test_three_megabytes_are_an_answer_and_thirty_are_too_many(adapter, provider):
    provider.script({"text_bytes": 3_000_000, "pieces": 50}, {"text_bytes": 3_000_000, "stream": False})
    for _ in range(2):
        reply = await adapter.call(a_call(provider.base_url), lambda _: None)
        assert len(reply.text) == 3_000_000
    provider.script({"text_bytes": 30_000_000, "pieces": 50}, {"text_bytes": 40_000_000, "stream": False})
    for _ in range(2):
        caught = await failure(adapter, a_call(provider.base_url))
        assert (caught.code, caught.entry.kind, caught.billable) == ("output-too-large", "terminal", True)


async def test_nul_and_surrogates_pass_unchanged_and_a_divided_emoji_is_joined(adapter, provider):
    events = [
        r'{"choices": [{"delta": {"content": "nul \u0000 lone \ud83d end "}}]}',
        r'{"choices": [{"delta": {"content": "whole \ud83d"}}]}',
        r'{"choices": [{"delta": {"content": "\ude00"}, "finish_reason": "stop"}]}',
    ]
    provider.script({"raw_events": events})
    reply = await adapter.call(a_call(provider.base_url), lambda _: None)
    assert reply.text == "nul \x00 lone \ud83d end whole \U0001f600"


async def test_a_prompt_with_a_lone_surrogate_can_be_sent(adapter, provider):
    call = a_call(provider.base_url, model="echo", messages=[Message("user", "half \ud83d emoji")])
    assert (await adapter.call(call, lambda _: None)).text == "half \ud83d emoji"


async def test_cancelling_closes_the_connection_at_once(adapter, provider):
    for behaviour in ({"delay_headers_s": 30}, {"text": "some", "end": "hang"}):
        provider.reset()
        provider.script(behaviour)
        task = asyncio.create_task(adapter.call(a_call(provider.base_url), lambda _: None))
        await asyncio.to_thread(provider.wait_for, 1)
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(provider.wait_disconnected, 1)


async def test_a_call_that_times_out_has_closed_its_connection(adapter, provider):
    provider.script({"end": "hang"})
    await failure(adapter, a_call(provider.base_url, timeouts=SHORT))
    await asyncio.to_thread(provider.wait_disconnected, 1)


async def test_the_endless_drip_of_tokens_ends_by_the_total_limit(adapter, provider):
    provider.script({"text": "x" * 1000, "pieces": 1000, "delay_piece_s": 0.1})
    start = time.monotonic()
    limits = {"call_s": 1.0, "first_token_s": 30, "idle_s": 30}
    caught = await failure(adapter, a_call(provider.base_url, timeouts=limits))
    assert caught.code == "call-timeout"
    # Without the limit the drip would last 100 s.
    assert time.monotonic() - start < 20


async def test_a_port_without_a_server_means_that_nothing_was_sent(adapter):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    caught = await failure(adapter, a_call(url))
    assert (caught.code, caught.sent, caught.billable) == ("connection-failed", False, False)


async def test_a_key_that_no_header_can_hold_is_refused_without_being_shown(adapter, provider):
    for key in ("two\nlines", "naïve", "with blank"):
        caught = await failure(adapter, a_call(provider.base_url, api_key=key))
        assert (caught.code, caught.sent) == ("auth-failed", False)
        assert key not in repr(vars(caught))
    assert provider.count == 0


async def test_nothing_is_retried(adapter, provider):
    provider.script({"status": 500}, {"end": "refuse"})
    for expected in ("server-error", "connection-lost"):
        assert (await failure(adapter, a_call(provider.base_url))).code == expected
    assert provider.count == 2


async def test_loopback_is_never_reached_through_a_proxy(provider, monkeypatch):
    # httpx reads the environment when a client is made, so the variable must be there in this process.
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    adapter = OpenAiAdapter()
    assert (await adapter.call(a_call(provider.base_url), lambda _: None)).text
    await adapter.aclose()


async def test_a_hundred_and_twenty_calls_at_once_all_finish(adapter, provider):
    call = a_call(provider.base_url, model="sleep-3000ms")
    replies = await asyncio.gather(*[adapter.call(call, lambda _: None) for _ in range(120)])
    assert {reply.finish_reason for reply in replies} == {"stop"}
    assert provider.stats["in_flight_max"] == 120


@pytest.mark.parametrize("stream", [True, False])
async def test_the_providers_own_id_and_the_model_that_answered_are_told(adapter, provider, stream):
    said = {"headers": {"x-request-id": "req_7"}, "answered_model": "m-2026-11-01", "stream": stream}
    provider.script(said)
    reply = await adapter.call(a_call(provider.base_url), lambda _: None)
    assert (reply.provider_request_id, reply.provider_model) == ("req_7", "m-2026-11-01")


async def test_a_failed_call_has_them_as_far_as_they_came(adapter, provider):
    provider.script({"status": 503, "headers": {"x-amzn-RequestId": "req_8"}})
    refused = await failure(adapter, a_call(provider.base_url))
    assert (refused.provider_request_id, refused.provider_model) == ("req_8", None)
    provider.script({"headers": {"x-request-id": "req_9"}, "answered_model": "m-2", "end": "cut"})
    cut = await failure(adapter, a_call(provider.base_url))
    assert (cut.code, cut.provider_request_id, cut.provider_model) == ("stream-cut", "req_9", "m-2")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("said", ["a\nb", "a" * 10_240, "sk-canary-0123456789", "two words", ""])
async def test_what_is_no_id_and_no_name_is_not_told(adapter, provider, said, stream):
    """A newline cannot stand in a header, but in the body's name of the model."""
    headers = {} if "\n" in said else {"x-request-id": said}
    provider.script({"headers": headers, "answered_model": said, "stream": stream})
    call = a_call(provider.base_url, api_key="sk-canary-0123456789")
    reply = await adapter.call(call, lambda _: None)
    assert (reply.provider_request_id, reply.provider_model) == (None, None)
    provider.script({"status": 500, "headers": headers})
    assert (await failure(adapter, call)).provider_request_id is None


async def test_the_model_is_the_first_that_a_stream_names(adapter, provider):
    """Azure's first piece names none."""
    piece = {"choices": [{"index": 0, "delta": {"content": "done"}, "finish_reason": "stop"}]}
    events = [json.dumps({"model": "", "choices": []}), json.dumps({"model": "m-3", **piece}), "[DONE]"]
    provider.script({"raw_events": events})
    assert (await adapter.call(a_call(provider.base_url), lambda _: None)).provider_model == "m-3"
