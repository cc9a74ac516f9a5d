"""Attacks on the record by whoever owns the database server: each is carried out, and it is shown who notices.

`alone` is the whole log checked against itself and the signer's public key; `kept` is a checkpoint that an auditor
saved before. Attack 16 (disabling the triggers) is around every other one here: see `tests.support.attacker`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from engine.ledger.entry import EntryPlace, Event, entry_bytes, entry_hash
from engine.signing import AuditFolder, Signer
from engine.store import log
from engine.store.database import Database
from engine.store.log_check import LogReport, Saved, check_log
from engine.verifier import checkpoint as formats
from engine.verifier import merkle
from engine.verifier import note as notes
from tests.integration.store.test_log import runs_on_record, system_entry
from tests.integration.store.test_signer import ORIGIN, TENANT, keys_of, refusal, sealed
from tests.support.attacker import as_superuser, cut_log
from tests.support.stored import execute, rows


@pytest.fixture
def database_url(own_database_url: str) -> str:
    """Each test changes the whole log."""
    return own_database_url


@dataclass(frozen=True, slots=True)
class Victim:
    """A log with checkpoints; ``key`` and ``kept`` are what an auditor has of it."""

    database: Database
    signer: Signer
    runs: list[UUID]
    key: notes.Verifier
    kept: log.Checkpoint

    @property
    def url(self) -> str:
        return self.database.url

    async def alone(self) -> LogReport:
        """Checked with the pinned key only."""
        return await check_log(self.database, trusted=[self.key])

    async def with_saved(self) -> LogReport:
        """Checked with the pinned key and the saved checkpoint."""
        return await check_log(self.database, trusted=[self.key], saved=[Saved(self.kept.note, "the saved checkpoint")])


@pytest.fixture
async def victim(database: Database, tmp_path: Path) -> Victim:
    signer = Signer(AuditFolder(tmp_path / "audit"))
    runs = await runs_on_record(database, 3)
    await system_entry(database)
    await sealed(database, signer)
    runs += await runs_on_record(database, 2)
    kept = await sealed(database, signer)
    (key,) = await keys_of(database)
    found = Victim(database, signer, runs, key, kept)
    assert (await found.with_saved()).faults == []
    return found


def codes(report: LogReport) -> set[str]:
    assert report.faults_count >= len(report.faults)
    return {code for code, _ in report.faults}


async def bodies_of(url: str, run_id: UUID) -> list[bytes]:
    return [
        row["body"] for row in await rows(url, "SELECT body FROM ledger_entries WHERE run_id = %s ORDER BY seq", run_id)
    ]


def rechained(bodies: list[bytes], changed: dict[int, dict[str, Any]]) -> list[bytes]:
    """The chain with other data in some entries (by number), every later entry made to fit."""
    prev, made = bytes(32), []
    for number, body in enumerate(bodies, start=1):
        said = json.loads(body)
        place = EntryPlace(UUID(said["tenant"]), UUID(said["run"]), number, prev)
        event = Event(said["type"], said["actor"], said["on_behalf_of"], {**said["data"], **changed.get(number, {})})
        made.append(entry_bytes(place, event, datetime.fromisoformat(said["at"])))
        prev = entry_hash(made[-1])
    return made


async def rewrite(url: str, run_id: UUID, bodies: list[bytes]) -> None:
    """Puts other entries in the place of a chain's, with all that the database derives from them but the log."""
    statements = []
    for number, body in enumerate(bodies, start=1):
        said = json.loads(body)
        statements.append(
            f"UPDATE ledger_entries SET body = '\\x{body.hex()}', hash = '\\x{entry_hash(body).hex()}',"
            f" prev = '\\x{said['prev']}' WHERE run_id = '{run_id}' AND seq = {number}"
        )
    statements.append(f"UPDATE ledger_heads SET hash = '\\x{entry_hash(bodies[-1]).hex()}' WHERE run_id = '{run_id}'")
    await as_superuser(url, *statements)


async def rebuild_log(url: str) -> None:
    """Makes the leaves and the nodes anew out of the entries as they are, in the order that they have."""
    leaves = await rows(
        url, "SELECT l.*, e.body FROM log_leaves l JOIN ledger_entries e USING (run_id, seq) ORDER BY index"
    )
    hashes = [merkle.leaf_hash(leaf["body"]) for leaf in leaves]
    statements = ["DELETE FROM log_leaves", "DELETE FROM log_nodes"]
    for index, leaf in enumerate(leaves):
        statements.append(
            f"INSERT INTO log_leaves VALUES ('{TENANT}', {index}, '{leaf['run_id']}', {leaf['seq']}, '\\x{hashes[index].hex()}')"
        )
    for level in range(1, len(leaves).bit_length()):
        for index in range(len(leaves) >> level):
            node = merkle.root_of(hashes[index << level : (index + 1) << level])
            statements.append(f"INSERT INTO log_nodes VALUES ('{TENANT}', {level}, {index}, '\\x{node.hex()}')")
    await as_superuser(url, *statements)


async def resign(url: str, key: Ed25519PrivateKey) -> None:
    """Signs every stored checkpoint anew, over the log as it is, with this key."""
    hashes = [row["leaf_hash"] for row in await rows(url, "SELECT leaf_hash FROM log_leaves ORDER BY index")]
    for row in await rows(url, "SELECT size FROM log_checkpoints"):
        root = merkle.root_of(hashes[: row["size"]])
        note = notes.sign(formats.text(ORIGIN, row["size"], root), ORIGIN, key)
        await as_superuser(
            url,
            f"UPDATE log_checkpoints SET root = '\\x{root.hex()}', note = '\\x{note.hex()}',"
            f" key_id = '{notes.verifier_of(key, ORIGIN).key_id}' WHERE size = {row['size']}",
        )


async def edit(victim: Victim, number: int = 3) -> None:
    """Attack 2's beginning: an entry says something else, and its chain fits."""
    run_id = victim.runs[1]
    await rewrite(victim.url, run_id, rechained(await bodies_of(victim.url, run_id), {number: {"reason": "other"}}))


async def test_a_log_that_nobody_touched_is_valid_and_counted(victim: Victim) -> None:
    report = await victim.with_saved()
    entries = await rows(victim.url, "SELECT count(*) AS n FROM ledger_entries")
    assert (report.faults_count, report.entries, report.size) == (0, entries[0]["n"], entries[0]["n"])
    assert (report.waiting, report.uncovered, report.checkpoints, report.pinned) == (0, 0, 2, True)
    assert report.saved_sizes == [victim.kept.size]
    assert report.chains == len(victim.runs) + 1
    await runs_on_record(victim.database)
    assert (await victim.alone()).waiting > 0
    await log.extend_log(victim.database)
    later = await victim.alone()
    assert (later.faults_count, later.waiting, later.uncovered) == (0, 0, later.size - victim.kept.size)


async def test_attack_1_bytes_of_an_entry_are_edited(victim: Victim) -> None:
    run_id = victim.runs[1]
    body = (await bodies_of(victim.url, run_id))[2]
    other = body.replace(b'"old":"created"', b'"old":"creaTed"')
    assert other != body
    await as_superuser(
        victim.url, f"UPDATE ledger_entries SET body = '\\x{other.hex()}' WHERE run_id = '{run_id}' AND seq = 3"
    )
    found = await victim.alone()
    assert {"entry-altered", "chain-broken", "leaf-mismatch"} <= codes(found)
    assert any(f"entry 3 of chain {run_id}" in text for _, text in found.faults)


async def test_attack_1_bytes_that_mean_the_same_are_seen_too(victim: Victim) -> None:
    run_id = victim.runs[0]
    body = (await bodies_of(victim.url, run_id))[-1]
    spaced = body.replace(b'","', b'", "', 1)
    await as_superuser(
        victim.url,
        f"UPDATE ledger_entries SET body = '\\x{spaced.hex()}', hash = '\\x{entry_hash(spaced).hex()}'"
        f" WHERE run_id = '{run_id}' AND body = '\\x{body.hex()}'",
        f"UPDATE ledger_heads SET hash = '\\x{entry_hash(spaced).hex()}' WHERE run_id = '{run_id}'",
    )
    assert {"entry-altered", "leaf-mismatch"} <= codes(await victim.alone())


async def test_attack_2_an_entry_is_edited_and_the_chain_made_to_fit(victim: Victim) -> None:
    await edit(victim)
    found = codes(await victim.alone())
    assert "leaf-mismatch" in found
    assert "chain-broken" not in found


async def test_attack_2_the_tree_is_rebuilt_too_and_the_signed_root_disagrees(victim: Victim) -> None:
    await edit(victim)
    await rebuild_log(victim.url)
    assert codes(await victim.alone()) == {"root-mismatch"}
    await runs_on_record(victim.database)
    assert await refusal(sealed(victim.database, victim.signer)) == "log-inconsistent"


async def test_attack_3_with_the_stolen_key_only_an_outside_checkpoint_tells(victim: Victim) -> None:
    await edit(victim)
    await rebuild_log(victim.url)
    (stolen,) = victim.signer.folder.keys(TENANT)
    await resign(victim.url, stolen)
    # The database, the key and all signatures agree: from within, nobody can tell.
    assert (await victim.alone()).faults == []
    assert codes(await victim.with_saved()) == {"saved-checkpoint"}
    # The signer's own memory is such an outside checkpoint.
    await runs_on_record(victim.database)
    assert await refusal(sealed(victim.database, victim.signer)) == "log-inconsistent"


async def test_attack_4_signed_again_with_another_key(victim: Victim) -> None:
    await edit(victim)
    await rebuild_log(victim.url)
    await resign(victim.url, Ed25519PrivateKey.generate())
    assert codes(await victim.alone()) == {"checkpoint-signature"}


async def test_attack_4_the_log_even_names_the_other_key(victim: Victim) -> None:
    """Whoever takes the keys from the database believes it; whoever pinned the key does not."""
    other = Ed25519PrivateKey.generate()
    named = str(notes.verifier_of(other, ORIGIN))
    bodies = await bodies_of(victim.url, TENANT)
    (number,) = [at for at, body in enumerate(bodies, start=1) if b'"key.created"' in body]
    await rewrite(victim.url, TENANT, rechained(bodies, {number: {"key": named}}))
    await rebuild_log(victim.url)
    await resign(victim.url, other)
    unpinned = await check_log(victim.database)
    assert (unpinned.faults, unpinned.pinned) == ([], False)
    assert codes(await victim.alone()) == {"checkpoint-signature"}


async def test_attack_5_the_last_entries_and_checkpoints_are_deleted(victim: Victim) -> None:
    await cut_log(victim.url, victim.kept.size - 4)
    # What is left agrees with itself, except for the rows of the run whose end is missing.
    assert codes(await victim.alone()) == {"row-mismatch"}
    found = await victim.with_saved()
    assert "saved-checkpoint" in codes(found)
    assert any("the last ones are gone" in text for _, text in found.faults)
    assert await refusal(victim.signer.sign(victim.database, TENANT)) == "log-shrank"


async def test_attack_5_whole_runs_with_their_rows_need_the_outside_checkpoint(victim: Victim) -> None:
    """The perfect cut: the last run was never there, as far as the database knows."""
    first = (await rows(victim.url, "SELECT min(size) AS size FROM log_checkpoints"))[0]["size"]
    late = tuple(str(run) for run in victim.runs[3:])
    await cut_log(victim.url, first)
    chosen = ", ".join(f"'{run}'" for run in late)
    await as_superuser(
        victim.url,
        "SET LOCAL session_replication_role = replica",
        *(f"DELETE FROM {table} WHERE run_id IN ({chosen})" for table in ("artifacts", "attempts", "steps", "plans")),
        f"DELETE FROM runs WHERE id IN ({chosen})",
    )
    assert (await victim.alone()).faults == []
    assert codes(await victim.with_saved()) == {"saved-checkpoint"}


@pytest.mark.parametrize("also", ["entries", "leaves", "numbers"])
async def test_attack_6_a_whole_run_is_deleted(victim: Victim, also: str) -> None:
    run_id = victim.runs[1]
    statements = [
        f"DELETE FROM ledger_entries WHERE run_id = '{run_id}'",
        f"DELETE FROM ledger_heads WHERE run_id = '{run_id}'",
    ]
    statements += [
        f"DELETE FROM {table} WHERE run_id = '{run_id}'" for table in ("artifacts", "attempts", "steps", "plans")
    ]
    statements += [f"DELETE FROM runs WHERE id = '{run_id}'"]
    if also != "entries":
        statements += [f"DELETE FROM log_leaves WHERE run_id = '{run_id}'"]
    if also == "numbers":
        renumbered = "SELECT tenant_id, row_number() OVER (ORDER BY index) - 1, run_id, seq, leaf_hash FROM log_leaves"
        statements += [
            f"CREATE TEMP TABLE shifted ON COMMIT DROP AS {renumbered}",
            "DELETE FROM log_leaves",
            "INSERT INTO log_leaves SELECT * FROM shifted",
        ]
    await as_superuser(victim.url, "SET LOCAL session_replication_role = replica", *statements)
    found = codes(await victim.alone())
    assert {"entries": "entry-missing", "leaves": "leaf-gap", "numbers": "node-altered"}[also] in found
    if also == "numbers":
        await rebuild_log(victim.url)
        # The second checkpoint says more leaves than there are, the first another root.
        assert codes(await victim.alone()) == {"root-mismatch", "checkpoint-ahead"}


async def test_attack_13_an_entry_is_back_dated(victim: Victim) -> None:
    """Inserted past the function, in the right chain, sequenced and signed: the log's own order gives it away."""
    run_id = victim.runs[0]
    (head,) = await rows(victim.url, "SELECT * FROM ledger_heads WHERE run_id = %s", run_id)
    at = datetime.now(UTC) - timedelta(hours=3)
    place = EntryPlace(TENANT, run_id, head["seq"] + 1, bytes(head["hash"]))
    body = entry_bytes(place, Event("review.commented", "somebody", None, {"review": "x"}), at)
    await as_superuser(
        victim.url,
        f"INSERT INTO ledger_entries VALUES ('{run_id}', {place.seq}, '{TENANT}', '\\x{place.prev.hex()}',"
        f" '\\x{entry_hash(body).hex()}', '\\x{body.hex()}', 'review.commented', '{at.isoformat()}')",
        f"INSERT INTO ledger_pending VALUES ('{TENANT}', '{run_id}', {place.seq})",
        f"UPDATE ledger_heads SET seq = {place.seq}, hash = '\\x{entry_hash(body).hex()}' WHERE run_id = '{run_id}'",
    )
    await sealed(victim.database, victim.signer)
    found = await victim.alone()
    assert codes(found) == {"entry-back-dated"}
    (told,) = [text for _, text in found.faults]
    assert f"entry {place.seq} of chain {run_id} says {at:%Y-%m-%d %H:%M:%SZ}" in told
    assert "behind a checkpoint of entries up to" in told
    # Put where its time would have it, and all signed again with the stolen key: only who kept a checkpoint can tell.
    leaves = [row["index"] for row in await rows(victim.url, "SELECT index FROM log_leaves WHERE run_id = %s", run_id)]
    await _move_leaf(victim.url, max(leaves), min(leaves) + place.seq - 1)
    await rebuild_log(victim.url)
    (stolen,) = victim.signer.folder.keys(TENANT)
    await resign(victim.url, stolen)
    assert (await victim.alone()).faults == []
    report = await victim.with_saved()
    assert codes(report) == {"saved-checkpoint"}
    assert [text for _, text in report.faults] == [
        f"the log is not the one of the saved checkpoint (size {victim.kept.size}): its past was changed"
    ]
    # The signer's own memory is such a checkpoint, too.
    await runs_on_record(victim.database)
    assert await refusal(sealed(victim.database, victim.signer)) == "log-inconsistent"


async def _move_leaf(url: str, old: int, new: int) -> None:
    await as_superuser(
        url,
        f"UPDATE log_leaves SET index = index + 1000000 WHERE index >= {new}",
        f"UPDATE log_leaves SET index = {new} WHERE index = {old + 1000000}",
        f"UPDATE log_leaves SET index = index - 1000000 + CASE WHEN index - 1000000 < {old} THEN 1 ELSE 0 END"
        " WHERE index >= 1000000",
    )


async def test_attack_14_an_old_checkpoint_is_shown_as_the_current_one(victim: Victim) -> None:
    """Newer checkpoints are hidden: what they covered is left uncovered, and a kept one is larger."""
    first = (await rows(victim.url, "SELECT min(size) AS size FROM log_checkpoints"))[0]["size"]
    await as_superuser(victim.url, f"DELETE FROM log_checkpoints WHERE size > {first}")
    report = await victim.with_saved()
    assert report.faults == []
    assert report.uncovered == report.size - first > 0
    assert report.saved_sizes == [victim.kept.size]
    assert victim.kept.size > first
    # Freshness: all that is signed in the database is the old one, smaller than what the auditor kept.
    assert report.checkpoints == 1
    latest = await victim.database.write(lambda connection: log.latest_checkpoint(connection, TENANT))
    assert latest is not None
    assert (latest.size, latest.note != victim.kept.note) == (first, True)
    # With what it covered gone as well, it is the current one for all that the database says; the kept one tells.
    await cut_log(victim.url, first)
    assert "saved-checkpoint" not in codes(await victim.alone())
    assert "saved-checkpoint" in codes(await victim.with_saved())
    assert await refusal(victim.signer.sign(victim.database, TENANT)) == "log-shrank"


async def test_attack_14_checkpoints_that_were_hidden_come_back_from_the_signers_memory(victim: Victim) -> None:
    first = (await rows(victim.url, "SELECT min(size) AS size FROM log_checkpoints"))[0]["size"]
    await as_superuser(victim.url, f"DELETE FROM log_checkpoints WHERE size > {first}")
    assert (await victim.alone()).uncovered > 0
    # The signer still remembers, and gives the database back what it signed.
    assert (await sealed(victim.database, victim.signer)).note == victim.kept.note
    assert (await victim.alone()).uncovered == 0


async def test_attack_15_an_old_backup_is_restored_and_goes_on(victim: Victim) -> None:
    first = (await rows(victim.url, "SELECT min(size) AS size FROM log_checkpoints"))[0]["size"]
    await cut_log(victim.url, first)
    await runs_on_record(victim.database, 5)
    await log.extend_log(victim.database)
    assert await refusal(victim.signer.sign(victim.database, TENANT)) == "log-inconsistent"
    assert "saved-checkpoint" in codes(await victim.with_saved())


@pytest.mark.parametrize(
    ("statement", "code"),
    [
        ("UPDATE log_leaves SET leaf_hash = sha256('x') WHERE index = 5", "leaf-mismatch"),
        ("UPDATE log_nodes SET hash = sha256('x') WHERE level = 2 AND index = 1", "node-altered"),
        ("DELETE FROM log_nodes WHERE level = 1 AND index = 2", "node-missing"),
        ("INSERT INTO log_nodes VALUES ('{tenant}', 9, 0, sha256('x'))", "node-extra"),
        ("UPDATE log_checkpoints SET root = sha256('x')", "checkpoint-altered"),
        ("UPDATE log_checkpoints SET note = 'x'", "checkpoint-signature"),
        ("UPDATE ledger_heads SET seq = seq + 1 WHERE run_id = '{run}'", "head-mismatch"),
        ("DELETE FROM ledger_heads WHERE run_id = '{run}'", "head-missing"),
        ("UPDATE ledger_entries SET type = 'run.changed' WHERE run_id = '{run}' AND seq = 1", "row-mismatch"),
        ("UPDATE ledger_entries SET at = at - interval '1 day' WHERE run_id = '{run}' AND seq = 1", "row-mismatch"),
        ("UPDATE attempts SET accepted = false WHERE run_id = '{run}'", "row-mismatch"),
        ("UPDATE runs SET actor_id = actor_id, state = 'failed' WHERE id = '{run}'", "row-mismatch"),
        (
            "UPDATE log_leaves a SET seq = 700 - b.seq, index = a.index FROM log_leaves b WHERE a.index = b.index AND a.run_id = '{run}'",
            "leaf-missing",
        ),
        ("INSERT INTO ledger_pending SELECT tenant_id, run_id, seq FROM log_leaves WHERE index = 0", "leaf-twice"),
    ],
)
async def test_each_piece_of_the_log_is_looked_at(victim: Victim, statement: str, code: str) -> None:
    made = statement.replace("{tenant}", str(TENANT)).replace("{run}", str(victim.runs[0]))
    await as_superuser(victim.url, "SET LOCAL session_replication_role = replica", made)
    assert code in codes(await victim.alone())


async def test_an_entry_past_the_queue_is_seen(victim: Victim) -> None:
    await runs_on_record(victim.database)
    await as_superuser(victim.url, "DELETE FROM ledger_pending")
    assert codes(await victim.alone()) == {"leaf-missing"}


async def test_what_a_new_key_signs_is_believed_by_who_knows_either(victim: Victim) -> None:
    await victim.signer.rotate(victim.database, TENANT, actor_id="operator", on_behalf_of=None, overlap_days=0)
    await runs_on_record(victim.database)
    await sealed(victim.database, victim.signer)
    old, new = await keys_of(victim.database)
    for known in (old, new):
        assert (await check_log(victim.database, trusted=[known])).faults == []
    stranger = notes.verifier_of(Ed25519PrivateKey.generate(), ORIGIN)
    assert codes(await check_log(victim.database, trusted=[stranger])) == {"checkpoint-signature"}


async def test_faults_are_bounded_and_all_counted(victim: Victim) -> None:
    await runs_on_record(victim.database, 12)
    await as_superuser(victim.url, "UPDATE ledger_entries SET hash = sha256(hash)")
    report = await victim.alone()
    assert len(report.faults) == 100
    assert report.faults_count > 100


async def test_a_saved_checkpoint_that_is_none_is_a_fault(victim: Victim) -> None:
    forged = victim.kept.note.replace(b"\n" + str(victim.kept.size).encode(), b"\n1", 1)
    report = await check_log(victim.database, trusted=[victim.key], saved=[Saved(forged, "the file")])
    assert codes(report) == {"saved-checkpoint"}
    await execute(victim.url, "SELECT 1")
