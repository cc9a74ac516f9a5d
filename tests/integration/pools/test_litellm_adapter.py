"""litellm against the stand-in provider in three protocols: OpenAI's, Anthropic's and Gemini's."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from engine import contracts
from tests.support.provider import Provider
from worker_pools.adapters import CallFailed, Message, ModelCall, judge
from worker_pools.adapters.base import request_parameters
from worker_pools.adapters.litellm import LIBRARY_TIMEOUT_EXTRA_S
from worker_pools.pool import Timeouts, Worker
from worker_pools.pool.file import parse_pool
from worker_pools.pool_check import check_pool

pytest.importorskip("litellm")
# litellm builds its answers from pydantic classes whose own fields differ, and warns of it.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:pydantic"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

PROTOCOLS = {
    "openai": "openai/gpt-4o",
    "anthropic": "anthropic/claude-sonnet-4-20250514",
    "gemini": "gemini/gemini-2.5-pro",
}
# litellm reads past what is no event, so of a page in place of a stream it sees only that no answer came.
UNREADABLE = {"reply-unreadable", "stream-cut"}
LIMITS = {"call_s": 60, "first_token_s": 60, "idle_s": 60}


@pytest.fixture
async def adapter():
    from worker_pools.adapters.litellm import LiteLlmAdapter

    made = LiteLlmAdapter()
    yield made
    await made.aclose()


@pytest.fixture(params=sorted(PROTOCOLS))
def call(request, provider: Provider) -> ModelCall:
    base_url = provider.base_url if request.param == "openai" else provider.root_url
    worker = {"name": "w", "description": "d", "adapter": "litellm", "model": PROTOCOLS[request.param]}
    worker |= {"base_url": base_url, "timeouts": LIMITS, "parameters": {"temperature": 0.2}, "output_tokens_max": 99}
    messages = [Message("system", "be brief"), Message("user", "hello")]
    return ModelCall(Worker.model_validate(worker), messages, "attempt-1", api_key="canary-key")


async def failure(adapter, call: ModelCall) -> CallFailed:
    with pytest.raises(CallFailed) as caught:
        await adapter.call(call, lambda _: None)
    assert str(caught.value) == caught.value.code
    assert caught.value.__cause__ is None
    assert "canary-key" not in repr(vars(caught.value))
    return caught.value


async def test_an_answer_arrives_through_each_protocol(adapter, call, provider):
    seen = []
    provider.script({"text": "one two three", "pieces": 3})
    reply = await adapter.call(call, seen.append)
    assert (reply.text, reply.finish_reason, judge(reply).failure) == ("one two three", "stop", None)
    assert (reply.input_tokens > 0, reply.output_tokens) == (True, 3)
    assert [one.text_chars for one in seen][-1] == len("one two three")
    (sent,) = provider.requests
    assert sent["attempt_id"] == "attempt-1"
    options = sent["body"].get("generationConfig", sent["body"])
    assert options["temperature"] == 0.2
    # What the record says of the request is what was sent.
    said = request_parameters(call.worker)
    whole = "gemini" in call.worker.model
    assert ("streamGenerateContent" not in sent["path"]) if whole else sent["body"]["stream"]
    assert ("stream" in said, "stream_options" in said) == (not whole, not whole)


async def test_usage_that_the_provider_did_not_give_is_not_made_up(adapter, call, provider):
    provider.script({"usage": None})
    if "gemini" in call.worker.model:
        assert (await failure(adapter, call)).code == "reply-unreadable"
        return
    if "anthropic" in call.worker.model:
        pytest.skip("the Anthropic protocol always carries usage")
    reply = await adapter.call(call, lambda _: None)
    assert (reply.input_tokens, reply.output_tokens) == (None, None)


@pytest.mark.parametrize("end", ["cut", "break", "reset"])
async def test_a_stream_that_breaks_off_is_never_an_answer(adapter, call, provider, end):
    provider.script({"text": "half an answer", "end": end})
    caught = await failure(adapter, call)
    # Gemini is called without streaming, so nothing of a broken answer is ever seen.
    streams = "gemini" not in call.worker.model
    assert (caught.code, caught.sent, caught.output_chars > 0) == (
        "stream-cut" if streams else "connection-lost",
        True,
        streams,
    )
    assert provider.count == 1


@pytest.mark.parametrize(
    ("behaviour", "code"),
    [
        ({"status": 500}, "server-error"),
        ({"status": 529, "body": {"error": {"type": "overloaded_error", "message": "Overloaded"}}}, "overloaded"),
        ({"status": 503, "body": {"error": {"message": "throttled"}}}, "overloaded"),
        ({"status": 401, "body": {"error": {"message": "invalid api key"}}}, "auth-failed"),
        ({"status": 400, "body": {"error": {"message": "prompt is too long: 9 > 8"}}}, "context-too-long"),
        (
            {
                "status": 400,
                "body": {
                    "error": {
                        "message": "The decoder prompt (length 9000) is longer than the maximum model length of 8192"
                    }
                },
            },
            "context-too-long",
        ),
        ({"status": 400, "body": {"error": {"message": "Unsupported value: 'temperature'"}}}, "parameter-refused"),
        (
            {"status": 404, "body": {"error": {"message": "model does not exist or you do not have access"}}},
            "model-not-found",
        ),
        ({"status": 400, "body": {"error": {"message": "odd request"}}}, "invalid-request"),
        ({"end": "refuse"}, "connection-lost"),
    ],
)
async def test_refusals_are_told_apart_after_one_request(adapter, call, provider, behaviour, code):
    provider.script(behaviour, times=None)
    assert (await failure(adapter, call)).code == code
    assert provider.count == 1


async def test_retry_advice_reaches_us_raw(adapter, call, provider):
    provider.script({"status": 429, "headers": {"Retry-After": "1.5"}}, times=None)
    caught = await failure(adapter, call)
    assert (caught.code, caught.status, caught.retry_after) == ("rate-limited", 429, "1.5")
    assert caught.date is not None
    assert provider.count == 1


async def test_an_error_in_mid_stream_is_overload_and_not_an_answer(adapter, call, provider):
    if "gemini" in call.worker.model:
        pytest.skip("Gemini is called without streaming")
    event = {"type": "error", "error": {"code": 529, "type": "overloaded_error", "message": "Overloaded"}}
    provider.script({"text": "three text chunks", "pieces": 3, "error_event": event})
    caught = await failure(adapter, call)
    assert caught.code == "overloaded"


async def test_declined_and_empty_replies_are_not_answers(adapter, call, provider):
    provider.script(
        {"text": "", "finish_reason": "content_filter"}, {"text": ""}, {"text": "cut", "finish_reason": "length"}
    )
    verdicts = [judge(await adapter.call(call, lambda _: None)) for _ in range(3)]
    assert verdicts[0].failure in {"refused", "content-filtered"}
    assert verdicts[1].failure == "empty-answer"
    assert (verdicts[2].failure, verdicts[2].truncated) == (None, True)


@pytest.mark.parametrize("behaviour", [{"delay_headers_s": 30}, {"text": "some", "end": "hang"}])
async def test_cancelling_and_timing_out_close_the_connection(adapter, call, provider, behaviour):
    provider.script(behaviour, times=None)
    limits = Timeouts(call_s=1, first_token_s=0.8, idle_s=0.4)
    call = replace(call, worker=call.worker.model_copy(update={"timeouts": limits}))
    task = asyncio.create_task(adapter.call(call, lambda _: None))
    await asyncio.to_thread(provider.wait_for, 1)
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await failure(adapter, call)).code in {"first-token-timeout", "idle-timeout", "call-timeout"}
    await asyncio.to_thread(provider.wait_disconnected, 2)


@pytest.mark.parametrize(
    ("behaviour", "failure_code"),
    [
        ({"text": "I cannot help.", "finish_reason": "content_filter"}, {"refused", "content-filtered"}),
        ({"text": "", "reasoning": "VAULT-7"}, {"empty-answer"}),
        ({"text": "   \n"}, {"empty-answer"}),
        ({"text": "", "reasoning": "so " * 500, "finish_reason": "length"}, {"truncated-thinking"}),
    ],
)
async def test_a_reply_without_an_answer_is_none_in_any_protocol(adapter, call, provider, behaviour, failure_code):
    """G2-05, G2-07."""
    provider.script(behaviour)
    reply = await adapter.call(call, lambda _: None)
    assert judge(reply).failure in failure_code
    assert reply.reasoning == behaviour.get("reasoning", "")
    assert "VAULT-7" not in reply.text
    assert provider.count == 1


async def test_a_prompt_that_gemini_blocks_is_declined(adapter, call, provider):
    """G2-05: a success without any candidate."""
    if "gemini" not in call.worker.model:
        pytest.skip("Gemini's own way")
    blocked = {"promptFeedback": {"blockReason": "SAFETY"}, "modelVersion": "m"}
    usage = {"promptTokenCount": 5, "totalTokenCount": 5}
    provider.script({"raw_body": json.dumps(blocked | {"usageMetadata": usage})}, times=None)
    assert judge(await adapter.call(call, lambda _: None)).failure == "content-filtered"
    assert provider.count == 1


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504, 529])
async def test_what_libraries_like_to_retry_is_sent_once(adapter, call, provider, status):
    """G2-17: an SDK of its own would repeat each of these."""
    provider.script({"status": status}, times=None)
    caught = await failure(adapter, call)
    assert (caught.entry.kind, provider.count) == ("retryable", 1)


@pytest.mark.parametrize(
    ("behaviour", "codes"),
    [
        ({"cut_head": 0, "end": "break"}, {"connection-lost"}),
        ({"cut_head": 0, "end": "reset"}, {"connection-lost"}),
        ({"cut_head": 20, "end": "break"}, {"connection-lost"}),
        ({"cut_head": 20, "end": "reset"}, {"connection-lost"}),
        ({"raw_stream": "", "end": "break"}, {"connection-lost", "stream-cut"}),
        ({"raw_stream": "", "end": "reset"}, {"connection-lost", "stream-cut"}),
        ({"raw_body": "<html>sign in</html>", "headers": {"Content-Type": "text/html"}}, UNREADABLE),
        ({"status": 502, "raw_body": "<html>Bad Gateway</html>"}, {"server-error"}),
        ({"status": 403, "raw_body": "<html>Just a moment...</html>"}, {"permission-denied"}),
    ],
)
async def test_a_line_that_breaks_and_a_page_instead_of_a_reply_have_their_codes(
    adapter, call, provider, behaviour, codes
):
    provider.script(behaviour, times=None)
    caught = await failure(adapter, call)
    assert caught.code in codes
    assert caught.sent
    assert provider.count == 1


@pytest.mark.parametrize("status", [301, 302, 307, 308])
async def test_a_redirect_is_never_followed(adapter, call, provider, status):
    """The prompt and the key would go to a host that the pool does not name."""
    provider.script({"status": status, "headers": {"Location": f"{provider.root_url}/elsewhere"}}, times=None)
    caught = await failure(adapter, call)
    assert (caught.code, caught.status) == ("redirected", status)
    assert provider.count == 1


async def test_a_port_without_a_server_means_that_nothing_was_sent(adapter, call):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        worker = call.worker.model_copy(update={"base_url": f"http://127.0.0.1:{free.getsockname()[1]}"})
    caught = await failure(adapter, replace(call, worker=worker))
    assert (caught.code, caught.sent, caught.billable) == ("connection-failed", False, False)


async def test_reset_headers_reach_us_through_litellm(adapter, call, provider):
    """G2-01."""
    told = {
        "retry-after-ms": "1250",
        "x-ratelimit-reset-requests": "6m0s",
        "x-ratelimit-remaining-requests": "0",
        "anthropic-ratelimit-input-tokens-reset": "2026-11-30T12:00:10Z",
    }
    provider.script({"status": 429, "headers": told}, times=None)
    assert (await failure(adapter, call)).retry_headers == told


async def test_a_large_limit_of_tokens_is_one_streamed_request(adapter, call, provider):
    """G2-15: Anthropic's SDK refuses 32,000 tokens without streaming, on the client."""
    call = replace(call, worker=call.worker.model_copy(update={"output_tokens_max": 32_000}))
    provider.script({"text": "long"})
    assert (await adapter.call(call, lambda _: None)).text == "long"
    assert provider.count == 1


async def test_the_messages_are_such_as_claude_takes(adapter, call, provider):
    """G2-09: no last message by the assistant, no blank content, no blank end, also after litellm's hands."""
    if "gemini" in call.worker.model:
        pytest.skip("Gemini has no such rules")
    provider.script({"strict_messages": True, "text": "taken"}, times=None)
    assert (await adapter.call(call, lambda _: None)).text == "taken"
    assert provider.count == 1


async def test_a_temperature_that_litellm_knows_to_be_refused_is_refused_before_any_request(adapter, call, provider):
    """G2-10: the pool file refuses it too; this is what a model does that the file's check does not know."""
    if "openai" not in call.worker.model:
        pytest.skip("a model of OpenAI")
    call = replace(call, worker=call.worker.model_copy(update={"model": "openai/gpt-5"}))
    caught = await failure(adapter, call)
    assert (caught.code, caught.sent) == ("parameter-refused", False)
    assert "temperature" in caught.provider_text
    assert provider.count == 0
    # It is the temperature and nothing else: without it the same call is made, and none is made up in its place.
    call = replace(call, worker=call.worker.model_copy(update={"parameters": {}}))
    assert (await adapter.call(call, lambda _: None)).text
    (sent,) = provider.requests
    assert "temperature" not in sent["body"]


async def test_no_limit_of_the_library_is_shorter_than_the_workers(adapter, call, provider, monkeypatch):
    """G2-15: the limit that litellm is given is the one that its HTTP client keeps, and ours comes first."""
    provider.script({"delay_headers_s": 30}, times=None)
    worker = call.worker.model_copy(update={"timeouts": Timeouts(call_s=3600, first_token_s=1800, idle_s=1800)})
    # Turned round for once: with the library's limit at one second and ours at half an hour, one second it is.
    monkeypatch.setattr("worker_pools.adapters.litellm.LIBRARY_TIMEOUT_EXTRA_S", -3599.0)
    start = time.monotonic()
    assert (await failure(adapter, replace(call, worker=worker))).code == "call-timeout"
    assert 0.9 < time.monotonic() - start < 20
    monkeypatch.undo()
    assert 0 < LIBRARY_TIMEOUT_EXTRA_S < contracts.CALL_MARGIN_S


@pytest.mark.slow
def test_the_sockets_of_litellm_ask_for_signs_of_life():
    """G2-15: read at import time, so looked at in a process of its own."""
    program = (
        "from worker_pools.adapters.litellm_library import import_litellm\n"
        "import_litellm()\n"
        "import socket\n"
        "from litellm.llms.custom_httpx.http_handler import build_aiohttp_keepalive_socket_factory as build\n"
        "made = build()((socket.AF_INET, socket.SOCK_STREAM, 0, '', ('127.0.0.1', 9)))\n"
        "assert made.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1\n"
        "made.close()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


async def test_a_model_without_a_provider_is_refused_before_any_request(adapter, call, provider):
    worker = call.worker.model_copy(update={"model": "no-such-thing"})
    caught = await failure(adapter, ModelCall(worker, call.messages, "a", api_key="canary-key"))
    assert (caught.code, caught.sent) == ("model-not-found", False)
    assert provider.count == 0


def test_pool_check_refuses_a_model_without_a_provider():
    text = (
        "name: x\n"
        "conductor: {adapter: litellm, model: anthropic/claude-sonnet-4-20250514}\n"
        "workers: [{name: a, description: d, adapter: litellm, model: no-such-thing}]\n"
        "policy: {on_failed_step: fallback}\n"
    )
    found = check_pool(parse_pool(text, label="x"), {})
    assert [(one.level, one.code) for one in found] == [("error", "model-unknown"), ("warning", "fallbacks-missing")]


@pytest.mark.slow
def test_the_import_fetches_nothing_and_prints_nothing():
    # A process of its own, because this one has imported litellm already. Any connection would fail the audit hook.
    program = (
        "import sys\n"
        "def hook(name, args):\n"
        "    if name in ('socket.connect', 'socket.getaddrinfo'): print('NETWORK', args, file=sys.stderr)\n"
        "sys.addaudithook(hook)\n"
        "from worker_pools.adapters.litellm_library import knows_model\n"
        "assert knows_model('anthropic/claude-sonnet-4-20250514') and not knows_model('no-such-thing')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "")
    assert "NETWORK" not in done.stderr
    assert "no-such-thing" not in done.stderr


async def test_the_providers_own_id_and_the_model_that_answered_are_told(adapter, call, provider):
    said = {"headers": {"x-request-id": "req_7"}, "answered_model": "snapshot-2026-11-01"}
    provider.script(said)
    reply = await adapter.call(call, lambda _: None)
    # litellm keeps the headers of Gemini's answers to itself.
    known = None if "gemini" in call.worker.model else "req_7"
    assert (reply.provider_request_id, reply.provider_model) == (known, "snapshot-2026-11-01")
    provider.script({"status": 503, "headers": {"x-request-id": "req_8"}})
    assert (await failure(adapter, call)).provider_request_id == "req_8"


async def test_a_model_that_the_provider_did_not_name_is_not_made_up(adapter, call, provider):
    """litellm fills in the name that was asked for; where that cannot be told apart, nothing is said."""
    streams = "gemini" not in call.worker.model
    provider.script({"answered_model": ""})
    assert (await adapter.call(call, lambda _: None)).provider_model is None
    asked = call.worker.model.partition("/")[2]
    assert (await adapter.call(call, lambda _: None)).provider_model == (asked if streams else None)


@pytest.mark.parametrize("said", ["a\nb", "a" * 10_240, "canary-key", "two words"])
async def test_what_is_no_id_and_no_name_is_not_told(adapter, call, provider, said):
    # No more than its HTTP library takes.
    provider.script({"headers": {} if "\n" in said else {"x-request-id": said[:4096]}, "answered_model": said})
    reply = await adapter.call(call, lambda _: None)
    assert (reply.provider_request_id, reply.provider_model) == (None, None)
