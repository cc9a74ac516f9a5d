"""A new version while runs are in flight, and back (G5-07, G3-03): in the order that CONTRIBUTING tells, as written."""

from __future__ import annotations

import asyncio
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
import temporalio.api.workflowservice.v1 as workflowservice
from google.protobuf.duration_pb2 import Duration
from temporalio.client import Client
from temporalio.service import RPCError

from activities.executions import reconcile
from engine import contracts
from engine.errors import UnavailableError
from engine.keeper.temporal import find_program
from engine.service import Submission, submit
from engine.settings import TemporalSettings
from engine.store.database import Database
from engine.store.schema import scripts
from engine.temporal_client import connect_temporal
from tests.migration.catalogue import revision
from tests.support.provider import Provider
from tests.support.releases import NEXT_REVISION, Release, next_release, this_release
from tests.support.runs import ended, lists_plan, worker_process
from tests.support.servers import TestServers, migrator_url, superuser_url
from tests.support.stored import check_invariants, dump, execute, record, rows
from tests.support.workers import Workers
from tests.support.workflows import handle_of, history_events, pool_of, provider_reaches, run_of, step_of, until

pytestmark = pytest.mark.slow

HEAD = str(scripts().get_current_head())
# What two steps need: the first is in flight, in a pause or held while versions change, the second comes after.
TWO = lists_plan(["Go.", "Go on."], [[], [0]], [0, 1])
# The plan of a second round: its first step is in flight while versions change.
MENDED = lists_plan(["Mend it.", "Conclude."], [[], [0]], [2, 1])
BROKEN = "model_id = [0, 99]\nsubtasks = ['Go.', 'Go on.']\naccess_list = [[], [7]]\n"


@dataclass
class Site:
    """Servers of one's own, their database, and a folder for versions of the program."""

    database: Database
    client: Client
    provider: Provider
    folder: Path
    workers: Workers

    @property
    def settings(self) -> dict[str, str]:
        return {
            "PODIUM_DATABASE_URL": self.database.url,
            "PODIUM_MIGRATION_URL": migrator_url(self.database.url),
            "PODIUM_TEMPORAL_ADDRESS": self.workers.address,
            "PODIUM_KEY_STORE": "none",
        }

    async def start(self, *models: str, plan: str | None = TWO, conductor: str = "plain", **policy: Any) -> UUID:
        folder = self.folder / uuid4().hex
        folder.mkdir()
        pool = pool_of(folder, self.provider.base_url, *models, conductor={"model": conductor}, policy=policy)
        submission = Submission(task="What?", pool=pool, actor_id="tester", plan_text=plan)
        return (await submit(self.database, self.client, submission)).id

    async def check_each_call_was_made_once(self, *runs: UUID) -> None:
        """Every request is one attempt on record, no request came twice, and no accepted step was called again."""
        on_record = []
        for run_id in runs:
            kept = await record(self.database.url, run_id)
            check_invariants(kept)
            on_record += [str(attempt["id"]) for attempt in kept.attempts]
            accepted = Counter((one["round"], one["position"]) for one in kept.attempts if one["accepted"])
            assert set(accepted.values()) == {1}
        assert sorted(request["attempt_id"] for request in self.provider.requests) == sorted(on_record)


@pytest.fixture
def workers(servers: TestServers, database_url: str, tmp_path: Path) -> Iterator[Workers]:
    with Workers(database_url, servers.temporal_address, tmp_path) as started:
        yield started


@pytest.fixture
async def site(database: Database, provider: Provider, tmp_path: Path, workers: Workers) -> Site:
    client = await connect_temporal(TemporalSettings(workers.address))
    return Site(database, client, provider, tmp_path, workers)


async def _runs_in_flight(site: Site) -> dict[str, UUID]:
    """A run in each of the states that a deploy may find: in a call, in a pause, held, planning again, and so on."""
    site.provider.script({"status": 429, "headers": {"Retry-After": "10"}}, model="busy")
    site.provider.script({"text": BROKEN}, {"text": TWO, "delay_first_s": 6}, model="planner")
    site.provider.script({"text": MENDED}, model="reviser", times=1)
    held = await site.start("sleep-1500ms", "plain")
    await provider_reaches(site.provider, 1)
    await execute(site.database.url, "UPDATE runs SET paused_at = clock_timestamp() WHERE id = %s", held)
    runs = {
        "held": held,
        "in a call": await site.start("sleep-7000ms", "plain"),
        "in a pause": await site.start("busy", "plain"),
        "planning again": await site.start("plain", "plain", plan=None, conductor="planner"),
        "waiting for a review": await site.start("plain", "plain", reviews=[{"gate": "after", "workers": ["w0"]}]),
        "in a later round": await site.start("plain", "plain", "sleep-7000ms", conductor="reviser", rounds_max=2),
    }
    # Of the last one: a round of two calls, the plan of the next round, and that one's first call.
    await provider_reaches(site.provider, 5 + 1 + 4)

    async def all_there() -> bool:
        step = await step_of(site.database, runs["in a pause"], 0)
        held = await step_of(site.database, runs["held"], 0)
        reviewed = await step_of(site.database, runs["waiting for a review"], 0)
        waits = (reviewed.state, reviewed.reason) == ("waiting", "review")
        return bool(step.attempts) and step.attempts[0].state == "failed" and held.state == "succeeded" and waits

    await until(all_there)
    return runs


async def _approve(site: Site, release: Release, run_id: UUID) -> None:
    """Somebody else than who submitted the run approves what waits, by a command of this version."""
    done = await asyncio.to_thread(release.podium, "review", "approve", str(run_id), PODIUM_ACTOR="reviewer")
    assert done.code == 0, done.err


async def _go_on(site: Site, run_id: UUID) -> None:
    await execute(site.database.url, "UPDATE runs SET paused_at = NULL WHERE id = %s", run_id)
    await handle_of(site.client, run_id).signal(contracts.WAKE_SIGNAL)


async def _markers(site: Site, run_id: UUID) -> int:
    events = await history_events(site.client, run_id)
    return sum(event.HasField("marker_recorded_event_attributes") for event in events)


@pytest.mark.slow
async def test_runs_in_flight_go_on_under_the_next_version_and_nothing_is_paid_twice(site: Site) -> None:
    old, new = this_release(site.folder, site.settings), next_release(site.folder, site.settings)
    old_worker = await asyncio.to_thread(old.worker, site.workers)
    runs = await _runs_in_flight(site)
    # 1. The schema, while the old workers work.
    done = await asyncio.to_thread(new.podium, "db", "upgrade", "--json")
    assert (done.code, done.valid_json("db-upgrade")["applied"]) == (0, [NEXT_REVISION]), done.err
    # 2. One new worker beside the old, 3. then no old one any more: it lets its calls finish.
    new_worker = await asyncio.to_thread(new.worker, site.workers)
    assert await asyncio.to_thread(old_worker.end) == 0
    await _go_on(site, runs["held"])
    # It was asked by the old version, and the decision is taken by the new one.
    await _approve(site, new, runs["waiting for a review"])
    for name, run_id in runs.items():
        run = await ended(site.database, run_id)
        assert run.state == "succeeded", (name, run.reason)
        # They went on as they had begun, by the old path of the new version's workflow. One that still asked for a plan
        # had not come to what changed: its answer may find either version.
        assert await _markers(site, run_id) in ((0, 1) if name == "planning again" else (0,)), name
    await site.check_each_call_was_made_once(*runs.values())
    assert (await run_of(site.database, runs["in a later round"])).round == 1
    (decided,) = (await record(site.database.url, runs["waiting for a review"])).entries("review.decided")
    assert decided["actor"] == "reviewer"
    fresh = await site.start("plain", "plain")
    assert (await ended(site.database, fresh)).state == "succeeded"
    assert await _markers(site, fresh) == 1
    assert await asyncio.to_thread(new_worker.end) == 0


@pytest.mark.slow
async def test_going_back_old_workers_refuse_the_new_schema_until_it_is_taken_back(site: Site) -> None:
    old, new = this_release(site.folder, site.settings), next_release(site.folder, site.settings)
    old_worker = await asyncio.to_thread(old.worker, site.workers)
    site.provider.script({"status": 429, "headers": {"Retry-After": "6"}}, model="busy")
    of_old = await site.start("busy", "plain")
    reviewed = await site.start("plain", "plain", reviews=[{"gate": "after", "workers": ["w0"]}])
    await provider_reaches(site.provider, 2)
    assert (await asyncio.to_thread(new.podium, "db", "upgrade")).code == 0
    new_worker = await asyncio.to_thread(new.worker, site.workers)
    assert await asyncio.to_thread(old_worker.end) == 0
    site.provider.script({"status": 429, "headers": {"Retry-After": "15"}}, model="busier")
    of_new = await site.start("busier", "plain")

    async def failed_once() -> bool:
        attempts = (await step_of(site.database, of_new, 0)).attempts
        return bool(attempts) and attempts[0].state == "failed"

    await until(failed_once)
    # 1. No new worker any more; what it calls may finish.
    assert await asyncio.to_thread(new_worker.end) == 0
    # 2. The old version does not touch a schema that it does not know, whatever the command.
    before = await dump(site.database.url)
    for command in (("worker",), ("list",), ("db", "upgrade"), ("db", "downgrade", HEAD)):
        done = await asyncio.to_thread(old.podium, *command)
        assert done.code == 5, (command, done.err)
        assert f"({NEXT_REVISION}) is newer than this program" in done.err
        assert f"podium db downgrade {HEAD}" in done.err
    assert await dump(site.database.url) == before
    # 3. The new version takes its schema back, 4. and the old workers go on.
    done = await asyncio.to_thread(new.podium, "db", "downgrade", HEAD, "--json")
    assert (done.code, done.valid_json("db-downgrade")["reverted"]) == (0, [NEXT_REVISION]), done.err
    assert revision(site.database.url) == HEAD
    old_worker = await asyncio.to_thread(old.worker, site.workers)
    assert (await ended(site.database, of_old)).state == "succeeded"
    # What waited for people waits on through both changes, and nobody has paid for it again.
    assert (await run_of(site.database, reviewed)).state == "waiting"
    await _approve(site, old, reviewed)
    assert (await ended(site.database, reviewed)).state == "succeeded"
    # What the new version began, only it can go on with; the record says so instead of keeping silent.
    await until(lambda: _stuck(site, of_new), timeout_s=60)
    assert await asyncio.to_thread(old_worker.end) == 0
    assert (await asyncio.to_thread(new.podium, "db", "upgrade")).code == 0
    await asyncio.to_thread(new.worker, site.workers)
    assert (await ended(site.database, of_new)).state == "succeeded"
    await site.check_each_call_was_made_once(of_old, of_new, reviewed)


async def _stuck(site: Site, run_id: UUID) -> bool:
    await reconcile(site.database, site.client)
    run = await run_of(site.database, run_id)
    return (run.state, run.reason) == ("waiting", "workflow-stuck")


@pytest.mark.slow
async def test_a_change_without_a_patch_is_reported_as_stuck_and_the_old_version_finishes(site: Site) -> None:
    old = this_release(site.folder, site.settings)
    careless = next_release(site.folder, site.settings, patched=False, migrates=False)
    old_worker = await asyncio.to_thread(old.worker, site.workers)
    run_id = await site.start("sleep-2000ms", "plain")
    await provider_reaches(site.provider, 1)
    assert await asyncio.to_thread(old_worker.end) == 0
    careless_worker = await asyncio.to_thread(careless.worker, site.workers)
    await until(lambda: _stuck(site, run_id), timeout_s=30)
    shown = await asyncio.to_thread(old.podium, "show", str(run_id))
    assert "workflow-stuck" in shown.out + shown.err
    assert await asyncio.to_thread(careless_worker.end) == 0
    await asyncio.to_thread(old.worker, site.workers)
    assert (await ended(site.database, run_id)).state == "succeeded"
    await site.check_each_call_was_made_once(run_id)


@pytest.mark.slow
async def test_a_schema_that_lost_a_column_stops_the_old_workers_and_fails_no_run(site: Site) -> None:
    """A contracting migration that came too early: a mistake, after which the runs wait for a version that fits."""
    old = this_release(site.folder, site.settings)
    await asyncio.to_thread(old.worker, site.workers)
    run_id = await site.start("sleep-700ms", "plain")
    await provider_reaches(site.provider, 1)
    await _contract(site, "finish_reason", "gone", NEXT_REVISION)
    with pytest.raises(UnavailableError) as caught:
        await run_of(site.database, run_id)
    assert caught.value.code == "schema-mismatch"
    await asyncio.sleep(4)
    (run,) = await rows(site.database.url, "SELECT state FROM runs WHERE id = %s", run_id)
    assert run["state"] == "running"
    await _contract(site, "gone", "finish_reason", HEAD)
    assert (await ended(site.database, run_id)).state == "succeeded"
    await site.check_each_call_was_made_once(run_id)


async def _contract(site: Site, old: str, new: str, version: str) -> None:
    """Takes a column away from the old code, as a migration would: with the version number, in one transaction."""
    await execute(
        superuser_url(site.database.url),
        f"DO $$ BEGIN ALTER TABLE attempts RENAME COLUMN {old} TO {new};"
        f" UPDATE alembic_version SET version_num = '{version}'; END $$",
    )


async def _namespace(client: Client) -> str:
    """A namespace of its own: which version is current holds for a queue, and queues are shared between tests."""
    name = f"versions-{uuid4().hex}"
    await client.workflow_service.register_namespace(
        workflowservice.RegisterNamespaceRequest(
            namespace=name, workflow_execution_retention_period=Duration(seconds=86400)
        )
    )
    async with asyncio.timeout(20):
        while True:
            try:
                await connect_temporal(TemporalSettings(client.service_client.config.target_host, namespace=name))
                await client.workflow_service.describe_namespace(
                    workflowservice.DescribeNamespaceRequest(namespace=name)
                )
            except RPCError:
                await asyncio.sleep(0.1)
            else:
                return name


@pytest.mark.slow
async def test_versioned_workers_get_work_once_their_version_is_the_current_one(site: Site) -> None:
    name = await _namespace(site.client)
    site.client = await connect_temporal(TemporalSettings(site.workers.address, namespace=name))
    settings = {**site.settings, "PODIUM_TEMPORAL_NAMESPACE": name, "PODIUM_DEPLOYMENT": "podium-test"}

    def make_current(build: str) -> None:
        command = f"worker deployment set-current-version --deployment-name podium-test --build-id {build} --yes"
        where = f"--address {site.workers.address} --namespace {name}"
        for _ in range(50):
            done = subprocess.run([find_program(), *command.split(), *where.split()], capture_output=True, check=False)
            if done.returncode == 0:
                return
        raise AssertionError(done.stderr)

    old, new = this_release(site.folder, settings), next_release(site.folder, settings, migrates=False)
    # A version is accepted as the current one when it polls every queue of the one before, so queues are named.
    pool_of(site.folder, site.provider.base_url, "plain")
    queues = ("--pool", "./pool.yaml")
    first = await asyncio.to_thread(old.worker, site.workers, *queues, PODIUM_BUILD_ID="1")
    before = await site.start("sleep-300ms", "sleep-6000ms")
    await asyncio.sleep(2)
    assert site.provider.count == 0
    await asyncio.to_thread(make_current, "1")
    await provider_reaches(site.provider, 2)
    second = await asyncio.to_thread(new.worker, site.workers, *queues, PODIUM_BUILD_ID="2")
    await asyncio.to_thread(make_current, "2")
    assert await asyncio.to_thread(first.end) == 0
    assert (await ended(site.database, before)).state == "succeeded"
    after = await site.start("plain", "plain")
    assert (await ended(site.database, after)).state == "succeeded"
    assert [await _markers(site, run_id) for run_id in (before, after)] == [0, 1]
    assert await _builds(site, before) == ["1", "2"]
    assert await _builds(site, after) == ["2"]
    await site.check_each_call_was_made_once(before, after)
    assert await asyncio.to_thread(second.end) == 0


async def _builds(site: Site, run_id: UUID) -> list[str]:
    """The versions that worked on a run, in order."""
    completed = [
        event.workflow_task_completed_event_attributes
        for event in await history_events(site.client, run_id)
        if event.HasField("workflow_task_completed_event_attributes")
    ]
    return list(dict.fromkeys(one.deployment_version.build_id for one in completed))


async def test_a_worker_without_a_build_id_is_not_versioned(
    servers: TestServers, database_url: str, provider: Provider, tmp_path: Path
) -> None:
    """An unversioned worker that named a behaviour would be refused by the server with every workflow task."""
    assert TemporalSettings(servers.temporal_address).build is None
    async with worker_process(database_url, servers.temporal_address) as process:
        pool = pool_of(tmp_path, provider.base_url, "plain", "plain")
        submission = Submission(task="What?", pool=pool, actor_id="tester", plan_text=TWO)
        run_id = (await submit(process.database, process.client, submission)).id
        assert (await ended(process.database, run_id)).state == "succeeded"
        events = await history_events(process.client, run_id)
    completed = [event.workflow_task_completed_event_attributes for event in events]
    assert {one.versioning_behavior for one in completed} == {0}
