"""The signer: it never contradicts itself, whatever the database says, and a change of keys is itself in the log."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable
from pathlib import Path
from uuid import UUID

import psycopg
import pytest

from engine.errors import InputError, PodiumError, RefusedError, UnavailableError
from engine.signing import AuditFolder, FileAnchor, LogKeeper, Signer
from engine.store import log
from engine.store.database import Database
from engine.store.exchange import Connection
from engine.store.tables import DEFAULT_TENANT
from engine.verifier import checkpoint as formats
from engine.verifier import note as notes
from engine.verifier.rotation import parse_rotation
from tests.integration.store.test_log import runs_on_record
from tests.support.attacker import cut_log
from tests.support.servers import superuser_url
from tests.support.stored import dump, execute, rows

TENANT = UUID(DEFAULT_TENANT)
ORIGIN = f"podium/{TENANT}"


@pytest.fixture
def database_url(own_database_url: str) -> str:
    """Each test looks at the whole log."""
    return own_database_url


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer(AuditFolder(tmp_path / "audit"))


async def sealed(database: Database, signer: Signer) -> log.Checkpoint:
    """A checkpoint of everything that is on record."""
    found = await LogKeeper(database, signer).seal(TENANT)
    assert found is not None
    return found


async def keys_of(database: Database) -> list[notes.Verifier]:
    async def work(connection: Connection) -> list[notes.Verifier]:
        return [notes.parse_key(key.key) for key in await log.signer_keys(connection, TENANT)]

    return await database.write(work)


async def refusal(work: Awaitable[object]) -> str:
    with pytest.raises(PodiumError) as caught:
        await work
    assert caught.value.hint
    return caught.value.code


async def test_a_checkpoint_says_size_and_root_and_is_signed_by_a_key_that_is_in_the_log(
    database: Database, signer: Signer, tmp_path: Path
) -> None:
    assert await LogKeeper(database, signer).seal(TENANT) is None
    await runs_on_record(database, 2)
    checkpoint = await sealed(database, signer)
    (key,) = await keys_of(database)
    opened = formats.open_checkpoint(checkpoint.note, [key], origin=ORIGIN)
    entries = await rows(database.url, "SELECT count(*) AS n FROM ledger_entries")
    assert opened.checkpoint.size == checkpoint.size == entries[0]["n"]
    assert opened.checkpoint.root == checkpoint.root
    assert checkpoint.key_id == key.key_id
    # Nothing was added, so there is nothing new to sign.
    assert await sealed(database, signer) == checkpoint
    await runs_on_record(database)
    assert (await sealed(database, signer)).size > checkpoint.size
    secret = tmp_path / "audit" / "signer" / str(TENANT)
    assert secret.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "audit").stat().st_mode & 0o777 == 0o700


async def test_the_database_holds_nothing_of_the_private_key(database: Database, signer: Signer) -> None:
    await runs_on_record(database)
    await sealed(database, signer)
    (key,) = signer.folder.keys(TENANT)
    raw = key.private_bytes_raw()
    everything = await dump(superuser_url(database.url))
    assert raw.hex() not in everything
    assert base64.b64encode(raw).decode() not in everything


async def test_a_log_that_was_cut_is_refused(database: Database, signer: Signer) -> None:
    await runs_on_record(database, 2)
    await sealed(database, signer)
    await runs_on_record(database)
    size = (await sealed(database, signer)).size
    await cut_log(database.url, size - 3)
    assert await refusal(signer.sign(database, TENANT)) == "log-shrank"


async def test_a_restored_backup_that_went_on_is_refused_until_somebody_says_so(
    database: Database, signer: Signer, tmp_path: Path
) -> None:
    """Attack 15: the log is longer than what was signed, and yet another one."""
    await runs_on_record(database)
    kept = await sealed(database, signer)
    await runs_on_record(database)
    lost = await sealed(database, signer)
    await cut_log(database.url, kept.size)
    await runs_on_record(database, 3)
    await log.extend_log(database)
    assert await refusal(signer.sign(database, TENANT)) == "log-inconsistent"
    assert (await _latest(database)).size == kept.size
    # On purpose, and on record: with the checkpoint that is given up.
    await signer.accept_restored(database, TENANT, actor_id="operator", on_behalf_of=None)
    (entry,) = await rows(database.url, "SELECT body FROM ledger_entries WHERE type = 'log.restored'")
    said = json.loads(entry["body"])
    assert said["actor"] == "operator"
    assert (said["data"]["remembered"], said["data"]["root"]) == (lost.size, lost.root.hex())
    assert (await sealed(database, signer)).size > lost.size
    # What is given up stays, for whoever looks into it.
    assert [path.read_bytes() for path in (tmp_path / "audit" / "memory").glob("*.before-restore-*")] == [lost.note]
    with pytest.raises(RefusedError) as caught:
        await signer.accept_restored(database, TENANT, actor_id="operator", on_behalf_of=None)
    assert caught.value.code == "nothing-restored"


async def _latest(database: Database) -> log.Checkpoint:
    found = await database.write(lambda connection: log.latest_checkpoint(connection, TENANT))
    assert found is not None
    return found


async def test_without_its_memory_it_does_not_go_on(database: Database, signer: Signer, tmp_path: Path) -> None:
    await runs_on_record(database)
    await sealed(database, signer)
    memory = tmp_path / "audit" / "memory" / str(TENANT)
    note = memory.read_bytes()
    memory.unlink()
    await runs_on_record(database)
    assert await refusal(sealed(database, signer)) == "signer-memory-missing"
    memory.write_bytes(note.replace(b"\n", b" \n", 1))
    assert await refusal(sealed(database, signer)) == "signer-memory-damaged"
    memory.write_bytes(note)
    assert (await sealed(database, signer)).size > formats.open_checkpoint(
        note, await keys_of(database)
    ).checkpoint.size


async def test_another_audit_directory_does_not_sign_for_this_database(
    database: Database, signer: Signer, tmp_path: Path
) -> None:
    """Attack 4, from within: a second key does not become the log's key by being there."""
    await runs_on_record(database)
    checkpoint = await sealed(database, signer)
    stranger = Signer(AuditFolder(tmp_path / "other"))
    await runs_on_record(database)
    await log.extend_log(database)
    assert await refusal(stranger.sign(database, TENANT)) == "signer-key-unknown"
    assert (await _latest(database)).note == checkpoint.note


async def test_two_audit_directories_at_the_very_start_leave_one_key(database: Database, tmp_path: Path) -> None:
    await runs_on_record(database)
    signers = [Signer(AuditFolder(tmp_path / f"audit-{number}")) for number in range(4)]
    results = await asyncio.gather(*(sealed(database, one) for one in signers), return_exceptions=True)
    assert len(await keys_of(database)) == 1
    signed = [result for result in results if isinstance(result, log.Checkpoint)]
    refused = [result.code for result in results if isinstance(result, PodiumError)]
    assert len(signed) >= 1
    assert set(refused) <= {"signer-key-unknown", "signer-memory-missing"}
    assert len(signed) + len(refused) == 4
    assert len({one.key_id for one in signed}) == 1


async def test_ten_at_once_in_one_directory_sign_one_history(database: Database, signer: Signer) -> None:
    async def work(number: int) -> log.Checkpoint:
        await asyncio.sleep(number * 0.01)
        await runs_on_record(database)
        return await sealed(database, signer)

    await asyncio.gather(*(work(number) for number in range(10)))
    keys = await keys_of(database)
    assert len(keys) == 1
    for row in await rows(database.url, "SELECT size, root, note FROM log_checkpoints ORDER BY size"):
        opened = formats.open_checkpoint(row["note"], keys, origin=ORIGIN).checkpoint
        assert (opened.size, opened.root) == (row["size"], row["root"])


async def test_a_new_key_is_introduced_by_the_old_one_and_both_sign_for_a_while(
    database: Database, signer: Signer
) -> None:
    await runs_on_record(database)
    await sealed(database, signer)
    signed = await signer.rotate(database, TENANT, actor_id="operator", on_behalf_of=None, overlap_days=1)
    old, new = await keys_of(database)
    assert old != new
    assert signed.key_id == new.key_id
    # Whoever knows only the old key can check the checkpoint that covers the change, and finds the new key under it.
    for known in (old, new):
        assert formats.open_checkpoint(signed.note, [known]).checkpoint.size == signed.size
    (first, second) = await database.write(lambda connection: log.signer_keys(connection, TENANT))
    assert (first.replaces, first.statement, second.replaces, second.overlap_s) == (None, None, str(old), 86_400)
    assert second.statement is not None
    stated = parse_rotation(second.statement)
    assert (stated.old, stated.new, stated.origin) == (old, new, ORIGIN)
    # The last checkpoint before it is the old key's alone.
    before = await database.write(lambda connection: log.first_checkpoint_after(connection, TENANT, stated.size))
    assert before is not None
    assert before.size == stated.size
    assert notes.opened(before.note, [old, new]).signers == (old,)
    assert second.index is not None
    assert second.index < signed.size
    await runs_on_record(database)
    later = await sealed(database, signer)
    assert notes.opened(later.note, [old]).signers == (old,)
    assert len(signer.folder.keys(TENANT)) == 2


async def test_after_the_overlap_the_old_key_signs_nothing_and_is_gone(database: Database, signer: Signer) -> None:
    await runs_on_record(database)
    await sealed(database, signer)
    signed = await signer.rotate(database, TENANT, actor_id="operator", on_behalf_of=None, overlap_days=0)
    old, new = await keys_of(database)
    # Also without an overlap, the change itself is signed by both.
    assert notes.opened(signed.note, [old, new]).signers == (new, old)
    await runs_on_record(database)
    later = await sealed(database, signer)
    assert notes.opened(later.note, [old, new]).signers == (new,)
    assert [notes.verifier_of(key, ORIGIN) for key in signer.folder.keys(TENANT)] == [new]
    third = await signer.rotate(database, TENANT, actor_id="operator", on_behalf_of="owner", overlap_days=0)
    assert third.key_id not in {old.key_id, new.key_id}


async def test_a_key_that_others_can_read_is_not_used(database: Database, signer: Signer, tmp_path: Path) -> None:
    await runs_on_record(database)
    await sealed(database, signer)
    secret = tmp_path / "audit" / "signer" / str(TENANT)
    secret.chmod(0o640)
    await runs_on_record(database)
    with pytest.raises(InputError) as caught:
        await sealed(database, signer)
    assert caught.value.code == "signer-key-open"
    secret.chmod(0o600)
    secret.write_text("{}")
    with pytest.raises(UnavailableError) as damaged:
        await sealed(database, signer)
    assert damaged.value.code == "signer-key-damaged"


async def test_a_directory_that_others_can_enter_is_refused_and_left_as_it_is(
    database: Database, tmp_path: Path
) -> None:
    folder = tmp_path / "open"
    folder.mkdir(mode=0o755)
    await runs_on_record(database)
    assert await refusal(sealed(database, Signer(AuditFolder(folder)))) == "audit-dir-open"
    assert folder.stat().st_mode & 0o777 == 0o755
    assert await refusal(sealed(database, Signer(AuditFolder(tmp_path / "no" / "such")))) == "audit-dir-unusable"


async def test_what_was_signed_and_not_stored_is_stored_the_same(
    database: Database, signer: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the memory and the database: the same note comes again, never a second one of that size."""
    from engine.signing import signer as module

    await runs_on_record(database)
    await sealed(database, signer)
    await runs_on_record(database)

    async def dies(*_: object) -> None:
        raise UnavailableError("killed", "killed", hint="here")

    with monkeypatch.context() as patched:
        patched.setattr(module, "_store", dies)
        assert await refusal(sealed(database, signer)) == "killed"
    note = signer.folder.memory(TENANT)
    checkpoint = await sealed(database, signer)
    assert checkpoint.note == note


async def test_checkpoints_come_soon_but_not_at_every_turn_and_anchors_less_often(
    database: Database, signer: Signer, tmp_path: Path
) -> None:
    now = [1000.0]
    anchored = tmp_path / "anchors"
    keeper = LogKeeper(database, signer, [FileAnchor(anchored)], clock=lambda: now[0])
    await runs_on_record(database)
    assert await keeper.turn()
    first = await _latest(database)
    (path,) = (anchored / str(TENANT)).iterdir()
    assert path.name == f"{first.size:016d}.checkpoint"
    assert path.read_bytes() == first.note
    assert path.stat().st_mode & 0o777 == 0o444
    # More comes at once: it waits for the next checkpoint, and nothing is forgotten meanwhile.
    await runs_on_record(database)
    assert await keeper.turn()
    assert (await _latest(database)).size == first.size
    now[0] += 6
    await keeper.turn()
    second = await _latest(database)
    assert second.size > first.size
    assert len(list((anchored / str(TENANT)).iterdir())) == 1
    assert not await keeper.turn()
    now[0] += 60
    assert not await keeper.turn()
    assert max(one.name for one in (anchored / str(TENANT)).iterdir()) == f"{second.size:016d}.checkpoint"
    # An idle keeper signs nothing.
    now[0] += 1000
    await keeper.turn()
    assert (await _latest(database)).size == second.size


async def test_a_refusal_is_logged_once_and_the_leaves_go_on(
    database: Database, signer: Signer, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    await runs_on_record(database)
    await sealed(database, signer)
    memory = signer.folder.path / "memory" / str(TENANT)
    memory.unlink()
    keeper = LogKeeper(database, signer, clock=lambda: now[0])
    for _ in range(3):
        await runs_on_record(database)
        now[0] += 10
        assert await keeper.turn()
    assert [record.levelname for record in caplog.records if "signer-memory-missing" in record.message] == ["ERROR"]
    assert await rows(database.url, "SELECT * FROM ledger_pending") == []


async def test_an_anchor_that_fails_is_tried_again_and_keeps_nobody(
    database: Database, signer: Signer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where the folder should be")
    keeper = LogKeeper(database, signer, [FileAnchor(blocked)], clock=lambda: now[0])
    await runs_on_record(database)
    await keeper.turn()
    assert (await _latest(database)).size > 0
    assert any("anchor-failed" in record.message for record in caplog.records)
    blocked.unlink()
    now[0] += 61
    await keeper.turn()
    assert len(list((blocked / str(TENANT)).iterdir())) == 1


async def test_a_checkpoint_that_somebody_else_stored_is_not_believed(database: Database, signer: Signer) -> None:
    """The application's role may store checkpoints; a false one is worth nothing without the key."""
    await runs_on_record(database)
    checkpoint = await sealed(database, signer)
    insert = "INSERT INTO log_checkpoints (tenant_id, size, root, note, key_id) VALUES (%s, %s, %s, %s, 'x')"
    with pytest.raises(psycopg.Error) as caught:
        await execute(database.url, insert, TENANT, checkpoint.size + 100, bytes(32), b"forged")
    assert caught.value.sqlstate == "PD010"
    # One of a size that the log has: it is in the way of nothing, and the true one comes with the next entries.
    await runs_on_record(database)
    await log.extend_log(database)
    size = await database.write(lambda connection: log.log_size(connection, TENANT))
    await execute(database.url, insert, TENANT, size, bytes(32), b"forged")
    shown = await sealed(database, signer)
    assert formats.open_checkpoint(shown.note, await keys_of(database)).checkpoint.size == shown.size == size
    await runs_on_record(database)
    true = await sealed(database, signer)
    assert formats.open_checkpoint(true.note, await keys_of(database)).checkpoint.size == true.size > size
