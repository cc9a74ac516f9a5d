"""After an erasure neither the database's files, nor the key store, nor Temporal give anything of the texts back.

Texts never reach a disk but sealed, the destroyed secrets are on none, and Temporal never had any text. The searches
cover every file of the servers and of the key store; a run in the clear proves that they would find something.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import psycopg
import pytest

from engine.errors import UnavailableError
from engine.store.database import Database
from engine.store.erasing import ErasureOrder, erase
from engine.store.erasure_scope import Target
from tests.support.nested import SELF, family_of
from tests.support.provider import Provider
from tests.support.runs import KEY_STORES, ended, lists_plan, worker_process
from tests.support.sealed import BASIS, finished_run
from tests.support.servers import TestServers
from tests.support.stored import check_invariants, record, texts_of
from tests.workflow.aviary import Aviary
from worker_pools.process import WorkerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def aviary(process: WorkerProcess, provider: Provider, tmp_path: Path) -> Iterator[Aviary]:
    return Aviary(process, provider, tmp_path)  # type: ignore[return-value]  # nothing to tear down


def written_out(url: str) -> None:
    """Has the server write all that it holds in memory."""
    with psycopg.connect(url.replace("postgresql+psycopg://", "postgresql://"), autocommit=True) as connection:
        connection.execute("SELECT pg_logical_emit_message(false, 'test', 'flush', true)")


def found_on_disk(servers: TestServers, url: str, needles: list[bytes]) -> list[str]:
    """Files of the servers and of the key store that hold one of these."""
    keys = Path(KEY_STORES.get(url, "file:///nowhere").removeprefix("file://"))
    paths = [path for root in (servers.home.root, keys) for path in root.rglob("*") if path.is_file()]
    assert len(paths) > 100
    found = []
    for path in paths:
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            continue
        found += [str(path) for needle in needles if needle in content]
    return found


def order(run_id: UUID, **more: object) -> ErasureOrder:
    return ErasureOrder(Target(run_id), "officer", None, BASIS, **more)  # type: ignore[arg-type]  # passed on


async def test_a_run_with_a_run_below_it_and_two_rounds(aviary: Aviary, servers: TestServers) -> None:
    word = aviary.word
    split = lists_plan([f"{word} split", f"{word} conclude"], [[], [0]], [1, 0])
    inner = lists_plan([f"{word} inner"], [[]], [0])
    mend = lists_plan([f"{word} mend"], ["all"], [0])
    aviary.provider.script(*({"text": text} for text in (split, inner, mend)), model="planner")
    aviary.provider.script({"text": f"{word} answers", "reasoning": f"{word} thinks"}, model="speaker", times=None)
    pool = aviary.pool("speaker", conductor={"model": "planner"}, more=[SELF], policy={"rounds_max": 2})
    run = await aviary.run(pool, conductor=True)
    assert (run.state, run.round, len(run.children)) == ("succeeded", 1, 1)
    assert word in (run.answer or "")
    database = aviary.process.database
    family = await family_of(database, run.id)
    for one in family:
        assert {row["key_epoch"] for row in (await record(database.url, one["id"])).artifacts} == {1}
    secrets: dict[UUID, bytes] = {}
    assert database.keys is not None
    for one in family:
        keys = database.keys.store.read(one["id"])
        assert keys is not None
        secrets[one["id"]] = keys.secret
    needles = [secret.hex().encode() for secret in secrets.values()] + list(secrets.values())
    written_out(database.url)
    # The control: before, each secret is found, and only in the key store.
    before = found_on_disk(servers, database.url, needles)
    assert sorted(Path(path).name for path in before) == sorted(str(run_id) for run_id in secrets)
    assert all(path.startswith(KEY_STORES[database.url].removeprefix("file://")) for path in before)
    await erase(database, order(run.id))
    for one in family:
        kept = await record(database.url, one["id"])
        check_invariants(kept)
        assert {row["kind"] for row in kept.artifacts if row["content"] is not None} <= {"basis"}
        assert await texts_of(database, one["id"], "output") == await texts_of(database, one["id"], "task") == []
    # The destroyed secrets are nowhere; the ciphertext may be in files that were not vacuumed, and opens no more.
    written_out(database.url)
    assert found_on_disk(servers, database.url, needles) == []
    await aviary.search()


async def test_no_word_of_a_sealed_task_is_ever_on_a_disk(
    process: WorkerProcess, servers: TestServers, tmp_path: Path
) -> None:
    """The control: a word in the clear is found in the files of the same servers."""
    sealed_word, plain_word = "kanarie-sealed-0815", "kanarie-plain-4711"
    await finished_run(process.database, [f"{sealed_word} answers"], task=f"Say {sealed_word}.")
    written_out(process.database.url)
    assert found_on_disk(servers, process.database.url, [sealed_word.encode()]) == []
    plain = Database(process.database.url)
    run_id = await finished_run(plain, [f"{plain_word} answers"], task=f"Say {plain_word}.")
    written_out(plain.url)
    assert found_on_disk(servers, plain.url, [plain_word.encode()])
    await erase(plain, order(run_id))
    assert await texts_of(plain, run_id, "task") == []
    await plain.close()


async def test_a_step_of_a_run_whose_task_is_gone_fails_and_says_so(aviary: Aviary) -> None:
    """As after a restored backup: the record says that the run goes on, and its keys are destroyed."""
    process = aviary.process
    run_id = await aviary.start(aviary.pool("sleep-700ms", "speaker"), access=[[], [0]])
    assert process.database.keys is not None
    # While the first step is called, the keys go.
    process.database.keys.store.rotate(run_id, 1, {})
    with psycopg.connect(
        process.database.url.replace("postgresql+psycopg://", "postgresql://"), autocommit=True
    ) as link:
        link.execute("UPDATE runs SET key_epoch = 2 WHERE id = %s", (run_id,))
    failed = await ended(process.database, run_id)
    assert (failed.state, failed.reason) == ("failed", "text-erased")
    # The step that was to read it was never called.
    assert [len(step.attempts) for step in failed.steps][1] == 0


async def test_a_delegated_step_takes_the_run_below_it_along(aviary: Aviary) -> None:
    word = aviary.word
    split = lists_plan([f"{word} split", "Conclude from it."], [[], [0]], [1, 0])
    aviary.provider.script(*({"text": text} for text in (split, lists_plan(["Look."], [[]], [0]))), model="planner")
    aviary.provider.script({"text": f"{word} is what the run below found out"}, {"text": "So be it."}, model="speaker")
    pool = aviary.pool("speaker", conductor={"model": "planner"}, more=[SELF])
    run = await aviary.run(pool, conductor=True)
    assert (run.state, run.answer, len(run.children)) == ("succeeded", "So be it.", 1)
    database = aviary.process.database
    await erase(database, ErasureOrder(Target(run.id, 0, 0), "officer", None, BASIS, copies="keep"))
    below = await record(database.url, run.children[0])
    check_invariants(below)
    assert {row["content"] for row in below.artifacts} == {None}
    kept = await record(database.url, run.id)
    check_invariants(kept)
    left = {row["kind"] for row in kept.artifacts if row["content"] is not None}
    gone = {(row["kind"], row["owner_id"]) for row in kept.artifacts if row["content"] is None}
    assert {"task", "output", "basis"} <= left
    # The conclusion was shown what the run below had found out: its prompt's salt is gone, its answer is not.
    (conclusion,) = run.steps[1].attempts
    assert ("prompt_manifest", conclusion.id) in gone
    assert await texts_of(database, run.id, "output") == [b"So be it."]


async def test_a_worker_does_not_begin_with_another_key_store(
    process: WorkerProcess, servers: TestServers, tmp_path: Path
) -> None:
    with pytest.raises(UnavailableError) as refused:
        async with worker_process(
            process.database.url, servers.temporal_address, key_store=(tmp_path / "others").as_uri()
        ):
            raise AssertionError("it began")
    assert refused.value.code == "key-store-other"
