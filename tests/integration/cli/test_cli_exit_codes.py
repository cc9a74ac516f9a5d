"""The exit crash of Temporal's SDK never reaches a user (temporalio/sdk-python#300)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.command import CHECKOUT, environment
from tests.support.podium_home import PodiumHome
from tests.support.provider import Provider

COMMANDS = 200
FAILING = 'model_id = ["quick"]\nsubtasks = ["please fail"]\naccess_list = [[]]\n'
DRIVER = CHECKOUT / "tests" / "support" / "many_commands.py"


@pytest.mark.slow
def test_200_commands_that_use_the_sdk_all_end_with_their_own_exit_code(provider: Provider):
    provider.script({"status": 401, "body": {}}, contains="please fail", times=None)
    with PodiumHome(provider.base_url) as home:
        (home.folder / "fail.txt").write_text(FAILING)
        (home.folder / "work.txt").write_text(FAILING.replace("please fail", "please work"))
        assert home.podium("run", "x", "--pool", "./pool.yaml", "--plan", "work.txt", "--json").code == 0
        # `doctor` connects to Temporal and asks it for its id; a run that fails has another code than 0.
        doctor = (["doctor", "--json"], 0)
        run = ["run", "x", "--pool", "./pool.yaml", "--json", "--plan"]
        cycle = [doctor] * 8 + [([*run, "work.txt"], 0), ([*run, "fail.txt"], 1)]
        wanted = [cycle[number % len(cycle)] for number in range(COMMANDS)]
        done = subprocess.run(
            [sys.executable, str(DRIVER)],
            input=json.dumps([arguments for arguments, _ in wanted]),
            env=environment(home.home, home.env),
            cwd=home.folder,
            stdout=subprocess.PIPE,
            text=True,
            timeout=300,
            check=True,
        )
    assert json.loads(done.stdout) == [code for _, code in wanted]
