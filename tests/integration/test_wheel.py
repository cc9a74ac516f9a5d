"""The installed wheel, not the source tree (G3-05): its worker starts in a clean process and runs every kind of run."""

from __future__ import annotations

import asyncio
import os
import shutil
import site
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from engine.errors import RefusedError
from engine.keystore.opening import open_keyring
from engine.operations.reviewing import decide_review
from engine.settings import TemporalSettings
from engine.store.database import Database
from engine.temporal_client import connect_temporal
from tests.replay.scenes import (
    ENDED,
    Stage,
    over_its_budget,
    paused,
    play,
    waiting_for_a_review,
    waiting_for_an_operator,
)
from tests.support.orders import connecting
from tests.support.processes import CHECKOUT
from tests.support.provider import Provider
from tests.support.reviews import asked
from tests.support.runs import ended
from tests.support.servers import TestServers
from tests.support.workers import WorkerChild, Workers

pytestmark = pytest.mark.slow

SOURCES = ("engine", "activities", "worker_pools", "migrations", "pyproject.toml", "README.md", "LICENSE")
BUILD_TOOLS_MIN = 77
# Written by the SDK when the sandbox has to import what is not there yet, and what its restrictions complain of.
COMPLAINTS = ("after initial workflow load", "RestrictedWorkflowAccessError", "Cannot access", "Warning:")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: a build leaves things behind in the folder that it is given."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (CHECKOUT / name).is_dir():
            shutil.copytree(CHECKOUT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(CHECKOUT / name, folder)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", ".", "--no-deps", "-w", "dist"]
    if int(version("setuptools").partition(".")[0]) >= BUILD_TOOLS_MIN:
        command.append("--no-build-isolation")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = (folder / "dist").glob("podium-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `podium` of an environment with the wheel in it; what it depends on is lent by the developer's."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    subprocess.run([*command, "install", "-q", "--no-deps", str(wheel)], check=True)
    (packages,) = (folder / "lib").glob("python3*/site-packages")
    # A plain path, so that the developer's own .pth files (the editable install is one) are not followed.
    (packages / "lent.pth").write_text("".join(f"{path}\n" for path in site.getsitepackages()))
    return folder / "bin" / "podium"


@pytest.fixture
def worker(installed: Path, servers: TestServers, database_url: str, tmp_path: Path) -> Iterator[WorkerChild]:
    env = {
        "PATH": os.environ.get("PATH", ""),
        "LANG": "C.UTF-8",
        "PYTHONWARNINGS": "always::UserWarning,always::RuntimeWarning",
        "PODIUM_DATABASE_URL": database_url,
        "PODIUM_TEMPORAL_ADDRESS": servers.temporal_address,
        "PODIUM_KEY_STORE": (tmp_path / "keys").as_uri(),
        "PODIUM_HOME": str(tmp_path / "home"),
    }
    with Workers(database_url, servers.temporal_address, tmp_path) as workers:
        # In a folder that has nothing to do with the checkout, so that nothing of it is found by chance.
        child = workers.run([str(installed), "worker", "--all-queues"], env, tmp_path)
        child.says(" is ready; ")
        yield child


def test_the_wheel_holds_what_the_program_reads_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
    packages = {name.partition("/")[0] for name in names if not name.startswith("podium-")}
    assert packages == {"engine", "activities", "worker_pools", "migrations"}
    for needed in ("worker_pools/pools/local.yaml", "migrations/versions/0001_first.py", "engine/py.typed"):
        assert needed in names


def test_the_modules_are_those_of_the_wheel(installed: Path, tmp_path: Path) -> None:
    program = "import engine.workflow, migrations, worker_pools.process; print(engine.__file__, migrations.__file__)"
    done = subprocess.run(
        [str(installed.parent / "python"), "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert all(path.startswith(str(installed.parents[1])) for path in done.stdout.split())


async def reviewed(stage: Stage) -> None:
    """A run whose two outputs each wait for somebody: nobody approves their own, and with others' approval it ends."""
    run_id = await play(stage, waiting_for_a_review)
    for who in ("bob", "carol"):
        (review,) = await asked(stage.database, run_id)
        with pytest.raises(RefusedError) as refused:
            await decide_review(stage.database, connecting(stage.client), review.id, "approve", actor_id="tester")
        assert refused.value.code == "review-own"
        done = await decide_review(stage.database, connecting(stage.client), review.id, "approve", actor_id=who)
        assert (done.decided.review_state, done.delivered) == ("approved", True)
    assert (await ended(stage.database, run_id)).state == "succeeded"


@pytest.mark.slow
async def test_a_worker_of_the_wheel_runs_plans_in_the_default_sandbox_without_a_warning(
    worker: WorkerChild, servers: TestServers, database_url: str, provider: Provider, tmp_path: Path
) -> None:
    """Every branch of the workflow: planning and repair, rounds, children, retries, holds, every kind of end."""
    client = await connect_temporal(TemporalSettings(servers.temporal_address))
    # What it seals it can be asked for with its own keys.
    database = Database(database_url, keys=open_keyring((tmp_path / "keys").as_uri()))
    stage = Stage(database, client, provider, tmp_path)
    for scene in (paused, waiting_for_an_operator, over_its_budget, *ENDED):
        await play(stage, scene)
    await reviewed(stage)
    await database.close()
    assert worker.code is None
    assert [word for word in COMPLAINTS if word in worker.said] == []
    assert await asyncio.to_thread(worker.end) == 0
