"""Operators' answers and budgets by the real command with a real keeper; only the models are stand-ins."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.command import PODIUM, environment
from tests.support.podium_home import POOL, PRICE, PodiumHome
from tests.support.provider import Provider

pytestmark = pytest.mark.slow

PLAN = 'model_id = ["echo", "quick", "echo"]\nsubtasks = ["one", "two", "three"]\naccess_list = [[], [0], [0, 1]]\n'
QUICK = 'model_id = ["quick", "quick"]\nsubtasks = ["one", "two"]\naccess_list = [[], [0]]\n'
BAD_KEY = {"status": 401, "body": {"error": {"message": "no such key"}}}


@pytest.fixture(scope="module")
def home(session_provider: Provider) -> Iterator[PodiumHome]:
    with PodiumHome(session_provider.base_url) as made:
        text = POOL.format(url=session_provider.base_url, price=PRICE)
        (made.folder / "waiting.yaml").write_text(text.replace("steps_max: 8", "steps_max: 8, on_failed_step: wait"))
        priced = text.replace('"echo",', '"echo", ').replace("model: echo}", f"model: echo, price: {PRICE}}}")
        (made.folder / "priced.yaml").write_text(
            priced.replace("{env: STAND_IN_KEY}", "{env: STAND_IN_KEY}, price: " + PRICE)
        )
        yield made


def stopped(home: PodiumHome, provider: Provider, *options: str) -> dict[str, Any]:
    """A run whose step 1 waits for an operator, as `run --json` prints it."""
    provider.script(BAD_KEY, model="quick")
    (home.folder / "plan.txt").write_text(PLAN)
    done = home.podium("run", "Go.", "--pool", "./waiting.yaml", "--plan", "plan.txt", "--json", *options)
    assert done.code == 3, done.err
    run: dict[str, Any] = done.valid_json("run")
    assert (run["state"], run["reason"]) == ("waiting", "operator")
    return run


def test_a_run_that_waits_ends_the_command_with_3_and_says_what_to_do(home: PodiumHome, provider: Provider) -> None:
    run = stopped(home, provider)
    step = run["steps"][1]
    assert (step["state"], step["reason"]) == ("waiting", "operator")
    assert step["waiting_since"] == step["attempts"][0]["ended_at"]
    assert run["waiting_since"] == step["waiting_since"]
    watched = home.podium("watch", run["id"])
    assert watched.code == 3
    lines = watched.err.splitlines()
    assert lines[-3] == f"run {run['id']} waiting: operator"
    assert lines[-2].startswith("step 1 (quick) waits for an operator for ")
    # Why, in the words of `show`.
    assert ": auth-failed (401): " in lines[-2]
    assert lines[-2].partition(": ")[2] in home.podium("show", run["id"]).out
    place = f"{run['id']} --step 1"
    assert lines[-1] == (
        f"hint: `podium retry {place} [--worker NAME]`, `podium skip {place}` or `podium abort {place}`"
    )
    shown = home.podium("show", run["id"]).out
    assert "\nwaits   step 1 (quick) waits for an operator for " in shown
    assert f"\nhint    `podium retry {place}" in shown
    done = home.podium("retry", run["id"], "--reason", "the key is back", "--json")
    assert done.code == 0, done.err
    answer = done.valid_json("answer")
    assert (answer["order"], answer["step"], answer["worker"], answer["delivered"]) == ("retry", 1, "quick", True)
    assert home.podium("watch", run["id"], "--json").valid_json("run")["state"] == "succeeded"


def test_another_worker_a_skip_and_an_abort(home: PodiumHome, provider: Provider) -> None:
    run = stopped(home, provider)
    done = home.podium("retry", run["id"], "--step", "1", "--worker", "slow")
    assert (done.code, done.out) == (0, f"step 1 of run {run['id']} is tried again by worker slow\n")
    assert home.podium("watch", run["id"], "--json").json["steps"][1]["worker"] == "slow"
    run = stopped(home, provider)
    done = home.podium("skip", "last")
    assert done.out == f"step 1 of run {run['id']} is left out; steps that may read it see nothing of it\n"
    ended = home.podium("watch", "last", "--json").valid_json("run")
    assert (ended["state"], ended["steps"][1]["state"]) == ("succeeded", "skipped")
    run = stopped(home, provider)
    done = home.podium("abort", run["id"], "--reason", "not worth it")
    assert (done.code, done.out) == (0, f"step 1 of run {run['id']} is given up, and the run fails\n")
    watched = home.podium("watch", run["id"], "--json")
    assert (watched.code, watched.json["state"], watched.json["reason"]) == (1, "failed", "aborted")


@pytest.mark.parametrize("command", ["retry", "skip", "abort"])
def test_an_answer_that_nobody_waits_for_is_refused_in_one_line(
    home: PodiumHome, provider: Provider, command: str
) -> None:
    run = home.run("Go.", "--json", plan=QUICK).json
    done = home.podium(command, run["id"], "--json")
    assert (done.code, done.error_code) == (1, "run-ended")
    assert done.json["error"]["hint"]
    live = stopped(home, provider)
    cases = {("--step", "0"): (1, "step-not-waiting"), ("--step", "9"): (2, "step-unknown")}
    for arguments, expected in cases.items():
        done = home.podium(command, live["id"], *arguments, "--json")
        assert (done.code, done.error_code) == expected
    assert home.podium(command, "ffffffff", "--json").error_code == "run-unknown"
    assert home.podium("skip", live["id"], "--step", "-1").code == 2
    if command == "retry":
        done = home.podium("retry", live["id"], "--worker", "nobody", "--json")
        assert (done.code, done.error_code) == (2, "worker-unknown")
    done = home.podium("show", live["id"], "--json").valid_json("run")
    assert {key: done[key] for key in ("state", "steps")} == {key: live[key] for key in ("state", "steps")}
    assert home.podium("abort", live["id"]).code == 0


def test_a_budget_stops_a_run_says_how_much_is_left_and_a_raise_lets_it_go_on(
    home: PodiumHome, provider: Provider
) -> None:
    (home.folder / "plan.txt").write_text(QUICK)
    done = home.podium(
        "run", "Go.", "--pool", "./priced.yaml", "--plan", "plan.txt", "--budget-usd", "0.1", "--budget-calls", "1", "--json"
    )  # fmt: skip
    assert done.code == 3, done.err
    run = done.valid_json("run")
    assert (run["state"], run["reason"], run["steps"][1]["reason"]) == ("waiting", "budget-calls", "budget-calls")
    budget = run["budget"]
    assert budget["calls"] == {"limit": 1, "spent": 1, "reserved": 0, "assumed": 0, "left": 0}
    assert budget["usd"]["limit"] == "0.1"
    assert budget["usd"]["spent"] == run["cost_usd"]
    assert budget["tokens"]["limit"] is None
    looked = home.podium("budget", run["id"], "--json")
    assert looked.valid_json("budget")["budget"] == budget
    shown = home.podium("budget", run["id"])
    assert shown.code == 0
    assert "budget  1 spent of 1 calls, 0 left" in shown.out
    assert f"podium budget {run['id']} --calls N" in shown.err
    assert "budget  1 spent of 1 calls, 0 left" in home.podium("show", run["id"]).out
    refused = home.podium("budget", run["id"], "--usd", "0.0000001", "--json")
    assert (refused.code, refused.error_code) == (1, "budget-below-used")
    raised = home.podium("budget", run["id"], "--calls", "5", "--none", "usd", "--reason", "go on", "--json")
    found = raised.valid_json("budget")
    assert (found["changed"], found["delivered"], found["budget"]["usd"]["limit"]) == (True, True, None)
    ended = home.podium("watch", run["id"], "--json").valid_json("run")
    assert (ended["state"], ended["budget"]["calls"]["spent"], provider.count) == ("succeeded", 2, 2)
    late = home.podium("budget", run["id"], "--calls", "9", "--json")
    assert (late.code, late.error_code) == (1, "run-ended")
    # A fork would have the limits of its source.
    assert "podium run ... --budget-usd" in late.json["error"]["hint"]


def screen(descriptor: int, *, until: str, timeout_s: float = 40.0) -> str:
    """What comes to a terminal until these words have come; AssertionError if they do not."""
    written = b""
    end = time.monotonic() + timeout_s
    while until.encode() not in written:
        assert time.monotonic() < end, written.decode(errors="replace")
        if select.select([descriptor], [], [], 0.2)[0]:
            written += os.read(descriptor, 65_536)
    return written.decode(errors="replace")


def test_on_a_terminal_a_run_that_waits_stays_in_view_until_it_was_answered(
    home: PodiumHome, provider: Provider
) -> None:
    run = stopped(home, provider)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 200, 0, 0))
    with subprocess.Popen(
        [*PODIUM, "watch", run["id"]], env=environment(home.home, {**home.env, "TERM": "xterm"}), cwd=home.folder,
        stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs,
    ) as watching:  # fmt: skip
        os.close(theirs)
        shown = screen(ours, until="podium abort")
        assert "step 1 (quick) waits for an operator for " in shown
        # Longer than it would take to leave a run that waits.
        time.sleep(1.5)
        assert watching.poll() is None
        assert home.podium("retry", run["id"]).code == 0
        screen(ours, until="succeeded after")
        watching.wait(timeout=30)
    os.close(ours)
    assert watching.returncode == 0
