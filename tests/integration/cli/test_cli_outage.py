"""What is said when the embedded servers cannot write or are gone: the reason, the run, what to do."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from uuid import UUID, uuid4

import psutil
import pytest
from sqlalchemy import text

from engine.cli.session import open_session
from engine.errors import UnavailableError
from engine.keeper.client import Needs, keeper_status
from engine.settings import load_settings
from tests.support.disk import SmallDisk, can_mount
from tests.support.podium_home import PodiumHome
from tests.support.provider import Provider

pytestmark = pytest.mark.slow

THREE = 'model_id = ["slow", "slow", "slow"]\nsubtasks = ["a", "b", "c"]\naccess_list = [[], [0], [1]]\n'
DISK_MB = 200
UNTOLD = "PODIUM_DATABASE_URL"


@pytest.fixture
def home(provider: Provider) -> Iterator[PodiumHome]:
    with PodiumHome(provider.base_url) as made:
        yield made


def start_and_wait_for_a_call(home: PodiumHome, provider: Provider) -> subprocess.Popen[str]:
    (home.folder / "plan.txt").write_text(THREE)
    before = provider.count
    provider.script({"text": "Late.", "delay_headers_s": 3}, times=1)
    process = home.start("run", "Go on.", "--pool", "./pool.yaml", "--plan", "plan.txt")
    provider.wait_for(before + 1, timeout_s=60)
    return process


async def kill_keeper(home: PodiumHome) -> None:
    status = await keeper_status(home.home)
    assert status is not None
    keeper = psutil.Process(status["pid"])
    keeper.kill()
    # Its servers follow, told by the kernel.
    psutil.wait_procs([keeper, psutil.Process(status["postgres_pid"])], timeout=10)


def wait_for_line(process: subprocess.Popen[str], beginning: str) -> str:
    assert process.stderr is not None
    return next(line for line in process.stderr if line.startswith(beginning))


@pytest.mark.skipif(not can_mount(), reason="only root can mount a small file system")
async def test_a_disk_that_fills_under_a_run_is_told_by_every_command(home: PodiumHome, provider: Provider):
    with SmallDisk(home.home, DISK_MB) as disk:
        try:
            # A home that has worked before has all its files; the first run would fail in other ways.
            assert home.run("Warm up.", plan=THREE).code == 0
            process = start_and_wait_for_a_call(home, provider)
            disk.fill()
            told = wait_for_line(process, "warning: disk-full: ")
            assert str(home.home) in told
            run_id = re.search(r"run (\S+) cannot go on", told)[1]
            assert process.stderr.readline().startswith("hint: free some space")
            shown = home.podium("show", run_id, "--json").valid_json("run")
            assert (shown["state"], shown["notes"][-1]["code"]) == ("running", "disk-full")
            assert "[disk-full]" in home.podium("show", run_id).out
            done = home.podium("doctor", "--json")
            (found,) = [check for check in done.valid_json("doctor")["checks"] if check["name"] == "home"]
            assert (done.code, found["status"]) == (5, "fail")
            assert found["text"].startswith("disk-full: ")
            watching = home.start("watch", run_id)
            assert run_id in wait_for_line(watching, "warning: disk-full: ")
            disk.free()
            _, err = process.communicate(timeout=90)
            assert process.returncode == 0, err
            assert "there is space again" in err
            assert watching.wait(timeout=90) == 0
            watching.communicate()

            process = start_and_wait_for_a_call(home, provider)
            disk.fill()
            wait_for_line(process, "warning: disk-full: ")
            await kill_keeper(home)
            _, err = process.communicate(timeout=90)
            assert process.returncode == 5
            assert re.search(
                r"^error: no space left .*; run \S+ is on record and the next command continues it$", err, re.MULTILINE
            )
            # No keeper can start now. Whichever part fails first, the reason is told.
            for command in (("list",), ("run", "x", "--template", "single", "--pool", "./pool.yaml")):
                done = home.podium(*command, "--json")
                assert (done.code, done.error_code) == (5, "disk-full"), done
                assert UNTOLD not in done.err
            assert home.podium("down").code == 0
            disk.free()
            watched = home.podium("watch", "last", "--json")
            assert watched.code == 0, watched.err
            assert watched.valid_json("run")["state"] == "succeeded"
        finally:
            home.podium("down")


async def test_a_keeper_that_dies_under_a_run_is_told_with_the_run_and_the_next_command_continues_it(
    home: PodiumHome, provider: Provider
):
    process = start_and_wait_for_a_call(home, provider)
    await kill_keeper(home)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 5
    last = err.splitlines()[-2:]
    found = re.fullmatch(
        r"error: the keeper of \S+ is gone; run (\S+) is on record and the next command continues it", last[0]
    )
    assert found is not None, err
    assert last[1] == f"hint: the next command starts it again: podium watch {found[1]}"
    assert UNTOLD not in err
    assert home.podium("watch", found[1], "--json").json["state"] == "succeeded"


@pytest.mark.parametrize("place", ["database", "temporal"])
async def test_a_keeper_that_dies_outside_of_following_is_told_the_same_way(home: PodiumHome, place: str):
    run_id = uuid4()
    assert home.podium("list").code == 0
    with pytest.raises(UnavailableError) as caught:
        await lose_keeper_while(home, run_id, place)
    words = f"run {run_id} is on record" if place == "database" else "the run was not confirmed"
    assert caught.value.code == "keeper-gone"
    assert words in caught.value.message
    assert "PODIUM_" not in f"{caught.value.message} {caught.value.hint}"


async def lose_keeper_while(home: PodiumHome, run_id: UUID, place: str) -> None:
    """Asks for one of the servers of a keeper that was just killed, as a command does outside of following."""
    settings = load_settings({"PODIUM_HOME": str(home.home)})
    async with open_session(settings, Needs()) as session:
        session.unconfirmed = True
        if place == "temporal":
            await kill_keeper(home)
            await session.client()
        session.run_id = run_id
        await kill_keeper(home)
        async with session.database.read() as connection:
            await connection.execute(text("SELECT 1"))
