"""Servers of one's own: `podium worker` processes do the work, and the same commands speak to them."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.command import PODIUM, Done, environment, podium
from tests.support.podium_home import POOL, PRICE
from tests.support.provider import Provider
from tests.support.servers import TestServers

ONE = 'model_id = ["quick"]\nsubtasks = ["a"]\naccess_list = [[]]\n'
KEYED = 'model_id = ["keyed"]\nsubtasks = ["a"]\naccess_list = [[]]\n'
STOPS = 3


class Site:
    """A folder with a pool and plans, and an environment that names real servers."""

    def __init__(self, folder: Path, database_url: str, temporal_address: str, provider_url: str) -> None:
        self.folder = folder
        self.env = {"PODIUM_DATABASE_URL": database_url, "PODIUM_TEMPORAL_ADDRESS": temporal_address}
        self.env["PODIUM_KEY_STORE"] = (folder / "keys").as_uri()
        (folder / "pool.yaml").write_text(POOL.format(url=provider_url, price=PRICE))
        (folder / "one.txt").write_text(ONE)
        (folder / "keyed.txt").write_text(KEYED)

    def podium(self, *arguments: str) -> Done:
        return podium(*arguments, home=self.folder / "home", env=self.env, cwd=self.folder)

    def run(self, plan: str) -> Done:
        return self.podium("run", "x", "--pool", "./pool.yaml", "--plan", plan, "--json")

    @contextmanager
    def worker(self, *options: str) -> Iterator[subprocess.Popen[str]]:
        process = subprocess.Popen(
            [*PODIUM, "worker", *options],
            env=environment(self.folder / "home", self.env),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


def wait_ready(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if " is ready; " in line:
            return
    raise AssertionError(f"the worker ended with {process.wait()}")


@pytest.fixture
def site(tmp_path: Path, database_url: str, servers: TestServers, provider: Provider) -> Site:
    return Site(tmp_path, database_url, servers.temporal_address, provider.base_url)


@pytest.mark.slow
def test_a_worker_performs_runs_of_servers_of_ones_own_and_stops_gracefully(site: Site, provider: Provider):
    with site.worker("--pool", "./pool.yaml") as worker:
        wait_ready(worker)
        done = site.run("one.txt")
        assert done.code == 0, done.err
        assert done.valid_json("run")["state"] == "succeeded"
        # Keys are the workers' matter here, so the command does not ask for one; the run waits and says for what.
        done = site.run("keyed.txt")
        assert done.code == 3, done.err
        assert done.valid_json("run")["reason"] == "secret-missing"
        assert "error:" not in done.err
        assert site.podium("doctor", "--json").valid_json("doctor")["healthy"]
        worker.send_signal(signal.SIGTERM)
        out, err = worker.communicate(timeout=60)
    assert (worker.returncode, out) == (0, "")
    assert err.splitlines()[-1] == "worker stopped"
    # No home is made by commands that have no use for one.
    assert not (site.folder / "home").exists()


@pytest.mark.slow
def test_a_worker_that_is_stopped_again_and_again_always_ends_with_0(site: Site):
    # Unlike a mere client, a worker has pollers at work; they must not abort the process while it ends.
    codes = []
    for _ in range(STOPS):
        with site.worker() as worker:
            wait_ready(worker)
            worker.send_signal(signal.SIGINT)
            worker.communicate(timeout=60)
            codes.append(worker.returncode)
    assert codes == [0] * STOPS


@pytest.mark.slow
def test_a_second_interrupt_ends_a_worker_at_once(site: Site, provider: Provider):
    provider.script({"delay_first_s": 30}, model="quick")
    with site.worker("--pool", "./pool.yaml") as worker:
        wait_ready(worker)
        site.podium("run", "x", "--pool", "./pool.yaml", "--plan", "one.txt", "--detach")
        provider.wait_for(1)
        worker.send_signal(signal.SIGINT)
        assert worker.stderr is not None
        # Calls of an earlier test's run, whose database is another, may be logged in between.
        assert any("Ctrl-C again" in line for line in worker.stderr)
        worker.send_signal(signal.SIGINT)
        assert worker.wait(timeout=5) == -signal.SIGINT


@pytest.mark.slow
def test_a_database_without_a_schema_is_refused_until_it_is_upgraded(tmp_path: Path, servers: TestServers):
    url = servers.new_database()
    try:
        site = Site(tmp_path, url, servers.temporal_address, "http://127.0.0.1:9/v1")
        for command in (("list",), ("worker",), ("run", "x", "--pool", "./pool.yaml", "--plan", "one.txt")):
            done = site.podium(*command)
            assert done.code == 5
            assert done.err.splitlines()[-1] == "hint: run `podium db upgrade`"
        done = site.podium("db", "upgrade", "--json")
        assert done.code == 0
        assert done.valid_json("db-upgrade")["applied"]
        assert site.podium("db", "upgrade", "--json").json["applied"] == []
        assert site.podium("list", "--json").json == []
    finally:
        servers.drop_database(url)


@pytest.mark.slow
def test_doctor_adopts_another_cluster_only_when_told_to(site: Site, servers: TestServers):
    assert site.podium("doctor").code == 0
    import asyncio

    from engine.store.cluster import remember_cluster
    from engine.store.database import Database

    async def forget() -> None:
        database = Database(site.env["PODIUM_DATABASE_URL"])
        await remember_cluster(database, "a cluster that is gone", "default", adopt=True)
        await database.close()

    asyncio.run(forget())
    done = site.podium("doctor", "--json")
    assert done.code == 5
    found = {check["name"]: check for check in done.valid_json("doctor")["checks"]}
    assert found["temporal"]["status"] == "fail"
    assert "--adopt-temporal" in found["temporal"]["hint"]
    assert site.podium("doctor", "--adopt-temporal").code == 0
    assert site.podium("doctor").code == 0
