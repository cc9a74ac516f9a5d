"""Runs in each state in which a deploy may find them, made with a real worker and the stand-in provider.

Each scene starts a run and returns when it stands where its name says. Models have names of their own in each scene,
so that all scenes can share a provider.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from uuid import UUID, uuid4

from temporalio.client import Client

from engine.service import Submission, submit
from engine.store.budgets import Limits
from engine.store.database import Database
from engine.store.snapshots import RunSnapshot, read_run
from tests.support.provider import Provider
from tests.support.runs import ended, lists_plan
from tests.support.stored import execute
from tests.support.workflows import handle_of, pool_of, until

LONG_S: Final = 600
ONE: Final = lists_plan(["Go."], [[]], [0])
TWO: Final = lists_plan(["Go.", "Go on."], [[], [0]], [0, 1])
FAN: Final = lists_plan(["One.", "Two.", "Three.", "Join."], [[], [], [], [0, 1, 2]], [0, 0, 0, 0])
SPLIT: Final = lists_plan(["Split this up.", "Conclude."], [[], [0]], [1, 0])
BROKEN: Final = "model_id = [0, 99]\nsubtasks = ['Go.', 'Go on.']\naccess_list = [[], [7]]\n"
KEEP: Final = "The answer is right.\nmodel_id = []\nsubtasks = []\naccess_list = []\n"
SELF: Final = [{"name": "self", "description": "plans a part of its own", "kind": "conductor"}]


@dataclass
class Stage:
    """Where scenes are played: servers with a worker, a provider, a folder."""

    database: Database
    client: Client
    provider: Provider
    folder: Path
    names: list[str] = field(default_factory=list)

    def model(self, *behaviours: dict[str, Any]) -> str:
        """A model that nobody else has, which behaves like this one time each."""
        self.names.append(f"model-{len(self.names)}")
        self.provider.script(*behaviours, model=self.names[-1])
        return self.names[-1]

    async def start(self, *models: str, plan: str | None, limits: Limits | None = None, **changes: Any) -> UUID:
        """Submits a run of a pool with these models."""
        folder = self.folder / uuid4().hex
        folder.mkdir()
        pool = pool_of(folder, self.provider.base_url, *models, **changes)
        submission = Submission(task="What?", pool=pool, actor_id="tester", plan_text=plan, limits=limits)
        return (await submit(self.database, self.client, submission)).id

    async def called(self, model: str, count: int = 1) -> None:
        """Waits until the model was asked so often."""
        end = time.monotonic() + 30
        while sum(one["model"] == model for one in self.provider.requests) < count:
            assert time.monotonic() < end, f"{model} was not called"
            await asyncio.sleep(0.05)

    async def stands(self, run_id: UUID, condition: Callable[[RunSnapshot], bool]) -> None:
        """Waits until the record of the run says this."""

        async def holds() -> bool:
            run = await read_run(self.database, run_id)
            return run is not None and condition(run)

        await until(holds, timeout_s=30)

    async def events(self, run_id: UUID, kind: str, count: int = 1) -> None:
        """Waits until the history of the run has so many events of a kind, such as ``TIMER_STARTED``."""

        async def there() -> bool:
            history = json.loads((await handle_of(self.client, run_id).fetch_history()).to_json())
            kinds = [str(event["eventType"]) for event in history["events"]]
            return kinds.count(f"EVENT_TYPE_{kind}") >= count

        await until(there, timeout_s=30)


async def in_a_call(stage: Stage) -> UUID:
    """The first step's call is in flight."""
    slow = stage.model({"delay_first_s": LONG_S})
    run_id = await stage.start(slow, "plain", plan=TWO)
    await stage.called(slow)
    return run_id


async def in_a_pause(stage: Stage) -> UUID:
    """The provider said when to come back, and that is not yet."""
    busy = stage.model({"status": 429, "headers": {"Retry-After": "300"}})
    run_id = await stage.start(busy, "plain", plan=TWO)
    await stage.stands(run_id, lambda run: bool(run.steps[0].attempts) and run.steps[0].attempts[0].state == "failed")
    return run_id


async def paused(stage: Stage) -> UUID:
    """By an operator, after the first step: the second is looked at again from time to time."""
    slow = stage.model({"delay_first_s": 1.5})
    run_id = await stage.start(slow, "plain", plan=TWO)
    await stage.called(slow)
    await execute(stage.database.url, "UPDATE runs SET paused_at = clock_timestamp() WHERE id = %s", run_id)
    await stage.events(run_id, "TIMER_STARTED")
    return run_id


async def planning_again(stage: Stage) -> UUID:
    """The first plan was invalid, and the Conductor is writing another."""
    planner = stage.model({"text": BROKEN}, {"delay_first_s": LONG_S})
    run_id = await stage.start("plain", plan=None, conductor={"model": planner})
    await stage.called(planner, 2)
    return run_id


async def waiting_for_an_operator(stage: Stage) -> UUID:
    """A step failed for good under the policy `wait`."""
    run_id = await stage.start(stage.model({"status": 404}), "plain", plan=TWO, policy={"on_failed_step": "wait"})
    await stage.events(run_id, "TIMER_STARTED")
    return run_id


async def waiting_for_a_review(stage: Stage) -> UUID:
    """People are asked about the first step's output."""
    run_id = await stage.start("plain", "plain", plan=TWO, policy={"reviews": [{"gate": "after"}]})
    await stage.events(run_id, "TIMER_STARTED")
    return run_id


async def over_its_budget(stage: Stage) -> UUID:
    """One call was allowed, and there are two steps."""
    run_id = await stage.start("plain", "plain", plan=TWO, limits=Limits(calls=1))
    await stage.events(run_id, "TIMER_STARTED")
    return run_id


async def without_a_worker(stage: Stage) -> UUID:
    """Nobody polls the queue of its only step."""
    run_id = await stage.start("plain", plan=ONE, worker={"queue": "nobody"}, conductor={"queue": "other"})
    await stage.stands(run_id, lambda run: run.reason == "no-worker")
    return run_id


async def in_the_second_round(stage: Stage) -> UUID:
    """The Conductor looks at the first round."""
    planner = stage.model({"text": ONE}, {"delay_first_s": LONG_S})
    run_id = await stage.start("plain", plan=None, conductor={"model": planner}, policy={"rounds_max": 2})
    await stage.called(planner, 2)
    return run_id


async def in_a_child(stage: Stage) -> UUID:
    """A step is a run of its own, which is being planned."""
    planner = stage.model({"delay_first_s": LONG_S})
    run_id = await stage.start("plain", plan=SPLIT, conductor={"model": planner}, more=SELF)
    await stage.called(planner)
    return run_id


async def finished_chain(stage: Stage) -> UUID:
    """Succeeded, one step after the other."""
    return await stage.start("plain", "plain", plan=TWO)


async def finished_fan(stage: Stage) -> UUID:
    """Succeeded, three steps at once and one that reads them."""
    return await stage.start("plain", plan=FAN)


async def finished_after_retries(stage: Stage) -> UUID:
    """Succeeded, with a repaired plan, an overloaded provider and two rounds."""
    planner = stage.model({"text": BROKEN}, {"text": ONE}, {"text": KEEP})
    busy = stage.model({"status": 503})
    return await stage.start(busy, plan=None, conductor={"model": planner}, policy={"rounds_max": 3})


async def finished_with_a_child(stage: Stage) -> UUID:
    """Succeeded, one step by a run of its own."""
    planner = stage.model({"text": ONE})
    return await stage.start("plain", plan=SPLIT, conductor={"model": planner}, more=SELF)


async def failed(stage: Stage) -> UUID:
    """A step failed for good while another one was in a call, which was kept."""
    missing, slow = stage.model({"status": 404}), stage.model({"delay_first_s": 1.0})
    plan = lists_plan(["Go.", "Go too.", "Join."], [[], [], [0, 1]], [0, 1, 0])
    return await stage.start(missing, slow, plan=plan)


async def late(stage: Stage) -> UUID:
    """The deadline passed in a call."""
    slow = stage.model({"delay_first_s": LONG_S})
    return await stage.start(slow, "plain", plan=TWO, policy={"deadline_s": 2})


async def cancelled(stage: Stage) -> UUID:
    """In a call."""
    slow = stage.model({"delay_first_s": LONG_S})
    run_id = await stage.start(slow, "plain", plan=TWO)
    await stage.called(slow)
    await handle_of(stage.client, run_id).cancel()
    return run_id


async def gone_on_after_a_pause(stage: Stage) -> UUID:
    """Succeeded, after it was held for a while and woken."""
    run_id = await paused(stage)
    await execute(stage.database.url, "UPDATE runs SET paused_at = NULL WHERE id = %s", run_id)
    await handle_of(stage.client, run_id).signal("wake")
    return run_id


Scene = Callable[[Stage], Awaitable[UUID]]
STANDING: Final[tuple[Scene, ...]] = (
    in_a_call,
    in_a_pause,
    paused,
    planning_again,
    waiting_for_an_operator,
    waiting_for_a_review,
    over_its_budget,
    without_a_worker,
    in_the_second_round,
    in_a_child,
)
# With the state in which each has to end.
ENDED: Final[dict[Scene, str]] = {
    finished_chain: "succeeded",
    finished_fan: "succeeded",
    finished_after_retries: "succeeded",
    finished_with_a_child: "succeeded",
    gone_on_after_a_pause: "succeeded",
    failed: "failed",
    late: "failed",
    cancelled: "cancelled",
}


async def play(stage: Stage, scene: Scene) -> UUID:
    """Plays a scene; a run that is to end has ended, in the state that was meant."""
    run_id = await scene(stage)
    if scene in ENDED:
        run = await ended(stage.database, run_id, timeout_s=60)
        assert run.state == ENDED[scene], (scene, run.state, run.reason)
    return run_id
