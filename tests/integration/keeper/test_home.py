"""The home: what is made, what is refused, and that nothing else is touched."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import ExitCode, InputError, UnavailableError
from engine.keeper.home import FORMAT, RUN_PATH_BYTES_MAX, leave_run_folder, lock_home, open_home
from engine.keeper.logs import LogFile
from tests.support.processes import (
    IS_ROOT,
    OTHER_UID,
    Holder,
    as_other,
    environment,
    permissions,
    public_folder,
    python_for_other,
)

OPEN = "import sys; from pathlib import Path; from engine.keeper.home import *; from engine.errors import PodiumError\n"
OPEN += "try: home = open_home(Path(sys.argv[1])); lock = lock_home(home); print('opened')\n"
OPEN += "except PodiumError as error: print(error.code, int(error.exit_code), error.message)\n"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_home_is_closed_to_others_and_its_missing_parents_are_ordinary(tmp_path: Path) -> None:
    before = permissions(tmp_path)
    home = open_home(tmp_path / "a" / "b" / "home")
    assert mode(home.root) == 0o700
    assert [mode(path) for path in (home.postgres_dir, home.temporal_dir, home.logs_dir)] == [0o700] * 3
    probe = tmp_path / "ordinary"
    probe.mkdir()
    assert mode(tmp_path / "a") == mode(tmp_path / "a" / "b") == mode(probe)
    assert home.version_path.read_text() == f"{FORMAT}\n"
    assert mode(home.version_path) == 0o600
    assert permissions(tmp_path) == before


def test_the_home_is_where_podium_home_says_else_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PODIUM_HOME", raising=False)
    assert open_home().root == tmp_path / ".podium"
    monkeypatch.setenv("PODIUM_HOME", str(tmp_path / "elsewhere"))
    assert open_home().root == tmp_path / "elsewhere"
    monkeypatch.setenv("PODIUM_HOME", "")
    assert open_home().root == tmp_path / ".podium"


def test_a_home_that_others_can_enter_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    root = tmp_path / "home"
    root.mkdir(mode=0o755)
    with pytest.raises(InputError, match="other users can enter") as caught:
        open_home(root)
    assert caught.value.code == "home-open-to-others"
    assert "chmod 700" in (caught.value.hint or "")
    assert mode(root) == 0o755
    assert list(root.iterdir()) == []
    root.chmod(0o700)
    open_home(root)


def test_a_folder_with_other_things_in_it_is_never_filled(tmp_path: Path) -> None:
    root = tmp_path / "home"
    root.mkdir(mode=0o700)
    (root / "thesis.tex").write_text("mine")
    with pytest.raises(InputError) as caught:
        open_home(root)
    assert caught.value.code == "home-not-empty"
    assert [path.name for path in root.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("below", ["", "deeper/home"])
def test_a_file_in_the_place_of_a_folder_is_a_clear_error(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError) as caught:
        open_home(tmp_path / "file" / below)
    assert caught.value.code == "home-not-a-folder"
    assert caught.value.hint


@pytest.mark.parametrize("text", [f"{FORMAT + 1}\n", "9999999999\n"])
def test_a_home_of_a_newer_version_is_refused_and_left_as_it_is(tmp_path: Path, text: str) -> None:
    home = open_home(tmp_path / "home")
    home.version_path.write_text(text, encoding="utf-8")
    before = sorted(home.root.rglob("*"))
    with pytest.raises(UnavailableError) as caught:
        open_home(home.root)
    assert caught.value.code == "home-newer"
    assert caught.value.exit_code == ExitCode.UNAVAILABLE
    assert home.version_path.read_text(encoding="utf-8") == text
    assert sorted(home.root.rglob("*")) == before


@pytest.mark.parametrize("text", ["", "\n", "something else\n", "²\n", "0\n", "-1\n", "1.5\n", "1" * 5000])
def test_a_damaged_version_file_is_not_called_newer(tmp_path: Path, text: str) -> None:
    home = open_home(tmp_path / "home")
    home.version_path.write_text(text, encoding="utf-8")
    before = sorted(home.root.rglob("*"))
    with pytest.raises(UnavailableError) as caught:
        open_home(home.root)
    assert caught.value.code == "home-damaged"
    assert str(home.version_path) in caught.value.message
    assert "newer" not in caught.value.message
    assert caught.value.hint
    assert caught.value.exit_code == ExitCode.UNAVAILABLE
    assert home.version_path.read_text(encoding="utf-8") == text
    assert sorted(home.root.rglob("*")) == before


def test_an_interrupted_first_opening_is_finished_by_the_next(tmp_path: Path) -> None:
    root = tmp_path / "home"
    root.mkdir(mode=0o700)
    (root / ".version-half").write_text("")
    assert open_home(root).version_path.exists()


def test_a_place_that_may_not_be_written_is_a_clear_error() -> None:
    python = python_for_other() if IS_ROOT else sys.executable
    if python is None:
        pytest.skip("root may write everywhere, and no Python is here that another user can run")
    with public_folder() as folder:
        (folder / "closed").mkdir(mode=0o555)
        command = [python, "-c", OPEN, str(folder / "closed" / "home")]
        command = as_other(command) if IS_ROOT else command
        done = subprocess.run(command, env=environment(), cwd="/", capture_output=True, text=True, check=True)
    assert done.stdout.startswith("home-not-writable 2 ")
    assert "permission denied" in done.stdout
    assert done.stderr == ""


@pytest.mark.skipif(not IS_ROOT, reason="only root can mount a small file system")
def test_a_full_disk_is_a_clear_error(tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=8k none "$1" && mkdir -m 700 "$1/home" && head -c 8k /dev/zero > "$1/filler" 2>/dev/null'
    script += '; exec "$2" -c "$3" "$1/home"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", str(tmp_path), sys.executable, OPEN]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.startswith("disk-full 5 "), done
    assert done.stderr == ""


@pytest.mark.skipif(not IS_ROOT, reason="only root can give a folder away")
def test_a_home_of_another_user_is_refused_to_root_too(tmp_path: Path) -> None:
    home = open_home(tmp_path / "home")
    os.chown(home.root, OTHER_UID, OTHER_UID)
    with pytest.raises(InputError) as caught:
        open_home(home.root)
    assert caught.value.code == "home-not-yours"


def deep(tmp_path: Path) -> Path:
    return tmp_path / ("d" * RUN_PATH_BYTES_MAX) / "home"


def test_sockets_of_a_deep_home_go_to_a_short_private_folder_that_it_remembers(tmp_path: Path) -> None:
    home = open_home(deep(tmp_path))
    try:
        assert len(os.fsencode(home.run_dir)) <= RUN_PATH_BYTES_MAX
        assert mode(home.run_dir) == 0o700
        assert open_home(home.root) == home
        home.run_dir.rmdir()  # as after a restart of the machine
        assert open_home(home.root) == home
        other = home.root.with_name("copy")
        home.root.rename(other)
        moved = open_home(other)
        assert moved.run_dir != home.run_dir
        moved.run_dir.rmdir()
    finally:
        home.run_dir.rmdir()


def test_the_sockets_folder_goes_when_it_is_empty_and_ours(tmp_path: Path) -> None:
    home = open_home(deep(tmp_path))
    (home.run_dir / "something").touch()
    leave_run_folder(home)
    assert home.run_dir.exists()
    (home.run_dir / "something").unlink()
    leave_run_folder(home)
    assert not home.run_dir.exists()
    leave_run_folder(home)
    near = open_home(tmp_path / "near")
    leave_run_folder(near)
    assert near.run_dir.exists()


def test_a_note_of_the_sockets_folder_that_is_garbage_is_not_followed(tmp_path: Path) -> None:
    home = open_home(deep(tmp_path))
    (home.root / "run-path").write_bytes(b"\xff\xfe/etc")
    again = open_home(home.root)
    assert again == home
    leave_run_folder(home)


@pytest.mark.parametrize("trap", ["link", "open", "foreign"])
def test_a_socket_folder_laid_by_somebody_else_is_never_used(tmp_path: Path, trap: str) -> None:
    if trap == "foreign" and not IS_ROOT:
        pytest.skip("only root can make a folder of somebody else")
    usual = open_home(deep(tmp_path)).run_dir
    usual.rmdir()
    if trap == "link":
        (tmp_path / "target").mkdir(mode=0o700)
        usual.symlink_to(tmp_path / "target")
    else:
        usual.mkdir(mode=0o700)
        if trap == "open":
            usual.chmod(0o777)
        else:
            os.chown(usual, OTHER_UID, OTHER_UID)
    try:
        home = open_home(deep(tmp_path))
        assert home.run_dir != usual
        assert mode(home.run_dir) == 0o700
        assert home.run_dir.lstat().st_uid == os.geteuid()
        assert open_home(deep(tmp_path)) == home
        home.run_dir.rmdir()
    finally:
        if trap == "link":
            usual.unlink()
        else:
            usual.rmdir()


def test_only_one_holds_the_lock_and_the_death_of_the_holder_frees_it(tmp_path: Path) -> None:
    root = tmp_path / "home"
    with Holder(root) as holder:
        facts = holder.facts()
        home = open_home(root)
        assert lock_home(home) is None
        assert home.lock_path.read_text() == f"{facts['pid']}\n"
        holder.kill()
    lock = lock_home(home)
    assert lock is not None
    assert lock_home(home) is None
    lock.release()
    lock.release()
    with lock_home(home) or pytest.fail("the lock was not given up"):
        assert lock_home(home) is None


def test_many_processes_may_open_a_new_home_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OPEN, str(tmp_path / "new" / "home")]
    running = [subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) for _ in range(8)]
    assert [process.communicate()[0].strip() for process in running] == ["opened"] * 8


def test_a_log_keeps_its_end_and_stays_bounded(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "server.log", bytes_max=1000)
    writer = log.open()
    try:
        for number in range(300):
            os.write(writer, f"line {number:04}\n".encode())
            log.trim()
        assert log.path.stat().st_size <= 1010
        assert log.path.with_name("server.log.1").stat().st_size <= 1010
        # The server's own descriptor goes on at the new end, not behind a hole.
        assert log.path.read_bytes().startswith(b"line ")
        assert log.path.read_text().endswith("line 0299\n")
        assert mode(log.path) == 0o600
        assert log.tail(bytes_max=10) == "line 0299\n"
        assert log.tail(since=log.size()) == ""
    finally:
        os.close(writer)
