"""Rounds: the Conductor sees the answer and keeps it or plans again; what it writes unreadably never means "keep"."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from activities.executions import reconcile
from engine.contracts import child_run_id, round_workflow_id
from engine.service import Submission, submit
from engine.settings import TemporalSettings
from engine.store.database import Database
from engine.temporal_client import connect_temporal
from tests.support.nested import CHAIN, KEEP, PLANNER, SELF, check_family, child_of
from tests.support.orders import cancel, nothing_more_is_called, pause, resume, unpause
from tests.support.provider import Provider
from tests.support.runs import ended, lists_plan, submit_plan, worker_process
from tests.support.servers import TestServers
from tests.support.workers import Workers
from tests.support.workflows import pool_of, provider_reaches, run_of, terminate_workflow, until, workflow_record
from worker_pools.pool import Pool
from worker_pools.process import WorkerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

ONE = lists_plan(["Answer."], [[]], [0])
MEND = lists_plan(["Mend it."], ["all"], [0])
EMPTY: dict[str, list[Any]] = {"model_id": [], "subtasks": [], "access_list": []}


def rounds_pool(folder: Path, provider: Provider, *models: str, rounds_max: int = 2, **changes: Any) -> Pool:
    conductor = {"model": PLANNER, **changes.pop("conductor", {})}
    policy = {"rounds_max": rounds_max, **changes.pop("policy", {})}
    return pool_of(folder, provider.base_url, *(models or ("plain",)), conductor=conductor, policy=policy, **changes)


def planned(provider: Provider, *texts: str) -> None:
    """What the Conductor writes, call by call."""
    provider.script(*({"text": text} for text in texts), model=PLANNER)


def models_of(provider: Provider) -> list[str]:
    return [request["model"] for request in provider.requests]


def shown_to(request: dict[str, Any]) -> str:
    return "\n".join(message["content"] for message in request["body"]["messages"])


@pytest.mark.parametrize("output", ["none", "json-schema"])
@pytest.mark.parametrize("text", [KEEP, json.dumps(EMPTY), f"```json\n{json.dumps(EMPTY, indent=2)}\n```"])
async def test_three_empty_lists_keep_the_answer_in_every_form(
    process: WorkerProcess, provider: Provider, tmp_path: Path, text: str, output: str
) -> None:
    planned(provider, json.dumps({"model_id": [0], "subtasks": ["Answer."], "access_list": [[]]}), text)
    pool = rounds_pool(tmp_path, provider, rounds_max=3, conductor={"structured_output": output})
    run = await ended(process.database, await submit_plan(process, pool, None))
    assert (run.state, run.reason, run.round) == ("succeeded", None, 1)
    assert models_of(provider) == [PLANNER, "plain", PLANNER]
    assert run.answer == run.steps[0].output is not None
    if output == "json-schema":
        schemas = [one["body"]["response_format"]["json_schema"]["schema"] for one in provider.requests[::2]]
        lengths = [{branch["properties"]["model_id"]["maxItems"] for branch in schema["anyOf"]} for schema in schemas]
        # Only a later round may be empty.
        assert [0 in each for each in lengths] == [False, True]
    await check_family(process.database, run.id)


async def test_every_round_may_be_revised_until_they_are_used_up(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    planned(provider, CHAIN, MEND, lists_plan(["Mend it once more."], [[]], [0]), "never asked for")
    run = await ended(process.database, await submit_plan(process, rounds_pool(tmp_path, provider, rounds_max=3), None))
    assert (run.state, run.round) == ("succeeded", 2)
    assert [(step.round, step.position) for step in run.steps] == [(0, 0), (0, 1), (1, 0), (2, 0)]
    assert run.answer == run.steps[-1].output
    assert models_of(provider) == [PLANNER, "plain", "plain", PLANNER, "plain", PLANNER, "plain"]
    third = shown_to(provider.requests[5])
    # It is shown the round before, not all rounds.
    assert "Mend it." in third
    assert "Look at one side." not in third
    await check_family(process.database, run.id)


async def test_positions_mean_steps_of_their_own_round(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    again = lists_plan(["Begin anew.", "End anew."], [[], [0]], [0, 0])
    planned(provider, CHAIN, again)
    run = await ended(process.database, await submit_plan(process, rounds_pool(tmp_path, provider, "echo"), None))
    assert run.state == "succeeded"
    first, second = (shown_to(request) for request in provider.requests[-2:])
    assert "Look at one side." not in first + second
    assert "Begin anew." in second
    assert 'round="' not in second


@pytest.mark.parametrize("text", ["I keep it.", "", "model_id = []\nsubtasks = []", KEEP.replace("[]", "none"), "[]"])
async def test_unreadable_text_in_a_later_round_is_sent_back_and_never_means_keep(
    process: WorkerProcess, provider: Provider, tmp_path: Path, text: str
) -> None:
    # An empty answer is not asked for again.
    planned(provider, ONE, *([text] * (2 if text else 1)))
    # A template is a way to begin; here there is an answer already, and a template would not mend it.
    policy = {"plan_repairs_max": 1, "on_invalid_plan": "single"}
    pool = rounds_pool(tmp_path, provider, policy=policy, conductor={"attempts_max": 1})
    run = await ended(process.database, await submit_plan(process, pool, None))
    assert run.state == "failed"
    assert run.reason in {"plan-invalid", "empty-answer"}
    assert run.answer is None
    assert run.steps[0].output
    if run.reason == "plan-invalid":
        assert models_of(provider) == [PLANNER, "plain", PLANNER, PLANNER]
        assert "cannot be run" in shown_to(provider.requests[3])
    await check_family(process.database, run.id)
    # A resume goes on in that round; what was answered before is kept.
    planned(provider, MEND)
    asked = provider.count
    await resume(process, run.id)
    run = await ended(process.database, run.id)
    assert (run.state, run.round, run.execution) == ("succeeded", 1, 2)
    assert models_of(provider)[asked:] == [PLANNER, "plain"]
    assert run.answer == run.steps[-1].output
    await check_family(process.database, run.id)


async def test_empty_lists_are_no_plan_in_the_first_round(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    planned(provider, KEEP, ONE, KEEP)
    run = await ended(process.database, await submit_plan(process, rounds_pool(tmp_path, provider), None))
    assert (run.state, run.round) == ("succeeded", 1)
    assert models_of(provider) == [PLANNER, PLANNER, "plain", PLANNER]


async def test_a_plan_from_a_file_is_revised_too(process: WorkerProcess, provider: Provider, tmp_path: Path) -> None:
    planned(provider, MEND)
    # Two queues, so that the run's workflow lives on neither of them.
    pool = rounds_pool(tmp_path, provider, conductor={"queue": "stand-in"}, worker={"queue": "stand-in"})
    run = await ended(process.database, await submit_plan(process, pool, ONE))
    assert (run.state, run.round) == ("succeeded", 1)
    assert models_of(provider) == ["plain", PLANNER, "plain"]


@pytest.mark.parametrize("model", [PLANNER, "slow"])
async def test_a_cancel_in_a_later_round_closes_its_call(
    process: WorkerProcess, provider: Provider, tmp_path: Path, model: str
) -> None:
    planned(provider, ONE)
    slow = {"delay_first_s": 60, "text": MEND}
    if model == "slow":
        provider.script({}, {"delay_first_s": 60}, model="slow")
        planned(provider, MEND)
    else:
        provider.script(slow, model=PLANNER)
    run_id = await submit_plan(process, rounds_pool(tmp_path, provider, "slow", rounds_max=3), None)
    await provider_reaches(provider, 4 if model == "slow" else 3)
    await cancel(process, run_id)
    run = await ended(process.database, run_id)
    assert (run.state, run.reason, run.answer) == ("cancelled", "cancelled", None)
    requests = await nothing_more_is_called(provider)
    assert [one["disconnected"] for one in requests] == [False] * (len(requests) - 1) + [True]
    assert run.steps[0].output
    await check_family(process.database, run_id)
    planned(provider, *([KEEP] if model == "slow" else [MEND, KEEP]))
    before = models_of(provider)
    await resume(process, run_id)
    run = await ended(process.database, run_id)
    assert run.state == "succeeded"
    # The answers of earlier rounds are kept, and so is a plan that was accepted.
    after = models_of(provider)[len(before) :]
    assert after == (["slow", PLANNER] if model == "slow" else [PLANNER, "slow", PLANNER])
    await check_family(process.database, run_id)


@pytest.mark.parametrize("held_before", ["the plan", "a step"])
async def test_a_pause_holds_a_later_round_and_its_end_wakes_it(
    process: WorkerProcess, provider: Provider, tmp_path: Path, held_before: str
) -> None:
    planned(provider, ONE)
    provider.script({"delay_first_s": 0.6, "text": CHAIN}, model=PLANNER)
    provider.script({"delay_first_s": 0.6}, model="slow", times=1)
    run_id = await submit_plan(process, rounds_pool(tmp_path, provider, "slow"), None)
    in_flight = 2 if held_before == "the plan" else 3
    await provider_reaches(provider, in_flight)
    await pause(process, run_id)

    async def shown() -> bool:
        run = await run_of(process.database, run_id)
        return (run.state, run.reason) == ("waiting", "paused")

    await until(shown)
    assert len(await nothing_more_is_called(provider, for_s=1.0)) == in_flight
    await unpause(process, run_id)
    # The next look of its own accord would come after half a minute.
    run = await ended(process.database, run_id, timeout_s=10)
    assert (run.state, run.round) == ("succeeded", 1)
    await check_family(process.database, run_id)


async def test_a_step_that_fails_in_a_later_round_fails_the_run(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    planned(provider, ONE, lists_plan(["Fail."], ["all"], [1]))
    provider.script({"status": 401}, model="broken")
    run_id = await submit_plan(process, rounds_pool(tmp_path, provider, "plain", "broken"), None)
    run = await ended(process.database, run_id)
    assert (run.state, run.reason, run.answer, run.round) == ("failed", "auth-failed", None, 1)
    await resume(process, run_id)
    run = await ended(process.database, run_id)
    assert (run.state, run.answer) == ("succeeded", run.steps[-1].output)
    assert models_of(provider) == [PLANNER, "plain", PLANNER, "broken", "broken"]
    await check_family(process.database, run_id)


async def test_the_deadline_holds_for_all_rounds(process: WorkerProcess, provider: Provider, tmp_path: Path) -> None:
    planned(provider, ONE)
    provider.script({"delay_first_s": 60}, model=PLANNER)
    pool = rounds_pool(tmp_path, provider, policy={"deadline_s": 2.5})
    run = await ended(process.database, await submit_plan(process, pool, None), timeout_s=15)
    assert (run.state, run.reason) == ("failed", "deadline-exceeded")
    assert [one["disconnected"] for one in await nothing_more_is_called(provider)] == [False, False, True]
    await check_family(process.database, run.id)


async def end_round(process: WorkerProcess, run_id: UUID) -> None:
    await process.client.get_workflow_handle(round_workflow_id(str(run_id), 1, 1)).terminate("by hand")


async def end_run(process: WorkerProcess, run_id: UUID) -> None:
    await terminate_workflow(process.client, run_id)

    async def settled() -> bool:
        await reconcile(process.database, process.client)
        return (await run_of(process.database, run_id)).ended_at is not None

    await until(settled)


@pytest.mark.parametrize("end", [end_round, end_run])
async def test_a_round_ended_by_hand_can_be_resumed(
    process: WorkerProcess, provider: Provider, tmp_path: Path, end: Callable[[WorkerProcess, UUID], Awaitable[None]]
) -> None:
    planned(provider, ONE, MEND)
    provider.script({}, {"delay_first_s": 60}, model="slow")
    run_id = await submit_plan(process, rounds_pool(tmp_path, provider, "slow", rounds_max=3), None)
    await provider_reaches(provider, 4)
    await end(process, run_id)
    run = await ended(process.database, run_id)
    assert (run.state, run.reason) == ("failed", "workflow-lost")
    await check_family(process.database, run_id)
    planned(provider, KEEP)
    await resume(process, run_id)
    run = await ended(process.database, run_id)
    assert (run.state, run.round) == ("succeeded", 2)
    assert models_of(provider) == [PLANNER, "slow", PLANNER, "slow", "slow", PLANNER]
    await check_family(process.database, run_id)


async def test_rounds_shrink_on_the_way_down_and_a_later_round_may_have_children(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    # The run may have three rounds, its child two, and the child's child one.
    planned(provider, ONE)
    planned(provider, lists_plan(["Split it."], ["all"], [1]))
    planned(provider, ONE, KEEP)
    planned(provider, KEEP)
    pool = rounds_pool(tmp_path, provider, rounds_max=3, more=[SELF])
    run = await ended(process.database, await submit_plan(process, pool, None))
    assert (run.state, run.round) == ("succeeded", 2)
    child = await child_of(process.database, run.id, 0, round_number=1)
    assert (child.state, child.round) == ("succeeded", 1)
    assert run.answer == child.answer == child.steps[0].output
    family = await check_family(process.database, run.id)
    assert [one["rounds_max"] for one in family] == [3, 2]
    assert family[1]["id"] == child_run_id(run.id, round=1, position=0)
    assert models_of(provider) == [PLANNER, "plain", PLANNER, PLANNER, "plain", PLANNER, PLANNER]


@pytest.mark.slow
async def test_a_dead_workers_call_in_a_later_round_is_failed_as_soon_as_there_is_a_successor(
    servers: TestServers, database_url: str, provider: Provider, tmp_path: Path
) -> None:
    """Otherwise it would be Temporal that missed the heartbeat, seconds later."""
    planned(provider, MEND)
    provider.script({}, {"delay_first_s": 60}, model="slow")
    # Not the queue of the module's own worker: it would take the call that is begun again, for another database.
    pool = rounds_pool(tmp_path, provider, "slow", worker={"queue": "lone"})
    submission = Submission(task="What is gravity?", pool=pool, actor_id="tester", plan_text=ONE)
    database = Database(database_url)
    client = await connect_temporal(TemporalSettings(servers.temporal_address))
    with Workers(database_url, servers.temporal_address, tmp_path) as workers:
        first = await asyncio.to_thread(workers.start, queue="lone")
        await asyncio.to_thread(first.says, "ready")
        run_id = (await submit(database, client, submission)).id
        await provider_reaches(provider, 3)
        await asyncio.to_thread(first.end, signal.SIGKILL)
    async with worker_process(database_url, servers.temporal_address, queues=("lone",)):
        run = await ended(database, run_id)
    await database.close()
    assert (run.state, run.round) == ("succeeded", 1)
    assert [attempt.state for attempt in run.steps[1].attempts] == ["unknown", "succeeded"]
    assert b"worker-lost" in await workflow_record(client, round_workflow_id(str(run_id), 1, 1))
