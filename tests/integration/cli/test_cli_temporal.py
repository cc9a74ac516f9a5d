"""What commands say of a Temporal server that is away or too old; no run is left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command import Done, podium
from tests.support.old_temporal import OldTemporal
from tests.support.podium_home import POOL, PRICE

ONE = 'model_id = ["quick"]\nsubtasks = ["a"]\naccess_list = [[]]\n'
RUN = ("run", "x", "--pool", "./pool.yaml", "--plan", "plan.txt", "--json")


@pytest.fixture
def command(tmp_path: Path, database_url: str) -> Callable[..., Done]:
    """Runs `podium` on a database of its own and the Temporal address that is given first."""
    (tmp_path / "pool.yaml").write_text(POOL.format(url="http://127.0.0.1:9/v1", price=PRICE))
    (tmp_path / "plan.txt").write_text(ONE)

    def call(address: str, *arguments: str) -> Done:
        env = {
            "PODIUM_DATABASE_URL": database_url,
            "PODIUM_TEMPORAL_ADDRESS": address,
            "PODIUM_KEY_STORE": (tmp_path / "keys").as_uri(),
        }
        return podium(*arguments, home=tmp_path / "home", env=env, cwd=tmp_path)

    return call


@pytest.mark.slow
def test_a_server_that_is_too_old_is_named_with_the_version_that_is_needed(command: Callable[..., Done]):
    with OldTemporal("1.23.1") as server:
        done = command(server.address, *RUN)
        assert (done.code, done.error_code) == (5, "temporal-too-old")
        worker = command(server.address, "worker")
        assert worker.code == 5
        assert worker.err.splitlines()[-2:] == [
            "error: this Temporal server is 1.23.1; Podium needs 1.24.2 or newer",
            "hint: upgrade the server that PODIUM_TEMPORAL_ADDRESS names",
        ]
        doctor = command(server.address, "doctor", "--json")
        (found,) = [check for check in doctor.valid_json("doctor")["checks"] if check["name"] == "temporal"]
        assert (doctor.code, found["status"]) == (5, "fail")
        assert "1.24.2" in found["text"]
        assert command(server.address, "list", "--json").json == []


@pytest.mark.slow
def test_a_server_that_does_not_answer_leaves_no_run_behind(command: Callable[..., Done]):
    done = command("127.0.0.1:9", *RUN)
    assert (done.code, done.error_code) == (5, "temporal-unreachable")
    assert "127.0.0.1:9" in done.json["error"]["message"]
    assert "PODIUM_TEMPORAL_ADDRESS" in done.json["error"]["hint"]
    assert command("127.0.0.1:9", "list", "--json").json == []
