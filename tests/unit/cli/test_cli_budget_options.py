"""Budgets that make no sense are refused at once: no server is started, no folder is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command import podium
from tests.support.podium_home import POOL, PRICE

QUICK = 'model_id = ["quick", "quick"]\nsubtasks = ["one", "two"]\naccess_list = [[], [0]]\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    text = POOL.format(url="http://127.0.0.1:9/v1", price=PRICE)
    (tmp_path / "pool.yaml").write_text(text)
    priced = text.replace("model: echo}", f"model: echo, price: {PRICE}}}")
    priced = priced.replace("{env: STAND_IN_KEY}", "{env: STAND_IN_KEY}, price: " + PRICE)
    (tmp_path / "priced.yaml").write_text(priced)
    (tmp_path / "plan.txt").write_text(QUICK)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--budget-usd", "-1"], "budget-invalid"),
        (["--budget-usd", "1e3"], "budget-invalid"),
        (["--budget-usd", "2000000"], "budget-invalid"),
        (["--budget-usd", "0.00000001", "--pool", "./priced.yaml"], "budget-hopeless"),
        (["--budget-tokens", "1"], "budget-hopeless"),
        (["--budget-calls", "0"], "usage"),
        (["--budget-usd", "5"], "budget-price-unknown"),
    ],
)
def test_a_budget_that_makes_no_sense_makes_no_run(folder: Path, arguments: list[str], code: str) -> None:
    command = ["run", "Go.", "--pool", "./pool.yaml", "--plan", "plan.txt", *arguments, "--json"]
    done = podium(*command, home=folder / "home", cwd=folder)
    assert (done.code, done.error_code) == (2, code)
    assert not (folder / "home").exists()


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--usd", "two"], "budget-invalid"),
        (["--usd", "1", "--none", "usd"], "budget-twice"),
        (["--reason", "because"], "budget-missing"),
        (["--none", "money"], "usage"),
        ([], "run-unknown"),
    ],
)
def test_a_change_of_a_budget_that_makes_no_sense_is_refused(folder: Path, arguments: list[str], code: str) -> None:
    done = podium("budget", "last", *arguments, "--json", home=folder / "home", cwd=folder)
    assert (done.code, done.error_code) == (2, code)
    assert not (folder / "home").exists()


@pytest.mark.parametrize("command", ["retry", "skip", "abort"])
def test_an_answer_to_nothing_starts_nothing(folder: Path, command: str) -> None:
    done = podium(command, "last", "--json", home=folder / "home", cwd=folder)
    assert (done.code, done.error_code) == (2, "run-unknown")
    assert podium(command, "last", "--step", "-1", home=folder / "home", cwd=folder).code == 2
    assert not (folder / "home").exists()
