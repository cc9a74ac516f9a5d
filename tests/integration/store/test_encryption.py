"""Texts are sealed before they reach the database, open for whoever has the keys, and for nobody else."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import ClassVar
from uuid import UUID, uuid4

import pytest

from engine.errors import RefusedError, UnavailableError
from engine.keystore import Keyring, RunKeys
from engine.keystore.files import FileKeyStore
from engine.ledger.commitment import ARTIFACT_DOMAIN, commitment
from engine.store.artifacts import read_run_artifacts
from engine.store.attempts import open_attempt
from engine.store.closing import close_step_attempt
from engine.store.database import Database
from engine.store.erasure_journal import keyless_runs, ready
from engine.store.forks import read_fork_source
from engine.store.inputs import read_step_inputs
from engine.store.orders import Order, request_cancel
from engine.store.retention import forget_orphans
from engine.store.runs import create_run
from engine.store.snapshots import list_runs, read_run
from engine.store.tables import DEFAULT_TENANT
from tests.support.sealed import finished_run, sealed_database
from tests.support.stored import (
    answered,
    check_invariants,
    dump,
    execute,
    new_run,
    opening,
    record,
    rows,
    stored_run,
    texts_of,
)

WORD = "kanarie-of-the-sealed-texts"
TENANT = UUID(DEFAULT_TENANT)


async def test_nothing_of_a_text_is_in_the_database(sealed: Database) -> None:
    run_id = await stored_run(sealed, [[], [0]], task=f"Say {WORD}.")
    opened = opening(run_id)
    await open_attempt(sealed, opened)
    await close_step_attempt(sealed, answered(opened, f"{WORD} it is."))
    text = await dump(sealed.url)
    assert WORD not in text
    assert WORD.encode().hex() not in text
    run = await read_run(sealed, run_id)
    assert run is not None
    assert (run.task, run.steps[0].output) == (f"Say {WORD}.", f"{WORD} it is.")
    inputs = await read_step_inputs(sealed, run_id, 0, 1)
    assert (inputs.task.text, inputs.visible[0].output.text) == (f"Say {WORD}.", f"{WORD} it is.")
    source = await read_fork_source(sealed, run_id)
    assert source is not None
    assert source.steps[0].output == f"{WORD} it is."
    (line,) = await list_runs(sealed, TENANT, limit=5)
    assert line.task_preview == f"Say {WORD}."
    check_invariants(await record(sealed.url, run_id))


async def test_the_salt_is_inside_and_fits_the_commitment(sealed: Database) -> None:
    run_id = await finished_run(sealed, ["an answer"])
    kept = await record(sealed.url, run_id)
    assert {row["salt"] for row in kept.artifacts} == {None}
    assert {row["key_epoch"] for row in kept.artifacts} == {1}
    said = {one["artifact"]: one for entry in kept.entries() for one in entry["data"].get("artifacts", [])}
    stored = await sealed.query(lambda connection: read_run_artifacts(connection, run_id))
    assert {str(one.id) for one in stored} == set(said)
    for one in stored:
        assert one.salt is not None
        assert one.content is not None
        assert said[str(one.id)]["commitment"] == commitment(one.salt, ARTIFACT_DOMAIN, one.path, one.content).hex()


async def test_a_text_of_another_place_is_not_shown_as_this_ones(sealed: Database) -> None:
    """An owner of the database moves one run's answer to another: nobody reads it there."""
    one, two = [await finished_run(sealed, [answer]) for answer in ("It is safe.", "It is poison.")]
    await execute(
        sealed.url,
        "UPDATE artifacts SET content = (SELECT content FROM artifacts WHERE run_id = %s AND kind = 'output')"
        " WHERE run_id = %s AND kind = 'output'",
        one,
        two,
    )
    with pytest.raises(RefusedError) as refused:
        await read_run(sealed, two)
    assert refused.value.code == "text-damaged"
    run = await read_run(sealed, one)
    assert run is not None
    assert run.answer == "It is safe."


async def test_large_tasks_are_previewed_one_by_one(sealed: Database) -> None:
    for size in (70_000, 200_000, 10):
        await stored_run(sealed, [[]], task=f"{WORD} " * (size // 28 + 1))
    lines = await list_runs(sealed, TENANT, limit=5)
    assert [line.task_preview.startswith(f"{WORD} {WORD}") for line in lines if line.task_preview] == [
        False,
        True,
        True,
    ]


async def test_runs_made_in_the_clear_stay_readable_beside_sealed_ones(sealed: Database) -> None:
    plain = Database(sealed.url)
    old = await stored_run(plain, [[], [0]], task="An old task.")
    # It goes on with a worker that has keys: its texts stay in the clear, as they began.
    opened = opening(old)
    await open_attempt(sealed, opened)
    await close_step_attempt(sealed, answered(opened, "An answer in the clear."))
    new = await stored_run(sealed, [[]], task="A new task.")
    assert {row["key_epoch"] for row in (await record(sealed.url, old)).artifacts} == {0}
    for run_id, task in ((old, "An old task."), (new, "A new task.")):
        run = await read_run(sealed, run_id)
        assert run is not None
        assert run.task == task
    with pytest.raises(UnavailableError) as needed:
        await read_run(plain, new)
    assert needed.value.code == "key-store-needed"
    assert {line.task_preview for line in await list_runs(plain, TENANT, limit=5)} == {None, "An old task."}
    with pytest.raises(UnavailableError) as unwritten:
        await open_attempt(plain, opening(new))
    assert unwritten.value.code == "key-store-needed"
    assert (await record(sealed.url, new)).attempts == []
    # What needs no key needs no key store.
    await request_cancel(plain, Order(new, "operator"))
    await plain.close()


async def test_a_missing_key_loses_nothing_and_is_said(sealed: Database, tmp_path: Path) -> None:
    run_id = await stored_run(sealed, [[]])
    other = await stored_run(sealed, [[]], task="Another task.")
    opened = opening(run_id)
    await open_attempt(sealed, opened)
    (key,) = (tmp_path / "keys").rglob(str(run_id))
    key.rename(tmp_path / "away")
    assert sealed.keys is not None
    sealed.keys.forget(run_id)
    for work in (close_step_attempt(sealed, answered(opened)), read_run(sealed, run_id)):
        with pytest.raises(UnavailableError) as missing:
            await work
        assert missing.value.code == "text-key-missing"
    assert await keyless_runs(sealed, 10) == [run_id]
    assert {line.task_preview for line in await list_runs(sealed, TENANT, limit=5)} == {None, "Another task."}
    (tmp_path / "away").rename(key)
    await close_step_attempt(sealed, answered(opened))
    assert await texts_of(sealed, run_id, "output") == [b"An answer."]
    assert await keyless_runs(sealed, 10) == []
    check_invariants(await record(sealed.url, other))


async def test_a_run_is_not_written_without_its_key(sealed: Database, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("this is no folder")
    with pytest.raises(UnavailableError) as unavailable:
        await stored_run(sealed, [[]])
    assert unavailable.value.code == "key-store-unavailable"
    assert await rows(sealed.url, "SELECT 1 FROM runs") == []


async def test_the_same_request_is_recognised_by_its_sealed_texts(sealed: Database) -> None:
    first = await create_run(sealed, new_run([[]], key="once"))
    again = await create_run(sealed, new_run([[]], key="once"))
    assert (again.id, again.existing) == (first.id, True)
    with pytest.raises(RefusedError) as refused:
        await create_run(sealed, new_run([[]], key="once", task="Something else."))
    assert refused.value.code == "idempotency-conflict"


async def test_keys_of_a_submitter_that_died_are_forgotten_and_others_never(sealed: Database, tmp_path: Path) -> None:
    assert sealed.keys is not None
    store = sealed.keys.store
    orphan = uuid4()
    store.create(orphan)
    # One that died between the record and the key store.
    run_id = await stored_run(sealed, [[]])
    settled = tmp_path / "keys" / "runs" / run_id.hex[-2:] / str(run_id)
    settled.rename(tmp_path / "keys" / "pending" / str(run_id))
    young = uuid4()
    store.create(young)
    long_ago = time.time() - 90_000
    for run in (orphan, run_id):
        os.utime(tmp_path / "keys" / "pending" / str(run), (long_ago, long_ago))
    assert await forget_orphans(sealed) == 1
    assert store.read(orphan) is None
    assert store.read(young) is not None
    assert settled.exists()
    fresh = sealed_database(sealed.url, tmp_path / "keys")
    assert (await read_run(fresh, run_id)) is not None
    await fresh.close()


async def test_a_step_costs_no_file_and_the_keys_are_read_once(own_database_url: str, tmp_path: Path) -> None:
    class Counting(FileKeyStore):
        calls: ClassVar[list[str]] = []

        def create(self, run_id: UUID) -> RunKeys:
            self.calls.append("create")
            return super().create(run_id)

        def read(self, run_id: UUID) -> RunKeys | None:
            self.calls.append("read")
            return super().read(run_id)

    store = Counting(tmp_path / "keys")
    submitter, worker = [Database(own_database_url, keys=Keyring(store)) for _ in range(2)]
    run_id = await stored_run(submitter, [[], [0], [0, 1]])
    assert store.calls == ["create"]
    changed = {path: path.stat().st_mtime_ns for path in (tmp_path / "keys").rglob("*")}
    for position in range(3):
        await read_step_inputs(worker, run_id, 0, position)
        opened = opening(run_id, position)
        await open_attempt(worker, opened)
        await close_step_attempt(worker, answered(opened, ends_run=position == 2))
    assert store.calls == ["create", "read"]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "keys").rglob("*")} == changed
    await submitter.close()
    await worker.close()


async def test_five_outputs_of_50_kb_cost_little_more_than_their_bytes(sealed: Database) -> None:
    texts = [f"{number}" * 50_000 for number in range(5)]
    run_id = await finished_run(sealed, texts)
    ((found,),) = [
        await rows(sealed.url, "SELECT sum(octet_length(content)) AS bytes FROM artifacts WHERE run_id = %s", run_id)
    ]
    assert sum(map(len, texts)) <= found["bytes"] < 1.03 * sum(map(len, texts))


async def test_one_database_has_one_key_store(sealed: Database, tmp_path: Path) -> None:
    await ready(sealed)
    await ready(sealed)
    other = sealed_database(sealed.url, tmp_path / "other")
    with pytest.raises(UnavailableError) as refused:
        await ready(other)
    assert refused.value.code == "key-store-other"
    await other.close()


async def test_a_write_that_is_repeated_seals_the_same_text_again(sealed: Database) -> None:
    """A conflict makes the transaction run twice with the same drafts; the second one counts."""
    run_id = await stored_run(sealed, [[]])
    opened = opening(run_id)
    await open_attempt(sealed, opened)
    closing = answered(opened, "the answer")
    await close_step_attempt(sealed, closing)
    await close_step_attempt(sealed, replace(closing))
    assert await texts_of(sealed, run_id, "output") == [b"the answer"]
