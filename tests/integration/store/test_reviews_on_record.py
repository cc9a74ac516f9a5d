"""Reviews in the store alone: repeated and concurrent transactions, and what the tables let nobody do."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from engine.errors import RefusedError
from engine.service import TENANT
from engine.store.attempts import ReviewSight, Ruling, open_attempt
from engine.store.closing import close_step_attempt
from engine.store.database import Database
from engine.store.gates import GateRule, Gates
from engine.store.orders import Order
from engine.store.persons import link_account
from engine.store.review_decisions import Decided, Verdict, decide
from engine.store.review_display import read_display, read_displays
from engine.store.review_expiry import READ_DUE, expire_reviews
from engine.store.review_requests import request_reviews
from engine.store.review_views import ReviewLine, reviews_of_run
from engine.store.sampling import sampling_salt
from engine.store.settling import Settlement, settle_run
from tests.support.servers import superuser_url
from tests.support.stored import answered, check_invariants, execute, opening, plain_url, record, rows, stored_run
from worker_pools.pool import ReviewRule


def gates(*rules: dict[str, Any], salt: bytes | None = None) -> Gates:
    return Gates(tuple(GateRule(ReviewRule.model_validate(rule).document) for rule in rules), {}, salt)


async def sight(database: Database, run_id: UUID, rules: Gates, **options: Any) -> ReviewSight:
    displays = await read_displays(database, run_id)
    return ReviewSight(rules, {own: None if one is None else one.shown for own, one in displays.items()}, **options)


async def look(database: Database, run_id: UUID, rules: Gates, dispatch: int, **options: Any) -> Ruling:
    """An Open by a later dispatch of the workflow."""
    seen = await sight(database, run_id, rules, **options)
    return await open_attempt(database, opening(run_id, 0, (1, dispatch, 1), review=seen))


async def lines(database: Database, run_id: UUID) -> tuple[ReviewLine, ...]:
    return await database.query(lambda connection: reviews_of_run(connection, run_id))


async def proposed(database: Database, rules: Gates) -> UUID:
    """A run whose only step has an output that waits for a review; nobody has been asked yet."""
    run_id = await stored_run(database, [[]])
    opened = opening(run_id, review=await sight(database, run_id, rules))
    assert (await open_attempt(database, opened)).verdict == "call"
    ruling = await close_step_attempt(database, answered(opened, review=ReviewSight(rules), ends_run=True))
    assert (ruling.verdict, ruling.code) == ("held", "review")
    again = await close_step_attempt(database, answered(opened, review=ReviewSight(rules), ends_run=True))
    assert (again.verdict, again.code) == ("held", "review")
    return run_id


async def verdict_of(database: Database, review_id: UUID, kind: Any = "approve", **options: Any) -> Verdict:
    display = await read_display(database, review_id)
    assert display is not None
    return Verdict(review_id, kind, "own-words", "I did.", display.shown, **options)


async def approved(database: Database, run_id: UUID, who: str, order_id: UUID | None = None) -> Decided:
    (line,) = await lines(database, run_id)
    return await decide(database, Order(run_id, who, id=order_id or uuid4()), await verdict_of(database, line.id))


ANSWER = gates({"gate": "answer"})


async def test_an_output_is_proposed_asked_about_approved_and_accepted_each_once(database: Database) -> None:
    run_id = await proposed(database, ANSWER)
    (step,) = (await record(database.url, run_id)).steps
    assert (step["state"], step["reason"], step["accepted_attempt_id"]) == ("waiting", "review", None)
    # Whoever died before asking is no loss: the next look finds it missing, and two at once ask once.
    ruling = await look(database, run_id, ANSWER, 1)
    assert (ruling.verdict, len(ruling.missing)) == ("held", 1)
    await asyncio.gather(*(request_reviews(database, run_id, ANSWER, ruling.missing) for _ in range(3)))
    (line,) = await lines(database, run_id)
    held = await look(database, run_id, ANSWER, 2)
    late = ruling.missing
    assert (held.verdict, held.missing) == ("held", ())
    # The link died before the answer of the COMMIT: the same decision again is one decision.
    order_id = uuid4()
    first = await approved(database, run_id, "bob", order_id)
    second = await decide(database, Order(run_id, "bob", id=order_id), await verdict_of(database, line.id))
    assert (first.review_state, second.review_state, second.ordered.at) == ("approved", "approved", None)
    # Somebody who found it missing long ago asks for nothing, and takes nothing back.
    await request_reviews(database, run_id, ANSWER, late)
    assert [one.state for one in await lines(database, run_id)] == ["approved"]
    done = await look(database, run_id, ANSWER, 3, ends_run=True)
    assert (done.verdict, done.run_ended) == ("done", True)
    assert (await look(database, run_id, ANSWER, 3, ends_run=True)).verdict == "done"
    kept = await record(database.url, run_id)
    check_invariants(kept)
    assert kept.run["state"] == "succeeded"
    assert len(kept.entries("review.decided")) == len(kept.entries("review.requested")) == 1


async def test_an_approval_that_nobody_has_compared_yet_opens_nothing(database: Database) -> None:
    run_id = await proposed(database, ANSWER)
    await request_reviews(database, run_id, ANSWER, (await look(database, run_id, ANSWER, 1)).missing)
    before = await sight(database, run_id, gates())
    await approved(database, run_id, "bob")
    ruling = await open_attempt(database, opening(run_id, 0, (1, 2, 1), review=ReviewSight(ANSWER, {})))
    assert (ruling.verdict, ruling.unchecked, before.displays != {}) == ("held", True, True)
    assert (await look(database, run_id, ANSWER, 3)).verdict == "done"


async def test_an_expiry_and_a_decision_at_once_are_one_or_the_other(own_database_url: str) -> None:
    database = Database(own_database_url)
    rules = gates({"gate": "answer", "expires_s": 1})
    seen = []
    runs = []
    for _ in range(6):
        run_id = await proposed(database, rules)
        await request_reviews(database, run_id, rules, (await look(database, run_id, rules, 1)).missing)
        runs.append(run_id)
    # One is decided in time and one too late, whatever the machine does; the others when the time is up.
    early, *runs, late = runs
    await approved(database, early, "bob")
    await asyncio.sleep(0.97)
    results = await asyncio.gather(
        *(approved(database, run_id, "bob") for run_id in runs),
        *(expire_reviews(database) for _ in range(6)),
        return_exceptions=True,
    )
    await asyncio.sleep(0.3)
    with pytest.raises(RefusedError) as refused:
        await approved(database, late, "bob")
    assert refused.value.code in {"review-expired", "review-closed"}
    await expire_reviews(database)
    for run_id, result in zip([early, *runs, late], [None, *results[: len(runs)], refused.value], strict=True):
        (line,) = await lines(database, run_id)
        assert line.state in {"approved", "expired"}
        assert (line.state == "approved") is not isinstance(result, RefusedError)
        kept = await record(database.url, run_id)
        check_invariants(kept)
        # One word on it, and a decision on record only where it counted.
        assert [entry["data"]["state"] for entry in kept.entries("review.closed")] == [line.state]
        assert len(kept.entries("review.decided")) == (line.state == "approved")
        seen.append(line.state)
    assert (seen[0], seen[-1]) == ("approved", "expired")
    await database.close()


async def test_a_run_that_ends_withdraws_its_questions_and_keeps_the_output(database: Database) -> None:
    run_id = await proposed(database, ANSWER)
    await request_reviews(database, run_id, ANSWER, (await look(database, run_id, ANSWER, 1)).missing)
    settled = await settle_run(database, Settlement(run_id, 1, "succeeded", None, ReviewSight(ANSWER)))
    assert (settled.state, settled.code) == ("failed", "answer-missing")
    (line,) = await lines(database, run_id)
    assert line.state == "withdrawn"
    with pytest.raises(RefusedError) as refused:
        await approved(database, run_id, "bob")
    assert refused.value.code == "review-closed"
    kept = await record(database.url, run_id)
    check_invariants(kept)
    assert kept.steps[0]["candidate_attempt_id"] is not None


async def test_the_record_of_reviews_is_only_ever_added_to(database: Database) -> None:
    run_id = await proposed(database, ANSWER)
    await request_reviews(database, run_id, ANSWER, (await look(database, run_id, ANSWER, 1)).missing)
    await approved(database, run_id, "bob")
    await link_account(database, TENANT, "x-2", "x", actor_id="admin")
    await sampling_salt(database, TENANT)
    for url in (database.url, superuser_url(database.url)):
        for statement in (
            "DELETE FROM reviews",
            "UPDATE review_decisions SET person = 'carol'",
            "DELETE FROM review_decisions",
            "UPDATE persons SET person = 'y'",
            "DELETE FROM persons",
            "UPDATE sampling_salts SET salt = sha256('mine')",
            "TRUNCATE reviews CASCADE",
            "TRUNCATE review_decisions",
            "TRUNCATE persons",
            "UPDATE reviews SET state = 'open', closed_at = NULL",
        ):
            with pytest.raises(psycopg.Error) as refused:
                await execute(url, statement)
            assert refused.value.sqlstate in {"PD018", "PD019", "42501"}
    (line,) = await lines(database, run_id)
    assert (line.state, line.decided_by) == ("approved", ("bob",))


async def test_the_salt_of_samples_is_made_once_whoever_asks(own_database_url: str) -> None:
    database = Database(own_database_url)
    salts = await asyncio.gather(*(sampling_salt(database, TENANT) for _ in range(5)))
    assert len(set(salts)) == 1
    found = await rows(database.url, "SELECT body FROM ledger_entries WHERE run_id = %s", TENANT)
    assert len(found) == 1
    await database.close()


async def test_looking_for_overdue_reviews_reads_only_those_from_the_index(database: Database) -> None:
    """Every worker looks every two seconds."""
    async with await psycopg.AsyncConnection.connect(plain_url(database.url)) as link:
        # A table with nothing in it would be read in whole.
        await link.execute("SET enable_seqscan = off")
        found = await (await link.execute(f"EXPLAIN {READ_DUE}".encode())).fetchall()
    plan = "\n".join(row[0] for row in found)
    assert "Index Scan using ix_reviews_expires_at" in plan
    assert "Index Cond: (expires_at <= " in plan
    assert "Sort" not in plan
