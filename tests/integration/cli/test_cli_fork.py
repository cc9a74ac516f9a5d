"""Forks by the real command with a real keeper; only the models are stand-ins."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.podium_home import PodiumHome, interrupt
from tests.support.provider import Provider

pytestmark = pytest.mark.slow

PLAN = 'model_id = ["quick", "echo", "quick"]\nsubtasks = ["one", "two", "three"]\naccess_list = [[], [0], [0, 1]]\n'
KEYED = 'model_id = ["quick", "keyed"]\nsubtasks = ["one", "two"]\naccess_list = [[], [0]]\n'
KEY = {"STAND_IN_KEY": "sk-stand-in"}


@pytest.fixture(scope="module")
def home(session_provider: Provider) -> Iterator[PodiumHome]:
    with PodiumHome(session_provider.base_url) as made:
        yield made


@pytest.fixture(scope="module")
def source(home: PodiumHome) -> dict[str, Any]:
    done = home.run("What is a heron?", "--json", plan=PLAN)
    assert done.code == 0, done.err
    run: dict[str, Any] = done.json
    return run


def test_a_fork_shows_what_it_will_do_then_does_it_and_show_says_whose_it_is(
    home: PodiumHome, source: dict[str, Any], provider: Provider
) -> None:
    provider.script({"text": "Grey."}, model="quick")
    done = home.podium("fork", source["id"], "--step", "2", "--subtask", "The colour only.")
    assert done.code == 0, done.err
    # A pipe gets the answer and nothing else.
    assert done.out == "Grey.\n"
    lines = done.err.splitlines()
    first = lines.index(f"fork of run {source['id']} (succeeded)")
    assert lines[first + 3].split() == ["step", "worker", "does", "why", "reads", "one", "try", "at", "most"]
    assert lines[first + 4].split() == ["0", "quick", "reused", "-", "-", "-", "-"]
    assert lines[first + 6].startswith("   2  quick   runs    edited: subtask  0, 1   $0.")
    assert lines[first + 7].startswith("1 step to run, 2 reused; cost at most $0.")
    assert any("run created" in line or "run running" in line for line in lines[first + 8 :])
    assert provider.count == 1
    shown = home.podium("show", "last")
    assert f"\nforked from {source['id']}\n" in shown.out
    assert "plan    edited, form lists" in shown.out
    document = home.podium("show", "last", "--json").valid_json("run")
    assert document["forked_from"] == source["id"]
    assert [step["state"] for step in document["steps"]] == ["reused", "reused", "succeeded"]
    assert document["steps"][1]["output"] == source["steps"][1]["output"]
    assert home.podium("show", source["id"], "--json").valid_json("run") == {**source, "notes": document["notes"]}


def test_a_dry_run_only_shows_and_says_what_is_unknown(
    home: PodiumHome, source: dict[str, Any], provider: Provider
) -> None:
    runs = len(home.podium("list", "--json").json)
    edit = ["fork", source["id"][:13], "--step", "0", "--worker", "slow"]
    shown = home.podium(*edit, "--dry-run")
    assert shown.code == 0, shown.err
    assert shown.out.splitlines()[-1].startswith(
        "3 steps to run, 0 reused; cost unknown: no bound for echo (the other steps at most $0."
    )
    assert "reads 0" in shown.out
    found = home.podium(*edit, "--dry-run", "--json").valid_json("fork")
    assert [(step["fate"], step["why"], step["edited"]) for step in found["steps"]] == [
        ("run", "edited", ["worker"]),
        ("run", "input-changed", []),
        ("run", "input-changed", []),
    ]
    assert found["steps"][1]["worst_usd"] is None
    assert found["steps"][2]["changed_inputs"] == [0, 1]
    assert (found["once_usd"], found["worst_usd"], found["unpriced"]) == (None, None, ["echo"])
    assert found["plan_digest"] != source["plan_digest"]
    assert provider.count == 0
    assert len(home.podium("list", "--json").json) == runs


def test_json_is_the_new_run_and_detach_prints_its_id(
    home: PodiumHome, source: dict[str, Any], provider: Provider
) -> None:
    (home.folder / "brief.txt").write_text("@ from a file\n")
    edit = ["fork", source["id"], "--step", "1", "--subtask", "@brief.txt", "--access", "none"]
    run = home.podium(*edit, "--json").valid_json("run")
    assert (run["state"], run["forked_from"]) == ("succeeded", source["id"])
    assert [step["access"] for step in run["steps"]] == [[], [], [0, 1]]
    assert [request["model"] for request in provider.requests] == ["echo", "quick"]
    assert "@ from a file" in json.dumps(provider.requests[0]["body"])
    left = home.podium("fork", run["id"], "--step", "2", "--subtask", "@@home", "--detach")
    assert left.code == 0
    assert "detached" in left.err
    watched = home.podium("watch", left.out.strip(), "--json").valid_json("run")
    assert (watched["state"], watched["forked_from"]) == ("succeeded", run["id"])
    assert "@home" in json.dumps(provider.requests[-1]["body"])


def test_a_fork_that_makes_no_sense_is_refused_and_nothing_is_made(
    home: PodiumHome, source: dict[str, Any], provider: Provider
) -> None:
    runs = home.podium("list", "--json").json
    refusals = {
        "nothing-to-run": (1, []),
        "step-unknown": (2, ["--step", "3", "--worker", "slow"]),
        "worker-unknown": (2, ["--step", "1", "--worker", "nobody"]),
        "access-later": (2, ["--step", "1", "--access", "2"]),
        "edit-changes-nothing": (2, ["--step", "1", "--worker", "echo"]),
    }
    for code, (exit_code, arguments) in refusals.items():
        done = home.podium("fork", source["id"], *arguments, "--json")
        assert (done.code, done.error_code) == (exit_code, code)
        assert done.json["error"]["hint"]
        assert done.err.splitlines()[-2].startswith("error: ")
    assert home.podium("list", "--json").json == runs
    assert provider.count == 0


def test_keys_are_needed_only_for_what_runs(home: PodiumHome, provider: Provider) -> None:
    done = home.run("Go.", "--json", plan=KEYED, env=KEY)
    assert done.code == 0, done.err
    run_id = done.json["id"]
    missing = home.podium("fork", run_id, "--step", "1", "--subtask", "More.", "--json")
    assert (missing.code, missing.error_code) == (2, "key-missing")
    done = home.podium("fork", run_id, "--step", "1", "--worker", "quick", "--json")
    assert done.valid_json("run")["state"] == "succeeded"


def test_ctrl_c_leaves_the_fork_going_on(home: PodiumHome, source: dict[str, Any], provider: Provider) -> None:
    provider.script({"delay_first_s": 4})
    process = home.start("fork", source["id"], "--step", "2", "--worker", "slow")
    provider.wait_for(1, timeout_s=60)
    interrupt(process, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert "detached: run" in err
    assert home.podium("watch", "last", "--json").json["forked_from"] == source["id"]
