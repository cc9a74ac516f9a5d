"""The key store of files: private, whole or not there, and forgetful when it is told to be."""

from __future__ import annotations

import multiprocessing
import os
import stat
import time
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from engine.errors import InputError, UnavailableError
from engine.keystore import ErasureRecord, Keyring, open_keyring
from engine.keystore.files import FileKeyStore
from engine.keystore.keyring import CACHED_MAX, CACHED_S
from engine.keystore.keys import RunKeys


@pytest.fixture
def store(tmp_path: Path) -> FileKeyStore:
    return FileKeyStore(tmp_path / "keys")


def files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


def everything(root: Path) -> bytes:
    return b"\n".join(path.read_bytes() for path in files(root))


def record(run_id: UUID) -> ErasureRecord:
    return ErasureRecord(uuid4(), run_id, 2, [uuid4()], {"actor_id": "officer"}, [{"id": "x", "content": "00"}])


def test_keys_are_there_for_another_process_and_for_their_owner_only(store: FileKeyStore, tmp_path: Path) -> None:
    run = uuid4()
    made = store.create(run)
    assert FileKeyStore(tmp_path / "keys").read(run) == made
    assert store.create(run) == made
    store.settle(made)
    assert store.read(run) == made
    assert store.create(run) == made
    for path in (tmp_path / "keys").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700


def test_a_run_without_keys_has_none(store: FileKeyStore) -> None:
    assert store.read(uuid4()) is None


def test_settling_twice_or_after_the_sweep_loses_nothing(store: FileKeyStore) -> None:
    run = uuid4()
    made = store.create(run)
    store.settle(made)
    store.settle(made)
    assert store.read(run) == made
    other = store.create(uuid4())
    store.drop_orphan(other.run_id)
    store.settle(other)
    assert store.read(other.run_id) == other


def test_a_destroyed_secret_is_nowhere_in_the_store(store: FileKeyStore, tmp_path: Path) -> None:
    run, kept, gone = uuid4(), uuid4(), uuid4()
    made = store.create(run)
    # A name that somebody still holds, for example a crash between two steps: the bytes under it go too.
    (tmp_path / "keys" / "pending" / f".{run}.abc").write_bytes(made.secret.hex().encode())
    os.link(tmp_path / "keys" / "pending" / str(run), tmp_path / "other-name")
    after = store.rotate(run, 1, {kept: 1})
    assert after.epoch == 2
    assert store.read(run) == after
    assert made.secret.hex().encode() not in everything(tmp_path)
    gone_key = made.key_of(gone, 1)
    assert gone_key is not None
    assert gone_key.hex().encode() not in everything(tmp_path)
    assert after.key_of(kept, 1) == made.key_of(kept, 1)
    # Once more is the same.
    assert store.rotate(run, 1, {}) == after


def test_keys_that_are_not_there_cannot_be_destroyed(store: FileKeyStore) -> None:
    with pytest.raises(UnavailableError) as missing:
        store.rotate(uuid4(), 1, {})
    assert missing.value.code == "text-key-missing"


def test_orphans_are_old_and_not_settled(store: FileKeyStore, tmp_path: Path) -> None:
    old, young, settled = (store.create(uuid4()) for _ in range(3))
    store.settle(settled)
    long_ago = time.time() - 90_000
    os.utime(tmp_path / "keys" / "pending" / str(old.run_id), (long_ago, long_ago))
    assert list(store.orphans(86_400)) == [old.run_id]
    # Whoever asks for it again is about to use it.
    store.create(old.run_id)
    assert list(store.orphans(86_400)) == []
    assert store.read(young.run_id) == young


def test_the_journal_keeps_whole_lines_only(store: FileKeyStore, tmp_path: Path) -> None:
    assert store.journal_end() == 0
    assert store.read_journal(0).records == [] or store.read_journal(0).records == ()
    first, second = record(uuid4()), record(uuid4())
    store.append_journal(first)
    middle = store.journal_end()
    path = tmp_path / "keys" / "erasures.jsonl"
    with path.open("ab") as torn:
        torn.write(b'{"erasure": "cut o')
    assert store.read_journal(0).end == middle
    store.append_journal(second)
    journal = store.read_journal(0)
    assert [one.erasure_id for one in journal.records] == [first.erasure_id, second.erasure_id]
    assert journal.end == store.journal_end()
    assert [one.erasure_id for one in store.read_journal(middle).records] == [second.erasure_id]
    assert journal.records[0].basis == [{"id": "x", "content": "00"}]


def test_a_journal_that_cannot_be_read_is_said(store: FileKeyStore, tmp_path: Path) -> None:
    store.append_journal(record(uuid4()))
    with (tmp_path / "keys" / "erasures.jsonl").open("ab") as damaged:
        damaged.write(b"no JSON\n")
    with pytest.raises(UnavailableError) as found:
        store.read_journal(0)
    assert found.value.code == "journal-damaged"


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b'{"format": 1, "run": "x", "epoch": 1, "secret": "zz"}', b"\x00" * 80]
)
def test_a_damaged_key_is_said(store: FileKeyStore, tmp_path: Path, content: bytes) -> None:
    made = store.create(uuid4())
    (tmp_path / "keys" / "pending" / str(made.run_id)).write_bytes(content)
    with pytest.raises(UnavailableError) as found:
        store.read(made.run_id)
    assert found.value.code == "key-damaged"


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    FileKeyStore(tmp_path / "keys").identity()
    (tmp_path / "keys" / "runs").chmod(0o755)
    with pytest.raises(InputError, match="other users can enter"):
        FileKeyStore(tmp_path / "keys").identity()


def test_a_place_that_is_none_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError) as found:
        FileKeyStore(tmp_path / "file" / "keys").create(uuid4())
    assert found.value.code == "key-store-unavailable"


def test_a_newer_store_is_not_touched(store: FileKeyStore, tmp_path: Path) -> None:
    store.identity()
    (tmp_path / "keys" / "store.json").write_text('{"format": 2, "id": "x"}')
    with pytest.raises(UnavailableError, match="another format"):
        FileKeyStore(tmp_path / "keys").identity()


def _make(root: str, run: str, results: multiprocessing.Queue[bytes]) -> None:
    store = FileKeyStore(Path(root))
    made = store.create(UUID(run))
    store.settle(made)
    results.put(made.secret)


def test_processes_that_make_the_same_keys_at_once_agree(tmp_path: Path) -> None:
    results: multiprocessing.Queue[bytes] = multiprocessing.Queue()
    run = str(uuid4())
    makers = [multiprocessing.Process(target=_make, args=(str(tmp_path / "keys"), run, results)) for _ in range(6)]
    for maker in makers:
        maker.start()
    found = {results.get(timeout=20) for _ in makers}
    for maker in makers:
        maker.join()
    assert len(found) == 1
    kept = FileKeyStore(tmp_path / "keys").read(UUID(run))
    assert kept is not None
    assert {kept.secret} == found


def _rotate(root: str, run: str, results: multiprocessing.Queue[bytes]) -> None:
    results.put(FileKeyStore(Path(root)).rotate(UUID(run), 1, {}).secret)


def test_processes_that_destroy_at_once_agree_on_what_follows(tmp_path: Path) -> None:
    made = FileKeyStore(tmp_path / "keys").create(uuid4())
    results: multiprocessing.Queue[bytes] = multiprocessing.Queue()
    workers = [
        multiprocessing.Process(target=_rotate, args=(str(tmp_path / "keys"), str(made.run_id), results))
        for _ in range(6)
    ]
    for worker in workers:
        worker.start()
    found = {results.get(timeout=20) for _ in workers}
    for worker in workers:
        worker.join()
    assert len(found) == 1
    assert made.secret not in found


async def test_a_keyring_remembers_for_a_while_and_not_too_much(store: FileKeyStore) -> None:
    now = [0.0]
    ring = Keyring(store, clock=lambda: now[0])
    made = await ring.create(uuid4())
    (store._pending / str(made.run_id)).unlink()
    assert await ring.for_reading(made.run_id, 1) == made
    now[0] = CACHED_S
    with pytest.raises(UnavailableError, match="no key"):
        await ring.for_reading(made.run_id, 1)
    for _ in range(CACHED_MAX + 5):
        ring._remember(RunKeys(uuid4(), 1, bytes(32)))
    assert len(ring._cached) == CACHED_MAX


async def test_a_keyring_gives_up_keys_of_an_epoch_that_has_passed(store: FileKeyStore) -> None:
    ring = Keyring(store)
    made = await ring.create(uuid4())
    # The database says that they are about to go: they are not used for anything new.
    with pytest.raises(UnavailableError) as early:
        await ring.for_writing(made.run_id, 2)
    assert early.value.code == "erasure-unfinished"
    FileKeyStore(store._root).rotate(made.run_id, 1, {})
    after = await ring.for_writing(made.run_id, 2)
    assert (after.epoch, after.secret == made.secret) == (2, False)


@pytest.mark.parametrize("url", ["keys", "s3://bucket", "file://host/keys", "file:keys", "/keys", ""])
def test_what_is_no_key_store_is_refused(url: str) -> None:
    with pytest.raises(InputError) as refused:
        open_keyring(url)
    assert refused.value.code == "key-store-invalid"


def test_none_is_no_keys_and_a_folder_may_have_blanks(tmp_path: Path) -> None:
    assert open_keyring("none") is None
    ring = open_keyring((tmp_path / "my keys").as_uri())
    assert ring is not None
    assert ring.store.place == str(tmp_path / "my keys")
