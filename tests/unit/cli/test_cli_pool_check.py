"""`podium pool check`: what a pool is, and whether its keys are here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command import podium, terminal_output

POOL = """\
name: mine
conductor: {base_url: "http://127.0.0.1:9/v1", model: m, api_key: {env: ONE_KEY}}
workers:
  - {name: a, description: first, base_url: "http://127.0.0.1:9/v1", model: m, api_key: {env: ONE_KEY}}
  - {name: b, description: second, base_url: "http://127.0.0.1:9/v1", model: m, api_key: {file: /nowhere/key}}
"""


def test_the_pool_that_comes_with_podium_is_valid(tmp_path: Path):
    done = podium("pool", "check", "local", "--keys", "--json", home=tmp_path / "home")
    assert (done.code, done.err) == (0, "")
    found = done.valid_json("pool-check")
    assert [worker["name"] for worker in found["workers"]] == ["writer", "explainer", "editor"]
    assert found["keys"] == []


def test_missing_keys_are_warned_of_and_fail_only_when_asked(tmp_path: Path):
    (tmp_path / "pool.yaml").write_text(POOL)
    done = podium("pool", "check", "./pool.yaml", "--json", home=tmp_path / "home")
    assert done.code == 0
    keys = done.valid_json("pool-check")["keys"]
    assert [(key["env"], key["file"], key["found"]) for key in keys] == [
        ("ONE_KEY", None, False),
        (None, "/nowhere/key", False),
    ]
    assert keys[0]["models"] == ["conductor", "a"]
    # In the words of the pool's own check, wherever keys are spoken of.
    assert "warning: The variable ONE_KEY has no key for conductor, a\n" in done.err
    assert "warning: The file /nowhere/key has no key for b\n" in done.err
    checked = podium("doctor", "--pool", "./pool.yaml", home=tmp_path / "home", cwd=tmp_path)
    assert "The variable ONE_KEY has no key for conductor, a in this environment" in checked.out
    done = podium("pool", "check", "./pool.yaml", "--keys", home=tmp_path / "home")
    assert done.code == 2
    assert done.err.count("ONE_KEY") == 1


@pytest.mark.slow
def test_a_key_that_is_there_is_never_shown(tmp_path: Path):
    (tmp_path / "pool.yaml").write_text(POOL)
    env = {"ONE_KEY": "sk-canary"}
    for options in ((), ("--json",), ("--keys",)):
        done = podium("pool", "check", "./pool.yaml", *options, home=tmp_path / "home", env=env)
        assert "canary" not in done.out + done.err
        assert "ONE_KEY" not in done.err


def test_an_invalid_pool_lists_every_fault_with_its_line(tmp_path: Path):
    (tmp_path / "pool.yaml").write_text(POOL.replace("name: a, ", "nmae: a, ").replace("model: m}", "model: m, x: 1}"))
    done = podium("pool", "check", "./pool.yaml", "--json", home=tmp_path / "home")
    assert (done.code, done.error_code) == (2, "pool-invalid")
    assert "pool.yaml:4: " in done.err
    assert "Traceback" not in done.err


def test_names_and_models_are_whole_however_narrow_the_terminal_is(tmp_path: Path):
    model = "a-model-with-a-name-of-forty-characters-x"
    (tmp_path / "pool.yaml").write_text(POOL.replace("model: m", f"model: {model}"))
    out = terminal_output("pool", "check", "./pool.yaml", home=tmp_path / "home", cwd=tmp_path, columns=60)
    assert out.count(model) == 3
    assert all(f"  {name} " in out for name in ("conductor", "a", "b"))


def test_a_pool_of_one_worker_is_told_in_the_singular(tmp_path: Path):
    (tmp_path / "pool.yaml").write_text("\n".join(POOL.splitlines()[:-1]) + "\n")
    done = podium("pool", "check", "./pool.yaml", home=tmp_path / "home")
    assert done.out.splitlines()[0] == "pool mine: 1 worker"


def test_no_color_means_no_escape_codes(tmp_path: Path):
    plain = terminal_output("pool", "check", "local", home=tmp_path / "home", cwd=tmp_path, env={"NO_COLOR": "1"})
    assert "explainer" in plain
    assert "\x1b" not in plain
    assert "\x1b" in terminal_output("pool", "check", "local", home=tmp_path / "home", cwd=tmp_path)


@pytest.mark.slow
def test_a_model_that_no_provider_has_is_refused(tmp_path: Path):
    worker = "{adapter: litellm, model: no-such-thing, name: odd, description: answers}"
    conductor = '{adapter: openai, base_url: "http://127.0.0.1:9/v1", model: any}'
    (tmp_path / "odd.yaml").write_text(f"name: odd\nconductor: {conductor}\nworkers:\n  - {worker}\n")
    done = podium("pool", "check", "./odd.yaml", "--json", home=tmp_path / "home", cwd=tmp_path)
    assert (done.code, done.error_code) == (2, "model-unknown")


def test_what_an_approval_will_say_is_shown(tmp_path: Path):
    rules = 'policy:\n  reviews:\n    - {gate: plan}\n    - {gate: answer, meaning: "I weighed it."}\n'
    (tmp_path / "pool.yaml").write_text(POOL + rules)
    done = podium("pool", "check", "./pool.yaml", home=tmp_path / "home", cwd=tmp_path)
    assert done.code == 0, done.err
    plan, plan_words, answer, answer_words = done.out.splitlines()[-4:]
    assert (plan, answer) == ("review  each plan, 1 approval", "review  the run's answer, 1 approval")
    assert plan_words.strip() == "approving says: I checked that this plan is fit for the task and may be performed."
    assert answer_words.strip() == "approving says: I weighed it."
