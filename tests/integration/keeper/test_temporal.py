"""The embedded Temporal server: real binary, real workflows, real kills."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import httpx
import psutil
import pytest
from temporalio import workflow
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest
from temporalio.client import Client, WorkflowExecutionStatus
from temporalio.worker import UnsandboxedWorkflowRunner, Worker

from engine.errors import BugError, UnavailableError
from engine.keeper.home import Home, lock_home, open_home
from engine.keeper.process import find_leftovers
from engine.keeper.temporal import RETENTION, TemporalServer, find_program
from tests.support.processes import IS_ROOT, Holder, environment, is_dead, kill_hard, until

# Each of them starts servers of its own.
pytestmark = pytest.mark.slow

GONE_WITHIN_S = 2.0


@workflow.defn
class Waiting:
    """Waits for a signal and returns it."""

    def __init__(self) -> None:
        self.word = ""

    @workflow.run
    async def run(self) -> str:
        await workflow.wait_condition(lambda: self.word != "")
        return self.word

    @workflow.signal
    def say(self, word: str) -> None:
        self.word = word


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return open_home(tmp_path / "home")


@pytest.fixture
async def server(home: Home) -> AsyncIterator[TemporalServer]:
    lock = lock_home(home)
    assert lock is not None
    server = TemporalServer(home)
    yield server
    await server.stop(graceful_s=0.0)
    lock.release()
    assert find_leftovers(home.root, frozenset({"temporal"})) == []


def listening(pid: int | None) -> dict[int, str]:
    connections = psutil.Process(pid).net_connections(kind="inet")
    return {item.laddr.port: item.laddr.ip for item in connections if item.status == psutil.CONN_LISTEN}


async def test_every_port_is_on_loopback_and_http_answers_nobody(server: TemporalServer) -> None:
    await server.start()
    ports = listening(server.pid)
    assert int(server.address.split(":")[1]) in ports
    assert set(ports.values()) == {"127.0.0.1"}
    assert psutil.Process(server.pid).net_connections(kind="udp") == []
    answers = []
    async with httpx.AsyncClient(timeout=2) as client:
        for port in ports:
            for host in ("127.0.0.1", "localhost", f"127.0.0.1:{port}", "attacker.example", "*", ""):
                try:
                    url = f"http://127.0.0.1:{port}/api/v1/namespaces"
                    response = await client.get(url, headers={"Host": host, "Origin": "http://attacker.example"})
                except httpx.HTTPError:
                    continue  # a gRPC port, or a refusal
                answers.append(response.status_code)
    assert answers, "the HTTP interface was found"
    assert set(answers) <= {400, 403, 404}


async def test_the_namespace_keeps_closed_workflows_for_a_week(server: TemporalServer) -> None:
    await server.start()
    client = await Client.connect(server.address)
    found = await client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace="default"))
    assert found.config.workflow_execution_retention_ttl.ToTimedelta() == RETENTION == timedelta(days=7)


async def test_a_file_keeps_its_cluster_id_and_a_new_file_has_another(server: TemporalServer) -> None:
    await server.start()
    first, address = server.cluster_id, server.address
    assert server.was_new_file
    assert first
    await server.stop()
    await server.start()
    assert (server.cluster_id, server.was_new_file, server.address) == (first, False, address)
    await server.stop()
    for part in server.database_path.parent.glob("temporal.db*"):
        part.unlink()
    await server.start()
    assert server.was_new_file
    assert server.cluster_id not in {"", first}


async def test_a_workflow_goes_on_after_kill_9_on_another_port(server: TemporalServer) -> None:
    await server.start()
    client = await Client.connect(server.address)
    handle = await client.start_workflow(Waiting.run, id="waiting", task_queue="q")
    watching = asyncio.create_task(server.wait())
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    assert await asyncio.wait_for(watching, 5) == -signal.SIGKILL
    old_address = server.address
    with socket.socket() as taker:
        taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taker.bind(("127.0.0.1", int(old_address.split(":")[1])))
        taker.listen()
        await server.start()
    assert server.address != old_address
    client = await Client.connect(server.address)
    handle = client.get_workflow_handle("waiting")
    assert (await handle.describe()).status == WorkflowExecutionStatus.RUNNING
    async with Worker(client, task_queue="q", workflows=[Waiting], workflow_runner=UnsandboxedWorkflowRunner()):
        await handle.signal(Waiting.say, "kept")
        assert await asyncio.wait_for(handle.result(), 20) == "kept"


async def test_a_requested_port_in_use_is_a_clear_error_and_a_free_one_is_taken(
    server: TemporalServer, home: Home
) -> None:
    with socket.socket() as taker:
        taker.bind(("127.0.0.1", 0))
        taker.listen()
        port = taker.getsockname()[1]
        asked = TemporalServer(home, port=port)
        with pytest.raises(UnavailableError, match=str(port)) as caught:
            await asked.start()
        assert caught.value.code == "port-in-use"
        assert asked.pid is None
    await asked.start()
    assert asked.address == f"127.0.0.1:{port}"
    await asked.stop()


def test_a_killed_keeper_takes_its_server_with_it(tmp_path: Path) -> None:
    root = tmp_path / "home"
    seen = set()
    for number in range(5):
        with Holder(root, "temporal") as holder:
            facts = holder.facts()
            assert facts["temporal"]["was_new_file"] is (number == 0)
            seen.add(facts["temporal"]["cluster_id"])
            holder.kill()
            if number % 2:
                kill_hard(facts["temporal"]["pid"])
            elif number == 0:
                until(lambda pid=facts["temporal"]["pid"]: is_dead(pid), within_s=GONE_WITHIN_S)  # type: ignore[misc] # a default binds the loop variable
    assert len(seen) == 1
    until(lambda: find_leftovers(root, frozenset({"temporal"})) == [], within_s=GONE_WITHIN_S)


async def test_a_server_that_outlived_its_keeper_is_stopped_by_the_next(server: TemporalServer, home: Home) -> None:
    await server.start()
    await server.stop()
    # As where the kernel sends no death signal: started by somebody who does not care.
    leftover = await asyncio.create_subprocess_exec(
        find_program(),
        *("server", "start-dev", "--headless", "--ip", "127.0.0.1", "--port", server.address.split(":")[1]),
        *("--db-filename", str(server.database_path), "--log-level", "never"),
        cwd=home.temporal_dir,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    await asyncio.to_thread(until, lambda: bool(listening(leftover.pid)), within_s=10)
    await server.start()
    assert server.pid != leftover.pid
    assert await asyncio.wait_for(leftover.wait(), 5) is not None


@pytest.mark.parametrize("wait_s", [0.05, 0.25])
async def test_a_first_start_that_was_killed_is_done_again(tmp_path: Path, wait_s: float) -> None:
    root = tmp_path / "home"
    with Holder(root, "temporal") as holder:
        until(lambda: bool(find_leftovers(root, frozenset({"temporal"}))), within_s=10)
        await asyncio.sleep(wait_s)
        complete = (root / "temporal" / "cluster").exists()
        holder.kill()
    with Holder(root, "temporal") as holder:
        facts = holder.facts()
        assert facts["temporal"]["was_new_file"] is not complete
        assert holder.end() == 0


async def test_a_damaged_file_is_one_clear_line_with_the_way_out(server: TemporalServer) -> None:
    await server.start()
    await server.stop()
    for part in server.database_path.parent.glob("temporal.db-*"):
        part.unlink()  # the write-ahead log alone would repair it
    server.database_path.write_bytes(b"this is no database" * 1000)
    with pytest.raises(UnavailableError) as caught:
        await server.start()
    assert caught.value.code == "temporal-start-failed"
    assert "\n" not in caught.value.message
    assert str(server.database_path) in (caught.value.hint or "")
    assert server.pid is None


@pytest.mark.skipif(not IS_ROOT, reason="only root can mount a small file system")
def test_a_full_disk_is_a_clear_error(tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=600k none "$1" && "$2" -m tests.support.holder "$1/home" temporal; echo "$?"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", str(tmp_path), sys.executable]
    done = subprocess.run(command, env=environment(), cwd="/", capture_output=True, text=True, check=True)
    told, code = done.stdout.splitlines()
    assert '"disk-full"' in told
    assert code == "5"


async def test_nothing_of_our_environment_but_the_least_reaches_the_server(
    server: TemporalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "canary")
    monkeypatch.setenv("TEMPORAL_ADDRESS", "127.0.0.1:1")
    await server.start()
    assert set(psutil.Process(server.pid).environ()) <= {"LANG", "TZ", "HOME", "PATH", "TMPDIR", "LD_LIBRARY_PATH"}
    assert [path for path in server.database_path.parent.rglob("*") if path.stat().st_mode & 0o077] == []


async def test_starting_a_running_server_is_a_bug(server: TemporalServer) -> None:
    with pytest.raises(BugError):
        _ = server.address
    await server.start()
    with pytest.raises(BugError):
        await server.start()
