"""Which checkpoint a run's beginning and a decision name: the last one that was signed before them, of their tenant."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from engine.errors import RefusedError
from engine.operations.reviewing import decide_review
from engine.signing import AuditFolder, Signer
from engine.store import log
from engine.store.attempts import FAIL, Place
from engine.store.children import ChildOpening, begin_child
from engine.store.database import Database
from engine.store.exchange import Connection
from engine.store.review_requests import request_reviews
from engine.store.runs import create_run
from engine.store.system_chain import lock_system
from tests.integration.store.test_reviews_on_record import gates, lines, look, proposed
from tests.integration.store.test_signer import sealed
from tests.support.orders import temporal_is_away
from tests.support.stored import new_run, record, rows, stored_run

TWO = gates({"gate": "answer", "approvals": 2})


@pytest.fixture
def database_url(own_database_url: str) -> str:
    """Each test has a log of its own."""
    return own_database_url


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer(AuditFolder(tmp_path / "audit"))


async def said(database: Database, run_id: UUID, type_: str) -> list[Any]:
    """The checkpoints that a run's entries of a type name."""
    return [entry["data"]["checkpoint"] for entry in (await record(database.url, run_id)).entries(type_)]


async def place_of(database: Database, run_id: UUID, type_: str) -> list[int]:
    """Where a run's entries of a type stand in the log, in order."""
    found = await rows(
        database.url,
        "SELECT index FROM log_leaves JOIN ledger_entries USING (run_id, seq) WHERE run_id = %s AND type = %s"
        " ORDER BY index",
        run_id,
        type_,
    )
    return [row["index"] for row in found]


async def test_a_run_names_the_last_signed_checkpoint_or_none(database: Database, signer: Signer) -> None:
    oldest = await stored_run(database, [[]])
    assert await said(database, oldest, "run.created") == [None]
    # In the log, and nobody has signed it yet.
    await log.extend_log(database)
    unsigned = await stored_run(database, [[]])
    assert await said(database, unsigned, "run.created") == [None]
    first = await sealed(database, signer)
    run_id = await stored_run(database, [[]])
    assert await said(database, run_id, "run.created") == [first.size]
    await log.extend_log(database)
    again = await stored_run(database, [[]])
    assert await said(database, again, "run.created") == [first.size]
    second = await sealed(database, signer)
    assert second.size > first.size
    young = await stored_run(database, [[]])
    assert await said(database, young, "run.created") == [second.size]
    await sealed(database, signer)
    # So the time of an entry lies between two signatures: behind the one that it names, before the first that covers it.
    for run, size in ((run_id, first.size), (again, first.size), (young, second.size)):
        (index,) = await place_of(database, run, "run.created")
        assert index >= size
    assert (await place_of(database, run_id, "run.created"))[0] < second.size


async def test_a_child_names_none_because_its_parent_does(database: Database, signer: Signer) -> None:
    await stored_run(database, [[]])
    await sealed(database, signer)
    parent = await stored_run(database, [[]])
    begun = await begin_child(database, ChildOpening(Place(parent, 0, 0), 1, "alpha", "Go on.", 3, FAIL))
    assert begun.child_id is not None
    (created,) = (await record(database.url, begun.child_id)).entries("run.created")
    assert "checkpoint" not in created["data"]


async def test_the_checkpoint_of_another_tenant_is_nobody_elses(database: Database, signer: Signer) -> None:
    other = UUID(int=2**100)

    async def work(connection: Connection) -> None:
        writer = await lock_system(connection, other, actor_id="tester")
        writer.entry("test.noted")
        await writer.commit()

    await database.write(work)
    await log.extend_log(database)
    assert (await signer.sign(database, other)).size > 0
    run_id = await stored_run(database, [[]])
    assert await said(database, run_id, "run.created") == [None]


async def test_every_decision_names_the_last_one_that_was_signed_before_it(database: Database, signer: Signer) -> None:
    run_id = await proposed(database, TWO)
    await request_reviews(database, run_id, TWO, (await look(database, run_id, TWO, 1)).missing)
    (line,) = await lines(database, run_id)
    await decide_review(database, temporal_is_away, line.id, "approve", actor_id="bob")
    kept = await sealed(database, signer)
    with pytest.raises(RefusedError):
        await decide_review(database, temporal_is_away, line.id, "approve", actor_id="bob")
    await decide_review(database, temporal_is_away, line.id, "approve", actor_id="carol")
    assert await said(database, run_id, "review.decided") == [None, kept.size]
    await sealed(database, signer)
    early, late = await place_of(database, run_id, "review.decided")
    assert early < kept.size <= late


async def test_a_run_that_is_asked_for_twice_keeps_the_checkpoint_of_the_first_time(
    database: Database, signer: Signer
) -> None:
    new = new_run([[]], key="only-once")
    run_id = (await create_run(database, new)).id
    await sealed(database, signer)
    again = await create_run(database, replace(new_run([[]], key="only-once")))
    assert (again.id, again.existing) == (run_id, True)
    assert await said(database, run_id, "run.created") == [None]
