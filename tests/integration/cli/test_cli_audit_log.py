"""`podium audit checkpoint | key | verify --database` as a user types them, against the embedded servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.verifier import checkpoint as formats
from engine.verifier import note as notes
from tests.support.podium_home import PodiumHome
from tests.support.provider import Provider

# Each of them starts servers of its own.
pytestmark = pytest.mark.slow

PLAN = "model_id = [0]\nsubtasks = ['Go.']\naccess_list = [[]]\n"


@pytest.fixture(scope="module")
def home(session_provider: Provider) -> Iterator[PodiumHome]:
    with PodiumHome(session_provider.base_url) as found:
        assert found.run("What is gravity?", plan=PLAN).code == 0
        yield found


def test_nothing_is_made_to_look_at_nothing(tmp_path: Path, session_provider: Provider) -> None:
    with PodiumHome(session_provider.base_url) as empty:
        for command in (("checkpoint",), ("key",), ("verify", "--database")):
            done = empty.podium("audit", *command)
            assert (done.code, done.out) == (2, "")
            assert "there is no record yet" in done.err
        assert not empty.home.exists()


def test_a_checkpoint_is_printed_kept_and_opened_by_the_printed_key(home: PodiumHome) -> None:
    done = home.podium("audit", "checkpoint")
    assert done.code == 0, done.err
    key = home.podium("audit", "key")
    assert key.code == 0
    signed = formats.open_checkpoint(done.out_bytes, notes.parse_keys(key.out_bytes))
    assert signed.checkpoint.size >= 6
    found = home.podium("audit", "checkpoint", "--json", "-o", "kept.txt").valid_json("audit-checkpoint")
    assert (home.folder / "kept.txt").read_bytes() == found["note"].encode()
    assert (
        found["size"]
        == formats.open_checkpoint(found["note"].encode(), notes.parse_keys(key.out_bytes)).checkpoint.size
    )
    assert home.podium("audit", "key", "--json").valid_json("audit-key")["history"][0]["replaces"] is None


def test_the_whole_log_is_valid_and_an_edit_is_found(home: PodiumHome) -> None:
    assert home.podium("audit", "key", "-o", "trust.txt").code == 0
    assert home.podium("audit", "checkpoint", "-o", "before.txt").code == 0
    done = home.podium("audit", "verify", "--database", "--trust", "trust.txt", "--checkpoint", "before.txt", "--json")
    found = done.valid_json("audit-verify-database")
    assert (done.code, found["valid"], found["faults"], found["pinned"]) == (0, True, [], True)
    assert len(found["saved"]) == 2
    assert found["entries"] == found["leaves"] > 6
    (home.folder / "wrong.txt").write_text("podium/x+00000000+AAAA\n")
    done = home.podium("audit", "verify", "--database", "--trust", "wrong.txt")
    assert (done.code, done.out) == (2, "")
    other = notes.Verifier(f"podium/{'0' * 8}-0000-0000-0000-{'1'.zfill(12)}", bytes(range(32)))
    (home.folder / "other.txt").write_text(f"{other}\n")
    done = home.podium("audit", "verify", "--database", "--trust", "other.txt")
    assert done.code == 1
    assert "checkpoint-signature: " in done.out
    assert "INVALID" in done.out


def test_a_run_after_the_checkpoint_is_not_covered_until_the_next(home: PodiumHome) -> None:
    assert home.run("Again?", plan=PLAN).code == 0
    done = home.podium("audit", "verify", "--database")
    assert "INVALID" not in done.out
    # The worker signs by itself, so it may have been quicker; the code and the words say the same.
    assert done.code == (3 if "not covered by a signed checkpoint yet: " in done.out else 0), done.out
    left = home.podium("audit", "verify", "--database", "--json")
    said = left.valid_json("audit-verify-database")
    assert left.code == (3 if said["waiting"] + said["uncovered"] else 0), said
    assert home.podium("audit", "checkpoint").code == 0
    done = home.podium("audit", "verify", "--database")
    assert done.code == 0, done.out
    assert "keys: those of the signer here" in done.out
    assert "compared with a checkpoint from outside the database, the signer's own memory" in done.out
    assert "not proven: that nothing was cut off" in done.out
    assert "not proven: that the stored texts are those that the entries commit to" in done.out
    (home.folder / "kept.txt").write_bytes(home.podium("audit", "checkpoint").out_bytes)
    done = home.podium("audit", "verify", "--database", "--checkpoint", "kept.txt")
    assert "database, yours (--checkpoint): " in done.out
    assert "nothing was cut off" not in done.out
    (home.folder / "no.txt").write_text("not one\n")
    done = home.podium("audit", "verify", "--database", "--checkpoint", "no.txt")
    assert (done.code, "is not a checkpoint" in done.err) == (2, True)


def test_a_rotated_key_is_introduced_by_the_old_one(home: PodiumHome) -> None:
    old = notes.parse_keys(home.podium("audit", "key").out_bytes)
    done = home.podium("audit", "key", "--rotate", "--json")
    found = done.valid_json("audit-key")
    assert [row["replaces"] for row in found["history"]] == [None, str(old[0])]
    signed = home.podium("audit", "checkpoint").out_bytes
    assert formats.open_checkpoint(signed, old).checkpoint.size
    assert formats.open_checkpoint(signed, [notes.parse_key(found["key"])]).checkpoint.size
    assert home.podium("audit", "verify", "--database").code == 0
    refused = home.podium("audit", "checkpoint", "--after-restore", "--json")
    assert (refused.code, refused.error_code) == (1, "nothing-restored")


def test_the_embedded_worker_signs_by_itself_and_anchors(home: PodiumHome) -> None:
    anchors = home.home / "audit" / "anchors"
    kept = list(anchors.rglob("*.checkpoint"))
    assert kept
    assert all(path.stat().st_mode & 0o777 == 0o444 for path in kept)
    assert (home.home / "audit").stat().st_mode & 0o777 == 0o700


def test_doctor_says_that_append_only_is_in_force_and_that_the_log_is_signed(home: PodiumHome) -> None:
    found = {check["name"]: check for check in home.podium("doctor", "--json").valid_json("doctor")["checks"]}
    assert found["append-only"]["status"] == "ok"
    assert found["log"]["status"] == "ok"
    assert "under the checkpoint of" in found["log"]["text"]


def test_doctor_says_that_the_signer_has_lost_its_memory(home: PodiumHome) -> None:
    (memory,) = (home.home / "audit" / "memory").iterdir()
    aside = home.folder / "aside"
    memory.rename(aside)
    try:
        done = home.podium("doctor", "--json")
        found = {check["name"]: check for check in done.valid_json("doctor")["checks"]}
        assert (done.code, found["log"]["status"]) == (5, "fail")
        assert "remembers none" in found["log"]["text"]
        assert "--after-restore" in found["log"]["hint"]
        assert home.podium("audit", "checkpoint", "--json").error_code == "signer-memory-missing"
    finally:
        aside.rename(memory)
    found = {check["name"]: check for check in home.podium("doctor", "--json").valid_json("doctor")["checks"]}
    assert (found["log"]["status"], found["reviews"]["status"]) == ("ok", "ok")
