"""Reviews that somebody with the application's password makes up: in the ledger alone, or in the tables alone."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from engine.errors import InputError, RefusedError
from engine.ledger.entry import EntryPlace, Event, entry_bytes, entry_hash
from engine.service import TENANT
from engine.store.database import Database
from engine.store.log_check import check_log
from engine.store.orders import Order
from engine.store.persons import link_account
from engine.store.review_decisions import decide
from engine.store.review_expiry import expire_reviews
from engine.store.review_requests import request_reviews
from engine.store.review_views import contradicted_reviews
from engine.store.settling import Settlement, settle_run
from tests.integration.store.test_reviews_on_record import (
    ANSWER,
    approved,
    gates,
    lines,
    look,
    proposed,
    sight,
    verdict_of,
)
from tests.support.stored import execute, plain_url, record, rows, stored_run

HELD = ("held", "review-contradicted", ())


@pytest.fixture
async def alone(own_database_url: str) -> AsyncIterator[Database]:
    """A database that no other test uses: links of accounts stay."""
    opened = Database(own_database_url)
    yield opened
    await opened.close()


async def append(database: Database, run_id: UUID, *events: tuple[str, dict[str, Any]], actor: str = "bob") -> None:
    """Adds entries with the function that is meant for it, as the role that everything connects as."""
    (head,) = await rows(database.url, "SELECT *, clock_timestamp() AS now FROM ledger_heads WHERE run_id = %s", run_id)
    seq, prev, now = head["seq"], bytes(head["hash"]), head["now"]
    assert isinstance(now, datetime)
    bodies = []
    for type_, data in events:
        place = EntryPlace(TENANT, run_id, seq + len(bodies) + 1, entry_hash(bodies[-1]) if bodies else prev)
        bodies.append(entry_bytes(place, Event(type_, actor, None, data), now))
    await execute(database.url, "SELECT ledger_append(%s, %s, %s, %s)", run_id, seq, prev, bodies)


async def in_question(database: Database, rule: dict[str, Any] | None = None) -> tuple[UUID, dict[str, Any]]:
    """A run whose answer waits for a review that was asked for; and what its entry says."""
    rules = ANSWER if rule is None else gates(rule)
    run_id = await proposed(database, rules)
    await request_reviews(database, run_id, rules, (await look(database, run_id, rules, 1)).missing)
    (entry,) = (await record(database.url, run_id)).entries("review.requested")
    return run_id, entry["data"]


def decided(asked: dict[str, Any], order: UUID | None = None) -> tuple[str, dict[str, Any]]:
    said = {
        "review": asked["review"], "order": str(order or uuid4()), "person": "bob", "decision": "approve",
        "meaning": "own-words", "subject": asked["subject"], "shown": asked["shown"], "checkpoint": None,
        "artifacts": [],
    }  # fmt: skip
    return "review.decided", said


def closed(asked: dict[str, Any], state: str = "approved") -> tuple[str, dict[str, Any]]:
    return "review.closed", {"review": asked["review"], "state": state, "sent_back": False, "moved": None}


INSERT = """
    INSERT INTO review_decisions (id, review_id, decision, meaning, actor_id, on_behalf_of, person, subject, shown,
                                  decided_at)
    SELECT %s, id, 'approve', 'own-words', %s, NULL, %s, subject, shown, clock_timestamp() FROM reviews WHERE id = %s
"""
COPY = "INSERT INTO reviews SELECT (jsonb_populate_record(reviews, %s::jsonb)).* FROM reviews WHERE id = %s"
APPROVE = "UPDATE reviews SET state = 'approved', closed_at = clock_timestamp() WHERE id = %s"


async def stays_closed(database: Database, run_id: UUID, words: str, dispatch: int = 2) -> None:
    """Open, the run's end and whoever checks the record all say so; nothing is asked anew."""
    ruling = await look(database, run_id, ANSWER, dispatch, ends_run=True)
    assert (ruling.verdict, ruling.code, ruling.missing) == HELD
    kept = await record(database.url, run_id)
    assert (kept.steps[0]["state"], kept.steps[0]["reason"]) == ("waiting", "review-contradicted")
    assert (kept.run["state"], kept.run["reason"]) == ("waiting", "review-contradicted")
    assert kept.steps[0]["accepted_attempt_id"] is None
    assert words in (await differing(database))[run_id]
    faults = [(code, text) for code, text in (await check_log(database)).faults if str(run_id) in text]
    assert [(code, words in text) for code, text in faults] == [("row-mismatch", True)]


async def differing(database: Database) -> dict[UUID, str]:
    return await contradicted_reviews(database, TENANT, 100)


async def test_entries_without_rows_open_nothing(database: Database) -> None:
    run_id, asked = await in_question(database)
    assert run_id not in await differing(database)
    await append(database, run_id, decided(asked), closed(asked))
    await stays_closed(database, run_id, "has 0 decisions in the table, and its entries say 1")
    # Nor by somebody who may decide: what they would add to was made up.
    with pytest.raises(RefusedError) as refused:
        await approved(database, run_id, "carol")
    assert refused.value.code == "review-contradicted"
    # Whoever asks for the end of the run gets it, but not as a success.
    settled = await settle_run(
        database, Settlement(run_id, 1, "succeeded", None, await sight(database, run_id, ANSWER))
    )
    assert settled.state == "failed"


async def test_a_broken_glass_without_a_row_opens_nothing(database: Database) -> None:
    run_id, asked = await in_question(database)
    bypassed = {"review": asked["review"], "order": str(uuid4()), "person": "bob", "artifacts": []}
    await append(database, run_id, ("review.bypassed", bypassed))
    await stays_closed(database, run_id, "has 0 decisions in the table")


async def test_an_end_without_a_row_opens_nothing(database: Database) -> None:
    run_id, asked = await in_question(database)
    await append(database, run_id, closed({**asked}, "stale"))
    await stays_closed(database, run_id, "is open in the table, and its entries say stale")


async def test_a_review_that_was_never_asked_for_opens_nothing(database: Database) -> None:
    run_id, asked = await in_question(database)
    made_up = {**asked, "review": str(uuid4()), "on_expiry": "approve"}
    await append(database, run_id, ("review.requested", made_up), closed(made_up, "expired"))
    await stays_closed(database, run_id, "has entries, but is not in the table")


@pytest.mark.parametrize(
    "change",
    [{"actor": "dan"}, {"person": "dan"}, {"order": "00000000-0000-4000-8000-000000000000"}, {"subject": "00" * 32}],
    ids=["account", "person", "id", "subject"],
)
async def test_decisions_match_their_entries_one_to_one(database: Database, change: dict[str, Any]) -> None:
    run_id, asked = await in_question(database)
    order = uuid4()
    await execute(database.url, INSERT, order, "bob", "bob", asked["review"])
    await execute(database.url, APPROVE, asked["review"])
    type_, said = decided(asked, order)
    said |= {key: value for key, value in change.items() if key != "actor"}
    await append(database, run_id, (type_, said), closed(asked), actor=change.get("actor", "bob"))
    await stays_closed(database, run_id, "or other ones")


async def test_rows_without_entries_open_nothing(database: Database) -> None:
    run_id, asked = await in_question(database)
    await execute(database.url, INSERT, uuid4(), "bob", "bob", asked["review"])
    await stays_closed(database, run_id, "has 1 decisions in the table, and its entries say 0")
    await execute(database.url, APPROVE, asked["review"])
    await stays_closed(database, run_id, "has 1 decisions in the table", dispatch=3)


async def test_terms_in_the_entry_that_are_not_those_of_the_row_open_nothing(database: Database) -> None:
    run_id, asked = await in_question(database, {"gate": "answer", "approvals": 2})
    # The same question once more, which one person can answer.
    await append(database, run_id, ("review.requested", {**asked, "approvals": 1}), decided(asked), closed(asked))
    rules = gates({"gate": "answer", "approvals": 2})
    ruling = await look(database, run_id, rules, 2, ends_run=True)
    assert (ruling.verdict, ruling.code, ruling.missing) == HELD


@pytest.mark.parametrize(
    "terms",
    [{"approvals": 1}, {"four_eyes": False}, {"reviewers": ["bob"]}, {"on_expiry": "approve"}, {"level": 1}],
    ids=lambda terms: next(iter(terms)),
)
async def test_a_review_that_asks_less_than_its_rule_opens_nothing_though_row_and_entry_agree(
    database: Database, terms: dict[str, Any]
) -> None:
    rule = {"gate": "answer", "approvals": 2, "expires_s": 3600, "on_expiry": "reject"}
    run_id, asked = await in_question(database, rule)
    own = str(uuid4())
    said = {**asked, "review": own, **terms}
    seq = len((await record(database.url, run_id)).bodies) + 1
    await execute(database.url, COPY, json.dumps({"id": own, "seq": seq, **terms}), asked["review"])
    await append(database, run_id, ("review.requested", said))
    assert run_id not in await differing(database)
    ruling = await look(database, run_id, gates(rule), 2, ends_run=True)
    assert (ruling.verdict, ruling.code, ruling.missing) == HELD


async def test_both_layers_refuse_the_second_account_of_an_author_whenever_it_was_linked(alone: Database) -> None:
    # Linked before: neither the words nor the table take it.
    run_id, asked = await in_question(alone)
    await link_account(alone, TENANT, "tess-2", "tess", actor_id="admin")
    await link_account(alone, TENANT, "tester", "tess", actor_id="admin")
    with pytest.raises(RefusedError) as refused:
        await approved(alone, run_id, "tess-2")
    assert refused.value.code == "review-own"
    with pytest.raises(psycopg.Error) as caught:
        await execute(alone.url, INSERT, uuid4(), "tess-2", "tess", asked["review"])
    assert caught.value.sqlstate == "PD014"


async def test_an_approval_by_an_account_that_turns_out_to_be_an_authors_opens_nothing(alone: Database) -> None:
    run_id, _ = await in_question(alone)
    assert (await approved(alone, run_id, "mallory")).review_state == "approved"
    await link_account(alone, TENANT, "mallory", "tess", actor_id="admin")
    await link_account(alone, TENANT, "tester", "tess", actor_id="admin")
    ruling = await look(alone, run_id, ANSWER, 2, ends_run=True)
    # The record is true, so somebody else is asked.
    assert (ruling.verdict, ruling.code, len(ruling.missing)) == ("held", "review", 1)
    assert run_id not in await differing(alone)


@pytest.mark.parametrize("links", [{"b2": "bob"}, {"b2": "tess", "tester": "tess"}], ids=["each-other", "author"])
async def test_the_table_counts_approvals_by_todays_persons_too(alone: Database, links: dict[str, str]) -> None:
    run_id, asked = await in_question(alone, {"gate": "answer", "approvals": 3})
    for who in ("bob", "b2"):
        assert (await approved(alone, run_id, who)).review_state == "open"
    for account, person in links.items():
        await link_account(alone, TENANT, account, person, actor_id="admin")
    assert (await approved(alone, run_id, "carol")).review_state == "open"
    with pytest.raises(psycopg.Error) as caught:
        await execute(alone.url, APPROVE, asked["review"])
    assert caught.value.sqlstate == "PD018"
    assert (await approved(alone, run_id, "dan")).review_state == "approved"
    (line,) = await lines(alone, run_id)
    assert (line.state, line.approved) == ("approved", 3)


async def test_what_goes_to_others_before_a_step_is_about_the_same_call(database: Database) -> None:
    rules = gates(
        {"gate": "before", "reviewers": ["bob"], "expires_s": 1, "on_expiry": "escalate",
         "escalate": {"reviewers": ["carol"]}}
    )  # fmt: skip
    run_id = await stored_run(database, [[]])
    await request_reviews(database, run_id, rules, (await look(database, run_id, rules, 1)).missing)
    await execute(database.url, "SELECT pg_sleep(1.05)")
    assert await expire_reviews(database) == [run_id]
    first, second = await lines(database, run_id)
    assert (first.state, second.state, second.level) == ("expired", "open", 1)
    ruling = await look(database, run_id, rules, 2)
    assert (ruling.verdict, ruling.missing) == ("held", ())
    await decide(database, Order(run_id, "carol", id=uuid4()), await verdict_of(database, second.id))
    assert (await look(database, run_id, rules, 3)).verdict == "call"
    asked = [entry["data"] for entry in (await record(database.url, run_id)).entries("review.requested")]
    assert len(asked) == 2
    assert asked[0]["basis"] == asked[1]["basis"] == {
        "worker": "alpha", "model": "plain", "attempts_base": 0, "sent_back": 0,
    }  # fmt: skip


# Tables of the session's own, which a look without a schema finds first.
IN_THE_WAY = {
    "another person": (
        {"gate": "answer"},
        "CREATE TEMP TABLE persons (LIKE public.persons)",
        ("approve", "tess-2", "tess-2"),
        "PD013",
    ),
    "other terms": (
        {"gate": "answer", "bypass": "never"},
        "CREATE TEMP TABLE reviews AS SELECT * FROM public.reviews; UPDATE pg_temp.reviews SET bypass = 'anyone'",
        ("bypass", "bob", "bob"),
        "PD017",
    ),
}


@pytest.mark.parametrize("name", IN_THE_WAY)
async def test_no_table_of_ones_own_gets_in_the_way_of_who_may_decide(alone: Database, name: str) -> None:
    rule, way, (decision, account, person), state = IN_THE_WAY[name]
    _, asked = await in_question(alone, rule)
    for own in ("tess-2", "tester"):
        await link_account(alone, TENANT, own, "tess", actor_id="admin")
    async with await psycopg.AsyncConnection.connect(plain_url(alone.url)) as link:
        for statement in way.split("; "):
            await link.execute(statement.encode())
        with pytest.raises(psycopg.Error) as caught:
            await link.execute(
                b"INSERT INTO public.review_decisions SELECT %s, id, %s, 'own-words', %s, NULL, %s, subject, shown,"
                b" clock_timestamp() FROM public.reviews WHERE id = %s",
                (uuid4(), decision, account, person, asked["review"]),
            )
        assert caught.value.sqlstate == state


async def test_a_review_is_closed_by_decisions_that_are_on_record(database: Database) -> None:
    _, asked = await in_question(database)
    async with await psycopg.AsyncConnection.connect(plain_url(database.url)) as link:
        await link.execute(
            "CREATE TEMP TABLE review_decisions AS SELECT gen_random_uuid() AS id, id AS review_id, 'approve' AS"
            " decision, 'bob' AS actor_id, NULL::text AS on_behalf_of FROM reviews"
        )
        with pytest.raises(psycopg.Error) as caught:
            await link.execute(APPROVE.encode(), (asked["review"],))
        assert caught.value.sqlstate == "PD018"


@pytest.mark.parametrize(
    ("account", "person"), [("tess", "zed"), ("zed", "tess-2"), ("zed", "zed")], ids=["person", "account", "itself"]
)
async def test_a_link_of_accounts_leads_to_a_person_and_no_further(alone: Database, account: str, person: str) -> None:
    await link_account(alone, TENANT, "tess-2", "tess", actor_id="admin")
    with pytest.raises(psycopg.Error) as caught:
        await execute(
            alone.url, "INSERT INTO persons (tenant_id, actor_id, person, linked_by) VALUES (%s, %s, %s, 'x')",
            TENANT, account, person,
        )  # fmt: skip
    assert caught.value.sqlstate == "PD020"


@pytest.mark.parametrize(("account", "person"), [("podium-engine", "bob"), ("bob", "podium-engine")])
async def test_podium_itself_is_nobodys_account(database: Database, account: str, person: str) -> None:
    with pytest.raises(InputError) as refused:
        await link_account(database, TENANT, account, person, actor_id="admin")
    assert refused.value.code == "person-invalid"
