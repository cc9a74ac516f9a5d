"""``kill -9`` of everything in the middle of a run; the next command brings it to its end and pays nothing twice."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.support.podium_home import PodiumHome
from tests.support.provider import Provider

PLAN = """\
model_id = [0, 0, 0]
subtasks = ["Say the first thing.", "Say the second thing.", "Say the third thing."]
access_list = [[], [0], [1]]
"""


def processes_of(home: Path) -> list[psutil.Process]:
    """Every process that works in the home or was told of it: keeper, servers, and commands."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(home) in " ".join(process.cmdline()) or process.cwd().startswith(str(home)):
                found.append(process)
        except psutil.Error:
            continue
    return [process for process in found if process.pid != os.getpid()]


def kill_everything(home: Path) -> int:
    """SIGKILL to all of them at once; returns how many there were."""
    found = processes_of(home)
    for process in found:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    return len(found)


def wait_until_succeeded(home: PodiumHome, run: str, timeout_s: float = 90.0) -> dict[str, object]:
    give_up_at = time.monotonic() + timeout_s
    while True:
        shown = home.podium("show", run, "--json")
        if shown.code == 0 and shown.json["state"] in {"succeeded", "failed", "cancelled"}:
            assert shown.json["state"] == "succeeded", shown.json
            return dict(shown.json)
        assert time.monotonic() < give_up_at, shown
        time.sleep(0.3)


def calls_by_subtask(provider: Provider) -> dict[str, int]:
    texts = [json.dumps(request["body"]) for request in provider.requests]
    # Each prompt quotes the subtasks of the steps that it may read, so a call is known by its newest one.
    newest = ["third" if "third" in text else "second" if "second" in text else "first" for text in texts]
    return {name: newest.count(name) for name in ("first", "second", "third")}


def test_a_killed_run_goes_on_with_the_next_command_and_no_finished_step_is_called_again(provider: Provider) -> None:
    provider.script({"text": "One."}, contains="first thing", times=1)
    provider.script({"text": "Two.", "delay_headers_s": 60}, contains="second thing", times=1)
    with PodiumHome(provider.base_url) as home:
        (home.folder / "plan.txt").write_text(PLAN)
        command = home.start("run", "Count.", "--pool", "./pool.yaml", "--plan", "plan.txt")
        provider.wait_for(2, timeout_s=60)
        assert kill_everything(home.home) >= 3
        command.kill()
        command.communicate()
        # The next command, whichever, revives the keeper and does not wait for the run.
        listed = home.podium("list", "--json")
        assert listed.code == 0
        run = wait_until_succeeded(home, listed.json[0]["id"])
        calls = calls_by_subtask(provider)
    assert calls == {"first": 1, "second": 2, "third": 1}
    states = [[attempt["state"] for attempt in step["attempts"]] for step in run["steps"]]  # type: ignore[attr-defined]  # JSON
    assert states == [["succeeded"], ["unknown", "succeeded"], ["succeeded"]]
    assert run["cost_complete"] is False


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["keeper", "postgres", "temporal"])
def test_a_run_survives_the_death_of_any_one_part(provider: Provider, victim: str) -> None:
    provider.script({"text": "One.", "delay_headers_s": 3}, contains="first thing", times=1)
    with PodiumHome(provider.base_url) as home:
        (home.folder / "plan.txt").write_text(PLAN)
        started = home.podium("run", "Count.", "--pool", "./pool.yaml", "--plan", "plan.txt", "--detach", "--json")
        assert started.code == 0, started.err
        provider.wait_for(1, timeout_s=60)
        names = {"keeper": "engine.keeper.daemon", "postgres": "postgres", "temporal": "start-dev"}
        victims = [one for one in processes_of(home.home) if names[victim] in " ".join(one.cmdline())]
        assert victims
        for process in victims:
            process.kill()
        run = wait_until_succeeded(home, started.json["id"])
        accepted = [sum(attempt["state"] == "succeeded" for attempt in step["attempts"]) for step in run["steps"]]  # type: ignore[attr-defined]  # JSON
        calls = calls_by_subtask(provider)
    assert accepted == [1, 1, 1]
    assert calls["second"] == 1
    assert calls["third"] == 1
    assert calls["first"] <= 2
