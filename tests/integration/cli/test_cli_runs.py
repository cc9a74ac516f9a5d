"""Runs by the real command with a real keeper; only the models are stand-ins."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.command import terminal_output
from tests.support.podium_home import PodiumHome, interrupt
from tests.support.provider import Provider

ONE = 'model_id = ["quick"]\nsubtasks = ["a"]\naccess_list = [[]]\n'
TWO = 'model_id = ["quick", "echo"]\nsubtasks = ["first", "second"]\naccess_list = [[], [0]]\n'
SLOW = 'model_id = ["slow", "slow", "slow"]\nsubtasks = ["a", "b", "c"]\naccess_list = [[], [0], [1]]\n'
KEYED = 'model_id = ["slow", "keyed"]\nsubtasks = ["a", "b"]\naccess_list = [[], [0]]\n'
KEY = {"STAND_IN_KEY": "sk-stand-in"}


@pytest.fixture(scope="module")
def home(session_provider: Provider) -> Iterator[PodiumHome]:
    with PodiumHome(session_provider.base_url) as made:
        yield made


def test_a_run_prints_its_answer_and_its_steps_and_tells_its_progress_elsewhere(home: PodiumHome, provider: Provider):
    provider.script({"text": "The answer is\n\x1b[31mred."}, model="quick")
    done = home.run("What colour?", plan=ONE)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    # A model cannot paint on the user's terminal. A pipe gets the answer and nothing else.
    assert lines == ["The answer is", "\\x1b[31mred."]
    lines = done.err.splitlines()
    assert lines[-3].split() == ["step", "worker", "state", "time", "in", "out", "cost", "calls", "reads"]
    assert lines[-2].split()[:3] == ["0", "quick", "succeeded"]
    assert re.fullmatch(r"run \S+ succeeded after .*, cost \$0\.\d+", lines[-1])
    (called,) = [number for number, line in enumerate(lines) if re.fullmatch(r"first call after \d+\.\d s", line)]
    assert any("step 0 quick" in line for line in lines[:called])
    assert "step 0 quick running" in done.err or "step 0 quick succeeded" in done.err
    assert "run succeeded" in done.err
    assert "succeeded in" not in done.out


@pytest.mark.parametrize("way", ["file", "pipe", "plan-piped"])
def test_a_task_and_a_plan_may_come_from_a_file_or_from_standard_input(way: str, home: PodiumHome, provider: Provider):
    task = "What colour is caf\u00e9?\n\nAnswer in one word."
    (home.folder / "task.txt").write_bytes(task.encode())
    (home.folder / "plan.txt").write_text(ONE)
    plan, stdin = ("-", ONE) if way == "plan-piped" else ("plan.txt", task if way == "pipe" else "")
    named = [] if way == "pipe" else ["--file", "task.txt"]
    done = home.podium("run", "--pool", "./pool.yaml", "--plan", plan, "--json", *named, stdin=stdin.encode())
    assert done.code == 0, done.err
    run = done.valid_json("run")
    assert (run["state"], [step["worker"] for step in run["steps"]]) == ("succeeded", ["quick"])
    (request,) = provider.requests
    assert task in request["body"]["messages"][-1]["content"]


def test_json_is_one_object_that_the_schema_describes_and_show_prints_the_same(home: PodiumHome, provider: Provider):
    said = {"headers": {"x-request-id": "req_7"}, "answered_model": "quick-2"}
    provider.script({"text": "One.", "usage": [7, 3], **said}, model="quick")
    done = home.run("Count.", "--json", plan=TWO)
    assert done.code == 0, done.err
    run = done.valid_json("run")
    assert run["state"] == "succeeded"
    assert run["answer"] == run["steps"][1]["output"]
    assert "One." in run["answer"]
    assert run["planning"] == []
    first = run["steps"][0]["attempts"][0]
    assert (first["input_tokens"], first["output_tokens"], first["cost_usd"]) == (7, 3, "0.000037")
    assert (first["provider_request_id"], first["provider_model"]) == ("req_7", "quick-2")
    told = home.podium("audit", "log", run["id"]).out
    assert "answered by quick-2, the provider's request req_7" in " ".join(told.split())
    # The second worker has no price: its cost is unknown, which is not 0, and the sum says that a part is missing.
    assert run["steps"][1]["attempts"][0]["cost_usd"] is None
    assert (run["cost_usd"], run["cost_complete"]) == ("0.000037", False)
    assert [step["access"] for step in run["steps"]] == [[], [0]]
    shown = home.podium("show", run["id"], "--json").valid_json("run")
    assert shown == run
    assert home.podium("watch", run["id"], "--json").valid_json("run") == run
    check = home.podium("plan", "check", "plan.txt", "--pool", "./pool.yaml", "--json")
    assert check.valid_json("plan-check")["digest"] == run["plan_digest"]


def test_the_conductor_plans_when_no_plan_is_given(home: PodiumHome, provider: Provider):
    done = home.run("Plan it.", "--json", env=KEY)
    assert done.code == 0, done.err
    run = done.valid_json("run")
    assert [attempt["state"] for attempt in run["planning"]] == ["succeeded"]
    assert len(run["steps"]) == 1
    assert [request["model"] for request in provider.requests] == ["planner", "quick"]
    shown = home.podium("show", "last").out
    assert "by the Conductor, form json" in shown
    assert "planning call 1: succeeded" in shown


def test_a_plan_of_the_conductor_that_stays_invalid_fails_the_run_and_is_shown(home: PodiumHome, provider: Provider):
    provider.script({"text": "I would rather not."}, model="planner", times=None)
    done = home.run("Plan it.", "--json", env=KEY)
    assert done.code == 1
    run = done.valid_json("run")
    assert (run["state"], run["reason"], run["steps"], run["answer"]) == ("failed", "plan-invalid", [], None)
    assert len(run["planning"]) == 3
    assert "error: run" in done.err
    assert "[no-plan]" in done.err
    shown = home.podium("show", run["id"]).out
    assert "no plan" in shown
    assert "\n    I would rather not.\n" in shown


@pytest.mark.slow
def test_a_failed_step_ends_with_1_and_show_says_what_the_provider_said(home: PodiumHome, provider: Provider):
    provider.script({"status": 401, "body": {"error": {"message": "no such key"}}}, model="quick", times=None)
    done = home.run("Fail.", plan=ONE)
    assert done.code == 1
    assert "Traceback" not in done.err
    blamed = r"^error: run \S+ failed: \S+ \(step 0, worker quick\): auth-failed \(401\): .*no such key"
    assert re.search(blamed, done.err, re.MULTILINE)
    shown = home.podium("show", "last")
    assert shown.code == 0
    assert 'auth-failed (401): the provider refuses the key: "no such key"; check' in shown.out
    done = home.podium("output", "last", "--step", "0")
    assert (done.code, done.out) == (1, "")


@pytest.mark.slow
def test_a_planning_call_that_failed_says_its_code_once(home: PodiumHome, provider: Provider):
    provider.script({"status": 401}, model="planner", times=None)
    done = home.run("Fail.", env=KEY)
    assert done.code == 1
    assert re.search(r"^error: run \S+ failed: auth-failed \(401\): the provider refuses", done.err, re.MULTILINE)


@pytest.mark.slow
def test_a_failed_call_names_the_address_and_the_key_variable(home: PodiumHome, provider: Provider):
    provider.script({"status": 401, "body": {}}, model="quick", times=None)
    done = home.run("Fail.", plan='model_id = ["keyed"]\nsubtasks = ["a"]\naccess_list = [[]]\n', env=KEY)
    assert done.code == 1
    assert "check STAND_IN_KEY" in done.err
    pool = (home.folder / "pool.yaml").read_text()
    away = re.sub(r'base_url: "[^"]*"', 'base_url: "http://127.0.0.1:9/v1"', pool)
    away = away.replace("attempts_max: 2", "attempts_max: 1")
    (home.folder / "away.yaml").write_text(away)
    (home.folder / "plan.txt").write_text(ONE)
    done = home.podium("run", "x", "--pool", "./away.yaml", "--plan", "plan.txt")
    assert done.code == 1
    assert "connection-failed: no connection to http://127.0.0.1:9/v1" in done.err


@pytest.mark.slow
def test_an_answer_that_was_cut_is_noted(home: PodiumHome, provider: Provider):
    provider.script({"text": "It is", "finish_reason": "length", "usage": [7, 200]}, model="quick")
    run = home.run("Cut.", "--json", plan=ONE).valid_json("run")
    words = "the answer stopped at its output limit (200 tokens); raise output_tokens_max"
    assert run["notes"] == [{"code": "answer-truncated", "field": None, "position": 0, "text": words}]
    assert f"step 0: {words}" in home.podium("show", run["id"]).out


@pytest.mark.slow
def test_detach_prints_the_id_and_watch_follows_to_the_same_end(home: PodiumHome):
    done = home.run("Later.", "--detach", plan=SLOW)
    assert done.code == 0, done.err
    run_id = done.out.strip()
    assert f"podium watch {run_id}" in done.err
    watched = home.podium("watch", run_id[:14])
    assert watched.code == 0, watched.err
    assert "step 2 slow succeeded" in watched.err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_detaches_and_the_run_goes_on(number: signal.Signals, home: PodiumHome, provider: Provider):
    (home.folder / "plan.txt").write_text(SLOW)
    provider.script({"delay_first_s": 4})
    process = home.start("run", "Go on.", "--pool", "./pool.yaml", "--plan", "plan.txt")
    provider.wait_for(1, timeout_s=60)
    interrupt(process, number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert out == ""
    run_id = re.search(r"detached: run (\S+) goes on in the keeper", err)[1]
    assert "Traceback" not in err
    watched = home.podium("watch", run_id, "--json")
    assert watched.code == 0
    assert watched.valid_json("run")["state"] == "succeeded"
    assert provider.count == 3


@pytest.mark.slow
def test_output_is_the_stored_text_and_nothing_else(home: PodiumHome, provider: Provider):
    text = "Ünïcode\n\x1b[0m no line feed at the end"
    provider.script({"text": text}, model="quick")
    run_id = home.run("Text.", "--json", plan=TWO).json["id"]
    done = home.podium("output", run_id, "--step", "0")
    assert (done.code, done.out_bytes, done.err) == (0, text.encode(), "")
    assert home.podium("output", run_id, "--step", "0", "--round", "0").out_bytes == text.encode()
    found = home.podium("output", run_id, "--step", "0", "--json").valid_json("output")
    assert found == {"schema_version": 1, "id": run_id, "round": 0, "step": 0, "text": text}
    answer = home.podium("output", run_id, "--json").valid_json("output")
    assert (answer["round"], answer["step"]) == (None, None)
    assert answer["text"] == home.podium("output", run_id).out
    assert home.podium("output", run_id, "--step", "7", "--json").error_code == "step-unknown"
    assert home.podium("output", run_id).out_bytes == home.podium("output", run_id, "--step", "1").out_bytes
    assert home.podium("output", run_id, "--step", "2").code == 2
    assert home.podium("output", run_id, "--step", "0", "--round", "1").code == 2


@pytest.mark.slow
def test_list_shows_the_newest_first_and_by_state(home: PodiumHome):
    first = home.run("Older.", "--json", plan=ONE).json["id"]
    second = home.run("Newer\n\x1b[31m of two.", "--json", plan=ONE).json["id"]
    found = home.podium("list", "--limit", "2", "--json").valid_json("list")
    assert [run["id"] for run in found] == [second, first]
    assert found[1]["task_preview"] == "Older."
    succeeded = home.podium("list", "--state", "succeeded", "--json").valid_json("list")
    assert {run["state"] for run in succeeded} == {"succeeded"}
    assert home.podium("list", "--state", "cancelled", "--json").json == []
    plain = home.podium("list", "-n", "1")
    assert second in plain.out
    assert "\x1b" not in plain.out
    lines = terminal_output(
        "list", "-n", "2", home=home.home, cwd=home.folder, env={**home.env, "NO_COLOR": "1"}, columns=72
    ).splitlines()
    assert len(lines) == 3
    assert all(len(line) <= 72 for line in lines)
    assert home.podium("show", lines[1].split()[0], "--json").json["id"] == second
    assert "Newer" in lines[1]


@pytest.mark.slow
def test_the_same_idempotency_key_gives_the_same_run_and_another_request_is_refused(
    home: PodiumHome, provider: Provider
):
    first = home.run("Once.", "--idempotency-key", "k1", "--json", plan=ONE).json["id"]
    again = home.run("Once.", "--idempotency-key", "k1", "--json", plan=ONE)
    assert (again.code, again.json["id"]) == (0, first)
    assert provider.count == 1
    # This command's start and that call have nothing to do with each other.
    told = home.run("Once.", "--idempotency-key", "k1", plan=ONE)
    assert "was created by an earlier request" in told.err
    assert "first call" not in told.err
    other = home.run("Twice.", "--idempotency-key", "k1", "--json", plan=ONE)
    assert (other.code, other.error_code) == (1, "idempotency-conflict")


@pytest.mark.slow
def test_a_reference_must_name_one_run(home: PodiumHome):
    done = home.podium("show", "not-an-id!", "--json")
    assert (done.code, done.error_code) == (2, "run-id-invalid")
    done = home.podium("show", "ffffffff", "--json")
    assert (done.code, done.error_code) == (2, "run-unknown")
    ids = [home.run("Alike.", "--json", plan=ONE).json["id"] for _ in range(2)]
    done = home.podium("show", ids[0][:4], "--json")
    assert (done.code, done.error_code) == (2, "run-id-ambiguous")


@pytest.mark.parametrize("name", ["lists.txt", "json.json", "steps.json", "steps.yaml"])
def test_every_example_plan_runs(name: str, home: PodiumHome, provider: Provider):
    plan = Path(__file__).parents[3] / "examples" / "plans" / name
    text = plan.read_text()
    done = home.run("Try it.", "--json", plan=text)
    assert done.code == 0, done.err
    assert done.valid_json("run")["state"] == "succeeded"


@pytest.mark.slow
def test_a_template_runs_without_a_conductor_and_detached_json_is_the_run_so_far(home: PodiumHome, provider: Provider):
    done = home.run("Try it.", "--template", "planner-executor-verifier", "--detach", "--json", env=KEY)
    assert done.code == 0, done.err
    run = done.valid_json("run")
    assert (run["answer"], run["planning"], len(run["steps"])) == (None, [], 3)
    watched = home.podium("watch", run["id"], "--json", env=KEY)
    assert watched.code == 0, watched.err
    assert watched.valid_json("run")["plan_digest"] == run["plan_digest"]
    assert "planner" not in {request["model"] for request in provider.requests}


@pytest.mark.slow
def test_a_run_that_lost_its_key_waits_for_it_and_any_command_brings_it_back(home: PodiumHome, provider: Provider):
    # Long enough for the keeper to be gone before the second step.
    provider.script({"delay_first_s": 6})
    run_id = home.run("Keyed.", "--detach", plan=KEYED, env=KEY).out.strip()
    # The keeper goes before the second step; the key was in its memory only.
    assert home.podium("down").code == 0
    done = home.podium("watch", run_id, "--json")
    assert done.code == 3, done.err
    run = done.valid_json("run")
    assert (run["state"], run["reason"]) == ("waiting", "secret-missing")
    assert run["steps"][1]["state"] == "waiting"
    assert "STAND_IN_KEY" not in json.dumps(run)
    assert f"podium watch {run_id}" in done.err
    shown = home.podium("show", run_id).out
    assert f"\nhint    the key of keyed is missing: set STAND_IN_KEY and run `podium watch {run_id}`\n" in shown
    assert home.podium("list", env=KEY).code == 0
    done = home.podium("watch", run_id, "--json", env=KEY)
    assert done.code == 0, done.err
    assert "sk-stand-in" not in done.out + done.err
    assert provider.requests[-1]["headers"]["authorization"] == "Bearer sk-stand-in"


@pytest.mark.slow
def test_doctor_and_upgrade_find_the_embedded_servers_healthy(home: PodiumHome):
    done = home.podium("doctor", "--json")
    found = done.valid_json("doctor")
    assert (done.code, found["healthy"]) == (0, True), done.out
    assert {"database", "schema", "clock", "temporal", "keeper"} <= {check["name"] for check in found["checks"]}
    done = home.podium("db", "upgrade", "--json")
    assert (done.code, done.valid_json("db-upgrade")["applied"]) == (0, [])
