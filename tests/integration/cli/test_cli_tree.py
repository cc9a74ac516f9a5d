"""What people and programs see of runs below a run and of rounds, by the real command with a real keeper."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.support.podium_home import PRICE, PodiumHome
from tests.support.provider import Provider

pytestmark = pytest.mark.slow

POOL = """\
name: tree
conductor: {{base_url: "{url}", model: planner, price: {price}}}
workers:
  - {{name: quick, description: answers, base_url: "{url}", model: quick, price: {price}, attempts_max: 1}}
  - {{name: self, description: splits, kind: conductor}}
  - {{name: free, description: has no price, base_url: "{url}", model: unpriced}}
policy: {{rounds_max: {rounds}, on_failed_step: {on_failed}}}
"""
SPLIT = 'model_id = ["quick", "self"]\nsubtasks = ["first", "second"]\naccess_list = [[], [0]]\n'
INNER = 'model_id = ["quick", "quick"]\nsubtasks = ["inner one", "inner two"]\naccess_list = [[], [0]]\n'
KEEP = "model_id = []\nsubtasks = []\naccess_list = []\n"
MEND = 'model_id = ["quick"]\nsubtasks = ["mend"]\naccess_list = [["all"]]\n'


@pytest.fixture(scope="module")
def home(session_provider: Provider) -> Iterator[PodiumHome]:
    with PodiumHome(session_provider.base_url) as made:
        yield made


def write_pool(home: PodiumHome, provider: Provider, *, rounds: int = 1, on_failed: str = "fail") -> None:
    text = POOL.format(url=provider.base_url, price=PRICE, rounds=rounds, on_failed=on_failed)
    (home.folder / "pool.yaml").write_text(text)


def test_a_tree_is_drawn_listed_and_counted_whole(home: PodiumHome, provider: Provider) -> None:
    write_pool(home, provider)
    provider.script({"text": INNER, "usage": [100, 10]}, model="planner")
    provider.script({"usage": [7, 3]}, model="quick", times=None)
    done = home.run("Split it.", "--json", plan=SPLIT)
    assert done.code == 0, done.err
    run = done.valid_json("run")
    (child,) = run["descendants"]
    assert run["children"] == [child["id"]]
    assert child["parent"] == {"run": run["id"], "round": 0, "step": 1}
    assert (child["state"], child["tokens"]) == ("succeeded", {"input": 114, "output": 16})
    # Three calls of 7 and 3 tokens and the child's plan, at 1 and 10 dollars a million.
    assert run["tokens"] == {"input": 121, "output": 19}
    assert (run["cost_usd"], run["cost_complete"]) == ("0.000311", True)
    assert run["parent"] is None
    assert [one["kept"] for one in run["rounds"]] == [False]
    shown = home.podium("show", run["id"]).out
    lines = shown.splitlines()
    (number,) = [number for number, line in enumerate(lines) if re.match(r" +1 .* self +second", line)]
    assert re.fullmatch(
        rf" +[└`] run {child['id']} succeeded: 2 of 2 steps, .*, 114 tokens in, 16 out, cost \$0\.000274",
        lines[number + 1],
    )
    (row,) = [line.split() for line in lines if line.split()[:3] == ["1", "self", "succeeded"]]
    assert row[-5:-1] == ["114", "16", "$0.000274", "3"]
    assert "cost $0.000311 with 1 run below it" in shown
    below = home.podium("show", child["id"])
    assert f"below   step 1 of run {run['id']}" in below.out
    listed = home.podium("list", "--json").valid_json("list")
    assert [one["id"] for one in listed] == [run["id"]]
    assert listed[0]["cost_usd"] == "0.000311"
    every = home.podium("list", "--all", "--json").valid_json("list")
    assert {one["id"]: one["parent"] for one in every} == {run["id"]: None, child["id"]: child["parent"]}
    assert f"(step 1 of run {run['id']})" in home.podium("list", "--all").out
    assert home.podium("output", "last").out.strip() == run["answer"]
    # Progress has a line for the run below, again and again as it goes on.
    assert home.podium("show", "last", "--json").json["id"] == run["id"]


def test_progress_tells_of_runs_below_and_of_rounds(home: PodiumHome, provider: Provider) -> None:
    write_pool(home, provider, rounds=2)
    provider.script({"text": INNER}, {"text": MEND}, model="planner")
    done = home.run("Split it.", plan=SPLIT)
    assert done.code == 0, done.err
    assert re.search(r"step 1: run [0-9a-f]{8} succeeded, 2 of 2 steps", done.err)
    assert "round 1: planning call 1" in done.err
    assert "round 1: step 0 quick succeeded" in done.err
    shown = home.podium("show", "last").out
    assert "round 0\n" in shown
    assert "round 1\n" in shown
    assert "round 1, planning call 1: succeeded" in shown
    run = home.podium("show", "last", "--json").valid_json("run")
    assert [(one["round"], one["steps"], one["kept"]) for one in run["rounds"]] == [(0, 2, False), (1, 1, False)]
    assert [attempt["round"] for attempt in run["planning"]] == [1]
    assert home.podium("output", "last", "--step", "0").out.strip() == run["answer"]
    first = home.podium("output", "last", "--step", "0", "--round", "0", "--json").valid_json("output")
    assert first["text"] == run["steps"][0]["output"]


def test_a_round_that_kept_the_answer_is_said_to(home: PodiumHome, provider: Provider) -> None:
    write_pool(home, provider, rounds=2)
    provider.script({"text": INNER}, {"text": KEEP}, model="planner")
    done = home.run("Answer it.")
    assert done.code == 0, done.err
    shown = home.podium("show", "last").out
    assert "round 1: the answer was kept" in shown
    run = home.podium("show", "last", "--json").valid_json("run")
    assert [(one["round"], one["kept"]) for one in run["rounds"]] == [(0, False), (1, True)]
    assert run["answer"] == run["steps"][1]["output"]
    assert run["plan_digest"] == run["rounds"][0]["plan_digest"] != run["rounds"][1]["plan_digest"]
    assert home.podium("output", "last", "--step", "1").out.strip() == run["answer"]


def test_why_a_run_below_failed_is_said_with_the_step_it_was_for(home: PodiumHome, provider: Provider) -> None:
    write_pool(home, provider)
    provider.script({"text": INNER}, model="planner")
    provider.script({}, {"status": 401}, model="quick")
    done = home.run("Split it.", plan=SPLIT)
    assert done.code == 1
    child = home.podium("show", "last", "--json").json["children"][0]
    assert f"child-failed (step 1, worker self): run {child} failed (auth-failed)" in done.err
    assert f"step 1: run {child} failed (auth-failed)" in home.podium("show", "last").out
    # A part of unknown cost below makes the whole unknown.
    provider.script({"text": INNER.replace("quick", "free")}, model="planner")
    done = home.run("Split it.", "--json", plan=SPLIT)
    run = done.valid_json("run")
    assert (run["state"], run["cost_complete"]) == ("succeeded", False)
    assert run["descendants"][0]["cost_complete"] is False
    assert home.podium("list", "--json").json[0]["cost_usd"] is None


def test_unreadable_text_of_a_later_round_is_shown(home: PodiumHome, provider: Provider) -> None:
    write_pool(home, provider, rounds=2)
    provider.script({"text": INNER}, *[{"text": "I keep it."}] * 3, model="planner")
    done = home.run("Answer it.")
    assert done.code == 1
    assert "plan-invalid" in done.err
    shown = home.podium("show", "last").out
    assert "round 1: no plan" in shown
    assert "    I keep it." in shown
    refused = home.podium("output", "last", "--json")
    assert (refused.code, refused.error_code) == (1, "output-missing")


def test_a_run_waits_when_all_that_is_left_waits_below_it(home: PodiumHome, provider: Provider) -> None:
    write_pool(home, provider, on_failed="wait")
    provider.script({"text": INNER}, model="planner")
    provider.script({}, {"status": 401}, model="quick")
    done = home.run("Split it.", plan=SPLIT)
    assert done.code == 3, done.err
    child = home.podium("show", "last", "--json").json["children"][0]
    assert f"run {child} below it waits (operator)" in done.err
    cancelled = home.podium("cancel", child)
    assert cancelled.code == 0
    assert "it belongs to a step of run" in cancelled.err
    done = home.podium("watch", "last")
    assert done.code == 3
    assert home.podium("cancel", "last").code == 0


def test_what_waits_below_is_said_with_the_command_that_answers_it(home: PodiumHome, provider: Provider) -> None:
    write_pool(home, provider, on_failed="wait")
    provider.script({"text": INNER}, model="planner")
    provider.script({}, {"status": 401}, model="quick")
    done = home.run("Split it.", "--json", plan=SPLIT)
    assert done.code == 3, done.err
    run = done.valid_json("run")
    (child,) = run["children"]
    shown = home.podium("show", run["id"]).out
    assert f"\nwaits   run {child} below it (step 1): waiting (operator)\n" in shown
    assert f"\nwaits   run {child}: step 0 (quick) waits for an operator" in shown
    assert f"\nhint    `podium retry {child} --step 0 " in shown
    for arguments in ((), ("--step", "1")):
        refused = home.podium("retry", run["id"], *arguments, "--json")
        assert (refused.code, refused.error_code) == (1, "step-not-waiting")
        assert f"`podium retry {child} --step 0`" in refused.json["error"]["hint"]
    assert home.podium("retry", child, "--worker", "free").code == 0
    assert home.podium("watch", run["id"]).code == 0
    # The attempt that failed was another worker's than the step's is by now.
    assert "step 0, attempt 1 (worker quick): failed" in home.podium("show", child).out


def test_a_pause_from_above_is_named_by_the_run_that_is_paused(home: PodiumHome, provider: Provider) -> None:
    write_pool(home, provider)
    provider.script({"text": INNER}, model="planner")
    provider.script({}, {"delay_first_s": 15}, model="quick")
    top = home.run("Split it.", "--detach", plan=SPLIT).out.strip()
    provider.wait_for(3, timeout_s=60)
    (child,) = home.podium("show", top, "--json").json["children"]
    assert home.podium("pause", top).code == 0
    refused = home.podium("unpause", child, "--json")
    assert (refused.code, refused.error_code) == (1, "run-not-paused")
    assert refused.json["error"]["message"] == f"run {child} is not paused itself: run {top} above it is"
    assert refused.json["error"]["hint"] == f"podium unpause {top}"
    while home.podium("show", child, "--json").json["reason"] != "paused":
        pass
    assert f"\nhint    podium unpause {top}\n" in home.podium("show", child).out
    assert f"hint: podium unpause {top}\n" in home.podium("watch", child).err
    assert home.podium("pause", child).code == 0
    lifted = home.podium("unpause", child)
    assert lifted.code == 0, lifted.err
    assert "goes on" not in lifted.out
    assert f"run {top} above it still is" in lifted.out
    assert f"podium unpause {top}" in lifted.err
    assert home.podium("unpause", top).out == f"run {top} goes on\n"
    assert home.podium("watch", top).code == 0
