"""Retention: texts go when their time has come, entries never; what lives, is held or is reused stays."""

from __future__ import annotations

import asyncio
from pathlib import Path
from uuid import UUID

from engine.ledger.entry import chain_faults
from engine.store.attempts import open_attempt
from engine.store.database import Database
from engine.store.holds import Matter, place_hold
from engine.store.orders import Order, pause_run
from engine.store.retention import due_runs, sweep
from engine.store.review_requests import request_reviews
from engine.store.runs import create_run
from engine.store.settling import Settlement, settle_run
from engine.store.snapshots import read_run
from engine.store.tables import DEFAULT_TENANT
from tests.integration.store.test_answers import waiting_run
from tests.integration.store.test_erasure import end, forked
from tests.integration.store.test_reviews_on_record import ANSWER, look, proposed
from tests.support.runs import make_pool
from tests.support.sealed import failed_run, finished_run, sealed_database
from tests.support.stored import check_invariants, execute, new_run, opening, record, rows, stored_run
from worker_pools.pool import pool_digest, pool_document

TENANT = UUID(DEFAULT_TENANT)


async def age(database: Database, run_id: UUID, days: float) -> None:
    """As if the run had ended so many days ago."""
    await execute(
        database.url, "UPDATE runs SET ended_at = clock_timestamp() - make_interval(secs => %s) WHERE id = %s",
        days * 86_400, run_id,
    )  # fmt: skip


async def keep_for(database: Database, run_id: UUID, days: int, folder: Path) -> None:
    """Pins a run to a pool that keeps texts for so many days."""
    document = pool_document(make_pool(folder, "http://127.0.0.1:9", policy={"retention_days": days}))
    digest = pool_digest(document)
    await execute(
        database.url,
        "INSERT INTO pool_snapshots (digest, name, document) VALUES (%s, 'test', %s)", digest, document,
    )  # fmt: skip
    await execute(database.url, "UPDATE runs SET pool_digest = %s WHERE id = %s", digest, run_id)


async def test_what_is_old_enough_goes_and_the_record_of_it_stays(sealed: Database) -> None:
    old, young = await finished_run(sealed, ["an old answer"]), await finished_run(sealed, ["a young answer"])
    failed = await failed_run(sealed, "an output of a run that failed")
    live, paused = await stored_run(sealed, [[]]), await stored_run(sealed, [[]])
    await pause_run(sealed, Order(paused, "operator"))
    long_ago = "UPDATE runs SET created_at = created_at - interval '400 days' WHERE id = ANY(%s)"
    await execute(sealed.url, long_ago, [live, paused])
    await age(sealed, old, 30.1)
    await age(sealed, young, 29.9)
    await age(sealed, failed, 31)
    before = {run: (await record(sealed.url, run)).bodies for run in (old, young, failed, live, paused)}
    assert {run.id for run in await due_runs(sealed, TENANT, 30)} == {old, failed}
    done = await sweep(sealed, TENANT, 30)
    assert set(done.erased) == {old, failed}
    assert done.bytes > 0
    for run in (old, failed):
        kept = await record(sealed.url, run)
        check_invariants(kept)
        assert {row["content"] for row in kept.artifacts} == {None}
        assert kept.bodies[: len(before[run])] == before[run]
        (entry,) = kept.entries("artifact.erased")
        assert (entry["data"]["cause"], entry["actor"]) == ("retention", "podium-engine")
    for run in (young, live, paused):
        kept = await record(sealed.url, run)
        assert kept.bodies == before[run]
        assert None not in {row["content"] for row in kept.artifacts}
    system = await rows(sealed.url, "SELECT type, body FROM ledger_entries WHERE run_id = %s ORDER BY seq", TENANT)
    assert [row["type"] for row in system] == ["retention.swept"]
    assert chain_faults([row["body"] for row in system]) == []
    # There is nothing left to do, and nothing to say about it.
    assert (await sweep(sealed, TENANT, 30)).erased == []
    assert len(await rows(sealed.url, "SELECT 1 FROM ledger_entries WHERE type = 'retention.swept'")) == 1


async def test_runs_that_wait_for_people_are_never_touched_however_old(sealed: Database) -> None:
    """For an operator, for a review, in a pause; and a call that is in flight."""
    operator = await waiting_run(sealed)
    review = await proposed(sealed, ANSWER)
    await request_reviews(sealed, review, ANSWER, (await look(sealed, review, ANSWER, 1)).missing)
    paused, running = await stored_run(sealed, [[]]), await stored_run(sealed, [[]])
    await pause_run(sealed, Order(paused, "operator"))
    await open_attempt(sealed, opening(running))
    runs = (operator, review, paused, running)
    old = "UPDATE runs SET created_at = created_at - interval '900 days', started_at = started_at - interval '900 days'"
    await execute(sealed.url, f"{old} WHERE id = ANY(%s)", list(runs))
    before = {run: await record(sealed.url, run) for run in runs}
    assert {before[run].run["state"] for run in runs} >= {"waiting", "running"}
    assert await due_runs(sealed, TENANT, 1) == []
    assert (await sweep(sealed, TENANT, 1)).erased == []
    assert {run: await record(sealed.url, run) for run in runs} == before
    assert (
        await rows(sealed.url, "SELECT 1 FROM ledger_entries WHERE run_id = %s AND type LIKE %s", TENANT, "ret%") == []
    )
    # The control: as soon as one of them has ended long ago, it is due.
    await settle_run(sealed, Settlement(running, 1, "failed", "test"))
    await age(sealed, running, 2)
    assert (await sweep(sealed, TENANT, 1)).erased == [running]


async def test_the_pool_says_how_long_and_the_installation_where_it_says_nothing(
    sealed: Database, tmp_path: Path
) -> None:
    short, long, silent = [await finished_run(sealed, ["an answer"]) for _ in range(3)]
    await keep_for(sealed, short, 7, tmp_path)
    await keep_for(sealed, long, 3650, tmp_path)
    for run in (short, long, silent):
        await age(sealed, run, 40)
    assert [run.id for run in await due_runs(sealed, TENANT, None)] == [short]
    assert {run.id for run in await due_runs(sealed, TENANT, 30)} == {short, silent}


async def test_an_output_that_a_younger_fork_reuses_stays_until_its_time_has_come(sealed: Database) -> None:
    source = await finished_run(sealed, ["an output that is reused", "the answer of the source"])
    fork = await forked(sealed, source)
    await age(sealed, source, 40)
    # The fork lives: only what it reuses keeps the run's texts, and those that are live are never touched.
    await end(sealed, fork, "another answer")
    done = await sweep(sealed, TENANT, 30)
    assert done.erased == [source]
    run = await read_run(sealed, fork)
    assert run is not None
    assert (run.steps[0].output, run.answer) == ("an output that is reused", "another answer")
    old = await read_run(sealed, source)
    assert old is not None
    assert (old.task, old.answer, old.steps[0].output) == (None, None, "an output that is reused")
    assert (await sweep(sealed, TENANT, 30)).erased == []
    await age(sealed, fork, 31)
    await sweep(sealed, TENANT, 30)
    second = (await sweep(sealed, TENANT, 30)).erased
    assert second == [source], second
    run = await read_run(sealed, fork)
    assert run is not None
    assert (run.task, run.steps[0].output) == (None, None)


async def test_a_tree_is_kept_while_any_of_it_lives(sealed: Database) -> None:
    parent, child = await finished_run(sealed, ["the parent"]), await stored_run(sealed, [[]])
    await execute(
        sealed.url,
        "UPDATE runs SET parent_run_id = %s, parent_round = 0, parent_position = 0 WHERE id = %s",
        parent,
        child,
    )
    await age(sealed, parent, 40)
    assert await due_runs(sealed, TENANT, 30) == []


async def test_sweeps_at_once_and_what_is_held(sealed: Database, tmp_path: Path) -> None:
    runs = [await finished_run(sealed, [f"answer {number}"]) for number in range(6)]
    for run in runs:
        await age(sealed, run, 40)
    await place_hold(sealed, Matter(TENANT, "m-1", "counsel", None, "evidence"), runs[:2])
    other = sealed_database(sealed.url, tmp_path / "keys")
    first, second = await asyncio.gather(sweep(sealed, TENANT, 30), sweep(other, TENANT, 30))
    assert sorted(set(first.erased) | set(second.erased)) == sorted(runs[2:])
    assert set(first.erased).isdisjoint(second.erased)
    for number, run in enumerate(runs):
        kept = await record(sealed.url, run)
        check_invariants(kept)
        assert len(kept.entries("artifact.erased")) == (number >= 2)
        assert len(kept.entries("erasure.refused")) == (number < 2)
    await other.close()


async def test_other_requests_go_on_while_a_sweep_works(sealed: Database) -> None:
    runs = [await finished_run(sealed, ["an answer"]) for _ in range(4)]
    for run in runs:
        await age(sealed, run, 40)
    work = asyncio.create_task(sweep(sealed, TENANT, 30))
    made = [(await create_run(sealed, new_run([[]]))).id for _ in range(5)]
    assert set((await work).erased) == set(runs)
    for run in made:
        check_invariants(await record(sealed.url, run))
