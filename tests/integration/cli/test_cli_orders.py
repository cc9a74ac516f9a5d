"""Cancel, pause, unpause and resume by the real command with a real keeper; only the models are stand-ins."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import PODIUM, Done, environment, podium
from tests.support.podium_home import POOL, PRICE, PodiumHome
from tests.support.provider import Provider
from tests.support.servers import TestServers

pytestmark = pytest.mark.slow

ONE = 'model_id = ["quick"]\nsubtasks = ["a"]\naccess_list = [[]]\n'
TWO = 'model_id = ["quick", "slow"]\nsubtasks = ["a", "b"]\naccess_list = [[], [0]]\n'
SLOW = 'model_id = ["slow", "slow", "quick"]\nsubtasks = ["a", "b", "c"]\naccess_list = [[], [0], [1]]\n'
KEYED = 'model_id = ["quick", "keyed"]\nsubtasks = ["a", "b"]\naccess_list = [[], [0]]\n'
UNKNOWN = "0192aaaa-0000-7000-8000-000000000000"
# Starting a command takes a second, and many on a busy machine.
PATIENCE_S = 60.0
COMMANDS = ("cancel", "pause", "unpause", "resume")


@pytest.fixture(scope="module")
def home(session_provider: Provider) -> Iterator[PodiumHome]:
    with PodiumHome(session_provider.base_url) as made:
        yield made


def shown(home: PodiumHome, run_id: str) -> Any:
    done = home.podium("show", run_id, "--json")
    assert done.code == 0, done.out + done.err
    return done.valid_json("run")


def until(home: PodiumHome, run_id: str, state: str, reason: str | None = None) -> Any:
    end = time.monotonic() + PATIENCE_S
    while True:
        run = shown(home, run_id)
        if (run["state"], run["reason"]) == (state, reason):
            return run
        assert time.monotonic() < end, run


def stuck(home: PodiumHome, provider: Provider, plan: str = SLOW) -> str:
    """A detached run whose first slow call is in flight and would take a minute."""
    provider.script({"delay_first_s": 60}, model="sleep-400ms")
    run_id = home.run("Go.", "--detach", plan=plan).out.strip()
    provider.wait_for(2 if plan == TWO else 1, timeout_s=PATIENCE_S)
    return run_id


def test_cancel_waits_for_the_end_closes_the_connection_and_keeps_what_was_finished(
    home: PodiumHome, provider: Provider
):
    run_id = stuck(home, provider, TWO)
    done = home.podium("cancel", run_id[:13], "--reason", "wrong task")
    assert (done.code, done.out.strip()) == (0, f"run {run_id} cancelled"), done.err
    assert "step 1 slow cancelled" in done.err
    provider.wait_disconnected(1)
    assert provider.count == 2
    run = shown(home, run_id)
    assert (run["state"], [step["state"] for step in run["steps"]]) == ("cancelled", ["succeeded", "cancelled"])
    assert home.podium("output", run_id, "--step", "0").code == 0
    # Who follows a cancelled run is told by the exit code.
    assert home.podium("watch", run_id).code == 4
    again = home.podium("cancel", run_id)
    assert again.code == 0
    assert "was cancelled already" in again.out
    found = home.podium("cancel", run_id, "--json").valid_json("order")
    assert (found["changed"], found["state"], found["delivered"]) == (False, "cancelled", True)


def test_run_ends_with_4_when_somebody_else_cancels_it(home: PodiumHome, provider: Provider):
    provider.script({"delay_first_s": 60}, model="sleep-400ms")
    (home.folder / "slow.txt").write_text(SLOW)
    with home.start("run", "Go.", "--pool", "./pool.yaml", "--plan", "slow.txt") as process:
        provider.wait_for(1, timeout_s=PATIENCE_S)
        done = home.podium("cancel", "last", "--json")
        assert done.code == 0, done.err
        found = done.valid_json("order")
        assert (found["changed"], found["state"], found["reason"]) == (True, "cancelled", "cancelled")
        out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (4, "")
    assert f"run {found['run']} cancelled" in err
    assert "Traceback" not in err


def test_cancel_need_not_wait(home: PodiumHome, provider: Provider):
    run_id = stuck(home, provider)
    done = home.podium("cancel", run_id, "--no-wait")
    assert (done.code, done.out.strip()) == (0, f"run {run_id} is being cancelled"), done.err
    until(home, run_id, "cancelled", "cancelled")


def test_a_paused_run_is_shown_as_such_and_goes_on(home: PodiumHome, provider: Provider):
    # As long as two commands take on a busy machine.
    provider.script({"delay_first_s": 10}, model="sleep-400ms")
    run_id = home.run("Go.", "--detach", plan=SLOW).out.strip()
    done = home.podium("pause", run_id, "--reason", "look first")
    assert done.code == 0, done.err
    assert done.out.startswith(f"run {run_id} is paused")
    assert f"podium unpause {run_id}" in done.err
    until(home, run_id, "waiting", "paused")
    time.sleep(1)
    assert provider.count == 1
    done = home.podium("pause", run_id, "--json")
    assert (done.code, done.error_code) == (1, "run-paused")
    done = home.podium("resume", run_id, "--json")
    assert (done.code, done.error_code) == (1, "run-live")
    assert f"podium unpause {run_id}" in done.json["error"]["hint"]
    done = home.podium("unpause", run_id, "--json")
    found = done.valid_json("order")
    assert (done.code, found["order"], found["changed"], found["delivered"]) == (0, "unpause", True, True)
    assert home.podium("watch", run_id).code == 0
    assert provider.count == 3


def test_a_bad_key_is_put_right_and_the_run_goes_on_from_there(home: PodiumHome, provider: Provider):
    provider.script({"text": "First."}, {"status": 401}, model="quick")
    done = home.run("Keyed.", "--json", plan=KEYED, env={"STAND_IN_KEY": "sk-wrong"})
    assert done.code == 1, done.err
    run_id = done.json["id"]
    done = home.podium("resume", run_id, "--reason", "the key was old", env={"STAND_IN_KEY": "sk-right"})
    assert done.code == 0, done.err
    assert f"run {run_id} succeeded" in done.err
    run = shown(home, run_id)
    assert (run["execution"], run["steps"][0]["output"]) == (2, "First.")
    assert [len(step["attempts"]) for step in run["steps"]] == [1, 2]
    keys = [request["headers"].get("authorization") for request in provider.requests]
    assert keys == [None, "Bearer sk-wrong", "Bearer sk-right"]
    done = home.podium("resume", run_id, "--json")
    assert (done.code, done.error_code) == (1, "run-succeeded")


def test_a_cancelled_run_is_resumed_with_another_pool_and_detached(home: PodiumHome, provider: Provider):
    run_id = stuck(home, provider, TWO)
    assert home.podium("cancel", run_id).code == 0
    text = (home.folder / "pool.yaml").read_text()
    (home.folder / "other.yaml").write_text(text.replace("model: sleep-400ms", "model: swift"))
    (home.folder / "small.yaml").write_text(
        "\n".join(line for line in text.splitlines() if "name: slow" not in line) + "\n"
    )
    before = shown(home, run_id)
    done = home.podium("resume", run_id, "--pool", "./small.yaml", "--json")
    assert (done.code, done.error_code) == (2, "worker-missing")
    assert shown(home, run_id) == before
    done = home.podium("resume", run_id, "--pool", "./other.yaml", "--detach", "--json")
    assert done.code == 0, done.err
    assert done.valid_json("run")["id"] == run_id
    run = home.podium("watch", run_id, "--json").valid_json("run")
    assert run["state"] == "succeeded"
    assert [step["model"] for step in run["steps"]] == ["quick", "swift"]
    assert [request["model"] for request in provider.requests] == ["quick", "sleep-400ms", "swift"]


def test_a_run_that_ended_takes_no_orders_and_stays_as_it_is(home: PodiumHome, provider: Provider):
    run_id = home.run("Go.", "--json", plan=ONE).json["id"]
    before = shown(home, run_id)
    for command in ("cancel", "pause", "unpause"):
        done = home.podium(command, run_id, "--json")
        assert (done.code, done.error_code) == (1, "run-ended")
        assert "already succeeded at 20" in done.json["error"]["message"]
        assert [line.split(":")[0] for line in done.err.splitlines()] == ["error", "hint"]
    assert shown(home, run_id) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_an_order_to_an_unknown_run_is_told_apart(home: PodiumHome, command: str):
    done = home.podium(command, UNKNOWN, "--reason", "x", "--json")
    assert (done.code, done.error_code) == (2, "run-unknown")


@pytest.mark.parametrize(("reason", "code"), [("x" * 5000, "reason-too-long"), (b"\xff", "reason-binary")])
def test_a_reason_that_cannot_be_kept_is_refused(home: PodiumHome, reason: str | bytes, code: str):
    done = home.podium("cancel", UNKNOWN, "--reason", reason, "--json")
    assert (done.code, done.error_code) == (2, code)


@pytest.mark.parametrize("command", COMMANDS)
def test_where_there_is_no_home_nothing_is_made_to_find_no_run(tmp_path: Path, command: str):
    done = podium(command, "last", "--json", home=tmp_path / "none")
    assert (done.code, done.error_code) == (2, "run-unknown")
    assert not (tmp_path / "none").exists()


class Site:
    """Servers of one's own without any worker; ``temporal`` may be an address where nobody answers."""

    def __init__(self, folder: Path, database_url: str, temporal: str, provider_url: str) -> None:
        self.folder = folder
        self.env = {"PODIUM_DATABASE_URL": database_url, "PODIUM_TEMPORAL_ADDRESS": temporal, "PODIUM_ACTOR": "ops@1"}
        self.env["PODIUM_KEY_STORE"] = (folder / "keys").as_uri()
        (folder / "pool.yaml").write_text(POOL.format(url=provider_url, price=PRICE))
        (folder / "one.txt").write_text(ONE)

    def podium(self, *arguments: str) -> Done:
        return podium(*arguments, home=self.folder / "home", env=self.env, cwd=self.folder)

    def submit(self) -> str:
        done = self.podium("run", "x", "--pool", "./pool.yaml", "--plan", "one.txt", "--detach")
        assert done.code == 0, done.err
        return done.out.strip()


def test_an_order_given_while_no_worker_is_there_holds_until_one_is(
    tmp_path: Path, database_url: str, servers: TestServers, provider: Provider
):
    site = Site(tmp_path, database_url, servers.temporal_address, provider.base_url)
    run_id = site.submit()
    done = site.podium("cancel", run_id, "--timeout", "0.5", "--json")
    assert (done.code, done.error_code) == (5, "cancel-pending")
    worker = subprocess.Popen(
        [*PODIUM, "worker", "--pool", "./pool.yaml"],
        env=environment(tmp_path / "home", site.env),
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        done = site.podium("cancel", run_id, "--json")
        found = done.valid_json("order")
        assert (done.code, found["changed"], found["state"]) == (0, False, "cancelled")
    finally:
        worker.kill()
        worker.wait()
    assert provider.count == 0


def test_an_order_given_while_temporal_is_away_is_on_record_and_says_so(
    tmp_path: Path, database_url: str, servers: TestServers, provider: Provider
):
    site = Site(tmp_path, database_url, servers.temporal_address, provider.base_url)
    run_id = site.submit()
    site.env["PODIUM_TEMPORAL_ADDRESS"] = "127.0.0.1:9"
    done = site.podium("pause", run_id)
    assert done.code == 0, done.err
    assert "the order is on record" in done.err
    found = site.podium("cancel", run_id, "--no-wait", "--json").valid_json("order")
    assert (found["changed"], found["delivered"]) == (True, False)
