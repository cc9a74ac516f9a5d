"""Erasing, holds and retention by the real command with a real keeper; only the models are stand-ins."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.command import Done
from tests.support.podium_home import PodiumHome
from tests.support.provider import Provider

pytestmark = pytest.mark.slow

PLAN = 'model_id = ["quick", "echo"]\nsubtasks = ["Say it first.", "Say it again."]\naccess_list = [[], [0]]\n'
WORD = "kanarie-on-the-command-line"
BASIS = "GDPR Art. 17(1)(b), ticket 4711"


@pytest.fixture(scope="module")
def home(session_provider: Provider) -> Iterator[PodiumHome]:
    with PodiumHome(session_provider.base_url) as made:
        hanging = (made.folder / "pool.yaml").read_text().replace("sleep-400ms", "sleep-60000ms")
        (made.folder / "hanging.yaml").write_text(hanging)
        yield made


def as_actor(home: PodiumHome, actor: str, *arguments: str) -> Done:
    return home.podium(*arguments, env={"PODIUM_ACTOR": actor})


def made(home: PodiumHome, provider: Provider, task: str = f"Say {WORD} to a child, and then once more.") -> str:
    provider.script({"text": f"The first answer has {WORD} in it."}, model="quick")
    done = home.run(task, "--json", plan=PLAN)
    assert done.code == 0, done.err
    return str(done.json["id"])


def keys_of(home: PodiumHome) -> list[str]:
    return [path.name for path in (home.home / "keys" / "runs").rglob("*") if path.is_file()]


def test_a_run_is_erased_and_every_command_says_so(home: PodiumHome, provider: Provider) -> None:
    run = made(home, provider)
    assert run in keys_of(home)
    preview = home.podium("erase", run, "--basis", BASIS, "--dry-run", "--json").valid_json("erase")
    assert (preview["erasure"], preview["scope"]) == (None, "run")
    assert home.podium("output", run).code == 0
    done = as_actor(home, "officer", "erase", run, "--basis", BASIS, "--reason", "They asked.", "--json")
    assert done.code == 0, done.err
    erased = done.valid_json("erase")
    assert erased["erased"] == preview["erased"]
    assert erased["in_the_clear"] == []
    for arguments in (("output", run), ("output", run, "--step", "0")):
        gone = home.podium(*arguments, "--json")
        assert (gone.code, gone.error_code) == (1, "text-erased")
    shown = home.podium("show", run)
    assert "task    (erased)" in shown.out
    assert "erased  " in shown.out
    assert WORD not in shown.out
    told = home.podium("show", run, "--json").valid_json("run")
    assert (told["answer"], told["state"]) == (None, "succeeded")
    assert {"task", "output"} <= set(told["erased"])
    assert [step["erased"] for step in told["steps"]] == [True, True]
    listed = {line["id"]: line for line in home.podium("list", "--json").json}
    assert listed[run]["task_preview"] == "(erased)"
    for arguments in (("fork", run, "--step", "1", "--worker", "quick"), ("erase", run, "--basis", BASIS)):
        refused = home.podium(*arguments, "--json")
        assert refused.code == 1, refused.out_bytes
        assert refused.error_code in {"text-erased", "nothing-to-erase"}


def test_a_bundle_says_what_is_gone_and_stays_valid(home: PodiumHome, provider: Provider) -> None:
    run = made(home, provider)
    trust, before, after = (home.folder / name for name in ("key.txt", "before.zip", "after.zip"))
    trust.write_bytes(home.podium("audit", "key").out_bytes)
    assert home.podium("audit", "export", run, "-o", str(before)).code == 0
    assert home.podium("erase", run, "--basis", BASIS).code == 0
    assert home.podium("audit", "export", run, "-o", str(after)).code == 0
    verdict = home.podium("audit", "verify", str(after), "--trust", str(trust), "--json")
    assert verdict.code == 4, verdict.out_bytes + verdict.err.encode()
    # What was exported before is the auditor's own copy, and as valid as it was.
    older = home.podium("audit", "verify", str(before), "--trust", str(trust), "--json")
    # The checkpoint was signed at the export, so nothing of it is left uncovered.
    said = older.valid_json("audit-verify")
    assert (older.code, said["verdict"], said["erased"]) == (0, "valid", []), older.out_bytes
    whole = home.podium("audit", "verify", "--database", "--trust", str(trust), "--json").valid_json(
        "audit-verify-database"
    )
    assert (whole["valid"], whole["faults"]) == (True, [])
    with zipfile.ZipFile(after) as archive:
        listed = {row["kind"]: row["state"] for row in json.loads(archive.read("artifacts.json"))["artifacts"]}
        content = b"".join(archive.read(name) for name in archive.namelist())
    assert (listed["task"], listed["output"], listed["basis"]) == ("erased", "erased", "disclosed")
    assert WORD.encode() not in content
    assert BASIS.encode() in content
    with zipfile.ZipFile(after) as archive:
        assert BASIS in archive.read("index.html").decode()


def test_a_step_and_an_artifact(home: PodiumHome, provider: Provider) -> None:
    run = made(home, provider)
    order = ("erase", run, "--step", "0", "--basis", BASIS, "--copies", "keep")
    preview = home.podium(*order, "--dry-run", "--json").valid_json("erase")
    texts = [(one["kind"], one["step"]) for one in preview["texts"]]
    assert {("output", 0), ("subtask", 0), ("subtask", 1), ("plan", None)} <= set(texts)
    assert ("output", 1) not in texts
    assert [one["artifact"] for one in sorted(preview["texts"], key=lambda one: str(one["artifact"]))] == preview[
        "erased"
    ][0]["artifacts"]
    done = home.podium(*order, "--reason", "They asked.")
    assert done.code == 0, done.err
    for words in ("output of step 0", "subtask of steps 0-1", "plan", "2 prompt manifests"):
        assert words in done.out
    assert "only you can tell" in done.out
    log = home.podium("audit", "log", run).out
    assert f"basis: {BASIS}" in log
    assert "reason: They asked." in log
    assert home.podium("output", run, "--step", "0", "--json").error_code == "text-erased"
    assert home.podium("output", run).code == 0
    for arguments, code in (
        (("--step", "9"), "step-unknown"),
        (("--artifact", "nonsense"), "artifact-unknown"),
        (("--round", "0"), "step-missing"),
    ):
        refused = home.podium("erase", run, *arguments, "--basis", BASIS, "--json")
        assert (refused.code, refused.error_code) == (2, code)
    assert home.podium("erase", run, "--basis", " ", "--json").error_code == "basis-missing"
    assert home.podium("erase", run, "--json").code == 2


def test_a_run_that_goes_on_is_not_erased(home: PodiumHome) -> None:
    (home.folder / "one.txt").write_text('model_id = ["slow"]\nsubtasks = ["x"]\naccess_list = [[]]\n')
    started = home.podium("run", "Wait.", "--pool", "./hanging.yaml", "--plan", "one.txt", "--detach")
    run = started.out.strip()
    refused = home.podium("erase", run, "--basis", BASIS, "--json")
    assert (refused.code, refused.error_code) == (1, "run-live")
    preview = home.podium("erase", run, "--basis", BASIS, "--dry-run", "--json").valid_json("erase")
    assert preview["live"] == [run]
    assert home.podium("cancel", run).code in {0, 4}
    assert home.podium("erase", run, "--basis", BASIS).code == 0


def test_a_hold_keeps_texts_and_takes_two_people_to_release(home: PodiumHome, provider: Provider) -> None:
    run = made(home, provider)
    placed = as_actor(home, "counsel", "hold", "add", "2026-0042", run, "--reason", "Doe v. Acme", "--json")
    assert placed.code == 0, placed.err
    assert placed.valid_json("hold")["runs"] == [run]
    refused = home.podium("erase", run, "--basis", BASIS, "--json")
    assert (refused.code, refused.error_code) == (1, "run-held")
    before = len(home.podium("audit", "log", run, "--json").valid_json("audit-log")["entries"])
    preview = home.podium("erase", run, "--basis", BASIS, "--dry-run", "--json")
    assert (preview.code, preview.error_code) == (1, "run-held")
    log = home.podium("audit", "log", run, "--json").valid_json("audit-log")["entries"]
    assert len(log) == before
    assert [(one["kind"], one["text"]) for one in log[-1]["said"]] == [("basis", BASIS)]
    assert home.podium("output", run).code == 0
    asked = as_actor(home, "ada", "hold", "release", "2026-0042", "--reason", "settled", "--json")
    assert (asked.code, asked.valid_json("hold")["state"]) == (3, "asked")
    again = as_actor(home, "ada", "hold", "release", "2026-0042", "--reason", "settled", "--json")
    assert (again.code, again.error_code) == (1, "second-person-needed")
    views: list[dict[str, Any]] = home.podium("hold", "list", "--json").valid_json("hold-list")
    assert [view["release_asked_by"] for view in views] == ["ada"]
    assert "ada asks for its release" in home.podium("hold", "list").out
    released = as_actor(home, "bob", "hold", "release", "2026-0042", "--reason", "settled")
    assert released.code == 0, released.err
    assert home.podium("erase", run, "--basis", BASIS).code == 0
    assert home.podium("hold", "list").err.strip() == "nothing is held"
    bad = home.podium("hold", "add", "Doe v. Acme", run, "--reason", "x", "--json")
    assert (bad.code, bad.error_code) == (2, "matter-invalid")


def test_retention_by_hand(home: PodiumHome) -> None:
    due = home.podium("retention", "sweep", "--dry-run", "--json", env={"PODIUM_RETENTION_DAYS": "30"})
    assert due.valid_json("retention")["due"] == []
    assert home.podium("retention", "sweep", env={"PODIUM_RETENTION_DAYS": "30"}).out.strip() == "nothing is due"
    bad = home.podium("retention", "sweep", "--json", env={"PODIUM_RETENTION_DAYS": "0"})
    assert (bad.code, bad.error_code) == (2, "setting-invalid")
    for days in ("0", "abc", "-1"):
        told = home.podium("retention", "sweep", "--dry-run", env={"PODIUM_RETENTION_DAYS": days})
        assert "hint: PODIUM_RETENTION_DAYS=365" in told.err
    lost = home.podium("audit", "key", "-o", str(home.folder / "nowhere" / "k"))
    assert lost.code == 2
    assert "hint: name a file in a folder" in lost.err


def test_a_fork_needs_only_what_it_takes_over(home: PodiumHome, provider: Provider) -> None:
    run = made(home, provider)
    entries = home.podium("audit", "log", run, "--json").valid_json("audit-log")["entries"]
    task = entries[0]["artifacts"][0]
    done = home.podium("erase", run, "--artifact", task, "--basis", BASIS, "--copies", "keep")
    assert done.code == 0, done.err
    assert ": task, " in done.out
    refused = home.podium("fork", run, "--step", "1", "--worker", "quick")
    assert refused.code == 1
    assert "the task of run" in refused.err
    forked = home.podium("fork", run, "--task", "Say something else.", "--json")
    assert forked.code == 0, forked.err
    assert forked.json["state"] == "succeeded"


def test_a_key_store_that_is_away_is_said_and_nothing_is_lost(home: PodiumHome, provider: Provider) -> None:
    run = made(home, provider)
    found = {check["name"]: check for check in home.podium("doctor", "--json").valid_json("doctor")["checks"]}
    assert found["key store"]["status"] == "ok"
    (key,) = [path for path in (home.home / "keys").rglob(run) if path.is_file()]
    shutil.move(key, home.folder / "away")
    shown = home.podium("show", run, "--json")
    assert (shown.code, shown.error_code) == (5, "text-key-missing")
    assert home.podium("list").code == 0
    done = home.podium("doctor", "--json")
    assert done.code == 5
    found = {check["name"]: check for check in done.json["checks"]}
    assert found["key store"]["status"] == "fail"
    assert run in found["key store"]["text"]
    shutil.move(home.folder / "away", key)
    assert home.podium("show", run, "--json").code == 0
    other = home.podium("list", "--json", env={"PODIUM_KEY_STORE": (home.folder / "other").as_uri()})
    assert (other.code, other.error_code) == (5, "key-store-other")
    assert json.loads((home.home / "keys" / "store.json").read_text())["format"] == 1
