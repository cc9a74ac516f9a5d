"""The same request twice (G3-10): one run for one key, two runs without, and no run for another request."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.podium_home import PodiumHome
from tests.support.provider import Provider

pytestmark = pytest.mark.slow

ONE = 'model_id = ["quick"]\nsubtasks = ["a"]\naccess_list = [[]]\n'
TWO = 'model_id = ["quick"]\nsubtasks = ["b"]\naccess_list = [[]]\n'


@pytest.fixture(scope="module")
def home(session_provider: Provider) -> Iterator[PodiumHome]:
    with PodiumHome(session_provider.base_url) as made:
        yield made


def runs(home: PodiumHome) -> list[str]:
    return [line["id"] for line in home.podium("list", "--json").valid_json("list")]


def test_the_key_of_a_finished_run_gives_its_result_and_calls_nothing(home: PodiumHome, provider: Provider) -> None:
    first = home.run("Once.", "--idempotency-key", "finished", "--json", plan=ONE).valid_json("run")
    again = home.run("Once.", "--idempotency-key", "finished", "--json", plan=ONE)
    assert again.code == 0
    assert (again.json["id"], again.json["answer"]) == (first["id"], first["answer"])
    assert provider.count == 1
    assert runs(home).count(first["id"]) == 1


def test_the_key_of_a_live_run_joins_it(home: PodiumHome, provider: Provider) -> None:
    provider.script({"delay_first_s": 4}, model="quick")
    first = home.run("Live.", "--idempotency-key", "live", "--detach", "--json", plan=ONE).json["id"]
    again = home.run("Live.", "--idempotency-key", "live", "--json", plan=ONE)
    assert (again.code, again.json["id"], again.json["state"]) == (0, first, "succeeded")
    assert provider.count == 1


@pytest.mark.parametrize(("task", "plan"), [("Another task.", ONE), ("Mine.", TWO), ("Mine.", None)])
def test_a_key_that_belongs_to_another_request_is_a_conflict_and_makes_no_run(
    home: PodiumHome, provider: Provider, task: str, plan: str | None
) -> None:
    first = home.run("Mine.", "--idempotency-key", "mine", "--json", plan=ONE).json["id"]
    before, called = runs(home), provider.count
    # A request that lacks a key of the pool is refused before anything is compared.
    other = home.run(task, "--idempotency-key", "mine", "--json", plan=plan, env={"STAND_IN_KEY": "sk-stand-in"})
    assert (other.code, other.error_code) == (1, "idempotency-conflict")
    assert first in other.json["error"]["message"]
    assert (runs(home), provider.count) == (before, called)


def test_without_a_key_two_requests_are_two_runs(home: PodiumHome, provider: Provider) -> None:
    found = {home.run("Twice.", "--json", plan=ONE).json["id"] for _ in range(2)}
    assert len(found) == 2
    assert provider.count == 2


def test_the_key_of_a_failed_run_says_so_and_how_to_go_on(home: PodiumHome, provider: Provider) -> None:
    provider.script({"status": 404}, model="quick")
    first = home.run("Fails.", "--idempotency-key", "failed", "--json", plan=ONE)
    assert (first.code, first.json["state"]) == (1, "failed")
    again = home.run("Fails.", "--idempotency-key", "failed", plan=ONE)
    assert again.code == 1
    assert f"podium resume {first.json['id']}" in again.err
    assert provider.count == 1
    assert runs(home).count(first.json["id"]) == 1
    resumed = home.podium("resume", first.json["id"], "--json")
    assert resumed.code == 0, resumed.err
    done = home.run("Fails.", "--idempotency-key", "failed", "--json", plan=ONE)
    assert (done.code, done.json["id"], done.json["state"]) == (0, first.json["id"], "succeeded")
    assert provider.count == 2


def test_the_help_says_how_long_a_key_holds(home: PodiumHome) -> None:
    told = " ".join(home.podium("run", "--help").out.split())
    assert "as long as the run is on record" in told
