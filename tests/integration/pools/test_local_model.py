"""The embedded model, for real: it starts, answers, plans, keeps strangers out, and dies with its parent."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import httpx
import psutil
import pytest

from worker_pools.adapters import CallFailed, Message, ModelCall, judge
from worker_pools.adapters.openai import OpenAiAdapter
from worker_pools.conductor_schema import plan_schema
from worker_pools.local_model import LocalModelServer
from worker_pools.pool import load_pool
from worker_pools.pool.template import fill, sections

pytest.importorskip("xllamacpp")

QUESTIONS = (
    "What is gravity? Explain it to a child.",
    "Give three tips for a good night's sleep.",
)


@pytest.fixture(scope="module")
def server():
    async def started() -> LocalModelServer:
        model = LocalModelServer()
        await model.start()
        return model

    # One event loop for the module: the process belongs to the loop that started it.
    loop = asyncio.new_event_loop()
    model = loop.run_until_complete(started())
    yield model
    loop.run_until_complete(model.stop())
    loop.close()


@pytest.fixture
async def adapter():
    made = OpenAiAdapter()
    yield made
    await made.aclose()


@pytest.mark.slow
async def test_a_worker_of_the_local_pool_answers(server, adapter):
    worker = load_pool("local").worker("writer")
    call = ModelCall(worker, [Message("user", QUESTIONS[0])], "a", api_key=server.api_key, base_url=server.base_url)
    reply = await adapter.call(call, lambda _: None)
    assert judge(reply).failure is None
    assert len(reply.text.split()) > 5
    assert 0 < reply.output_tokens <= worker.output_tokens_max
    assert reply.input_tokens > 0


@pytest.mark.slow
async def test_the_plans_of_the_local_conductor_can_be_run(server, adapter):
    pool = load_pool("local")
    schema = plan_schema(
        workers=range(3), steps_max=5, subtask_chars_max=pool.conductor.subtask_chars_max, last_step_reads=True
    )
    workers = "\n".join(f"{number}: {one.name} - {one.description}" for number, one in enumerate(pool.workers))
    for question in QUESTIONS:
        values = {"task": question, "workers": workers, "steps_max": "5", "nonce": ""}
        messages = [Message(part.role, fill(part.text, values)) for part in sections(pool.templates.conductor)]
        call = ModelCall(pool.conductor, messages, "a", schema, server.api_key, server.base_url)
        reply = await adapter.call(call, lambda _: None)
        plan = json.loads(reply.text)
        length = len(plan["model_id"])
        assert reply.finish_reason == "stop"
        assert 2 <= length == len(plan["subtasks"]) == len(plan["access_list"]) <= 5
        assert all(earlier < step for step, access in enumerate(plan["access_list"]) for earlier in access)
        assert plan["access_list"][-1]


async def test_a_stranger_without_the_key_is_refused_and_no_page_is_served(server, adapter):
    worker = load_pool("local").worker("writer")
    call = ModelCall(worker, [Message("user", "hello")], "a", api_key="wrong", base_url=server.base_url)
    with pytest.raises(CallFailed, match="auth-failed"):
        await adapter.call(call, lambda _: None)
    async with httpx.AsyncClient(trust_env=False) as client:
        for path, statuses in (("/v1/models", {401}), ("/slots", {401, 501}), ("/props", {401}), ("/", {401, 404})):
            answer = await client.get(server.base_url.removesuffix("/v1") + path)
            assert answer.status_code in statuses, path
            assert "smollm" not in answer.text
    listening = [one.laddr.ip for one in psutil.Process(server.pid).net_connections() if one.status == "LISTEN"]
    assert set(listening) == {"127.0.0.1"}


async def test_a_prompt_that_is_too_long_is_told_as_such(server, adapter):
    worker = load_pool("local").worker("writer")
    call = ModelCall(worker, [Message("user", "word " * 5000)], "a", None, server.api_key, server.base_url)
    with pytest.raises(CallFailed, match="context-too-long"):
        await adapter.call(call, lambda _: None)


def test_neither_the_key_nor_the_prompt_stands_in_the_process_list(server):
    process = psutil.Process(server.pid)
    assert server.api_key not in " ".join(process.cmdline())
    assert server.api_key not in repr(process.environ())


@pytest.mark.slow
def test_the_server_dies_when_its_parent_is_killed():
    program = (
        "import asyncio, sys\n"
        "from worker_pools.local_model import LocalModelServer\n"
        "async def main():\n"
        "    model = LocalModelServer()\n"
        "    await model.start()\n"
        "    print(model.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        model = psutil.Process(int(parent.stdout.readline()))
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait(10)
    end = time.monotonic() + 10
    while model.is_running() and model.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.05)
