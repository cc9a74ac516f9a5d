"""What a user can hand in wrongly: one line, a hint, a documented exit code, and nothing half done."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command import Done, podium

POOL = """\
name: mine
conductor: {base_url: "http://127.0.0.1:9/v1", model: m, api_key: {env: CONDUCTOR_KEY}}
workers:
  - name: one
    description: does it
    base_url: "http://127.0.0.1:9/v1"
    model: m
    api_key: {env: WORKER_KEY}
"""
PLAN = 'model_id = [0]\nsubtasks = ["a"]\naccess_list = [[]]\n'


def run(tmp_path: Path, *arguments: str | bytes, stdin: bytes = b"", env: dict[str, str] | None = None) -> Done:
    """Runs `podium run` with input that is wrong, and sees that it left nothing behind."""
    before = sorted(tmp_path.rglob("*"))
    done = podium("run", *arguments, home=tmp_path / "home", stdin=stdin, env=env)
    assert sorted(tmp_path.rglob("*")) == before
    assert "Traceback" not in done.err
    return done


def assert_refused(done: Done, code: str) -> None:
    assert (done.code, done.error_code) == (2, code)
    assert done.err.splitlines()[0].startswith("error: ")
    assert done.json["error"]["hint"]


@pytest.mark.parametrize(
    ("stdin", "code"),
    [
        (b"", "task-empty"),
        (b"  \n\t ", "task-empty"),
        (b"\x89PNG\r\n\x1a\n\xff\xfe", "task-binary"),
        (b"what\0is it", "task-binary"),
        (b"x" * 5_000_000, "task-too-large"),
        (b"x" * (16 * 1024 * 1024 + 1), "task-too-large"),
    ],
)
def test_no_task_or_none_that_is_text_is_bad_input(stdin: bytes, code: str, tmp_path: Path):
    assert_refused(run(tmp_path, "--json", stdin=stdin), code)


def test_an_argument_is_held_to_the_same_rules(tmp_path: Path):
    assert_refused(run(tmp_path, "", "--json"), "task-empty")
    assert_refused(run(tmp_path, b"caf\xe9", "--json"), "task-binary")


def test_a_task_is_given_once(tmp_path: Path):
    (tmp_path / "task.txt").write_text("hello")
    assert_refused(run(tmp_path, "hello", "--file", "task.txt", "--json"), "task-twice")
    assert_refused(run(tmp_path, "-", "--plan", "-", "--json"), "stdin-twice")
    assert_refused(run(tmp_path, "hello", "--plan", "p", "--template", "single", "--json"), "plan-twice")


def test_a_file_that_cannot_be_read_is_bad_input(tmp_path: Path):
    assert_refused(run(tmp_path, "--file", "nowhere.txt", "--json"), "file-unreadable")
    assert_refused(run(tmp_path, "--file", ".", "--json"), "file-unreadable")
    assert_refused(run(tmp_path, "--file", "bad\nname", "--json"), "file-unreadable")


def test_an_error_on_line_7_of_a_pool_file_is_found_there(tmp_path: Path):
    lines = POOL.splitlines()
    assert lines[6].strip() == "model: m"
    (tmp_path / "pool.yaml").write_text(POOL.replace("    model: m\n", "    modle: m\n"))
    done = run(tmp_path, "hello", "--pool", "./pool.yaml", "--json")
    assert_refused(done, "pool-invalid")
    assert "pool.yaml:7: workers[0].modle: unknown key" in done.err


def test_an_unknown_pool_is_bad_input_and_the_known_ones_are_named(tmp_path: Path):
    done = run(tmp_path, "hello", "--pool", "nobody", "--json")
    assert_refused(done, "pool-not-found")
    assert "local" in done.json["error"]["hint"]


def test_an_invalid_plan_file_creates_no_run(tmp_path: Path):
    (tmp_path / "plan.txt").write_text(PLAN.replace("[0]\n", "[7]\n", 1))
    done = run(tmp_path, "hello", "--plan", "plan.txt", "--json")
    assert_refused(done, "plan-invalid")
    assert "worker 7" in done.err
    (tmp_path / "plan.txt").write_text("Dear Sir or Madam,")
    assert_refused(run(tmp_path, "hello", "--plan", "plan.txt", "--json"), "plan-invalid")


def test_every_fault_of_a_plan_file_is_told_with_its_place(tmp_path: Path):
    (tmp_path / "plan.txt").write_text('model_id = [7, 8]\nsubtasks = ["a", "b"]\naccess_list = [[], [5]]\n')
    done = run(tmp_path, "hello", "--plan", "plan.txt")
    assert (done.code, done.out) == (2, "")
    lines = done.err.splitlines()
    assert sum("plan.txt:1:" in line for line in lines) == 2
    assert sum("plan.txt:3:" in line for line in lines) == 1
    assert lines[-1] == "hint: podium plan check plan.txt --pool local"


def test_an_unclosed_quote_has_a_hint_for_people(tmp_path: Path):
    (tmp_path / "plan.txt").write_text('model_id = [0]\nsubtasks = ["a]\naccess_list = [[]]\n')
    done = podium("plan", "check", "plan.txt", home=tmp_path / "home")
    assert done.code == 2
    assert "hint: close the quote or bracket" in done.err


def test_an_unknown_template_is_bad_input(tmp_path: Path):
    done = run(tmp_path, "hello", "--template", "nobody", "--json")
    assert done.code == 2
    assert "nobody" in done.err


def test_a_missing_key_names_its_variable_and_its_worker(tmp_path: Path):
    (tmp_path / "pool.yaml").write_text(POOL)
    (tmp_path / "plan.txt").write_text(PLAN)
    done = run(tmp_path, "hello", "--pool", "./pool.yaml", "--plan", "plan.txt", "--json")
    assert_refused(done, "key-missing")
    assert "WORKER_KEY" in done.err
    assert "worker one" in done.err
    # Without a plan the Conductor is asked first, so its key is needed too.
    done = run(tmp_path, "hello", "--pool", "./pool.yaml", "--json", env={"WORKER_KEY": "k"})
    assert_refused(done, "key-missing")
    assert "CONDUCTOR_KEY" in done.err


def test_an_idempotency_key_with_blanks_is_bad_input(tmp_path: Path):
    assert_refused(run(tmp_path, "hello", "--idempotency-key", "a b", "--json"), "idempotency-key-invalid")


def test_half_of_the_settings_is_bad_input(tmp_path: Path):
    done = run(tmp_path, "hello", "--json", env={"PODIUM_DATABASE_URL": "postgresql://u@127.0.0.1:1/d"})
    assert_refused(done, "settings-incomplete")


def test_servers_of_ones_own_need_a_key_store(tmp_path: Path):
    env = {"PODIUM_DATABASE_URL": "postgresql://u@127.0.0.1:1/d", "PODIUM_TEMPORAL_ADDRESS": "127.0.0.1:1"}
    for command in (("run", "hello"), ("list",), ("worker",)):
        done = podium(*command, "--json", home=tmp_path / "home", env=env)
        if command != ("worker",):
            assert (done.code, done.error_code) == (2, "key-store-missing")
    done = podium("run", "hello", "--json", home=tmp_path / "home", env={**env, "PODIUM_KEY_STORE": "s3://keys"})
    assert (done.code, done.error_code) == (2, "key-store-invalid")
    done = podium("worker", home=tmp_path / "home", env=env)
    assert done.code == 2
    assert "PODIUM_KEY_STORE" in done.err


def test_servers_that_cannot_be_reached_end_with_5(tmp_path: Path):
    env = {
        "PODIUM_DATABASE_URL": "postgresql://user:canary@127.0.0.1:1/none",
        "PODIUM_TEMPORAL_ADDRESS": "127.0.0.1:1",
        "PODIUM_KEY_STORE": "none",
    }
    for command in (("run", "hello"), ("list",), ("db", "upgrade")):
        done = podium(*command, "--json", home=tmp_path / "home", env=env)
        assert (done.code, done.error_code) == (5, "database-unreachable")
        assert "canary" not in done.err + done.out
    done = podium("doctor", "--json", home=tmp_path / "home", env=env)
    assert done.code == 5
    assert done.valid_json("doctor")["healthy"] is False
    assert list(tmp_path.iterdir()) == []
