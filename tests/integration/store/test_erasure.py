"""Erasing: keys, salts and contents go, and with them what was made of them; entries and sizes stay."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from engine.errors import InputError, RefusedError, UnavailableError
from engine.ledger.commitment import ARTIFACT_DOMAIN, commitment
from engine.store.artifacts import ArtifactDraft, read_run_artifacts
from engine.store.attempts import open_attempt
from engine.store.closing import close_step_attempt
from engine.store.database import Database
from engine.store.erasing import erase, look
from engine.store.forks import ForkDraft, ReusedStep, read_fork_source
from engine.store.ids import artifact_id, plan_id, step_id
from engine.store.inputs import read_step_inputs
from engine.store.orders import Order
from engine.store.resuming import Resumption, resume_run
from engine.store.run_writer import lock_run
from engine.store.runs import create_run
from engine.store.snapshots import list_runs, read_run
from tests.support.sealed import BASIS, failed_run, finished_run, order_for, sealed_database
from tests.support.servers import superuser_url
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
)

WORD = "kanarie-that-shall-be-forgotten"


async def state(database: Database, run_id: UUID) -> dict[tuple[str, Any], bool]:
    """Which artifacts are erased, by kind and owner."""
    kept = await record(database.url, run_id)
    check_invariants(kept)
    for row in kept.artifacts:
        assert (row["content"] is None) == (row["erased_at"] is not None) == (row["erasure_id"] is not None)
    return {(row["kind"], row["owner_id"]): row["erased_at"] is not None for row in kept.artifacts}


def erased_in(found: dict[tuple[str, Any], bool]) -> set[tuple[str, Any]]:
    return {place for place, is_erased in found.items() if is_erased}


async def test_a_whole_run(sealed: Database) -> None:
    run_id = await finished_run(sealed, [f"{WORD} one", f"{WORD} two"], task=f"Say {WORD} twice.")
    done = await erase(sealed, order_for(run_id))
    found = await state(sealed, run_id)
    assert {kind for (kind, _), is_erased in found.items() if not is_erased} == {"basis"}
    kept = await record(sealed.url, run_id)
    (entry,) = kept.entries("artifact.erased")
    assert {*entry["data"]["erased"]} == {str(row["id"]) for row in kept.artifacts if row["erased_at"]}
    assert (entry["actor"], entry["data"]["erasure"]) == ("officer", str(done.id))
    assert all(row["byte_count"] > 0 for row in kept.artifacts)
    run = await read_run(sealed, run_id)
    assert run is not None
    assert (run.task, run.answer, run.steps[0].output, run.answer_erased) == (None, None, None, True)
    assert {"task", "output", "subtask", "plan"} <= run.erased
    (line,) = await list_runs(sealed, kept.run["tenant_id"], limit=3)
    assert line.task_preview == "(erased)"
    with pytest.raises(RefusedError, match="none of these texts"):
        await erase(sealed, order_for(run_id))


async def test_the_basis_is_committed_text_that_outlives_the_keys(sealed: Database) -> None:
    run_id = await finished_run(sealed, ["an answer"])
    await erase(sealed, replace(order_for(run_id), reason="The person asked for it."))
    (entry,) = (await record(sealed.url, run_id)).entries("artifact.erased")
    assert BASIS not in json.dumps(entry)
    stored = await sealed.query(lambda connection: read_run_artifacts(connection, run_id))
    texts = {one.kind: one for one in stored if not one.erased}
    assert {kind: one.content for kind, one in texts.items()} == {
        "basis": BASIS.encode(),
        "basis_reason": b"The person asked for it.",
    }
    for said in entry["data"]["artifacts"]:
        own = texts[said["kind"]]
        assert own.salt is not None
        assert own.content is not None
        assert said["commitment"] == commitment(own.salt, ARTIFACT_DOMAIN, own.path, own.content).hex()


async def test_a_step_takes_its_plan_and_the_prompts_that_showed_it_along(sealed: Database) -> None:
    run_id = await finished_run(sealed, ["the first answer of all", f"{WORD} in the middle", "the last answer of all"])
    await erase(sealed, order_for(run_id, round=0, position=1))
    calls = [opening(run_id, position).attempt_id for position in range(3)]
    found = await state(sealed, run_id)
    gone = erased_in(found)
    assert {("output", calls[1]), ("subtask", step_id(run_id, 0, 1)), ("plan", plan_id(run_id, 0))} <= gone
    # Its text stood in the plan, and all subtasks are in that; the manifest's salt would prove a guess of it.
    assert ("prompt_manifest", calls[1]) in gone
    assert not gone & {("output", calls[0]), ("output", calls[2]), ("task", run_id)}
    run = await read_run(sealed, run_id)
    assert run is not None
    assert [step.output for step in run.steps] == ["the first answer of all", None, "the last answer of all"]
    assert run.plan_json is None


async def test_one_artifact_leaves_the_others_readable_with_keys_of_their_own(sealed: Database) -> None:
    run_id = await finished_run(sealed, ["the first answer of all", "the last answer of all"])
    calls = [opening(run_id, position).attempt_id for position in range(2)]
    await erase(sealed, order_for(run_id, artifact_id=artifact_id(calls[0], "output")))
    gone = erased_in(await state(sealed, run_id))
    assert ("output", calls[0]) in gone
    assert ("output", calls[1]) not in gone
    # Another one later, and a text that is written in between with the new keys.
    await erase(sealed, order_for(run_id, artifact_id=artifact_id(calls[1], "output")))
    run = await read_run(sealed, run_id)
    assert run is not None
    assert (run.task, run.answer) == ("What is gravity?", None)
    assert [row["epoch"] for row in await rows(sealed.url, "SELECT key_epoch AS epoch FROM runs")] == [3]


async def test_a_prompt_that_showed_the_text_loses_its_salt(sealed: Database) -> None:
    run_id = await stored_run(sealed, [[], [0]])
    first, second = opening(run_id, 0), opening(run_id, 1)
    answer = artifact_id(first.attempt_id, "output")
    await open_attempt(sealed, first)
    await close_step_attempt(sealed, answered(first, "the answer that is shown"))
    await open_attempt(sealed, replace(second, shown=(answer,)))
    await close_step_attempt(sealed, answered(second, "the last answer", ends_run=True))
    await erase(sealed, order_for(run_id, artifact_id=answer))
    gone = erased_in(await state(sealed, run_id))
    assert {("output", first.attempt_id), ("prompt_manifest", second.attempt_id)} <= gone
    assert ("prompt_manifest", first.attempt_id) not in gone


async def test_what_does_not_exist_and_what_lives_is_refused(sealed: Database) -> None:
    live = await stored_run(sealed, [[]])
    with pytest.raises(RefusedError) as refused:
        await erase(sealed, order_for(live))
    assert refused.value.code == "run-live"
    done = await finished_run(sealed, ["an answer"])
    with pytest.raises(InputError, match="no step 9"):
        await erase(sealed, order_for(done, round=0, position=9))
    with pytest.raises(InputError, match="no artifact"):
        await erase(sealed, order_for(done, artifact_id=artifact_id(live, "task")))
    with pytest.raises(InputError, match="no run"):
        await erase(sealed, order_for(UUID(int=5)))
    assert erased_in(await state(sealed, done)) == set()
    assert await rows(sealed.url, "SELECT 1 FROM erasures") == []


async def forked(database: Database, source_id: UUID) -> UUID:
    """A fork that reuses the first step and has not ended."""
    source = await read_fork_source(database, source_id)
    assert source is not None
    attempt = source.steps[0].attempt_id
    assert attempt is not None
    reused = [ReusedStep(0, source.steps[0].id, attempt, "plain")]
    draft = ForkDraft(source_id, 0, task_edited=False, edited={1: ["subtask"]}, reused=reused, left_out={})
    new = replace(new_run([[], [0]], task=source.task), origin="fork", fork=draft)
    return (await create_run(database, new)).id


async def end(database: Database, run_id: UUID, output: str) -> None:
    last = opening(run_id, 1)
    await open_attempt(database, last)
    await close_step_attempt(database, answered(last, output, ends_run=True))


async def test_a_live_fork_keeps_what_it_reuses(sealed: Database) -> None:
    source = await finished_run(sealed, ["an output that is reused", "the answer"], task=f"A task full of {WORD}.")
    fork = await forked(sealed, source)
    with pytest.raises(RefusedError, match=f"run {fork} has not ended"):
        await erase(sealed, order_for(source, copies="erase"))
    await end(sealed, fork, "another answer")
    assert (await look(sealed, order_for(source))).readers == (fork,)


async def test_copies_in_forks_are_for_whoever_orders_it_to_decide(sealed: Database) -> None:
    task = f"A task full of {WORD}, long enough to be no chance."
    source = await finished_run(sealed, ["an output that is reused", "the answer of the source"], task=task)
    fork = await forked(sealed, source)
    await end(sealed, fork, f"It quotes: {task}")
    with pytest.raises(RefusedError) as refused:
        await erase(sealed, order_for(source))
    assert refused.value.code == "copies-exist"
    assert str(fork) in refused.value.message
    reach = await look(sealed, order_for(source))
    assert set(reach.copies) == {fork}
    await erase(sealed, order_for(source, copies="keep"))
    run = await read_run(sealed, fork)
    assert run is not None
    assert (run.task, run.steps[0].output, run.steps[0].output_erased) == (task, None, True)
    await erase(sealed, order_for(fork, artifact_id=artifact_id(fork, "task"), copies="erase"))
    again = await read_run(sealed, fork)
    assert again is not None
    assert (again.task, again.answer) == (None, None)
    (entry,) = (await record(sealed.url, fork)).entries("artifact.erased")
    assert len(entry["data"]["erased"]) >= 2


async def test_copies_can_be_erased_in_one_go(sealed: Database) -> None:
    task = f"A task full of {WORD}, long enough to be no chance."
    source = await finished_run(sealed, ["an output that is reused", "the answer of the source"], task=task)
    fork = await forked(sealed, source)
    await end(sealed, fork, "its own answer, which quotes nothing")
    await erase(sealed, order_for(source, copies="erase"))
    run = await read_run(sealed, fork)
    assert run is not None
    assert (run.task, run.answer) == (None, "its own answer, which quotes nothing")
    (entry,) = (await record(sealed.url, fork)).entries("artifact.erased")
    assert (entry["data"]["scope"], entry["data"]["artifacts"]) == ("copy", [])


async def test_a_fork_of_what_is_being_erased_is_refused(sealed: Database) -> None:
    source = await finished_run(sealed, ["an output that is reused", "the answer"])
    read = await read_fork_source(sealed, source)
    assert read is not None
    attempt = read.steps[0].attempt_id
    assert attempt is not None
    await erase(sealed, order_for(source))
    draft = ForkDraft(source, 0, False, {}, [ReusedStep(0, read.steps[0].id, attempt, "plain")], {})
    with pytest.raises(RefusedError) as late:
        await create_run(sealed, replace(new_run([[], [0]]), origin="fork", fork=draft))
    assert late.value.code == "text-erased"
    with pytest.raises(RefusedError) as refused:
        await read_fork_source(sealed, source)
    assert refused.value.code == "text-erased"


async def test_an_erased_run_cannot_go_on(sealed: Database) -> None:
    run_id = await failed_run(sealed, "an output")
    await erase(sealed, order_for(run_id))
    digest = (await record(sealed.url, run_id)).run["pool_digest"]
    with pytest.raises(RefusedError) as refused:
        await resume_run(sealed, Order(run_id, "operator"), Resumption(digest, {}, None, planned_workers=False))
    assert refused.value.code == "text-erased"


async def test_a_step_that_needs_an_erased_text_is_told_so(sealed: Database) -> None:
    run_id = await failed_run(sealed, "an output")
    await erase(sealed, order_for(run_id, artifact_id=artifact_id(opening(run_id, 0).attempt_id, "output")))
    with pytest.raises(RefusedError) as refused:
        await read_step_inputs(sealed, run_id, 0, 1)
    assert refused.value.code == "text-erased"


async def test_the_same_request_as_an_erased_one_cannot_be_told(sealed: Database) -> None:
    run_id = await stored_run(sealed, [[]], key="only-once")
    opened = opening(run_id)
    await open_attempt(sealed, opened)
    await close_step_attempt(sealed, answered(opened, "done", ends_run=True))
    assert (await create_run(sealed, new_run([[]], key="only-once"))).existing
    await erase(sealed, order_for(run_id))
    with pytest.raises(RefusedError, match="texts were erased"):
        await create_run(sealed, new_run([[]], key="only-once"))


async def test_another_process_stops_using_the_destroyed_keys(sealed: Database, tmp_path: Path) -> None:
    """A worker that remembers the old secret writes with the new one, and cannot read what was erased."""
    run_id = await failed_run(sealed, f"{WORD} is the output")
    other = sealed_database(sealed.url, tmp_path / "keys")
    assert (await read_run(other, run_id)) is not None
    assert other.keys is not None
    remembered = other.keys._cached[run_id][1]
    texts = "SELECT id, content FROM artifacts WHERE run_id = %s"
    before = {row["id"]: row["content"] for row in await rows(sealed.url, texts, run_id)}
    assert None not in before.values()
    task = artifact_id(run_id, "task")
    await erase(sealed, order_for(run_id, artifact_id=task))
    order = Order(run_id, "operator", reason="written after the erasure")

    async def late(connection: Any) -> None:
        writer, _ = await lock_run(connection, run_id, actor_id="reviewer")
        drafts = [ArtifactDraft(order.id, "reason", b"written after the erasure")]
        writer.entry("review.commented", artifacts=writer.artifacts(drafts))
        await writer.commit()

    await other.write(late)
    assert other.keys._cached[run_id][1].secret != remembered.secret
    stored = await sealed.query(lambda connection: read_run_artifacts(connection, run_id))
    assert b"written after the erasure" in [one.content for one in stored]
    after = {row["id"]: row["content"] for row in await rows(sealed.url, texts, run_id)}
    assert (after[task], before[task] is None) == (None, False)
    # What was not erased is read with a key of its own, though the secret that it was sealed with is destroyed.
    assert after[artifact_id(opening(run_id, 0).attempt_id, "output")] is not None
    run = await read_run(other, run_id)
    assert run is not None
    assert (run.task, run.steps[0].output) == (None, f"{WORD} is the output")
    # And what is put back into the database as it was opens for nobody who remembers the old secret.
    put_back = "SET session_replication_role = replica; UPDATE artifacts SET content = '\\x{}', erased_at = NULL"
    await execute(superuser_url(sealed.url), f"{put_back.format(before[task].hex())} WHERE id = '{task}'")
    (back,) = await other.query(lambda connection: read_run_artifacts(connection, run_id, [task]))
    assert (back.content, back.salt, back.erased) == (None, None, False)
    await other.close()


async def test_reads_and_an_erasure_at_once_see_a_text_or_that_it_is_erased(sealed: Database, tmp_path: Path) -> None:
    others = [sealed_database(sealed.url, tmp_path / "keys") for _ in range(3)]
    for _ in range(4):
        run_id = await finished_run(sealed, ["one answer", "another answer"], task=f"Say {WORD}.")

        async def reader(database: Database, run_id: UUID = run_id) -> None:
            while True:
                run = await read_run(database, run_id)
                assert run is not None
                assert run.task in {f"Say {WORD}.", None}
                assert run.answer in {"another answer", None}
                if run.task is None and run.answer is None:
                    return

        readers = [asyncio.create_task(reader(database)) for database in others]
        await asyncio.sleep(0.02)
        await erase(sealed, order_for(run_id))
        await asyncio.wait_for(asyncio.gather(*readers), 10)
    for other in others:
        await other.close()


async def test_two_erasures_of_one_run_at_once(sealed: Database, tmp_path: Path) -> None:
    other = sealed_database(sealed.url, tmp_path / "keys")
    for _ in range(5):
        run_id = await finished_run(sealed, ["the first output", "the second output"])
        calls = [opening(run_id, position).attempt_id for position in range(2)]
        results = await asyncio.gather(
            erase(sealed, order_for(run_id, artifact_id=artifact_id(calls[0], "output"))),
            erase(other, order_for(run_id, artifact_id=artifact_id(calls[1], "output"))),
            return_exceptions=True,
        )
        assert [result for result in results if isinstance(result, BaseException)] == []
        gone = erased_in(await state(sealed, run_id))
        assert {("output", calls[0]), ("output", calls[1])} <= gone
        run = await read_run(other, run_id)
        assert run is not None
        assert run.task == "What is gravity?"
    await other.close()


async def test_texts_in_the_clear_can_be_erased_too(own_database_url: str) -> None:
    plain = Database(own_database_url)
    run_id = await finished_run(plain, [f"{WORD} in the clear"], task=f"Say {WORD}.")
    assert WORD in await dump(plain.url)
    await erase(plain, order_for(run_id))
    assert WORD not in await dump(plain.url)
    (entry,) = (await record(plain.url, run_id)).entries("artifact.erased")
    assert entry["data"]["key_epoch"] is None
    await plain.close()


async def test_without_the_key_store_an_erasure_waits_for_it(sealed: Database, tmp_path: Path) -> None:
    run_id = await finished_run(sealed, ["an answer"])
    (tmp_path / "keys").rename(tmp_path / "away")
    (tmp_path / "keys").write_text("")
    assert sealed.keys is not None
    sealed.keys.forget(run_id)
    with pytest.raises(UnavailableError):
        await erase(sealed, order_for(run_id))
    assert erased_in(await state(sealed, run_id)) == set()
    (tmp_path / "keys").unlink()
    (tmp_path / "away").rename(tmp_path / "keys")
    await erase(sealed, order_for(run_id))
    assert erased_in(await state(sealed, run_id))


async def test_nothing_of_an_entry_changes(sealed: Database) -> None:
    run_id = await finished_run(sealed, ["one", "two"])
    before = (await record(sealed.url, run_id)).bodies
    await erase(sealed, order_for(run_id))
    after = (await record(sealed.url, run_id)).bodies
    assert after[: len(before)] == before
    assert [json.loads(body)["type"] for body in after[len(before) :]] == ["artifact.erased"]
