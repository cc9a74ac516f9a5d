"""Nothing that people, models or providers write reaches Temporal: runs full of one word, and a search for it.

Every text holds the word. The search covers the whole history of each workflow, its description with pending
activities, and the file in which the Temporal server keeps everything it ever stored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from engine.operations.answers import retry_step
from engine.store.orders import Order
from tests.support.nested import SELF, family_of
from tests.support.orders import connecting
from tests.support.provider import Provider
from tests.support.runs import ended, lists_plan
from tests.support.servers import TestServers, superuser_url
from tests.support.workflows import (
    handle_of,
    provider_reaches,
    run_of,
    spellings,
    temporal_record,
    until,
)
from tests.workflow.aviary import Aviary
from worker_pools.process import WorkerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def aviary(process: WorkerProcess, provider: Provider, tmp_path: Path) -> Iterator[Aviary]:
    return Aviary(process, provider, tmp_path)  # type: ignore[return-value]  # nothing to tear down


def temporal_files(servers: TestServers) -> bytes:
    """Everything that the server has on disk."""
    return b"".join(
        path.read_bytes() for path in servers.home.root.rglob("*") if path.is_file() and "temporal" in path.name
    )


async def test_success_with_a_plan_by_the_conductor(aviary: Aviary, servers: TestServers) -> None:
    word = aviary.word
    plan = lists_plan([f"{word} one", f"{word} two"], [[], [0]], [0, 1])
    aviary.provider.script({"text": f"{word} I plan.\n{plan}", "reasoning": f"{word} thinking"}, model="planner")
    aviary.provider.script({"text": f"{word} answers", "reasoning": f"{word} thinks"}, model="speaker", times=None)
    run = await aviary.run(aviary.pool("speaker", "speaker", conductor={"model": "planner"}), conductor=True)
    assert run.state == "succeeded"
    assert word in (run.answer or "")
    await aviary.search()
    files = temporal_files(servers)
    assert str(run.id).encode() in files
    assert [needle for needle in spellings(word) if needle in files] == []


FAILURES = {
    "an echo of the prompt": {"status": 400, "body": {"error": {"message": "WORD is not allowed", "param": "WORD"}}},
    "a server error": {"status": 500, "body": {"error": {"message": "WORD crashed", "trace": 'File "WORD.py"'}}},
    "a malformed stream": {"raw_events": ["WORD is not JSON"]},
    "an error in the stream": {"text": "WORD", "error_event": {"error": {"message": "WORD", "code": 500}}},
    "a refusal": {"text": "WORD I will not", "refusal": "WORD", "finish_reason": "WORD-finish"},
    "a wrong key": {"status": 401, "body": {"error": {"message": "Incorrect API key: sk-WORD"}}},
    "a header": {"status": 429, "headers": {"Retry-After": "WORD", "X-Request-Id": "WORD"}, "raw_body": "WORD"},
}


@pytest.mark.parametrize("name", FAILURES)
async def test_provider_failures(aviary: Aviary, name: str) -> None:
    behaviour = json.loads(json.dumps(FAILURES[name]).replace("WORD", aviary.word))
    aviary.provider.script(behaviour, model="broken", times=None)
    run = await aviary.run(aviary.pool("plain", "broken"))
    assert run.state == "failed"
    assert run.reason is not None
    await aviary.search()


async def test_pending_retries_show_a_code_only(aviary: Aviary) -> None:
    """The description of a running workflow quotes the last failure of each activity that waits for its retry."""
    headers = {"Retry-After": "30"}
    body = {"error": {"message": aviary.word}}
    aviary.provider.script({"status": 503, "headers": headers, "body": body}, model="busy", times=None)
    run_id = await aviary.start(aviary.pool("busy"), access=[[]])

    async def retrying() -> bool:
        return b"overloaded" in await temporal_record(aviary.process.client, run_id)

    await until(retrying)
    await aviary.search()
    await handle_of(aviary.process.client, run_id).cancel()
    assert (await ended(aviary.process.database, run_id)).state == "cancelled"
    await aviary.search()


async def test_a_database_error_that_quotes_rows(aviary: Aviary) -> None:
    word = aviary.word
    address = superuser_url(aviary.process.database.url).replace("postgresql+psycopg://", "postgresql://")
    body = f"""
        CREATE FUNCTION quote_{word}() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF NEW.kind = 'output' THEN
                RAISE EXCEPTION 'refused %', '{word}' USING DETAIL = 'the row holds {word}', ERRCODE = '23514';
            END IF;
            RETURN NEW;
        END $$;
        CREATE TRIGGER quote_{word} BEFORE INSERT ON artifacts FOR EACH ROW EXECUTE FUNCTION quote_{word}();
    """
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute(body.encode())
        try:
            aviary.provider.script({"text": f"{word} answers"}, model="speaker", times=None)
            run = await aviary.run(aviary.pool("speaker"), access=[[]])
        finally:
            connection.execute(f"DROP TRIGGER quote_{word} ON artifacts".encode())
    assert run.state == "failed"
    assert (run.reason or "").startswith("bug-")
    assert aviary.provider.count == 1
    await aviary.search()


async def test_connections_that_die_in_the_middle_of_a_step(aviary: Aviary) -> None:
    run_id = await aviary.start(aviary.pool("sleep-700ms"), access=[[]])
    await provider_reaches(aviary.provider, 1)
    address = aviary.process.database.url.replace("postgresql+psycopg://", "postgresql://")
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE backend_type = 'client backend' AND datname = current_database() AND pid <> pg_backend_pid()"
        )
    run = await ended(aviary.process.database, run_id)
    assert run.state == "succeeded"
    assert aviary.provider.count == 1
    await aviary.search()


async def test_an_invalid_plan(aviary: Aviary) -> None:
    aviary.provider.script({"text": f"{aviary.word} is no plan"}, model="planner", times=None)
    pool = aviary.pool("plain", conductor={"model": "planner"}, policy={"plan_repairs_max": 1})
    run = await aviary.run(pool, conductor=True)
    assert (run.state, run.reason) == ("failed", "plan-invalid")
    await aviary.search()


async def test_a_bug_in_an_activity(aviary: Aviary) -> None:
    async def broken() -> None:
        raise RuntimeError(f"{aviary.word} in a bug") from KeyError(aviary.word)

    before = aviary.process.context.local_endpoint
    aviary.process.context.local_endpoint = broken  # type: ignore[assignment]  # it never returns
    try:
        local = aviary.pool("tiny", worker={"base_url": "local", "api_key": None})
        run = await aviary.run(local, access=[[]])
    finally:
        aviary.process.context.local_endpoint = before
    assert (run.state, run.reason) == ("failed", "bug-runtime-error")
    assert [attempt.state for attempt in run.steps[0].attempts] == ["unknown"]
    await aviary.search()


async def test_runs_below_a_run_rounds_and_a_substitute(aviary: Aviary) -> None:
    """The child's task is a whole prompt, its plan and the revised one are full of the word, and a step changes hands."""
    word = aviary.word
    split = lists_plan([f"{word} split", f"{word} conclude"], [[], [0]], [2, 0])
    inner = lists_plan([f"{word} inner"], [[]], [1])
    mend = lists_plan([f"{word} mend"], ["all"], [0])
    nonsense = f"{word} is no plan"
    aviary.provider.script(*({"text": text} for text in (split, inner, nonsense, mend)), model="planner")
    aviary.provider.script({"status": 401, "body": {"error": {"message": word}}}, model="broken", times=None)
    aviary.provider.script({"text": f"{word} answers", "reasoning": f"{word} thinks"}, model="speaker", times=None)
    pool = aviary.pool(
        "speaker",
        "broken",
        conductor={"model": "planner"},
        more=[{**SELF, "fallbacks": ["w0"]}],
        policy={"rounds_max": 2, "on_failed_step": "fallback"},
    )
    run = await aviary.run(pool, conductor=True)
    assert (run.state, run.round) == ("succeeded", 1)
    # The run below failed, so its step went to the substitute.
    assert [step.worker for step in run.steps] == ["w0", "w0", "w0"]
    assert len(run.children) == 1
    assert word in (run.answer or "")
    assert len(await aviary.workflows()) == 3
    await aviary.search()


async def test_a_step_that_waits_for_an_operator_below_a_run(aviary: Aviary) -> None:
    word = aviary.word
    aviary.provider.script({"text": lists_plan([f"{word} inner"], [[]], [0])}, model="planner")
    aviary.provider.script({"status": 401, "body": {"error": {"message": word}}}, model="once")
    aviary.provider.script({"text": f"{word} answers"}, model="once", times=None)
    pool = aviary.pool("once", conductor={"model": "planner"}, more=[SELF], policy={"on_failed_step": "wait"})
    run_id = await aviary.start(pool, plan=lists_plan([f"{word} split"], [[]], [1]))

    async def waits() -> bool:
        return [one["state"] for one in await family_of(aviary.process.database, run_id)][1:] == ["waiting"]

    await until(waits)
    await aviary.search()
    child = (await run_of(aviary.process.database, run_id)).children[0]
    given = Order(child, f"operator-{word}", reason=f"because of {word}")
    await retry_step(aviary.process.database, connecting(aviary.process.client), given, position=0, worker=None)
    assert (await ended(aviary.process.database, run_id)).state == "succeeded"
    await aviary.search()


async def test_a_cancelled_call(aviary: Aviary) -> None:
    behaviour = {"text": f"{aviary.word} " * 50, "pieces": 50, "delay_piece_s": 0.2}
    aviary.provider.script(behaviour, model="slow", times=None)
    run_id = await aviary.start(aviary.pool("slow"), access=[[]])
    await provider_reaches(aviary.provider, 1)
    await handle_of(aviary.process.client, run_id).cancel()
    run = await ended(aviary.process.database, run_id)
    assert run.state == "cancelled"
    await aviary.search()
