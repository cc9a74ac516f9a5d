"""Saved histories of runs that a release leaves behind, replayed by the code of today (G3-03, G5-07).

A failure here means that runs in flight would get stuck with the next deploy. Put the change behind
`workflow.patched("name")` (see CONTRIBUTING) instead of recording the histories anew.
"""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
from datetime import timedelta
from pathlib import Path

import pytest
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer
from temporalio.workflow import NondeterminismError

from engine import contracts
from engine.converter import DATA_CONVERTER
from engine.workflow import RunWorkflow
from tests.replay.changed import Added, AddedWithPatch, Hurried, Removed, Renamed, Reordered
from tests.replay.record import HISTORIES
from tests.replay.scenes import ENDED, STANDING
from worker_pools.process import workflow_runner

FILES = sorted(HISTORIES.rglob("*.json"))


def events_of(file: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(file.read_text())["events"]
    return found


def history_of(file: Path) -> WorkflowHistory:
    text = file.read_text()
    started = json.loads(text)["events"][0]["workflowExecutionStartedEventAttributes"]
    return WorkflowHistory.from_json(started["workflowId"], text)


async def replay(file: Path, workflow: type) -> Exception | None:
    """Replays a history with the worker's own converter in a sandbox that watches; gives what stood in the way."""
    runner = workflow_runner(watched=True)
    replayer = Replayer(workflows=[workflow], data_converter=DATA_CONVERTER, workflow_runner=runner)
    return (await replayer.replay_workflow(history_of(file), raise_on_replay_failure=False)).replay_failure


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
async def test_a_saved_history_goes_on_under_the_code_of_today(file: Path) -> None:
    assert await replay(file, RunWorkflow) is None


def test_there_is_a_history_of_every_state_in_which_a_deploy_may_find_a_run() -> None:
    names = {scene.__name__.replace("_", "-") for scene in (*STANDING, *ENDED)}
    releases = {file.parent for file in FILES}
    assert releases
    for release in releases:
        assert {file.stem.partition(".")[0] for file in FILES if file.parent == release} == names


# Names of the histories in which the change shows.
CHANGES: dict[type, tuple[str, ...]] = {
    Added: ("in-a-call", "in-a-pause", "paused", "waiting-for-an-operator", "finished-chain", "cancelled"),
    Removed: ("failed", "late", "cancelled", "finished-after-retries"),
    Reordered: ("finished-fan", "failed"),
    Renamed: ("in-a-call", "over-its-budget", "finished-chain", "finished-with-a-child"),
}


@pytest.mark.parametrize(
    ("change", "name"),
    [(change, name) for change, names in CHANGES.items() for name in names],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
async def test_a_change_of_what_the_workflow_asks_for_is_found_out(change: type, name: str) -> None:
    for file in [file for file in FILES if file.stem == name]:
        assert isinstance(await replay(file, change), NondeterminismError)


async def test_what_is_not_deterministic_is_refused() -> None:
    for file in [file for file in FILES if file.stem == "finished-chain"]:
        assert "bug-restricted-workflow-access-error" in str(await replay(file, Hurried))


async def test_the_same_change_behind_a_patch_is_none() -> None:
    for file in FILES:
        assert await replay(file, AddedWithPatch) is None, file.name


async def test_a_changed_default_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timeouts, pauses and intervals may be tuned: they are not compared."""
    for name in ("NO_WORKER_TIMEOUT", "HEARTBEAT_TIMEOUT", "BOOKKEEPING_TIMEOUT", "HELD_RECHECK_FIRST"):
        monkeypatch.setattr(contracts, name, timedelta(seconds=7))
    for file in FILES:
        assert await replay(file, RunWorkflow) is None, file.name


def test_the_histories_name_no_machine_no_person_and_no_text() -> None:
    forbidden = {socket.gethostname(), f"{os.getpid()}@", "What?", "Go on.", "Split this", "127.0.0.1"}
    if len(getpass.getuser()) > 4:
        forbidden.add(getpass.getuser())
    for file in FILES:
        text = file.read_text()
        assert [word for word in forbidden if word in text] == [], file.name
        identities = set(re.findall(r'"identity": "([^"]*)"', text))
        strange = {one for one in identities if not re.fullmatch(r"podium(-[0-9a-f-]{36})?|history-service", one)}
        assert strange == set(), file.name
