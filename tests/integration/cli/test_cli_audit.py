"""An auditor's way with the real command: export, verify with nothing at hand, tamper, ask; and who read what."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from engine.verifier.archive import open_archive
from tests.support.command import CHECKOUT, Done
from tests.support.podium_home import PodiumHome
from tests.support.provider import Provider
from tests.unit.verifier.test_verifier_alone import DENIED

TWO = 'model_id = ["quick", "echo"]\nsubtasks = ["first", "second"]\naccess_list = [[], [0]]\n'


@pytest.fixture(scope="module")
def home(session_provider: Provider) -> Iterator[PodiumHome]:
    with PodiumHome(session_provider.base_url) as made:
        yield made


@pytest.fixture(scope="module")
def run_id(home: PodiumHome, session_provider: Provider) -> str:
    session_provider.reset()
    session_provider.script({"text": "The canary sings."}, model="quick")
    done = home.run("What does it do?", "--json", plan=TWO)
    assert done.code == 0, done.err
    return str(done.json["id"])


@pytest.fixture(scope="module")
def trust(home: PodiumHome) -> Path:
    done = home.podium("audit", "key")
    assert done.code == 0, done.err
    path = home.folder / "key.txt"
    path.write_bytes(done.out_bytes)
    return path


@pytest.fixture(scope="module")
def bundle(home: PodiumHome, run_id: str) -> Path:
    path = home.folder / "bundle.zip"
    done = home.podium("audit", "export", run_id[:13], "-o", str(path), "--json")
    assert done.code == 0, done.err
    said = done.valid_json("audit-export")
    assert (said["runs"], said["unanchored"], said["bytes"]) == ([run_id], 0, path.stat().st_size)
    return path


@cache
def without_network() -> tuple[str, ...]:
    """The beginning of a command line that has no network at all; nothing where the kernel lets nobody do that."""
    command = ("unshare", "-rn")
    if shutil.which("unshare") is None:
        return ()
    return command if subprocess.run([*command, "true"], check=False, capture_output=True).returncode == 0 else ()


def offline(folder: Path, bundle: Path, trust: Path, *more: str) -> Done:
    """The verifier as an auditor runs it: an isolated interpreter in an empty folder, no network, no database.

    In any case an audit hook denies it sockets, other processes and writing, and checks that sockets are denied.
    """
    archive = folder / "podium-verify.pyz"
    if not archive.exists():
        command = [sys.executable, "-m", "engine.verifier.build", "-o", str(archive)]
        subprocess.run(command, cwd=CHECKOUT, check=True, capture_output=True)
    done = subprocess.run(
        [*without_network(), sys.executable, "-I", "-c", DENIED, str(archive), str(bundle), "--trust", str(trust), *more],
        cwd=folder, env={"PATH": os.environ["PATH"]}, capture_output=True, check=False,
    )  # fmt: skip
    return Done(done.returncode, done.stdout, done.stderr.decode())


def test_a_bundle_verifies_with_the_command_and_with_the_archive_alone(
    home: PodiumHome, bundle: Path, trust: Path, run_id: str, tmp_path: Path
) -> None:
    done = home.podium("audit", "verify", str(bundle), "--trust", str(trust), "--json")
    assert done.code == 0, done.out + done.err
    said = done.valid_json("audit-verify")
    assert (said["verdict"], [run["run"] for run in said["runs"]]) == ("valid", [run_id])
    assert said["runs"][0]["prompts_rendered"] == 2
    alone = offline(tmp_path, bundle, trust, "--json")
    assert alone.code == 0, alone.out + alone.err
    assert alone.json == {name: value for name, value in said.items() if name != "schema_version"}
    people = home.podium("audit", "verify", str(bundle), "--trust", str(trust))
    assert people.out.startswith("VALID\n")
    assert "Not proven:" in people.out


def test_a_bundle_that_was_tampered_with_fails_with_a_reason(
    home: PodiumHome, bundle: Path, trust: Path, tmp_path: Path
) -> None:
    data = bytearray(bundle.read_bytes())
    data[len(data) // 2] ^= 1
    changed = tmp_path / "changed.zip"
    changed.write_bytes(data)
    for done in (
        home.podium("audit", "verify", str(changed), "--trust", str(trust)),
        offline(tmp_path, changed, trust),
    ):
        assert done.code == 1
        assert done.out.startswith("INVALID\n")
        assert "digest" in done.out
        assert "Traceback" not in done.err


def test_who_saw_the_output_of_step_0_is_answered_from_the_bundle(
    home: PodiumHome, bundle: Path, trust: Path, run_id: str
) -> None:
    question = ("--who-saw", run_id, "0", "--who-approved", run_id, "1")
    done = home.podium("audit", "verify", str(bundle), "--trust", str(trust), *question, "--json")
    approved, saw = done.valid_json("audit-verify")["answers"]
    assert approved["reviews"] == []
    assert [(call["worker"], call["step"]) for call in saw["calls"]] == [("echo", 1)]
    assert {"worker": "slow", "model": "sleep-400ms"} in saw["never_shown"]


def test_a_redacted_bundle_says_so_and_gives_3(home: PodiumHome, run_id: str, trust: Path) -> None:
    path = home.folder / "redacted.zip"
    done = home.podium("audit", "export", run_id, "-o", str(path), "--redact", "output@0", "--redact", "output@1")
    assert done.code == 0, done.err
    assert "2 texts withheld" in done.out
    archive = open_archive(path.read_bytes())
    assert not any(b"canary" in archive.read(name) for name in archive.names)
    checked = home.podium("audit", "verify", str(path), "--trust", str(trust))
    assert checked.code == 3
    assert "withheld by order" in checked.out


@pytest.mark.slow
def test_the_log_tells_what_happened_in_words(home: PodiumHome, run_id: str, bundle: Path) -> None:
    done = home.podium("audit", "log", run_id, "--json")
    assert done.code == 0, done.err
    said = done.valid_json("audit-log")
    types = [entry["type"] for entry in said["entries"]]
    assert types[:2] == ["run.created", "plan.accepted"]
    assert "run.exported" in types
    assert [entry["seq"] for entry in said["entries"]] == list(range(1, len(types) + 1))
    people = home.podium("audit", "log", run_id)
    assert people.code == 0
    for words in ("run created, with a plan from a file", "step 1: attempt 1 sent to echo", "accepted", "exported"):
        assert words in people.out
    assert "canary" not in people.out
    below = home.podium("audit", "log", run_id, "--below")
    # Nothing is below it, so it is the same with a column in front.
    assert [line.split() for line in below.out.splitlines()[1:]] == [
        line.split() for line in people.out.splitlines()[1:]
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["export", "last", "-o", "missing/bundle.zip"], 2, "file-unwritable"),
        (["export", "last", "-o", "b.zip", "--redact", "everything"], 2, "redaction-invalid"),
        (["export", "last", "-o", "b.zip", "--redact", "00000000-0000-7000-8000-000000000001"], 2, "redaction-unknown"),
        (["export", "0000000000", "-o", "b.zip"], 2, "run-unknown"),
        (["export", "last", "-o", "b.zip", "--since", "pool.yaml"], 2, "checkpoint-unreadable"),
        (["verify"], 2, "usage"),
        (["verify", "pool.yaml"], 2, "trust-missing"),
        (["verify", "nothing.zip", "--trust", "pool.yaml"], 2, "usage"),
        (["log", "0000000000"], 2, "run-unknown"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(
    home: PodiumHome, run_id: str, arguments: list[str], code: int, error: str
) -> None:
    done = home.podium("audit", *arguments, "--json")
    assert (done.code, done.error_code) == (code, error), done.err
    assert not (home.folder / "b.zip").exists()
    assert [path.name for path in home.folder.iterdir() if path.name.endswith(".part")] == []


def test_a_file_that_is_no_bundle_is_invalid(home: PodiumHome, trust: Path) -> None:
    done = home.podium("audit", "verify", "pool.yaml", "--trust", str(trust))
    assert done.code == 1
    assert "not a bundle" in done.out


@pytest.mark.slow
def test_a_pool_can_ask_that_reads_are_recorded(home: PodiumHome, provider: Provider) -> None:
    pool = (home.folder / "pool.yaml").read_text()
    (home.folder / "watched.yaml").write_text(pool.replace("{steps_max: 8}", "{steps_max: 8, reads: required}"))
    done = home.run("What does it do?", "--pool", "watched.yaml", "--json", plan=TWO)
    assert done.code == 0, done.err
    run_id = done.json["id"]
    assert home.podium("output", run_id, "--step", "0", env={"PODIUM_ACTOR": "anna"}).code == 0
    assert home.podium("show", run_id, env={"PODIUM_ACTOR": "berta"}).code == 0
    entries = home.podium("audit", "log", run_id, "--json").valid_json("audit-log")["entries"]
    reads = [(entry["actor"], entry["text"]) for entry in entries if entry["type"] == "artifact.read"]
    assert [actor for actor, _ in reads] == [f"uid-{os.getuid()}", "anna", "berta"]
    assert reads[1][1] == "read 1 stored text (podium output)"
    # So far nobody has written anything that the log shows.
    review = home.podium("review", "request", run_id, "--json").json["id"]
    assert home.podium("review", "comment", review, "As in the ticket.", env={"PODIUM_ACTOR": "anna"}).code == 0
    shown = home.podium("audit", "log", run_id, env={"PODIUM_ACTOR": "carla"})
    assert "comment: As in the ticket." in shown.out
    entries = home.podium("audit", "log", run_id, "--json").json["entries"]
    (read,) = [entry for entry in entries if entry["type"] == "artifact.read" and entry["actor"] == "carla"]
    assert read["text"] == "read 1 stored text (podium audit log)"


@pytest.mark.slow
def test_reads_are_not_recorded_unless_a_pool_asks(home: PodiumHome, run_id: str) -> None:
    assert home.podium("output", run_id).code == 0
    entries = home.podium("audit", "log", run_id, "--json").json["entries"]
    assert [entry for entry in entries if entry["type"] == "artifact.read"] == []


def test_the_overview_of_the_group_is_quick(home: PodiumHome) -> None:
    began = time.monotonic()
    done = home.podium("audit", "--help")
    took_s = time.monotonic() - began
    assert done.code == 0
    assert [name for name in ("export", "verify", "log", "checkpoint", "key") if name not in done.out] == []
    # As `podium --help`, with room for a busy machine.
    assert took_s < 2
