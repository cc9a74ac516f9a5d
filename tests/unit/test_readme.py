"""What README.md and CONTRIBUTING.md tell people to type exists, and their examples are valid."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from activities.plan_text import read_plan
from engine.errors import ExitCode
from engine.plan.template import template_names
from engine.store.drafts import RejectedPlan
from tests.support.command_line import check_command_line
from worker_pools.pool import load_pool
from worker_pools.pool.file import packaged_pool_names, parse_pool

CHECKOUT = Path(__file__).parents[2]
TEXTS = {name: (CHECKOUT / name).read_text() for name in ("README.md", "CONTRIBUTING.md")}
README = TEXTS["README.md"]
MAKEFILE = (CHECKOUT / "Makefile").read_text()
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`\n]+)`")


def blocks(text: str, info: str) -> list[str]:
    """The fenced blocks with the given info string."""
    return [body for kind, body in FENCE.findall(text) if kind == info]


def commands(text: str) -> list[str]:
    """Every command line in a fenced shell block, and everything in back quotes that begins like one."""
    lines = [line for body in blocks(text, "sh") for line in body.splitlines()]
    inline = CODE.findall(FENCE.sub("", text))
    words = ("podium ", "make")
    return [line for line in (*lines, *inline) if line.startswith(words) and not line.startswith("podium/")]


ALL = [(name, line) for name, text in TEXTS.items() for line in commands(text)]


def test_there_are_commands_to_check() -> None:
    found = [line for _, line in ALL]
    assert {"make run", "make test", "podium list", "podium run --help", "podium down"} <= set(found)


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, line in ALL if line.startswith("podium ")])
def test_each_podium_command_is_one_that_podium_understands(name: str, line: str) -> None:
    arguments = shlex.split(line, comments=True)[1:]
    check_command_line(arguments)
    for word in arguments:
        if word.startswith("examples/"):
            assert (CHECKOUT / word).is_file(), f"{name}: {line}"
        if "--pool" in arguments and word == arguments[arguments.index("--pool") + 1]:
            load_pool(str(CHECKOUT / word) if "/" in word else word)
        if "--template" in arguments and word == arguments[arguments.index("--template") + 1]:
            assert word in template_names()


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, line in ALL if line.startswith("make")])
def test_each_make_command_names_a_target(name: str, line: str) -> None:
    words = [word for word in shlex.split(line)[1:] if "=" not in word]
    for target in words:
        assert re.search(rf"^{re.escape(target)}:.*## ", MAKEFILE, re.MULTILINE), f"{name}: {line}"


def test_a_command_that_does_not_exist_is_found() -> None:
    for line in ("frobnicate", "run --no-such-option x", "plan frobnicate", "output --step -3 last"):
        with pytest.raises(click.ClickException):
            check_command_line(shlex.split(line))


@pytest.mark.parametrize("form", ["text plan", "json plan", "yaml plan"])
def test_each_plan_in_the_readme_is_valid_and_says_the_same(form: str) -> None:
    (text,) = blocks(README, form)
    draft = read_plan(load_pool("local"), text)
    assert not isinstance(draft, RejectedPlan)
    assert [step.worker for step in draft.plan.steps] == ["writer", "explainer", "editor"]
    assert draft.plan.notes == ()
    assert [step.subtask for step in draft.plan.steps] == [
        "List causes of tides.",
        "List effects of tides.",
        "Write one paragraph about tides.",
    ]


def test_each_edit_of_a_fork_in_the_readme_changes_the_plan_in_the_readme() -> None:
    (text,) = blocks(README, "text plan")
    draft = read_plan(load_pool("local"), text)
    assert not isinstance(draft, RejectedPlan)
    edits = re.findall(r"--step (\d) --access (\S+)", "\n".join(commands(README)))
    assert edits
    for position, access in edits:
        reads = ",".join(str(read) for read in draft.plan.steps[int(position)].access)
        assert access not in {"all", reads or "none"}, (position, access)


def test_the_pool_in_the_readme_is_valid() -> None:
    (text,) = blocks(README, "yaml pool")
    assert parse_pool(text, label="README.md").name == "mine"


@pytest.mark.parametrize("path", sorted((CHECKOUT / "examples" / "pools").glob("*.yaml")), ids=lambda path: path.name)
def test_each_example_pool_is_valid(path: Path) -> None:
    assert load_pool(str(path)).name == path.stem


def test_the_readme_names_every_packaged_pool_and_template() -> None:
    for name in (*packaged_pool_names(), *template_names()):
        assert f"`{name}`" in README, name


def test_the_exit_codes_are_those_of_the_program() -> None:
    told = {int(code) for code in re.findall(r"^\| (\d+) \| ", README, re.MULTILINE)}
    assert told == {code.value for code in ExitCode}


def test_every_variable_in_the_readme_is_read_and_every_setting_is_told() -> None:
    read = set(re.findall(r'"(PODIUM_[A-Z_]+)"', (CHECKOUT / "engine" / "settings.py").read_text()))
    told = set(re.findall(r"PODIUM_[A-Z_]+", README))
    assert told - read == set()
    assert read - told == set()


def test_every_link_to_a_file_leads_somewhere() -> None:
    for name, text in TEXTS.items():
        for target in re.findall(r"\]\(([^)#]+)", text):
            if "://" not in target:
                assert (CHECKOUT / target).exists(), f"{name}: {target}"


def test_nobody_is_told_that_podium_makes_them_compliant() -> None:
    assert "complian" not in README.lower()
