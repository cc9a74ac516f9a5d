"""litellm against the stand-in provider in three protocols: OpenAI's, Anthropic's and Gemini's."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.support.provider import Provider
from worker_pools.adapters import CallFailed, Message, ModelCall, judge
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
    assert reply.parameters_sent["temperature"] == 0.2


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


def test_the_import_fetches_nothing_and_prints_nothing():
    # A process of its own, because this one has imported litellm already. Any connection would fail the audit hook.
    program = (
        "import sys\n"
        "def hook(name, args):\n"
        "    if name in ('socket.connect', 'socket.getaddrinfo'): print('NETWORK', args, file=sys.stderr)\n"
        "sys.addaudithook(hook)\n"
        "from worker_pools.adapters.litellm import knows_model\n"
        "assert knows_model('anthropic/claude-sonnet-4-20250514') and not knows_model('no-such-thing')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "")
    assert "NETWORK" not in done.stderr
    assert "no-such-thing" not in done.stderr
