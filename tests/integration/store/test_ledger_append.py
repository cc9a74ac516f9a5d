"""The ledger in the database: chained, canonical, free of text, written with the state or not at all."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
import rfc8785

from engine.ledger.commitment import ARTIFACT_DOMAIN, commitment
from engine.ledger.entry import GENESIS, EntryPlace, Event, entry_bytes, entry_hash
from engine.store import queries
from engine.store.attempts import open_attempt
from engine.store.closing import close_step_attempt
from engine.store.database import Database
from engine.store.exchange import Connection
from engine.store.run_writer import lock_run
from tests.support.stored import answered, check_invariants, execute, opening, record, rows, stored_run


async def _whole_run(database: Database) -> Any:
    run_id = await stored_run(database, [[], [0]], task="canary task")
    for position in (0, 1):
        opened = opening(run_id, position)
        await open_attempt(database, opened)
        await close_step_attempt(database, answered(opened, "canary output", ends_run=True))
    return run_id


async def test_a_whole_run_is_one_chain_of_canonical_entries_without_text(database: Database) -> None:
    run_id = await _whole_run(database)
    kept = await record(database.url, run_id)
    check_invariants(kept)
    assert [entry["type"] for entry in kept.entries()] == [
        *("run.created", "plan.accepted"),
        *("run.changed", "attempt.sent", "attempt.closed"),
        *("attempt.sent", "attempt.closed", "run.closed"),
    ]
    for number, body in enumerate(kept.bodies, start=1):
        document = json.loads(body)
        assert rfc8785.dumps(document) == body
        assert document["seq"] == number
        assert document["on_behalf_of"] == (None if number <= 2 else "tester")
        assert not any(text in body for text in (b"canary", b"Do 0.", b"Do 1.", b"gravity"))
    (closing,) = kept.entries("run.closed")
    assert closing["data"]["entries_before"] == len(kept.bodies) - 1
    assert all(isinstance(entry["data"]["cost_usd"], str) for entry in kept.entries("attempt.closed"))


async def test_every_artifact_is_committed_to_once_and_the_salt_opens_it(database: Database) -> None:
    run_id = await _whole_run(database)
    kept = await record(database.url, run_id)
    said = {one["artifact"]: one for entry in kept.entries() for one in entry["data"].get("artifacts", [])}
    assert set(said) == {str(row["id"]) for row in kept.artifacts}
    for row in kept.artifacts:
        path = f"{row['owner_id']}/{row['kind']}/{row['ordinal']}"
        opened = commitment(row["salt"], ARTIFACT_DOMAIN, path, row["content"])
        assert said[str(row["id"])]["commitment"] == opened.hex()
        assert said[str(row["id"])]["bytes"] == len(row["content"]) == row["byte_count"]
    assert len({bytes(row["salt"]) for row in kept.artifacts}) == len(kept.artifacts)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"seq": 7}, "PD002"),
        ({"prev": bytes(31) + b"\1"}, "PD002"),
        ({"run": True}, "PD002"),
        ({"from_seq": -1}, "PD001"),
        ({"from_hash": GENESIS}, "PD001"),
    ],
)
async def test_an_entry_in_the_wrong_place_is_refused(database: Database, change: dict[str, Any], code: str) -> None:
    run_id = await stored_run(database, [[]])
    before = await record(database.url, run_id)
    seq = before.head["seq"] + change.get("from_seq", 0)
    head = change.get("from_hash", bytes(before.head["hash"]))
    place = EntryPlace(
        before.run["tenant_id"],
        (await stored_run(database, [[]])) if "run" in change else run_id,
        change.get("seq", seq + 1),
        change.get("prev", head),
    )
    body = entry_bytes(place, Event("step.changed", "tester", None, {}), before.run["created_at"])
    with pytest.raises(psycopg.Error) as caught:
        await execute(database.url, "SELECT ledger_append(%s, %s, %s, %s)", run_id, seq, head, [body])
    # An entry number that exists already stops at the table's key, before the head is looked at.
    assert caught.value.sqlstate in {code, "23505"}
    assert await record(database.url, run_id) == before


async def test_state_and_entry_are_written_together_or_not_at_all(database: Database) -> None:
    run_id = await stored_run(database, [[]])
    before = await record(database.url, run_id)

    async def work(connection: Connection) -> None:
        writer, (steps,) = await lock_run(connection, run_id, (queries.READ_ALL_STEPS, (run_id,)))
        writer.set_run_state("running")
        writer.set_step_state(steps[0], "running")
        writer.seq += 1
        await writer.commit()

    with pytest.raises(psycopg.Error) as caught:
        await database.write(work)
    assert caught.value.sqlstate == "PD002"
    assert await record(database.url, run_id) == before


async def test_a_move_that_is_not_legal_is_refused_with_its_entry(database: Database) -> None:
    run_id = await stored_run(database, [[]])
    before = await record(database.url, run_id)

    async def work(connection: Connection) -> None:
        writer, _ = await lock_run(connection, run_id)
        # Nothing was called yet.
        writer.set_run_state("succeeded")
        await writer.commit()

    with pytest.raises(psycopg.Error) as caught:
        await database.write(work)
    assert caught.value.sqlstate == "PD003"
    assert await record(database.url, run_id) == before


async def test_a_moved_head_is_found_out_and_the_write_repeated(database: Database) -> None:
    run_id = await stored_run(database, [[]])
    tries = []

    async def work(connection: Connection) -> None:
        writer, _ = await lock_run(connection, run_id)
        tries.append(writer.seq)
        if len(tries) == 1:
            writer.head = GENESIS
            # Entries that fit their own chain, of which the database knows nothing.
            writer.seq = 700
        writer.set_run_state("waiting", "no-worker")
        await writer.commit()

    await database.write(work)
    assert len(tries) == 2
    check_invariants(await record(database.url, run_id))


async def test_the_heads_of_all_runs_are_those_of_their_chains(database: Database) -> None:
    await _whole_run(database)
    for head in await rows(database.url, "SELECT * FROM ledger_heads"):
        kept = await record(database.url, head["run_id"])
        assert head["hash"] == entry_hash(kept.bodies[-1])
