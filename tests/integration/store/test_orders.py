"""Orders that people give to runs: one transaction each, with who and why, and nothing changed where one is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from engine.errors import InputError, RefusedError
from engine.ledger.commitment import ARTIFACT_DOMAIN, commitment
from engine.store.attempts import open_attempt
from engine.store.closing import close_step_attempt
from engine.store.database import Database
from engine.store.drafts import StepRoute
from engine.store.orders import Order, pause_run, request_cancel, unpause_run
from engine.store.resuming import PoolSnapshotDraft, Resumption, resume_run
from engine.store.run_writer import AttemptResult
from engine.store.settling import Settlement, settle_run
from tests.support.link import Cut, Link
from tests.support.runs import make_pool
from tests.support.stored import answered, check_invariants, ended_with, execute, opening, record, stored_run
from worker_pools.pool import pool_digest, pool_document

Write = Callable[[Database, Order], Awaitable[Any]]
CHAIN = [[], [0], [1]]


def order(run_id: UUID, reason: str | None = None, actor: str = "operator-1") -> Order:
    return Order(run_id, actor, "somebody", reason)


async def resumption(database: Database, run_id: UUID, **changes: Any) -> Resumption:
    kept = await record(database.url, run_id)
    routes = {name: StepRoute("plain", "stand-in") for name in ("alpha", "beta", "gamma")}
    return Resumption(
        **{
            "pool_seen": kept.run["pool_digest"],
            "routes": routes,
            "deadline_s": None,
            "planned_workers": False,
            **changes,
        }
    )


async def resume(database: Database, order_: Order) -> Any:
    return await resume_run(database, order_, await resumption(database, order_.run_id))


async def ended_run(database: Database, state: str, code: str | None = None) -> UUID:
    """A chain of three whose first step is answered and whose run has then ended."""
    run_id = await stored_run(database, CHAIN if state != "succeeded" else [[]])
    opened = opening(run_id, 0)
    await open_attempt(database, opened)
    await close_step_attempt(database, answered(opened, ends_run=state == "succeeded"))
    if state != "succeeded":
        await settle_run(database, Settlement(run_id, 1, state, code or state))  # type: ignore[arg-type]  # a state
    return run_id


ORDERS: dict[str, tuple[Write, str]] = {
    "cancel": (request_cancel, "run.cancel_requested"),
    "pause": (pause_run, "run.paused"),
    "unpause": (unpause_run, "run.unpaused"),
    "resume": (resume, "run.resumed"),
}


async def ready(database: Database, name: str) -> UUID:
    """A run that takes this order."""
    if name == "resume":
        return await ended_run(database, "failed", "auth-failed")
    run_id = await stored_run(database, CHAIN)
    if name == "unpause":
        await pause_run(database, order(run_id))
    return run_id


@pytest.mark.parametrize("name", ORDERS)
async def test_an_order_says_who_and_why_and_keeps_the_words_out_of_the_ledger(database: Database, name: str) -> None:
    write, type_ = ORDERS[name]
    run_id = await ready(database, name)
    given = order(run_id, "the cänary sang")
    await write(database, given)
    kept = await record(database.url, run_id)
    check_invariants(kept)
    (entry,) = kept.entries(type_)
    assert (entry["actor"], entry["on_behalf_of"]) == ("operator-1", "somebody")
    assert entry["data"]["order"] == str(given.id)
    (said,) = entry["data"]["artifacts"]
    (artifact,) = [row for row in kept.artifacts if row["kind"] == "reason"]
    assert (artifact["owner_id"], bytes(artifact["content"]).decode()) == (given.id, "the cänary sang")
    path = f"{given.id}/reason/0"
    kept_commitment = commitment(bytes(artifact["salt"]), ARTIFACT_DOMAIN, path, bytes(artifact["content"]))
    assert said["commitment"] == kept_commitment.hex()
    assert b"sang" not in b"".join(kept.bodies)


@pytest.mark.parametrize("cut", ["before-commit", "after-commit"])
@pytest.mark.parametrize("name", ORDERS)
async def test_an_order_whose_link_dies_around_its_commit_counts_once(database: Database, name: str, cut: Cut) -> None:
    write, type_ = ORDERS[name]
    run_id = await ready(database, name)
    given = order(run_id, "once")
    if name == "resume":
        wish = await resumption(database, run_id)

        async def write(through: Database, wanted: Order) -> Any:
            return await resume_run(through, wanted, wish)

    async with Link(database.url) as link:
        linked = Database(link.url, pool_size=1)
        link.cut_next(cut)
        result = await write(linked, given)
        await linked.close()
        assert link.cuts == 1
    before = await record(database.url, run_id)
    check_invariants(before)
    assert [entry["data"]["order"] for entry in before.entries(type_)].count(str(given.id)) == 1
    assert result.execution == 2 if name == "resume" else result.changed
    # The same order once more, whoever repeats it, changes nothing and is told the same.
    again = await write(database, given)
    assert await record(database.url, run_id) == before
    assert again.execution == 2 if name == "resume" else again.changed


@pytest.mark.parametrize(
    ("name", "state", "code"),
    [
        ("cancel", "succeeded", "run-ended"),
        ("cancel", "failed", "run-ended"),
        ("pause", "succeeded", "run-ended"),
        ("pause", "failed", "run-ended"),
        ("pause", "cancelled", "run-ended"),
        ("pause", "paused", "run-paused"),
        ("pause", "cancelling", "run-cancelling"),
        ("unpause", "succeeded", "run-ended"),
        ("unpause", "cancelled", "run-ended"),
        ("unpause", "created", "run-not-paused"),
        ("unpause", "cancelling", "run-cancelling"),
        ("resume", "succeeded", "run-succeeded"),
        ("resume", "created", "run-live"),
        ("resume", "paused", "run-live"),
        ("resume", "cancelling", "run-live"),
    ],
)
async def test_an_order_that_does_not_fit_is_refused_and_changes_nothing(
    database: Database, name: str, state: str, code: str
) -> None:
    if state in {"succeeded", "failed", "cancelled"}:
        run_id = await ended_run(database, state)
    else:
        run_id = await stored_run(database, CHAIN)
        if state != "created":
            await (pause_run if state == "paused" else request_cancel)(database, order(run_id))
    before = await record(database.url, run_id)
    with pytest.raises(RefusedError) as refused:
        await ORDERS[name][0](database, order(run_id, "a reason that must not stay"))
    assert refused.value.code == code
    assert str(run_id) in refused.value.message
    assert refused.value.hint
    assert await record(database.url, run_id) == before


async def test_a_second_cancel_is_harmless_and_says_since_when(database: Database) -> None:
    run_id = await stored_run(database, CHAIN)
    first = await request_cancel(database, order(run_id, actor="one"))
    before = await record(database.url, run_id)
    second = await request_cancel(database, order(run_id, actor="two"))
    assert (first.changed, second.changed, second.at) == (True, False, first.at)
    assert await record(database.url, run_id) == before
    await settle_run(database, Settlement(run_id, 1, "cancelled", "cancelled"))
    third = await request_cancel(database, order(run_id))
    assert (third.state, third.changed) == ("cancelled", False)


@pytest.mark.parametrize("planned", [True, False])
async def test_a_pause_is_shown_only_when_nothing_runs_any_more(database: Database, planned: bool) -> None:
    place = 0 if planned else None
    run_id = await stored_run(database, CHAIN if planned else None)
    await pause_run(database, order(run_id))
    kept = await record(database.url, run_id)
    assert (kept.run["state"], kept.run["reason"]) == ("waiting", "paused")
    back = await unpause_run(database, order(run_id))
    assert (back.state, back.reason) == ("running" if planned else "planning", None)
    opened = opening(run_id, place)
    assert (await open_attempt(database, opened)).verdict == "call"
    during = await pause_run(database, order(run_id))
    assert during.state == ("running" if planned else "planning")
    kept = await record(database.url, run_id)
    assert kept.run["paused_at"] == kept.run["wake_requested_at"] == during.at
    check_invariants(kept)


async def test_a_pause_does_not_hide_what_else_a_run_waits_for(database: Database) -> None:
    run_id = await stored_run(database, CHAIN)
    await execute(database.url, "UPDATE runs SET state = 'waiting', reason = 'secret-missing' WHERE id = %s", run_id)
    for write in (pause_run, unpause_run):
        assert (await write(database, order(run_id))).reason == "secret-missing"


async def failed_chain(database: Database) -> UUID:
    """Step 0 is answered, step 1 failed for good, step 2 never began."""
    run_id = await stored_run(database, CHAIN)
    first, second = opening(run_id, 0), opening(run_id, 1)
    await open_attempt(database, first)
    await close_step_attempt(database, answered(first))
    await open_attempt(database, second)
    refused = AttemptResult("failed", "auth-failed", provider_status=401, cost_usd=Decimal(0))
    await close_step_attempt(database, ended_with(second, refused))
    await settle_run(database, Settlement(run_id, 1, "failed", "auth-failed"))
    return run_id


async def test_a_resumed_run_keeps_its_answers_and_tries_the_rest_anew(database: Database) -> None:
    run_id = await failed_chain(database)
    before = await record(database.url, run_id)
    assert [step["state"] for step in before.steps] == ["succeeded", "failed", "cancelled"]
    wish = await resumption(database, run_id, deadline_s=60.0)
    assert (await resume_run(database, order(run_id), wish)).execution == 2
    kept = await record(database.url, run_id)
    check_invariants(kept)
    assert [step["state"] for step in kept.steps] == ["succeeded", "pending", "pending"]
    assert kept.steps[0] == before.steps[0]
    assert kept.attempts == before.attempts
    run = kept.run
    assert (run["state"], run["reason"], run["execution"], run["execution_seen"]) == ("created", None, 2, 1)
    assert (run["ended_at"], run["cancel_requested_at"], run["paused_at"]) == (None, None, None)
    (entry,) = kept.entries("run.resumed")
    assert entry["data"]["execution"] == 2
    assert run["deadline_at"] is not None
    # The answered step is found, the failed one may be called, and the old execution may call nothing.
    assert (await open_attempt(database, opening(run_id, 0, (2, 0, 1)))).verdict == "done"
    assert (await open_attempt(database, opening(run_id, 1, (1, 1, 1)))).verdict == "superseded"
    assert (await open_attempt(database, opening(run_id, 1, (2, 0, 1)))).verdict == "call"


async def test_a_run_that_was_cancelled_while_it_was_paused_is_resumed_without_either(database: Database) -> None:
    run_id = await stored_run(database, CHAIN)
    await pause_run(database, order(run_id))
    await request_cancel(database, order(run_id))
    await settle_run(database, Settlement(run_id, 1, "cancelled", "cancelled"))
    await resume(database, order(run_id))
    assert (await open_attempt(database, opening(run_id, 0, (2, 0, 1)))).verdict == "call"


def other_pool(folder: Path, **changes: Any) -> PoolSnapshotDraft:
    document = pool_document(make_pool(folder, "http://127.0.0.1:9", **changes))
    return PoolSnapshotDraft("other", pool_digest(document), document)


async def test_another_pool_is_pinned_and_the_unfinished_steps_take_its_models(
    database: Database, tmp_path: Path
) -> None:
    run_id = await failed_chain(database)
    before = await record(database.url, run_id)
    pool = other_pool(tmp_path, worker={"model": "better", "queue": "elsewhere"})
    routes = {name: StepRoute("better", "elsewhere") for name in ("alpha", "beta", "gamma")}
    await resume_run(database, order(run_id), await resumption(database, run_id, routes=routes, repin=pool))
    kept = await record(database.url, run_id)
    check_invariants(kept)
    assert kept.run["pool_digest"] == pool.digest
    (entry,) = kept.entries("run.repinned")
    assert (entry["data"]["old"], entry["data"]["new"]) == (before.run["pool_digest"], pool.digest)
    assert [(step["model"], step["queue"]) for step in kept.steps] == [
        ("plain", "stand-in"), ("better", "elsewhere"), ("better", "elsewhere"),
    ]  # fmt: skip
    assert [entry["data"]["step"] for entry in kept.entries("step.routed")] == [1, 2]


async def test_a_pool_without_a_worker_of_an_unfinished_step_is_refused(database: Database, tmp_path: Path) -> None:
    run_id = await failed_chain(database)
    before = await record(database.url, run_id)
    repin = other_pool(tmp_path, name="other")

    async def wish(*names: str) -> Resumption:
        routes = {name: StepRoute("better", "elsewhere") for name in names}
        return await resumption(database, run_id, routes=routes, repin=repin)

    with pytest.raises(InputError, match="beta") as refused:
        await resume_run(database, order(run_id), await wish("alpha", "gamma"))
    assert refused.value.code == "worker-missing"
    assert await record(database.url, run_id) == before
    # The worker of a finished step may be missing.
    assert (await resume_run(database, order(run_id), await wish("beta", "gamma"))).execution == 2


@pytest.mark.parametrize("planned_workers", [True, False])
async def test_a_substitute_makes_room_for_the_planned_worker_where_the_policy_says_so(
    database: Database, planned_workers: bool
) -> None:
    run_id = await failed_chain(database)
    await execute(
        database.url,
        "UPDATE steps SET planned_worker = worker, worker = 'gamma', model = 'costly' WHERE run_id = %s AND position = 1",
        run_id,
    )
    routes = {name: StepRoute(f"model-of-{name}", "stand-in") for name in ("alpha", "beta", "gamma")}
    wish = await resumption(database, run_id, routes=routes, planned_workers=planned_workers)
    await resume_run(database, order(run_id), wish)
    step = (await record(database.url, run_id)).steps[1]
    expected = ("beta", "model-of-beta", None) if planned_workers else ("gamma", "model-of-gamma", "beta")
    assert (step["worker"], step["model"], step["planned_worker"]) == expected


async def family(database: Database) -> tuple[UUID, UUID, UUID]:
    ids = [await ended_run(database, "failed", "x") for _ in range(3)]
    for child, parent in ((ids[1], ids[0]), (ids[2], ids[1])):
        await execute(
            database.url,
            "UPDATE runs SET parent_run_id = %s, parent_round = 0, parent_position = 0 WHERE id = %s",
            parent,
            child,
        )
    return ids[0], ids[1], ids[2]


async def test_a_run_is_resumed_only_when_everything_below_it_has_ended_and_only_from_the_top(
    database: Database,
) -> None:
    root, child, grandchild = await family(database)
    before = await record(database.url, child)
    with pytest.raises(RefusedError, match=str(root)) as refused:
        await resume(database, order(child))
    assert refused.value.code == "run-is-child"
    assert await record(database.url, child) == before
    await execute(database.url, "UPDATE runs SET state = 'created', ended_at = NULL WHERE id = %s", grandchild)
    before = await record(database.url, root)
    with pytest.raises(RefusedError) as refused:
        await resume(database, order(root))
    assert refused.value.code == "descendants-live"
    assert refused.value.hint is not None
    assert str(grandchild) in refused.value.hint
    assert await record(database.url, root) == before
    await execute(
        database.url, "UPDATE runs SET state = 'failed', ended_at = clock_timestamp() WHERE id = %s", grandchild
    )
    await resume(database, order(root))


async def test_a_resume_that_was_overtaken_by_one_with_another_pool_is_told(database: Database, tmp_path: Path) -> None:
    run_id = await failed_chain(database)
    stale = await resumption(database, run_id)
    routes = {name: StepRoute("better", "elsewhere") for name in ("alpha", "beta", "gamma")}
    wish = await resumption(database, run_id, routes=routes, repin=other_pool(tmp_path, name="other"))
    await resume_run(database, order(run_id), wish)
    await settle_run(database, Settlement(run_id, 2, "failed", "auth-failed"))
    with pytest.raises(RefusedError) as refused:
        await resume_run(database, order(run_id), stale)
    assert refused.value.code == "run-changed"


PAIRS = [("cancel", "resume"), ("pause", "unpause"), ("resume", "resume"), ("cancel", "pause"), ("pause", "pause")]


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
@pytest.mark.parametrize("times", [10, pytest.param(50, marks=pytest.mark.slow)])
async def test_of_two_operators_at_once_one_wins_and_the_other_is_told(
    database: Database, one: str, other: str, times: int
) -> None:
    """Whatever order the two came in, the record is what one after the other would have made."""
    for _ in range(times):
        run_id = await ready(database, "resume" if other == "resume" else "cancel")
        before = await record(database.url, run_id)
        orders = [order(run_id, f"by {name}", name) for name in ("one", "two")]
        results = await asyncio.gather(
            *(ORDERS[name][0](database, given) for name, given in zip((one, other), orders, strict=True)),
            return_exceptions=True,
        )
        for result in results:
            assert not isinstance(result, BaseException) or isinstance(result, RefusedError), result
        won = [not isinstance(result, BaseException) for result in results]
        assert any(won)
        kept = await record(database.url, run_id)
        check_invariants(kept)
        new = [entry for entry in kept.entries()[len(before.bodies) :] if "order" in entry["data"]]
        # Every order that was accepted has its entry, by its giver, and no refused order left a trace.
        accepted = [str(given.id) for given, good in zip(orders, won, strict=True) if good]
        assert sorted(entry["data"]["order"] for entry in new) == sorted(accepted)
        assert sum(row["kind"] == "reason" for row in kept.artifacts) == sum(won)
        run = kept.run
        pauses = [entry["type"] for entry in new if entry["type"] in {"run.paused", "run.unpaused"}]
        assert (run["paused_at"] is not None) == (pauses[-1:] == ["run.paused"])
        cancelled = new[-1]["type"] == "run.cancel_requested" or (one, won[0], other) == ("cancel", True, "pause")
        assert (run["cancel_requested_at"] is not None) == cancelled
        if other == "resume":
            assert (run["execution"], run["state"]) == (2, "created")
        if (one, other) in {("resume", "resume"), ("pause", "pause")}:
            assert sum(won) == 1


async def test_a_refused_reason_is_refused_before_anything_is_written() -> None:
    run_id = UUID(int=1)
    for reason, code in (("x" * 5000, "reason-too-long"), ("a\0b", "reason-binary"), ("\udcff", "reason-binary")):
        with pytest.raises(InputError) as refused:
            Order(run_id, "operator", None, reason)
        assert refused.value.code == code
