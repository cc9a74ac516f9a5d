"""Records the histories that test_replay.py replays: `python -m tests.replay.record`.

To be called once for each release, with the code that is released: the histories stand for the runs that its workers
leave behind. Earlier releases' histories stay, in the folder of their version; this one's are written anew.

Needs the embedded servers (`make setup`). Takes a minute.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

from temporalio.client import Client, WorkflowExecutionStatus

from engine import contracts
from engine.store.schema import upgrade_schema
from tests.replay.scenes import ENDED, STANDING, Scene, Stage, play
from tests.support.provider import Provider
from tests.support.runs import worker_process
from tests.support.servers import TestServers
from tests.support.workflows import handle_of, until

HISTORIES = Path(__file__).parent / "histories"
# Half a minute each in production; the events are the same.
IMPATIENT = timedelta(seconds=1)


async def _fetch(client: Client, workflow_id: str) -> list[dict[str, Any]]:
    """The events of a workflow, as JSON."""
    history = json.loads((await client.get_workflow_handle(workflow_id).fetch_history()).to_json())
    events: list[dict[str, Any]] = history["events"]
    return events


async def _family(client: Client, workflow_id: str) -> dict[str, list[dict[str, Any]]]:
    """The events of a workflow and of all rounds and children below it, by workflow id."""
    found = {workflow_id: await _fetch(client, workflow_id)}
    for event in found[workflow_id]:
        started = event.get("childWorkflowExecutionStartedEventAttributes")
        if started is not None:
            found |= await _family(client, started["workflowExecution"]["workflowId"])
    return found


def _write(folder: Path, name: str, events: list[dict[str, Any]]) -> None:
    """One event a line, so that a change can be read."""
    lines = ",\n".join(json.dumps(event, sort_keys=True) for event in events)
    (folder / f"{name}.json").write_text('{"events": [\n' + lines + "\n]}\n")


async def _record(scene: Scene, stage: Stage, folder: Path) -> None:
    run_id = await play(stage, scene)
    handle = handle_of(stage.client, run_id)

    async def closed() -> bool:
        return (await handle.describe()).status != WorkflowExecutionStatus.RUNNING

    if scene in ENDED:
        # The record is ahead of the history by the last workflow task.
        await until(closed)
    name = scene.__name__.replace("_", "-")
    family = await _family(stage.client, handle.id)
    for number, events in enumerate(family.values()):
        _write(folder, name if number == 0 else f"{name}.below-{number}", events)
    print(f"{name}: {', '.join(str(len(events)) for events in family.values())} events")


async def main(folder: Path) -> None:
    """Plays every scene and writes its history into the folder."""
    contracts.NO_WORKER_TIMEOUT = IMPATIENT
    with TestServers() as servers, Provider() as provider, tempfile.TemporaryDirectory() as scratch:
        url = servers.new_database()
        upgrade_schema(url)
        async with worker_process(url, servers.temporal_address) as process:
            stage = Stage(process.database, process.client, provider, Path(scratch))
            for scene in (*STANDING, *ENDED):
                await _record(scene, stage, folder)


if __name__ == "__main__":
    target = HISTORIES / version("podium")
    with tempfile.TemporaryDirectory() as name:
        # Either all of them or none: a scene that fails leaves the recorded ones alone.
        asyncio.run(main(Path(name)))
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for file in Path(name).iterdir():
            shutil.copy(file, target)
    print(f"written to {target.relative_to(HISTORIES.parents[2])}")
    sys.stdout.flush()
