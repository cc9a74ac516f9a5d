"""Attacks 9, 10 and 11 of the design of evidence: on a real database and a real Temporal, by somebody who has both.

(12, a second account or somebody on whose behalf, is in test_reviews_people.)
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from engine import contracts
from engine.contracts import RunRequest, StepSpec
from engine.operations.reviewing import comment_review, decide_review
from engine.store.database import Database
from tests.support.orders import nothing_more_is_called, temporal_is_away
from tests.support.provider import Provider
from tests.support.reviews import asked, decide_as, reviewed_pool, reviews_of, submit_as
from tests.support.runs import ended, lists_plan, worker_process
from tests.support.servers import TestServers, superuser_url
from tests.support.stored import dump, execute, record, rows
from tests.support.workflows import handle_of, run_of, spellings, temporal_record, terminate_workflow, until
from worker_pools.process import WorkerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

ONE = lists_plan(["one"], [[]], [0])
PAIR = lists_plan(["one", "two", "join"], [[], [], [0, 1]], [0, 1, 2])
ANSWER = {"gate": "answer"}


async def as_superuser(url: str, *statements: str) -> None:
    """Does this without anything that watches over the tables, as an administrator can."""
    tables = ("reviews", "review_decisions", "attempts", "steps", "artifacts")
    off = "; ".join(f"ALTER TABLE {table} DISABLE TRIGGER ALL" for table in tables)
    on = "; ".join(f"ALTER TABLE {table} ENABLE TRIGGER ALL" for table in tables)
    await execute(superuser_url(url), "; ".join([off, *statements, on]))


async def _failed(url: str, run_id: UUID) -> bool:
    (row,) = await rows(url, "SELECT state, reason FROM runs WHERE id = %s", run_id)
    return (row["state"], row["reason"]) == ("failed", "review-unshowable")


async def waits(database: Database, run_id: UUID) -> None:
    async def shown() -> bool:
        run = await run_of(database, run_id)
        return (run.state, run.reason) == ("waiting", "review")

    await until(shown)


async def test_attack_9_an_approval_that_is_moved_to_another_step_opens_nothing(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    url = process.database.url
    run_id = await submit_as(process, reviewed_pool(tmp_path, provider, {"gate": "before"}), PAIR)
    first, second = sorted(await asked(process.database, run_id, count=2), key=lambda line: line.step or 0)
    await decide_as(process, first.id, "bob")

    async def called() -> bool:
        return provider.count == 1

    await until(called)
    await waits(process.database, run_id)
    # The same approval for the other step: rows as they would be, and its row moved there altogether.
    await as_superuser(
        url,
        f"""INSERT INTO review_decisions SELECT gen_random_uuid(), '{second.id}', decision, meaning, actor_id,
            on_behalf_of, person, '\\x{second.subject.hex()}', '\\x{second.shown.hex()}', decided_at
            FROM review_decisions WHERE review_id = '{first.id}'""",
        f"UPDATE reviews SET state = 'approved', closed_at = now() WHERE id = '{second.id}'",
        f"UPDATE reviews SET position = 1 WHERE id = '{first.id}'",
        f"UPDATE steps SET state = 'pending', reason = NULL WHERE run_id = '{run_id}' AND position = 1",
    )
    await handle_of(process.client, run_id).signal(contracts.WAKE_SIGNAL)
    assert len(await nothing_more_is_called(provider, for_s=1.0)) == 1
    assert (await run_of(process.database, run_id)).state == "waiting"
    kept = await record(url, run_id)
    assert [entry["data"]["review"] for entry in kept.entries("review.decided")] == [str(first.id)]


async def test_attack_9_the_database_refuses_a_decision_about_anything_else(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    run_id = await submit_as(process, reviewed_pool(tmp_path, provider, {"gate": "before"}), PAIR)
    first, second = await asked(process.database, run_id, count=2)
    before = await rows(process.database.url, "SELECT * FROM reviews WHERE run_id = %s ORDER BY id", run_id)
    insert = """
        INSERT INTO review_decisions
        VALUES (gen_random_uuid(), %s, 'approve', 'm', %s, NULL, %s, %s, %s, now())
    """
    own = (first.subject, first.shown)
    for values, code in (
        ((first.id, "bob", "bob", first.subject, second.shown), "PD012"),
        ((first.id, "bob", "bob", bytes(32), first.shown), "PD012"),
        ((first.id, "alice", "alice", *own), "PD014"),
        ((first.id, "alice", "bob", *own), "PD013"),
    ):
        with pytest.raises(Exception, match=r".") as refused:
            await execute(process.database.url, insert, *values)
        assert getattr(refused.value, "sqlstate", None) == code
    for statement in (
        "UPDATE reviews SET state = 'approved', closed_at = now() WHERE id = %s",
        "UPDATE reviews SET position = 9 WHERE id = %s",
        "UPDATE reviews SET excluded = '{}' WHERE id = %s",
        "UPDATE reviews SET subject = sha256('x') WHERE id = %s",
    ):
        with pytest.raises(Exception, match=r".") as refused:
            await execute(process.database.url, statement, first.id)
        assert getattr(refused.value, "sqlstate", None) == "PD018"
    assert await rows(process.database.url, "SELECT * FROM reviews WHERE run_id = %s ORDER BY id", run_id) == before


@pytest.mark.parametrize("sealed", [False, True])
async def test_attack_10_an_output_that_is_changed_after_its_approval_does_not_pass(
    servers: TestServers, template_database: str, provider: Provider, tmp_path: Path, sealed: bool
) -> None:
    url = servers.new_database(template_database)
    queue = f"attack-{int(sealed)}"
    pool = reviewed_pool(tmp_path, provider, ANSWER, worker={"queue": queue})
    provider.script({"text": "pay ten to Bob"}, model="plain")
    # Without a key store what is stored is the text itself.
    options = {"key_store": f"file://{tmp_path}/keys"} if sealed else {}
    async with worker_process(url, servers.temporal_address, queues=(queue,), **options) as first:
        run_id = await submit_as(first, pool, ONE)
        (review,) = await asked(first.database, run_id)
        await waits(first.database, run_id)
        # The worker is away while somebody approves what is there, and then it is changed.
        database = first.database
        await decide_review(database, temporal_is_away, review.id, "approve", actor_id="bob")
        changed = "set_byte(content, 20, 0)" if sealed else "convert_to('pay all to Eve', 'UTF8')"
        await as_superuser(
            url,
            f"UPDATE artifacts SET content = {changed} WHERE run_id = '{run_id}' AND kind = 'output'",
        )
        await handle_of(first.client, run_id).signal(contracts.WAKE_SIGNAL)
        if sealed:
            # Nobody can be shown such a text, so nobody is asked about it.
            await until(lambda: _failed(url, run_id), timeout_s=20)
            assert [line.state for line in await reviews_of(database, run_id)] == ["stale"]
        else:
            (again,) = await asked(database, run_id)
            assert (again.id != review.id, again.shown != review.shown) == (True, True)
            assert [line.state for line in await reviews_of(database, run_id)] == ["stale", "open"]
            assert (await run_of(database, run_id)).answer is None
    servers.drop_database(url)


async def test_attack_11_temporal_is_told_to_approve_and_nothing_is_approved(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    run_id = await submit_as(process, reviewed_pool(tmp_path, provider, ANSWER), ONE)
    (review,) = await asked(process.database, run_id)
    await waits(process.database, run_id)
    handle = handle_of(process.client, run_id)
    for name in (contracts.WAKE_SIGNAL, "approve", "review"):
        for argument in ({"review": str(review.id), "decision": "approve"}, "approved"):
            await handle.signal(name, argument)
            await handle.signal(name)
    await asyncio.sleep(1.0)
    assert len(await nothing_more_is_called(provider)) == 1
    run = await run_of(process.database, run_id)
    assert (run.state, run.reason, run.answer) == ("waiting", "review", None)
    assert [line.state for line in await reviews_of(process.database, run_id)] == ["open"]
    await decide_as(process, review.id, "bob")
    assert (await ended(process.database, run_id, timeout_s=10)).state == "succeeded"


async def test_attack_11_a_workflow_that_says_that_all_is_done_does_not_end_the_run_well(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    """Somebody who may start workflows claims that the step is done, or settles the run himself."""
    run_id = await submit_as(process, reviewed_pool(tmp_path, provider, ANSWER), ONE)
    await asked(process.database, run_id)
    await terminate_workflow(process.client, run_id)
    forged = RunRequest(str(run_id), 1, steps=[StepSpec(0, [], "stand-in", 20.0)], done=[0])
    await process.client.start_workflow(
        contracts.WORKFLOW_TYPE, forged, id=f"run-{run_id}.1.r7", task_queue=contracts.pool_queue("stand-in")
    )
    run = await ended(process.database, run_id, timeout_s=15)
    assert (run.state, run.reason, run.answer) == ("failed", "answer-missing", None)
    assert [line.state for line in await reviews_of(process.database, run_id)] == ["withdrawn"]


async def test_attack_11_an_accepted_answer_that_nobody_reviewed_is_no_success_either(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    """The step's row is made to look done; the end of the run asks the ledger."""
    run_id = await submit_as(process, reviewed_pool(tmp_path, provider, ANSWER), ONE)
    (review,) = await asked(process.database, run_id)
    await waits(process.database, run_id)
    await terminate_workflow(process.client, run_id)
    await as_superuser(
        process.database.url,
        f"""UPDATE steps SET state = 'succeeded', reason = NULL, accepted_attempt_id = candidate_attempt_id,
            candidate_attempt_id = NULL WHERE run_id = '{run_id}'""",
        f"UPDATE attempts SET accepted = true WHERE run_id = '{run_id}'",
        f"UPDATE reviews SET state = 'approved', closed_at = now() WHERE id = '{review.id}'",
    )
    forged = RunRequest(str(run_id), 1, steps=[StepSpec(0, [], "stand-in", 20.0)], done=[0])
    await process.client.start_workflow(
        contracts.WORKFLOW_TYPE, forged, id=f"run-{run_id}.1.r8", task_queue=contracts.pool_queue("stand-in")
    )
    run = await ended(process.database, run_id, timeout_s=15)
    assert (run.state, run.reason, run.answer) == ("failed", "review-missing", None)


async def test_nothing_that_reviewers_write_and_no_name_of_theirs_reaches_temporal(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    word = f"kanarie{uuid4().hex}"
    rules = [{"gate": "plan", "meaning": f"{word} meant"}, {"gate": "answer", "reviewers": [f"{word}.r"]}]
    run_id = await submit_as(process, reviewed_pool(tmp_path, provider, *rules), ONE, f"{word}.s")
    (plan,) = await asked(process.database, run_id)
    await comment_review(process.database, plan.id, actor_id=f"{word}.c", on_behalf_of=None, text=f"{word} said")
    await decide_as(process, plan.id, f"{word}.p", reason=f"{word} why")
    (answer,) = await asked(process.database, run_id)
    await decide_as(process, answer.id, f"{word}.r", "reject", send_back=True, reason=f"{word} again")
    (answer,) = await asked(process.database, run_id)
    await decide_as(process, answer.id, f"{word}.r", meaning=f"{word} is fine")
    assert (await ended(process.database, run_id, timeout_s=10)).state == "succeeded"
    kept = await temporal_record(process.client, run_id)
    # The pool's answers would be found in the same way.
    assert str(run_id).encode() in kept
    for spelling in spellings(word):
        assert spelling not in kept
    # In the database, texts by people are artifacts and nothing else; names and the pool's own words are no such text.
    texts = await dump(process.database.url, without=("artifacts", "pool_snapshots"))
    for said in ("said", "why", "again", "is fine"):
        assert f"{word} {said}" not in texts
