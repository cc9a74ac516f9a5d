"""The command as a whole: help, usage, exit codes, streams, and commands that need no server."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.command import PODIUM, environment, podium

COMMANDS = ("run", "show", "list", "watch", "output", "plan", "pool", "worker", "up", "down", "db", "doctor")


def test_help_names_every_command_and_every_exit_code(tmp_path: Path):
    done = podium("--help", home=tmp_path / "home")
    assert (done.code, done.err) == (0, "")
    for name in COMMANDS:
        assert f"\n  {name} " in done.out
    for code in ("0 ok", "1 the run failed", "2 bad", "3 waiting", "4 cancelled", "5 a service", "130 interrupted"):
        assert code in " ".join(done.out.split())


@pytest.mark.parametrize("command", [*((name,) for name in COMMANDS), ("plan", "check"), ("db", "upgrade")])
def test_every_command_explains_itself(command: tuple[str, ...], tmp_path: Path):
    done = podium(*command, "--help", home=tmp_path / "home")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"Usage: podium {' '.join(command)}")


def test_help_imports_nothing_heavy(tmp_path: Path):
    script = (
        "import sys\nfrom engine.cli.main import invoke\ncode = invoke(['--help'])\n"
        "heavy = {'temporalio', 'sqlalchemy', 'pydantic', 'rich', 'psycopg', 'httpx', 'yaml', 'asyncio'}\n"
        "sys.exit(code or ', '.join(heavy & set(sys.modules)) or 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(tmp_path), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_help_takes_a_few_times_as_long_as_an_empty_program(tmp_path: Path):
    def fastest(*command: str) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            subprocess.run(command, env=environment(tmp_path), stdout=subprocess.DEVNULL, check=True)
            times.append(time.perf_counter() - start)
        return min(times)

    # The bound of the design is 0.4 s on an idle machine, about fifteen times an empty program; measured: five times.
    assert fastest(*PODIUM, "--help") < 12 * fastest(sys.executable, "-c", "pass")


@pytest.mark.parametrize(
    "arguments", [("nobody",), ("show",), ("run", "a", "b"), ("list", "--limit", "0"), ("list", "-x")]
)
def test_misuse_ends_with_2_and_a_hint(arguments: tuple[str, ...], tmp_path: Path):
    done = podium(*arguments, "--json", home=tmp_path / "home")
    assert (done.code, done.error_code) == (2, "usage")
    assert done.err.count("\n") == 2
    assert "--help` shows" in done.err.splitlines()[1]
    assert list(tmp_path.iterdir()) == []


def test_without_a_command_the_overview_is_shown_and_the_code_is_2(tmp_path: Path):
    done = podium(home=tmp_path / "home")
    assert (done.code, done.out) == (2, "")
    assert "Commands:" in done.err


def test_what_follows_two_hyphens_is_no_option(tmp_path: Path):
    done = podium("show", "--", "--json", home=tmp_path / "home")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ")


def test_looking_where_nothing_is_starts_no_servers_and_makes_no_home(tmp_path: Path):
    home = tmp_path / "home"
    done = podium("list", "--json", home=home)
    assert (done.code, done.valid_json("list")) == (0, [])
    for command in ("show", "watch", "output"):
        assert podium(command, "last", home=home).code == 2
    done = podium("show", "last", "--json", home=home)
    assert (done.code, done.error_code) == (2, "run-unknown")
    assert podium("down", home=home).code == 0
    done = podium("doctor", "--json", home=home)
    assert done.code == 0
    assert "warn" in {check["status"] for check in done.valid_json("doctor")["checks"]}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["worker", "up"])
def test_a_command_for_the_other_kind_of_servers_is_refused(name: str, tmp_path: Path):
    remote = {"PODIUM_DATABASE_URL": "postgresql://u@127.0.0.1:1/d", "PODIUM_TEMPORAL_ADDRESS": "127.0.0.1:1"}
    done = podium(name, home=tmp_path / "home", env=remote if name == "up" else {})
    assert done.code == 2
    assert done.err.count("\n") == 2


def test_a_home_that_is_a_file_is_bad_input(tmp_path: Path):
    (tmp_path / "home").write_text("")
    done = podium("run", "hello", "--json", home=tmp_path / "home")
    assert (done.code, done.error_code) == (2, "home-not-a-folder")


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_home_that_cannot_be_is_bad_input_for_list_too(place: str, tmp_path: Path):
    (tmp_path / "file").write_text("")
    home = tmp_path / place
    done = podium("list", "--json", home=home, cwd=tmp_path)
    assert done.code == 2
    assert done.error_code == "home-not-a-folder"
    assert podium("run", "hello", "--json", home=home, cwd=tmp_path).error_code == done.error_code


def test_no_runs_yet_names_the_home(tmp_path: Path):
    done = podium("list", home=tmp_path / "home")
    assert (done.code, done.out) == (0, "")
    assert done.err.startswith(f"no runs yet in {tmp_path / 'home'}; podium run ")


@pytest.mark.parametrize("group", ["plan", "pool", "db"])
def test_the_help_of_groups_is_not_cut_off(group: str, tmp_path: Path):
    usage, *rest = podium(group, "--help", home=tmp_path / "home").out.splitlines()
    assert usage.startswith("Usage: ")
    assert not [line for line in rest if line.endswith("...")]


def test_help_of_run_names_the_templates_that_there_are():
    from engine.cli.run import TEMPLATES
    from engine.plan.template import template_names

    assert sorted(TEMPLATES) == sorted(template_names())


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(
            [*PODIUM, "pool", "check", "local"],
            env=environment(tmp_path / "home"),
            stdout=pipe,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_bug_shows_one_line_and_keeps_its_trace(tmp_path: Path):
    # The only way to a bug that needs no bug: a module that is not what it should be, found first on the path.
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "yaml.py").write_text("raise ZeroDivisionError('canary')\n")
    env = {"PYTHONPATH": f"{broken}:{environment(tmp_path)['PYTHONPATH']}", "TMPDIR": str(tmp_path)}
    done = podium("pool", "check", "local", "--json", home=tmp_path / "home", env=env)
    assert (done.code, done.error_code) == (1, "bug-zero-division-error")
    assert "Traceback" not in done.err
    (trace,) = tmp_path.glob("podium-bug-*.txt")
    assert str(trace) in done.err
    assert "canary" in trace.read_text()
    assert trace.stat().st_mode & 0o077 == 0
    done = podium("pool", "check", "local", home=tmp_path / "home", env={**env, "PODIUM_DEBUG": "1"})
    assert "Traceback" in done.err


def test_the_interpreter_is_never_taken_down(tmp_path: Path):
    # That is where a process that used Temporal's SDK may abort. What Python does last would leave a file here.
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, pathlib\natexit.register(pathlib.Path(__file__).with_name('taken-down').touch)\n"
    )
    env = {"PYTHONPATH": f"{tmp_path}:{environment(tmp_path)['PYTHONPATH']}"}
    for arguments, code in ((("--help",), 0), (("pool", "check", "local"), 0), (("show", "last"), 2), (("nobody",), 2)):
        assert podium(*arguments, home=tmp_path / "home", env=env).code == code
        assert not (tmp_path / "taken-down").exists()
    subprocess.run([sys.executable, "-c", "pass"], env=environment(tmp_path, env), check=True)
    assert (tmp_path / "taken-down").exists()


def test_version_is_one_line(tmp_path: Path):
    done = podium("--version", home=tmp_path / "home")
    assert done.code == 0
    assert done.out.startswith("podium ")
    assert done.out.count("\n") == 1
