"""kill -9 in the middle of an erasure, at each thing that it does to the database or to a disk.

The process that dies is a real one. Whoever opens the database next finds the run untouched, or finishes the erasure.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

import engine.store.artifacts
import engine.store.erasing
import engine.store.holding
import engine.store.run_writer
from engine.store import exchange as exchanging
from engine.store.database import Database
from engine.store.erasing import erase
from engine.store.erasure_journal import ready
from engine.store.ids import artifact_id
from engine.store.snapshots import read_run
from tests.support.sealed import finished_run, order_for, sealed_database
from tests.support.stored import check_invariants, opening, record, rows

STEPS_MAX = 60
_USERS = (engine.store.erasing, engine.store.run_writer, engine.store.holding, engine.store.artifacts)


def run(work: Callable[[Database], Awaitable[Any]], url: str, keys: Path) -> Any:
    async def opened() -> Any:
        database = sealed_database(url, keys)
        try:
            return await work(database)
        finally:
            await database.close()

    return asyncio.run(opened())


class Death:
    """Kills its own process at the n-th thing done: each packet to the database, before and after, each file's step."""

    def __init__(self, at: int) -> None:
        self._left = at

    def step(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            self.step()
            result = function(*args, **options)
            self.step()
            return result

        return wrapped

    def around_exchange(self) -> None:
        real = exchanging.exchange

        async def wrapped(*args: Any) -> Any:
            self.step()
            result = await real(*args)
            self.step()
            return result

        for module in _USERS:
            module.exchange = wrapped  # type: ignore[attr-defined]  # they import it by name

    def arm(self) -> None:
        self.around_exchange()
        for name in ("fsync", "pwrite", "ftruncate", "link"):
            setattr(os, name, self.around(getattr(os, name)))
        Path.replace = self.around(Path.replace)  # type: ignore[method-assign]  # in a process that is about to die


def die_in_an_erasure(url: str, keys: Path, run_id: UUID, at: int, target: dict[str, Any]) -> bool:
    """Erases in a process of its own that dies at its n-th step; False if it got to its end before."""
    child = os.fork()
    if child == 0:
        try:
            Death(at).arm()
            run(lambda database: erase(database, order_for(run_id, **target)), url, keys)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


async def _make(database: Database) -> UUID:
    return await finished_run(database, ["the first output of it", "the second output of it"])


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_a_kill_anywhere_leaves_a_run_untouched_or_its_erasure_finished(
    own_database_url: str, tmp_path: Path, whole: bool
) -> None:
    keys, url = tmp_path / "keys", own_database_url
    begun = 0
    for at in range(1, STEPS_MAX):
        run_id = run(_make, url, keys)
        wanted = artifact_id(opening(run_id, 0).attempt_id, "output")
        target = {} if whole else {"artifact_id": wanted}
        died = die_in_an_erasure(url, keys, run_id, at, target)
        begun += run(partial(_check, run_id=run_id, wanted=wanted, whole=whole), url, keys)
        # No file of the key store has a name that nobody knows.
        assert [path for path in keys.rglob(".*") if str(run_id) in path.name] == []
        if not died:
            break
    else:
        raise AssertionError("it never came to its end")
    assert at > 20
    # Some deaths come before anything is written down, most come after.
    assert 10 < begun < at


async def _check(database: Database, *, run_id: UUID, wanted: UUID, whole: bool) -> bool:
    # What a worker or a command does first.
    await ready(database)
    kept = await record(database.url, run_id)
    check_invariants(kept)
    assert await rows(database.url, "SELECT 1 FROM erasures WHERE finished_at IS NULL") == []
    begun = bool(kept.entries("artifact.erased"))
    if not begun:
        assert [row["id"] for row in kept.artifacts if row["erased_at"] or row["erasure_id"]] == []
        target = {} if whole else {"artifact_id": wanted}
        await erase(database, order_for(run_id, **target))
        kept = await record(database.url, run_id)
    assert len(kept.entries("artifact.erased")) == 1
    gone = {row["id"] for row in kept.artifacts if row["erased_at"]}
    assert wanted in gone
    snapshot = await read_run(database, run_id)
    assert snapshot is not None
    if whole:
        assert {row["kind"] for row in kept.artifacts if row["id"] not in gone} == {"basis"}
        assert snapshot.answer is None
    else:
        assert (snapshot.task, snapshot.answer) == ("What is gravity?", "the second output of it")
    assert database.keys is not None
    found = database.keys.store.read(run_id)
    assert found is not None
    assert found.epoch == kept.run["key_epoch"] == 2
    return begun
