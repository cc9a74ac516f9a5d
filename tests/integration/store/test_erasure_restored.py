"""Attack 17: a restored backup of the database brings erased texts back. It does not: their keys are gone, and the key
store's journal has them erased again before anybody is served."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from uuid import UUID

import pytest

from engine.errors import UnavailableError
from engine.store.database import Database
from engine.store.erasing import erase
from engine.store.erasure_journal import ready
from engine.store.ids import artifact_id
from engine.store.snapshots import read_run
from tests.support.sealed import BASIS, failed_run, finished_run, order_for, sealed_database
from tests.support.servers import TestServers
from tests.support.stored import check_invariants, opening, record, rows, texts_of

WORD = "kanarie-that-a-backup-would-bring-back"


@pytest.fixture
async def sealed(own_database_url: str, tmp_path: Path) -> AsyncIterator[Database]:
    opened = sealed_database(own_database_url, tmp_path / "keys")
    await ready(opened)
    yield opened
    await opened.close()


@pytest.fixture
def backups(servers: TestServers) -> Iterator[Callable[[str], str]]:
    made: list[str] = []

    def backup(url: str) -> str:
        """A copy of every file of a database, as a physical backup is; nobody may be connected."""
        made.append(servers.new_database(url))
        return made[-1]

    yield backup
    for url in made:
        servers.drop_database(url)


async def copied(database: Database, backup: Callable[[str], str]) -> str:
    await database.engine.dispose()
    return backup(database.url)


async def restored(url: str, tmp_path: Path) -> Database:
    return sealed_database(url, tmp_path / "keys")


async def test_a_backup_from_before_gives_nothing_back_and_is_erased_again(
    sealed: Database, backups: Callable[[str], str], tmp_path: Path
) -> None:
    run_id = await finished_run(sealed, [f"{WORD} one", f"{WORD} two"], task=f"Say {WORD}.")
    other = await finished_run(sealed, ["an answer that nobody erases"])
    backup = await copied(sealed, backups)
    done = await erase(sealed, order_for(run_id))
    before = await restored(backup, tmp_path)
    # Even before the journal is carried out, no key is left for what the backup holds.
    assert await texts_of(before, run_id, "task") == []
    assert [row["content"] for row in (await record(backup, run_id)).artifacts if row["content"] is None] == []
    await before.close()
    again = await restored(backup, tmp_path)
    await ready(again)
    kept = await record(backup, run_id)
    check_invariants(kept)
    assert {row["kind"] for row in kept.artifacts if row["content"] is not None} == {"basis"}
    (entry,) = kept.entries("artifact.erased")
    assert (entry["data"]["erasure"], entry["data"]["restored"], entry["actor"]) == (str(done.id), True, "officer")
    # On which basis is known again too, word for word, and committed to by the same commitment.
    assert await texts_of(again, run_id, "basis") == [BASIS.encode()]
    (original,) = (await record(sealed.url, run_id)).entries("artifact.erased")
    assert entry["data"]["artifacts"] == original["data"]["artifacts"]
    run = await read_run(again, other)
    assert run is not None
    assert run.answer == "an answer that nobody erases"
    # Once is enough.
    await ready(again)
    assert len((await record(backup, run_id)).entries("artifact.erased")) == 1
    await again.close()


async def test_several_erasures_of_one_run_are_carried_out_in_their_order(
    sealed: Database, backups: Callable[[str], str], tmp_path: Path
) -> None:
    run_id = await finished_run(sealed, ["the first output", "the second output"])
    backup = await copied(sealed, backups)
    outputs = [artifact_id(opening(run_id, position).attempt_id, "output") for position in range(2)]
    for output in outputs:
        await erase(sealed, order_for(run_id, artifact_id=output))
    again = await restored(backup, tmp_path)
    await ready(again)
    kept = await record(backup, run_id)
    check_invariants(kept)
    assert [set(entry["data"]["erased"]) for entry in kept.entries("artifact.erased")] == [
        {str(one)} for one in outputs
    ]
    assert kept.run["key_epoch"] == 3
    run = await read_run(again, run_id)
    assert run is not None
    assert (run.task, run.answer) == ("What is gravity?", None)
    await again.close()


async def test_a_backup_from_when_the_run_was_at_work(
    sealed: Database, backups: Callable[[str], str], tmp_path: Path
) -> None:
    """The restored record says that the run goes on; its texts are gone all the same, and it can only fail."""
    run_id = await failed_run(sealed, f"{WORD} is an output")
    backup = await copied(sealed, backups)
    await erase(sealed, order_for(run_id))
    again = await restored(backup, tmp_path)
    await ready(again)
    assert await texts_of(again, run_id, "output") == []
    check_invariants(await record(backup, run_id))
    await again.close()


async def test_a_backup_from_before_the_run_was_there(
    sealed: Database, backups: Callable[[str], str], tmp_path: Path
) -> None:
    backup = await copied(sealed, backups)
    run_id = await finished_run(sealed, ["an answer"])
    await erase(sealed, order_for(run_id))
    again = await restored(backup, tmp_path)
    await ready(again)
    assert await rows(backup, "SELECT 1 FROM erasures") == []
    await again.close()


async def test_a_restored_copy_of_the_key_store_is_noticed(sealed: Database, tmp_path: Path) -> None:
    run_id = await finished_run(sealed, [f"{WORD} is an answer"])
    shutil.copytree(tmp_path / "keys", tmp_path / "copy")
    await erase(sealed, order_for(run_id))
    await ready(sealed)
    shutil.rmtree(tmp_path / "keys")
    shutil.move(tmp_path / "copy", tmp_path / "keys")
    older = await restored(sealed.url, tmp_path)
    with pytest.raises(UnavailableError) as noticed:
        await ready(older)
    assert noticed.value.code == "key-store-older"
    assert older.keys is not None
    store = older.keys.store
    back = store.read(run_id)
    assert back is not None
    assert back.epoch == 1
    await ready(older, adopt=True)
    after = store.read(run_id)
    assert after is not None
    assert (after.epoch, after.secret == back.secret) == (2, False)
    await ready(older)
    await older.close()


async def test_another_key_store_is_refused_until_it_is_adopted(sealed: Database, tmp_path: Path) -> None:
    run_id = await finished_run(sealed, ["an answer"])
    other = sealed_database(sealed.url, tmp_path / "other-keys")
    with pytest.raises(UnavailableError) as refused:
        await ready(other)
    assert refused.value.code == "key-store-other"
    with pytest.raises(UnavailableError) as missing:
        await texts_of(other, run_id, "task")
    assert missing.value.code == "text-key-missing"
    await ready(other, adopt=True)
    await ready(other)
    assert UUID(str((await rows(sealed.url, "SELECT store_id FROM key_store"))[0]["store_id"])) == (
        other.keys.store.identity() if other.keys is not None else None
    )
    await other.close()
