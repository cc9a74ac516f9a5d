"""Child processes: how they start, end and are found again."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from engine.errors import UnavailableError
from engine.keeper import launch
from engine.keeper.logs import LogFile
from engine.keeper.process import NAMESPACE, ChildProcess, Program, Stage, find_leftovers, run_to_end, stop_leftovers
from tests.support.processes import until

PYTHON = Path(sys.executable)
NAMES = frozenset({Path(os.path.realpath(sys.executable)).name})
# Deaf to everything that can be ignored; says so when it is.
DEAF = "import signal, time, sys; [signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT, signal.SIGTERM)]"
DEAF += "; print('deaf', flush=True); time.sleep(60)"


def program(folder: Path, code: str) -> Program:
    return Program(PYTHON, ["-c", code], folder)


async def deaf_child(folder: Path) -> ChildProcess:
    child = await ChildProcess.start(program(folder, DEAF), LogFile(folder / "log"))
    await asyncio.to_thread(until, lambda: "deaf" in child.output(), within_s=10)
    return child


async def test_a_program_that_ignores_polite_signals_is_killed_within_its_bound(tmp_path: Path) -> None:
    child = await deaf_child(tmp_path)
    start = time.monotonic()
    assert await child.stop([Stage(signal.SIGINT, 0.2), Stage(signal.SIGTERM, 0.2)]) == -signal.SIGKILL
    assert 0.3 < time.monotonic() - start < 3
    assert await child.stop([Stage(signal.SIGINT, 0.2)]) == -signal.SIGKILL
    assert await child.wait() == -signal.SIGKILL


async def test_a_leftover_is_found_by_its_folder_and_stopped_and_its_like_elsewhere_is_not(tmp_path: Path) -> None:
    (tmp_path / "ours" / "below").mkdir(parents=True)
    (tmp_path / "ours-too").mkdir()
    inside = await deaf_child(tmp_path / "ours" / "below")
    elsewhere = await deaf_child(tmp_path / "ours-too")
    try:
        assert [process.pid for process in find_leftovers(tmp_path / "ours", NAMES)] == [inside.pid]
        assert find_leftovers(tmp_path / "ours", frozenset({"postgres"})) == []
        assert await stop_leftovers(tmp_path / "ours", NAMES, [Stage(signal.SIGTERM, 0.2)]) == 1
        assert await inside.wait() == -signal.SIGKILL
        assert await stop_leftovers(tmp_path / "ours", NAMES, []) == 0
        assert elsewhere.exit_code is None
    finally:
        await elsewhere.stop([])


async def test_a_child_is_in_a_session_of_its_own_so_ctrl_c_does_not_reach_it(tmp_path: Path) -> None:
    child = await deaf_child(tmp_path)
    try:
        assert os.getsid(child.pid) == child.pid != os.getsid(0)
        status = Path(f"/proc/{child.pid}/status").read_text()  # noqa: ASYNC240 - /proc does not block
        assert "SigIgn:\t0000000000000000" not in status, "the probe works: it ignores two signals itself"
    finally:
        await child.stop([])


async def test_a_child_whose_parent_died_before_it_could_ask_for_the_signal_does_not_start(tmp_path: Path) -> None:
    command = program(tmp_path, "print('started')").command()
    command[command.index(str(os.getpid()))] = "1"
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, message = await process.communicate()
    assert (process.returncode, output) == (launch.EXIT_CODE, b"")
    assert b"the parent is gone" in message


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
@pytest.mark.parametrize("identity", ["self", "namespace"])
def test_the_death_signal_survives_the_change_of_identity(tmp_path: Path, identity: str) -> None:
    code = "import sys, os, time; from pathlib import Path; print(os.getpid(), flush=True); time.sleep(60)"
    starter = (
        "import subprocess, sys, time; from pathlib import Path;"
        "from engine.keeper.process import *; from engine.keeper.process import Identity;"
        f"p = Program(Path(sys.executable), ['-c', {code!r}], Path({str(tmp_path)!r}), Identity({identity!r}));"
        "subprocess.Popen(p.command(), start_new_session=True); time.sleep(60)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    parent = subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, env=environment, text=True)
    assert parent.stdout is not None
    line = parent.stdout.readline()
    if not line and identity == "namespace":
        pytest.skip("user namespaces are forbidden here")
    child = psutil.Process(int(line))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    gone, _ = psutil.wait_procs([child], timeout=3)
    assert gone or child.status() == psutil.STATUS_ZOMBIE


async def test_a_short_program_gets_its_input_and_a_bound(tmp_path: Path) -> None:
    echo = program(tmp_path, "import sys; print(sys.stdin.read() + '!'); sys.exit(3)")
    assert await run_to_end(echo, text="word", timeout_s=10) == (3, "word!\n")
    start = time.monotonic()
    with pytest.raises(UnavailableError) as caught:
        await run_to_end(program(tmp_path, DEAF), timeout_s=0.5)
    assert caught.value.code == "process-stuck"
    assert time.monotonic() - start < 3
    assert find_leftovers(tmp_path, NAMES) == []


async def test_a_program_that_is_not_there_is_reported_by_its_exit(tmp_path: Path) -> None:
    code, output = await run_to_end(Program(tmp_path / "missing", [], tmp_path), timeout_s=10)
    assert code == launch.EXIT_CODE
    assert "No such file" in output
    assert len(output.splitlines()) == 1


async def test_inside_the_namespace_it_is_nobody_and_files_stay_ours(tmp_path: Path) -> None:
    code = "import os; open('file', 'w').close(); print(os.getuid(), os.geteuid())"
    ended, output = await run_to_end(Program(PYTHON, ["-c", code], tmp_path, NAMESPACE), timeout_s=10)
    if ended == launch.EXIT_CODE:
        pytest.skip("user namespaces are forbidden here")
    assert output.split() == ["65534", "65534"]
    status = (tmp_path / "file").stat()
    assert (status.st_uid, status.st_mode & 0o777) == (os.geteuid(), 0o600)


async def test_a_log_over_its_size_is_trimmed_while_the_server_writes(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "log", bytes_max=10_000)
    noise = "import sys\nfor n in range(5000): print('line', n, flush=True)"
    child = await ChildProcess.start(program(tmp_path, noise), log)
    assert await child.wait() == 0
    await asyncio.to_thread(until, lambda: log.size() <= log.bytes_max, within_s=5)
    assert "line 4999" in log.path.with_name("log.1").read_text()
