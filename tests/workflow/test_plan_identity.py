"""A plan is the same plan before and after storage, in whatever order its keys came (G4-09)."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest

from activities.plan_text import read_plan
from engine.plan import canonical_plan, plan_digest
from engine.store.database import Database
from engine.store.drafts import PlanDraft
from tests.support.orders import resume
from tests.support.provider import Provider
from tests.support.runs import ended, submit_plan, worker_process
from tests.support.servers import TestServers
from tests.support.stored import dump, record, rows
from tests.support.workflows import pool_of

STEPS = {"access_list": [[], "all"], "subtasks": ["Größe é\u2028 1.0", "Then 1e2."], "model_id": [0, 1]}
# Two orders of the keys, white space of the people's own, an escaped letter.
ODD = 'So:\r\n  {"subtasks": ["Gr\\u00f6ße é\\u2028 1.0", "Then 1e2."],\n"access_list":[ [],"all"],"model_id":[0,1 ]}\n'
PLAIN = json.dumps({key: STEPS[key] for key in ("model_id", "subtasks", "access_list")}, ensure_ascii=False)


async def test_the_digest_is_one_over_storage_restart_resume_and_order_of_keys(
    servers: TestServers, database_url: str, provider: Provider, tmp_path: Path
) -> None:
    pool = pool_of(tmp_path, provider.base_url, "one", "two")
    drafts = [read_plan(pool, text) for text in (ODD, PLAIN)]
    assert all(isinstance(draft, PlanDraft) for draft in drafts)
    (first, second) = (draft.plan for draft in drafts if isinstance(draft, PlanDraft))
    digest = plan_digest(first)
    assert plan_digest(second) == digest
    provider.script({"status": 401}, model="two")
    async with worker_process(database_url, servers.temporal_address) as process:
        run_id = await submit_plan(process, pool, ODD)
        run = await ended(process.database, run_id)
        assert (run.state, run.reason) == ("failed", "auth-failed")
    # Another worker, with nothing in its memory, goes on with what is stored.
    async with worker_process(database_url, servers.temporal_address) as process:
        await resume(process, run_id)
        run = await ended(process.database, run_id)
        assert (run.state, run.reason, run.execution) == ("succeeded", None, 2)
    assert run.plan_json == canonical_plan(first)
    assert sha256(run.plan_json or b"").hexdigest() == digest
    texts = {row["kind"]: row["content"] for row in (await record(database_url, run_id)).artifacts}
    assert texts["plan_text"] == ODD.encode()


async def test_what_is_missing_has_one_spelling(
    servers: TestServers, database_url: str, provider: Provider, tmp_path: Path
) -> None:
    """NULL: not the JSON null, not a text of that name, not an empty one. So one question finds all unfinished steps."""
    provider.script({"status": 401}, model="two")
    async with worker_process(database_url, servers.temporal_address) as process:
        run_id = await submit_plan(process, pool_of(tmp_path, provider.base_url, "one", "two"), PLAIN)
        run = await ended(process.database, run_id)
    asked = "SELECT position FROM steps WHERE run_id = %s AND accepted_attempt_id IS NULL"
    assert [row["position"] for row in await rows(database_url, asked, run_id)] == [1]
    assert [step.position for step in run.steps if step.output is None] == [1]
    values = [line.partition(": ")[2] for line in (await dump(database_url, without=("alembic_version",))).splitlines()]
    assert "null" not in values


@pytest.mark.parametrize("kind", ["json", "jsonb"])
async def test_no_column_is_of_a_type_that_changes_what_it_is_given(database: Database, kind: str) -> None:
    query = "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = 'public' AND data_type = %s"
    assert await rows(database.url, query, kind) == []
