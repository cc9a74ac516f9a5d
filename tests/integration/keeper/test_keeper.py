"""The keeper: one a home, shared by commands, gone when nobody needs it, private to its user."""

from __future__ import annotations

import re
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.keeper.home import lock_home, open_home
from tests.support.podium_home import PodiumHome
from tests.support.processes import IS_ROOT, as_other
from tests.support.provider import Provider

# Each of them starts servers of its own.
pytestmark = pytest.mark.slow

KEYED = 'model_id = ["slow", "keyed"]\nsubtasks = ["a", "b"]\naccess_list = [[], [0]]\n'


def lock_is_free(home: Path) -> bool:
    lock = lock_home(open_home(home))
    if lock is None:
        return False
    lock.release()
    return True


def wait_for(condition: object, timeout_s: float = 30.0) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]  # object is a callable here
        assert time.monotonic() < give_up_at
        time.sleep(0.05)


def test_commands_that_start_at_the_same_moment_share_one_keeper(provider: Provider) -> None:
    with PodiumHome(provider.base_url) as home:
        commands = [home.start("run", f"Task {n}.", "--pool", "./pool.yaml", "--template", "single") for n in range(4)]
        for command in commands:
            out, err = command.communicate(timeout=120)
            assert command.returncode == 0, (out, err)
        keepers = [
            process
            for process in psutil.process_iter()
            if str(home.home) in " ".join(_cmdline(process)) and "engine.keeper.daemon" in " ".join(_cmdline(process))
        ]
        assert len(keepers) == 1
        assert len(home.podium("list", "--json").json) == 4


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_the_keeper_leaves_when_there_is_neither_a_client_nor_a_live_run(provider: Provider) -> None:
    with PodiumHome(provider.base_url) as home:
        home.env["PODIUM_KEEPER_IDLE_S"] = "0.5"
        provider.script({"text": "Late.", "delay_headers_s": 4}, times=1)
        started = home.run("Wait.", "--template", "single", "--detach", "--json")
        assert started.code == 0, started.err
        time.sleep(2.5)
        # No client any more, but a live run: it stays.
        assert not lock_is_free(home.home)
        wait_for(lambda: lock_is_free(home.home))
        assert not list(home.home.glob("run/keeper.sock"))
        assert not [one for one in psutil.process_iter() if str(home.home) in " ".join(_cmdline(one))]
        # And the record is still there for the next command.
        assert home.podium("list", "--json").json[0]["state"] == "succeeded"


def test_up_runs_in_the_foreground_and_ends_cleanly_on_a_signal(provider: Provider) -> None:
    with PodiumHome(provider.base_url) as home:
        up = home.start("up")
        wait_for((home.home / "run" / "keeper.sock").exists, 60)
        # A client is answered when everything is up.
        assert home.podium("list", "--json").code == 0
        up.terminate()
        up.communicate(timeout=60)
        assert up.returncode == 0
        assert lock_is_free(home.home)
        assert not [one for one in psutil.process_iter() if str(home.home) in " ".join(_cmdline(one))]


def test_up_takes_over_from_a_keeper_in_the_background_and_its_runs_go_on(provider: Provider) -> None:
    with PodiumHome(provider.base_url) as home:
        provider.script({"text": "Late.", "delay_headers_s": 60}, times=1)
        run_id = home.run("Wait.", "--template", "single", "--detach").out.strip()
        provider.wait_for(1, timeout_s=60)
        background = home.home.joinpath("lock").read_text()
        up = home.start("up")
        wait_for(lambda: home.home.joinpath("lock").read_text() == f"{up.pid}\n", 60)
        assert home.home.joinpath("lock").read_text() != background
        watched = home.podium("watch", run_id, "--json")
        assert watched.code == 0, watched.err
        assert watched.json["state"] == "succeeded"
        # A second one does not take over from the first, which somebody sits before.
        second = home.podium("up")
        assert second.code == 1
        assert "another `podium up`" in second.err
        up.terminate()
        _, err = up.communicate(timeout=60)
        assert up.returncode == 0
        assert "taking over from the keeper in the background" in err
        assert lock_is_free(home.home)


def test_up_hands_over_the_keys_of_live_runs_and_names_missing_ones_without_a_traceback(provider: Provider) -> None:
    with PodiumHome(provider.base_url) as home:
        key = {"STAND_IN_KEY": "sk-stand-in"}
        run_id = home.run("Keyed.", "--detach", plan=KEYED, env=key).out.strip()
        assert home.podium("down").code == 0

        def reason() -> str | None:
            found: str | None = home.podium("list", "--json").json[0]["reason"]
            return found

        bare = home.start("up")
        wait_for(lambda: reason() == "secret-missing", 60)
        log = home.home / "logs" / "keeper.log"
        wait_for(lambda: "secret-missing: Completing activity as failed" in log.read_text())
        bare.terminate()
        _, err = bare.communicate(timeout=60)
        assert err.count("STAND_IN_KEY") == 1
        assert err.count("hint: ") == 1
        assert "Traceback" not in err + log.read_text()
        assert "Completing activity" not in err

        home.env |= key
        up = home.start("up")
        del home.env["STAND_IN_KEY"]
        # Nobody else has the key: what the provider gets, `up` brought.
        wait_for(lambda: any(_authorization(one) == "Bearer sk-stand-in" for one in provider.requests), 60)
        assert home.podium("watch", run_id, "--json").json["state"] == "succeeded"
        up.terminate()
        _, err = up.communicate(timeout=60)
        assert "STAND_IN_KEY" not in err
        assert "sk-stand-in" not in err + log.read_text()
        assert "Traceback" not in err


def _authorization(request: dict[str, Any]) -> str | None:
    found: str | None = request["headers"].get("authorization")
    return found


def test_upgrade_of_embedded_servers_starts_them_and_finds_nothing_left_to_do(provider: Provider) -> None:
    with PodiumHome(provider.base_url) as home:
        done = home.podium("db", "upgrade")
        assert done.code == 0, done.err
        assert re.fullmatch(r"the embedded servers upgrade themselves; the schema is \d{4}\n", done.out)
        found = home.podium("db", "upgrade", "--json").valid_json("db-upgrade")
        assert found["applied"] == []
        assert done.out.endswith(f" {found['revision']}\n")


def test_the_sockets_folder_of_a_deep_home_goes_with_the_keeper(provider: Provider) -> None:
    with PodiumHome(provider.base_url) as home:
        home.home = home.folder / ("d" * 100) / "home"
        assert home.podium("list").code == 0
        assert home.run("Hello.", "--template", "single").code == 0
        folder = open_home(home.home).run_dir
        assert folder.parent != home.home
        assert home.podium("down").code == 0
        assert not folder.exists()
        # Looking whether there is something to stop leaves nothing either.
        assert home.podium("down").code == 0
        assert not folder.exists()
        # And the home is as good as ever.
        assert home.podium("list", "--json").json[0]["state"] == "succeeded"


def test_down_stops_the_keeper_and_says_when_there_is_none(provider: Provider) -> None:
    with PodiumHome(provider.base_url) as home:
        assert home.run("Hello.", "--template", "single").code == 0
        assert home.podium("down").code == 0
        assert lock_is_free(home.home)
        again = home.podium("down")
        assert again.code == 0
        assert "nothing was running" in again.err
        assert home.podium("list").code == 0
        done = home.podium("down", "--json")
        assert done.valid_json("down") == {"schema_version": 1, "home": str(home.home), "stopped": True}
        assert home.podium("down", "--json").valid_json("down")["stopped"] is False


def test_the_socket_and_the_home_are_closed_to_others(provider: Provider) -> None:
    with PodiumHome(provider.base_url) as home:
        assert home.run("Hello.", "--template", "single").code == 0
        socket_path = open_home(home.home).socket_path
        assert stat.S_IMODE(socket_path.stat().st_mode) == 0o600
        assert stat.S_IMODE(socket_path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(home.home.stat().st_mode) == 0o700


@pytest.mark.skipif(not IS_ROOT, reason="only root can act as another user")
def test_another_user_cannot_talk_to_the_keeper_even_with_the_folder_open(provider: Provider) -> None:
    with PodiumHome(provider.base_url) as home:
        assert home.run("Hello.", "--template", "single").code == 0
        socket_path = open_home(home.home).socket_path
        for folder in (home.folder, home.home, socket_path.parent):
            folder.chmod(0o755)
        socket_path.chmod(0o666)
        script = (
            "import socket,sys; s=socket.socket(socket.AF_UNIX); s.settimeout(5); s.connect(sys.argv[1]);"
            's.sendall(b\'{"op":"hello","version":1}\\n\'); print(len(s.recv(1000)))'
        )
        done = subprocess.run(
            as_other(["/usr/bin/python3", "-c", script, str(socket_path)]), capture_output=True, text=True, check=False
        )
        home.home.chmod(0o700)
        # Hung up on, before or after it could say anything; never answered.
        assert done.stdout.strip() in {"", "0"}, (done.stdout, done.stderr)
        assert "PermissionError" not in done.stderr


def test_a_secret_of_the_first_command_is_not_in_the_keepers_environment(provider: Provider) -> None:
    with PodiumHome(provider.base_url) as home:
        done = home.run("Hello.", "--template", "single", env={"STAND_IN_KEY": "canary-key", "OTHER_API_KEY": "canary"})
        assert done.code == 0, done.err
        keepers = [one for one in psutil.process_iter() if "engine.keeper.daemon" in " ".join(_cmdline(one))]
        for keeper in keepers:
            if str(home.home) in " ".join(keeper.cmdline()):
                assert "canary" not in str(keeper.environ())


def test_a_program_of_another_protocol_version_is_told_what_to_do(provider: Provider) -> None:
    with PodiumHome(provider.base_url) as home:
        assert home.run("Hello.", "--template", "single").code == 0
        script = (
            "import socket,sys; s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
            's.sendall(b\'{"op":"hello","version":99}\\n\'); print(s.recv(1000).decode())'
        )
        done = subprocess.run(
            [sys.executable, "-c", script, str(open_home(home.home).socket_path)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert "podium down" in done.stdout
        assert open_home(home.home).socket_path.exists()


def test_short_commands_one_after_the_other_keep_the_keeper(provider: Provider) -> None:
    with PodiumHome(provider.base_url) as home:
        # Commands come more often than this, and each is there for less than the keeper's look around.
        home.env["PODIUM_KEEPER_IDLE_S"] = "7"
        assert home.run("Hello.", "--template", "single").code == 0
        holder = home.home.joinpath("lock").read_text()
        until = time.monotonic() + 16
        while time.monotonic() < until:
            assert home.podium("list", "--json").code == 0
        assert home.home.joinpath("lock").read_text() == holder
