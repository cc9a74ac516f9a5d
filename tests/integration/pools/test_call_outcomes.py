"""What becomes of every way in which a provider can answer badly: both adapters, a real server, one request each.

The letters and numbers are those of the public cases (G2-03 and so on). The wordings of refusals are in
tests/unit/pools/test_failure_words.py, what a run makes of an outcome in tests/workflow.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from engine import contracts
from worker_pools.adapters import CallFailed, Message, ModelCall, judge
from worker_pools.adapters.clients import (
    CONNECT_TIMEOUT_S,
    WRITE_TIMEOUT_S,
    HttpClients,
    keepalive_options,
    proxy_of,
)
from worker_pools.adapters.openai import OpenAiAdapter
from worker_pools.pool import Worker

LONG = {"call_s": 60, "first_token_s": 60, "idle_s": 60}
PIECE = '{"choices": [{"index": 0, "delta": {"content": "half"}}]}'
LAST = '{"choices": [{"index": 0, "delta": {"content": " done"}, "finish_reason": "stop"}]}'
WHOLE = json.dumps({"choices": [{"index": 0, "message": {"content": "whole"}, "finish_reason": "stop"}]})


@pytest.fixture
async def adapter():
    made = OpenAiAdapter()
    yield made
    await made.aclose()


def a_call(base_url: str, **changes: Any) -> ModelCall:
    fields = {"name": "w", "description": "d", "base_url": base_url, "model": "m", "timeouts": LONG}
    return ModelCall(Worker.model_validate(fields | changes), [Message("user", "hello")], "attempt-1")


async def outcome(adapter: Any, call: ModelCall) -> str:
    """The code of a call's failure, `answer` for an answer."""
    try:
        reply = await adapter.call(call, lambda _: None)
    except CallFailed as failure:
        return failure.code
    return judge(reply).failure or "answer"


@pytest.mark.parametrize(
    ("behaviour", "code"),
    [
        # G2-03: overload, before and in the middle of an answer.
        ({"status": 529, "body": {"type": "error", "error": {"type": "overloaded_error"}}}, "overloaded"),
        ({"status": 503, "body": {"error": {"message": "throttled"}}}, "overloaded"),
        ({"raw_events": ['{"error": {"code": 503, "message": "no"}}']}, "overloaded"),
        ({"raw_events": [PIECE, '{"error": "Overloaded"}', "[DONE]"]}, "overloaded"),
        ({"raw_events": [PIECE, '{"object": "error", "message": "slow down", "code": 429}']}, "rate-limited"),
        ({"raw_stream": f"data: {PIECE}\n\nevent: error\ndata: Overloaded\n\n"}, "reply-unreadable"),
        ({"finish_reason": "error"}, "stream-cut"),
        ({"finish_reason": "abort"}, "stream-cut"),
        ({"finish_reason": "insufficient_system_resource"}, "overloaded"),
        # G2-04: in a stream that began as a success.
        ({"raw_events": ['{"error": {"message": "prompt is too long: 9 > 8"}}']}, "context-too-long"),
        # G2-05, G2-07: complete replies without an answer.
        ({"text": "", "finish_reason": "content_filter"}, "content-filtered"),
        ({"text": "I cannot help.", "finish_reason": "content_filter"}, "content-filtered"),
        ({"text": "I cannot help.", "refusal": "no"}, "refused"),
        ({"text": "", "usage": [9, 126]}, "empty-answer"),
        ({"text": "  \n", "stream": False}, "empty-answer"),
        ({"text": "", "reasoning": "hm " * 99, "finish_reason": "length"}, "truncated-thinking"),
        ({"text": "", "reasoning": "VAULT-7"}, "empty-answer"),
        ({"raw_body": '{"choices": [{"message": {"content": null}, "finish_reason": "stop"}]}'}, "empty-answer"),
        ({"raw_body": '{"choices": []}'}, "empty-answer"),
        # G2-12: the key, the model, the address.
        ({"status": 401, "body": {"error": {"message": "no"}}}, "auth-failed"),
        ({"status": 403, "raw_body": "<html>Just a moment...</html>"}, "permission-denied"),
        ({"status": 404, "body": {"error": {"message": "model `m` does not exist"}}}, "model-not-found"),
        ({"status": 404, "raw_body": "<html>404 Not Found</html>"}, "endpoint-not-found"),
        ({"status": 301, "headers": {"Location": "http://127.0.0.1:1/"}}, "redirected"),
        ({"status": 308, "headers": {"Location": "http://127.0.0.1:1/"}}, "redirected"),
        # The line breaks: before, in and after the head.
        ({"cut_head": 0, "end": "break"}, "connection-lost"),
        ({"cut_head": 0, "end": "reset"}, "connection-lost"),
        ({"cut_head": 20, "end": "break"}, "connection-lost"),
        ({"cut_head": 20, "end": "reset"}, "connection-lost"),
        ({"raw_stream": "", "end": "break"}, "stream-cut"),
        ({"raw_stream": "", "end": "reset"}, "stream-cut"),
        ({"raw_body": WHOLE, "end": "break"}, "stream-cut"),
        ({"raw_body": WHOLE, "end": "reset"}, "stream-cut"),
        # The reply does not follow the protocol.
        ({"raw_stream": "data: {not json}\n\n"}, "reply-unreadable"),
        ({"raw_stream": "data: [1, 2]\n\n"}, "reply-unreadable"),
        ({"raw_stream": ""}, "reply-unreadable"),
        ({"raw_stream": "just some words"}, "reply-unreadable"),
        ({"raw_stream": '{"response": "a"}\n{"response": "b"}\n'}, "reply-unreadable"),
        ({"raw_body": ""}, "reply-unreadable"),
        ({"raw_body": "{}"}, "reply-unreadable"),
        ({"raw_body": '{"detail": "sign in first"}'}, "reply-unreadable"),
        ({"raw_body": "<html>sign in</html>", "headers": {"Content-Type": "text/html"}}, "reply-unreadable"),
        ({"status": 502, "raw_body": "<html>Bad Gateway</html>"}, "server-error"),
        ({"status": 524, "raw_body": "<html>A timeout occurred</html>"}, "server-error"),
        ({"status": 429, "raw_body": "<html>Too Many Requests</html>"}, "rate-limited"),
        ({"status": 204, "raw_body": ""}, "server-error"),
        # [DONE] after half an answer: a proxy closes in order what broke behind it.
        ({"raw_events": [PIECE, "[DONE]"]}, "stream-cut"),
        ({"raw_events": ["[DONE]"]}, "stream-cut"),
        ({"raw_stream": ": ping\n\n"}, "stream-cut"),
    ],
)
async def test_each_bad_reply_has_one_outcome_after_one_request(adapter, provider, behaviour, code):
    """G2-03, G2-04, G2-05, G2-07, G2-12, G2-17."""
    provider.script(behaviour, times=None)
    assert await outcome(adapter, a_call(provider.base_url)) == code
    assert provider.count == 1


@pytest.mark.parametrize(
    ("behaviour", "text"),
    [
        # A label that is wrong, or none, does not cost an answer that was paid for.
        ({"raw_events": [PIECE, LAST], "headers": {"Content-Type": "application/json"}}, "half done"),
        ({"raw_events": [PIECE, LAST], "headers": {"Content-Type": "text/plain"}}, "half done"),
        ({"raw_events": [PIECE, LAST], "headers": {"Content-Type": ""}}, "half done"),
        ({"raw_body": WHOLE, "headers": {"Content-Type": "text/event-stream"}}, "whole"),
        ({"raw_stream": f": hello\n\nretry: 9\n\ndata:{PIECE}\n\ndata:{LAST}\n\n"}, "half done"),
        ({"raw_stream": f"\ufeffdata: {PIECE}\r\n\r\ndata: {LAST}\r\n\r\n"}, "half done"),
        # Neither [DONE] nor the last blank line nor a trailing usage is needed where the end was told.
        ({"raw_events": [PIECE, LAST], "end": "no-done"}, "half done"),
        ({"raw_stream": f"data: {PIECE}\n\ndata: {LAST}"}, "half done"),
        ({"raw_events": [PIECE, LAST], "end": "reset"}, "half done"),
        ({"raw_body": '{"choices": [{"message": {"content": "whole"}}]}'}, "whole"),
    ],
)
async def test_an_odd_reply_that_is_complete_is_an_answer(adapter, provider, behaviour, text):
    provider.script(behaviour)
    reply = await adapter.call(a_call(provider.base_url), lambda _: None)
    assert (reply.text, judge(reply).failure) == (text, None)
    assert (reply.input_tokens, reply.output_tokens) == (None, None)


async def test_an_answer_cut_at_its_limit_is_marked(adapter, provider):
    """G2-07: the text is an answer, cut; only a limit that left no text at all is a failure."""
    provider.script({"text": "cut he", "finish_reason": "length"})
    verdict = judge(await adapter.call(a_call(provider.base_url), lambda _: None))
    assert (verdict.failure, verdict.truncated) == (None, True)


async def test_a_refusal_whose_text_never_comes_keeps_its_advice(adapter, provider, monkeypatch):
    """G2-01: the status and the headers are there, and that is what counts."""
    # The wait is shortened in this process, where the adapter lives; nothing is replaced.
    monkeypatch.setattr("worker_pools.adapters.openai.ERROR_TEXT_S", 0.3)
    provider.script({"status": 429, "headers": {"Retry-After": "7"}, "end": "hang"})
    with pytest.raises(CallFailed) as caught:
        await adapter.call(a_call(provider.base_url), lambda _: None)
    assert (caught.value.code, caught.value.status, caught.value.retry_after) == ("rate-limited", 429, "7")
    await asyncio.to_thread(provider.wait_disconnected, 1)


async def test_reset_headers_are_handed_on_with_what_is_left(adapter, provider):
    """G2-01."""
    told = {
        "x-ratelimit-reset-requests": "6m0s",
        "x-ratelimit-remaining-requests": "0",
        "anthropic-ratelimit-input-tokens-reset": "2026-11-30T12:00:10Z",
    }
    provider.script({"status": 429, "headers": told | {"X-Other": "1"}})
    with pytest.raises(CallFailed) as caught:
        await adapter.call(a_call(provider.base_url), lambda _: None)
    assert caught.value.retry_headers == told


async def test_an_answer_that_is_long_in_coming_takes_one_request(adapter, provider):
    """G2-15, scaled down: nothing but the worker's own limits ends a wait, and the first token restarts the clock."""
    provider.script({"delay_headers_s": 1.5, "delay_first_s": 1.0, "text": "late"}, times=None)
    limits = {"call_s": 60, "first_token_s": 30, "idle_s": 0.5}
    reply = await adapter.call(a_call(provider.base_url, timeouts=limits), lambda _: None)
    assert (reply.text, provider.count) == ("late", 1)
    assert 2.4 < reply.first_token_s < 30


async def test_no_limit_of_http_is_shorter_than_the_workers_and_none_longer_than_temporals(provider):
    """G2-15: a call of 30 minutes without a token survives where the worker's limits allow it."""
    clients = HttpClients()
    for url in (provider.base_url, "https://host.example/v1"):
        async with clients.lease(url) as client:
            # What waits for the model has no limit but ours; connecting and sending are not waiting for the model.
            assert (client.timeout.read, client.timeout.pool) == (None, None)
            assert (client.timeout.connect, client.timeout.write) == (CONNECT_TIMEOUT_S, WRITE_TIMEOUT_S)
    await clients.aclose()
    # Temporal's limit for one attempt is the worker's call_s and this margin: tests/workflow/test_provider_trouble.py.
    assert max(CONNECT_TIMEOUT_S, WRITE_TIMEOUT_S) < contracts.CALL_MARGIN_S


def served_once(answer: bytes, seen: list[int]) -> Iterator[str]:
    """The address of a server that answers one request and then ends."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(answer)
                seen.append(1)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        thread.join(10)


async def test_the_sockets_of_calls_ask_for_signs_of_life(adapter):
    """G2-15: a router between us and the provider forgets a connection that is silent for minutes."""
    body = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(WHOLE), WHOLE.encode())
    seen: list[int] = []
    for url in served_once(body, seen):
        clients = HttpClients()
        async with clients.lease(url) as client, client.stream("POST", url, content=b"{}") as response:
            sock = response.extensions["network_stream"].get_extra_info("socket")
            found = [sock.getsockopt(level, option) for level, option, _ in keepalive_options()]
            await response.aread()
        await clients.aclose()
        assert found == [value for _, _, value in keepalive_options()]
        assert len(found) == 4 or not hasattr(socket, "TCP_KEEPIDLE")
    assert seen == [1]


@pytest.mark.parametrize(
    ("environment", "url", "proxy"),
    [
        ({}, "https://host.example/v1", None),
        ({"HTTPS_PROXY": "http://proxy:3128"}, "https://host.example/v1", "http://proxy:3128"),
        ({"https_proxy": "proxy:3128"}, "https://host.example/v1", "http://proxy:3128"),
        ({"HTTPS_PROXY": "http://proxy:3128"}, "http://host.example/v1", None),
        ({"ALL_PROXY": "http://proxy:3128"}, "http://host.example/v1", "http://proxy:3128"),
        ({"ALL_PROXY": "http://proxy:3128", "NO_PROXY": "host.example"}, "https://host.example:8443/v1", None),
        ({"ALL_PROXY": "http://proxy:3128", "NO_PROXY": ".example"}, "https://host.example/v1", None),
        ({"ALL_PROXY": "http://proxy:3128", "NO_PROXY": "*"}, "https://host.example/v1", None),
        ({"ALL_PROXY": "http://proxy:3128"}, "http://127.0.0.1:8000/v1", None),
        ({"ALL_PROXY": "http://proxy:3128"}, "http://[::1]:8000/v1", None),
        ({"ALL_PROXY": "http://proxy:3128"}, "http://localhost:8000/v1", None),
    ],
)
def test_the_proxy_is_the_one_that_the_environment_names(monkeypatch, environment, url, proxy):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert proxy_of(url) == proxy


async def test_a_call_goes_through_the_proxy_of_the_environment(adapter, provider, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", provider.root_url)
    provider.script({"text": "by proxy"})
    reply = await adapter.call(a_call("http://host.example/v1"), lambda _: None)
    assert reply.text == "by proxy"
    assert provider.requests[0]["path"] == "http://host.example/v1/chat/completions"


async def test_a_proxy_that_cannot_be_used_is_a_connection_that_failed_and_is_not_quoted(adapter, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "gopher://user:canary@proxy")
    with pytest.raises(CallFailed) as caught:
        await adapter.call(a_call("http://host.example/v1"), lambda _: None)
    assert (caught.value.code, caught.value.sent) == ("connection-failed", False)
    assert "canary" not in repr(vars(caught.value))


async def test_a_slow_drip_of_comments_or_reasoning_ends_by_the_right_limit(adapter, provider):
    """G2-15: comments are not tokens; reasoning is."""
    provider.script({"text": "", "end": "drip"}, {"text": "x", "end": "drip"})
    limits = {"call_s": 30, "first_token_s": 0.6, "idle_s": 0.4}
    start = time.monotonic()
    assert await outcome(adapter, a_call(provider.base_url, timeouts=limits)) == "first-token-timeout"
    assert await outcome(adapter, a_call(provider.base_url, timeouts=limits)) == "idle-timeout"
    assert time.monotonic() - start < 20
    provider.script({"reasoning": "so " * 8, "pieces": 8, "delay_piece_s": 0.2, "text": "answer"})
    assert await outcome(adapter, a_call(provider.base_url, timeouts=limits | {"idle_s": 5})) == "answer"
