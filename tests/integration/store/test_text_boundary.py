"""Text is in artifacts and nowhere else, comes back byte for byte, and times are UTC whatever the sessions say."""

from __future__ import annotations

import asyncio
import os
import sys
from datetime import UTC, timedelta
from pathlib import Path
from typing import Any

import pytest

from activities.plan_text import read_plan
from engine.plan import canonical_plan
from engine.plan.clean import clean_text
from engine.service import Submission, prepare
from engine.store.artifacts import text_draft
from engine.store.attempts import open_attempt
from engine.store.closing import Closing, close_step_attempt
from engine.store.database import Database
from engine.store.drafts import RejectedPlan
from engine.store.inputs import read_step_inputs
from engine.store.planning import close_planning_attempt
from engine.store.run_writer import AttemptResult
from engine.store.runs import create_run
from engine.store.settling import Settlement, settle_run
from engine.store.snapshots import list_runs, read_run
from tests.support.runs import lists_plan, make_pool
from tests.support.servers import superuser_url
from tests.support.stored import answered, check_invariants, dump, ended_with, execute, new_run, opening, record, rows

ROUGH = "canary-{} \U0001f600 é\u2028 \\x00 \"quoted\" 'single' %s $1 \t\r\n end "


def canary(name: str) -> str:
    return ROUGH.replace("{}", name)


async def test_text_of_people_models_and_providers_is_in_artifacts_only(own_database_url: str, tmp_path: Path) -> None:
    database = Database(own_database_url)
    pool = make_pool(tmp_path, "http://127.0.0.1:9")
    plan = lists_plan([canary("subtask"), "Then join."], [[], [0]]).rstrip() + "\n"
    filed = prepare(Submission(task=canary("task"), pool=pool, actor_id="tester", plan_text="canary-prose\n" + plan))
    await create_run(database, filed)
    first, second = opening(filed.id, 0), opening(filed.id, 0, (1, 0, 2))
    await open_attempt(database, first)
    message = text_draft(first.attempt_id, "provider_message", canary("provider"))
    failed = ended_with(first, AttemptResult("failed", "overloaded"), retry=True, drafts=(message,))
    await close_step_attempt(database, failed)
    await open_attempt(database, second)
    done = answered(second, canary("output"))
    reasoning = text_draft(second.attempt_id, "reasoning", canary("reasoning"))
    await close_step_attempt(
        database, Closing(done.place, done.attempt_id, done.result, (*done.drafts, reasoning), attempts_max=3)
    )

    planned = prepare(Submission(task=canary("task"), pool=pool, actor_id="tester"))
    await create_run(database, planned)
    opened = opening(planned.id, None)
    await open_attempt(database, opened)
    rejected = read_plan(pool, lists_plan(["canary-invalid", "x"], [["canary-access"], [5]]))
    assert isinstance(rejected, RejectedPlan)
    closing = Closing(opened.place, opened.attempt_id, AttemptResult("succeeded"), attempts_max=3)
    await close_planning_attempt(database, closing, rejected, fallback=None, repairs_max=2)

    everywhere = await dump(own_database_url)
    for name in ("task", "subtask", "output", "reasoning", "provider", "prose", "invalid", "access"):
        assert f"canary-{name}" in everywhere, name
    elsewhere = await dump(own_database_url, without=("artifacts",))
    assert "canary" not in elsewhere
    assert b"canary".hex() not in elsewhere
    await database.close()


async def test_bytes_come_back_as_they_were_given(database: Database, tmp_path: Path) -> None:
    pool = make_pool(tmp_path, "http://127.0.0.1:9")
    text = 'Thoughts.\r\n```json\n{"access_list": [[], "all"], "model_id": [1, 0],\n "subtasks": ["A\\u00e9 ", "B"]}\n```  \n'
    new = prepare(Submission(task=canary("task"), pool=pool, actor_id="tester", plan_text=text))
    assert new.plan is not None
    await create_run(database, new)
    opened = opening(new.id, 0, worker=new.plan.plan.steps[0].worker)
    await open_attempt(database, opened)
    await close_step_attempt(database, answered(opened, canary("output")))
    run = await read_run(database, new.id)
    assert run is not None
    assert (run.task, run.steps[0].output, run.steps[0].subtask) == (canary("task"), canary("output"), "Aé ")
    assert run.plan_json == canonical_plan(new.plan.plan)
    stored = {row["kind"]: row["content"] for row in (await record(database.url, new.id)).artifacts}
    assert stored["plan_text"] == text.encode()
    inputs = await read_step_inputs(database, new.id, 0, 1)
    assert [(one.position, one.subtask.text, one.output.text) for one in inputs.visible] == [
        (0, "Aé ", canary("output"))
    ]


@pytest.mark.parametrize(
    ("text", "notes"),
    [("ok \x00 done", (1, 0)), ("half \ud83d emoji", (0, 1)), ("whole \U0001f600 emoji", (0, 0)), ("", (0, 0))],
)
async def test_what_postgres_cannot_hold_is_replaced_before_it_is_stored(
    database: Database, text: str, notes: tuple[int, int]
) -> None:
    cleaned = clean_text(text)
    assert (cleaned.nul_count, cleaned.surrogate_count) == notes
    run = new_run([[], [0]])
    await create_run(database, run)
    opened = opening(run.id, 0)
    await open_attempt(database, opened)
    assert (await close_step_attempt(database, answered(opened, cleaned.text))).verdict == "done"
    kept = await record(database.url, run.id)
    assert kept.kept_texts(opened) == [cleaned.text.encode()]
    snapshot = await read_run(database, run.id)
    assert snapshot is not None
    assert snapshot.steps[0].output == cleaned.text
    assert (await read_step_inputs(database, run.id, 0, 1)).visible[0].output.text == cleaned.text


async def test_an_output_of_sixteen_mebibytes_is_stored_once(database: Database) -> None:
    run = new_run([[], [0]])
    await create_run(database, run)
    opened = opening(run.id, 0)
    await open_attempt(database, opened)
    text = "é" * (8 * 1024 * 1024)
    assert (await close_step_attempt(database, answered(opened, text))).verdict == "done"
    (length,) = await rows(
        database.url,
        "SELECT sum(length(content)) FROM artifacts WHERE owner_id = %s AND kind = 'output'",
        opened.attempt_id,
    )
    assert length["sum"] == 16 * 1024 * 1024
    assert (await read_step_inputs(database, run.id, 0, 1)).visible[0].output.text == text


async def test_every_time_column_carries_its_zone(database: Database) -> None:
    assert (
        await rows(
            database.url,
            "SELECT table_name, column_name, data_type FROM information_schema.columns WHERE table_schema = 'public' "
            "AND data_type IN ('timestamp without time zone', 'date', 'time without time zone')",
        )
        == []
    )


async def test_times_are_utc_and_days_have_24_hours_in_any_session(own_database_url: str) -> None:
    name = own_database_url.partition("?")[0].rpartition("/")[2]
    await execute(superuser_url(own_database_url), f"ALTER DATABASE \"{name}\" SET timezone = 'America/New_York'")
    await execute(superuser_url(own_database_url), f"ALTER DATABASE \"{name}\" SET datestyle = 'German'")
    database = Database(own_database_url)
    run = new_run([[]])
    # Longer than half a year, so that a change of the clocks lies within.
    await create_run(database, type(run)(**{**_fields(run), "deadline_s": 200 * 86400.0}))
    opened = opening(run.id, 0)
    await open_attempt(database, opened)
    await close_step_attempt(database, answered(opened, ends_run=True))
    snapshot = await read_run(database, run.id)
    assert snapshot is not None
    attempt = snapshot.steps[0].attempts[0]
    times = [snapshot.created_at, snapshot.started_at, attempt.started_at, attempt.ended_at, snapshot.ended_at]
    assert all(moment is not None and moment.utcoffset() == timedelta(0) for moment in [*times, snapshot.read_at])
    assert times == sorted(times)  # type: ignore[type-var]  # none is None, as was just shown
    kept = await database.fetch(("SELECT deadline_at, created_at FROM runs WHERE id = %s", (run.id,)))
    row = kept[0][0]
    assert abs((row["deadline_at"] - row["created_at"]).total_seconds() - 200 * 86400) < 5
    (line,) = await list_runs(database, run.tenant_id, limit=1)
    assert line.created_at.tzinfo is UTC or line.created_at.utcoffset() == timedelta(0)
    await database.close()


def _fields(run: Any) -> dict[str, Any]:
    return {name: getattr(run, name) for name in run.__dataclass_fields__}


async def test_a_process_in_another_zone_writes_the_same_instants(database: Database) -> None:
    script = (
        "import asyncio, sys\n"
        "from engine.store.database import Database\n"
        "from tests.support.stored import stored_run\n"
        "async def main():\n"
        "    database = Database(sys.argv[1])\n"
        "    print(await stored_run(database, [[]]))\n"
        "    await database.close()\n"
        "asyncio.run(main())\n"
    )
    environment = {**os.environ, "TZ": "Asia/Seoul", "PGTZ": "America/New_York", "PYTHONPATH": str(Path.cwd())}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, database.url, env=environment, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    (row,) = (
        await database.fetch(
            ("SELECT clock_timestamp() - created_at AS age FROM runs WHERE id = %s", (output.decode().strip(),))
        )
    )[0]
    assert timedelta(0) <= row["age"] < timedelta(minutes=2)
    (said,) = await rows(
        database.url,
        "SELECT at - runs.created_at AS gap FROM ledger_entries JOIN runs ON runs.id = run_id "
        "WHERE run_id = %s AND seq = 1",
        output.decode().strip(),
    )
    assert abs(said["gap"]) < timedelta(seconds=5)


async def test_a_deadline_in_the_past_fails_a_live_step_and_calls_nothing(database: Database) -> None:
    run = new_run([[], []])
    await create_run(database, run)
    await execute(database.url, "UPDATE runs SET deadline_at = clock_timestamp() WHERE id = %s", run.id)
    ruling = await open_attempt(database, opening(run.id, 0))
    assert (ruling.verdict, ruling.code) == ("failed", "deadline-exceeded")
    kept = await record(database.url, run.id)
    assert (kept.attempts, kept.steps[0]["state"]) == ([], "failed")
    assert (await settle_run(database, Settlement(run.id, 1, "failed", "deadline-exceeded"))).state == "failed"
    check_invariants(await record(database.url, run.id))
