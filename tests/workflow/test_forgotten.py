"""Temporal forgets workflows long before the record does (G5-06): every command goes on without them.

The commands are the real ones, on the real servers of the suite; only the models stand in.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import pytest_asyncio

from activities.executions import reconcile
from tests.support.command import Done, podium
from tests.support.exports import TestSigner, verified
from tests.support.nested import check_family
from tests.support.orders import nothing_more_is_called
from tests.support.provider import Provider
from tests.support.reviews import asked, reviewed_pool, submit_as
from tests.support.runs import ended, lists_plan, submit_plan, worker_process
from tests.support.servers import TestServers
from tests.support.stored import check_invariants, record
from tests.support.workflows import delete_workflow, pool_of, run_of
from worker_pools.process import WorkerProcess

# Temporal takes half a minute to forget a closed workflow.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

TWO = lists_plan(["Say one.", "Say two."], [[], [0]], [0, 1])
Command = Callable[..., Awaitable[Done]]


@dataclass(frozen=True)
class Site:
    """A worker, the commands of its installation, and runs of which Temporal knows nothing any more."""

    process: WorkerProcess
    command: Command
    signer: TestSigner
    folder: Path
    succeeded: UUID
    failed: UUID
    to_fork: UUID


def _command(process: WorkerProcess, address: str, folder: Path) -> Command:
    async def run(*arguments: str, who: str = "bob") -> Done:
        env = {
            "PODIUM_DATABASE_URL": process.database.url,
            "PODIUM_TEMPORAL_ADDRESS": address,
            "PODIUM_KEY_STORE": "none",
            "PODIUM_ACTOR": who,
        }
        return await asyncio.to_thread(podium, *arguments, home=folder / "home", env=env, cwd=folder)

    return run


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(
    servers: TestServers,
    template_database: str,
    session_provider: Provider,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Site]:
    folder = tmp_path_factory.mktemp("forgotten")
    # The tests say when the reconciler looks: a run whose workflow has just gone must not be settled in between.
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr("worker_pools.process.RECONCILE_INTERVAL_S", 3600.0)
    url = servers.new_database(template_database)
    async with worker_process(url, servers.temporal_address) as process:
        pool = pool_of(folder, session_provider.base_url, "plain", "plain")
        bad = pool_of(folder, session_provider.base_url, "plain", "broken")
        session_provider.reset()
        session_provider.script({"status": 401}, model="broken", times=2)
        runs = [await submit_plan(process, which, TWO) for which in (pool, bad, bad)]
        for run_id in runs:
            await ended(process.database, run_id)
        await asyncio.gather(*(delete_workflow(process.client, run_id) for run_id in runs))
        command = _command(process, servers.temporal_address, folder)
        yield Site(process, command, TestSigner(process.database), folder, *runs)
    servers.drop_database(url)
    monkeypatch.undo()


async def _shown(site: Site, run_id: UUID) -> dict[str, Any]:
    done = await site.command("show", str(run_id), "--json")
    assert done.code == 0, done.err
    run: dict[str, Any] = done.valid_json("run")
    return run


async def test_what_has_ended_is_shown_listed_and_given_out(site: Site, provider: Provider) -> None:
    before = await record(site.process.database.url, site.succeeded)
    run = await _shown(site, site.succeeded)
    assert (run["state"], [step["state"] for step in run["steps"]]) == ("succeeded", ["succeeded"] * 2)
    listed = await site.command("list", "--json")
    states = {one["id"]: one["state"] for one in listed.valid_json("list")}
    assert (states[str(site.succeeded)], states[str(site.failed)]) == ("succeeded", "failed")
    given = await site.command("output", str(site.succeeded), "--step", "0")
    assert (given.code, given.out.strip()) == (0, (await run_of(site.process.database, site.succeeded)).steps[0].output)
    watched = await site.command("watch", str(site.succeeded))
    assert watched.code == 0, watched.err
    log = await site.command("audit", "log", str(site.succeeded))
    assert log.code == 0, log.err
    assert provider.count == 0
    # Looking changed nothing but what says that somebody looked.
    after = await record(site.process.database.url, site.succeeded)
    assert (after.steps, after.attempts) == (before.steps, before.attempts)


async def test_the_evidence_of_what_has_ended_is_exported_and_proven(site: Site) -> None:
    target = site.folder / "bundle.zip"
    await site.signer.seal()
    done = await site.command("audit", "export", str(site.succeeded), str(site.failed), "-o", str(target))
    assert done.code == 0, done.err
    assert verified(target, site.signer).findings.faults == []


async def test_orders_to_what_has_ended_are_refused_with_how_it_ended(site: Site, provider: Provider) -> None:
    for arguments in (("cancel",), ("pause",), ("resume",), ("budget", "--usd", "5")):
        name, *options = arguments
        before = await record(site.process.database.url, site.succeeded)
        done = await site.command(name, str(site.succeeded), *options, "--json")
        assert (done.code, done.error_code in {"run-ended", "run-succeeded", "budget-missing"}) == (1, True), done.err
        assert "Traceback" not in done.err
        assert await record(site.process.database.url, site.succeeded) == before
    assert provider.count == 0


async def test_a_run_that_failed_is_resumed_and_what_it_had_is_not_paid_again(site: Site, provider: Provider) -> None:
    assert await reconcile(site.process.database, site.process.client) in {0, 1}
    done = await site.command("resume", str(site.failed), "--json")
    assert done.code == 0, done.err
    run = await ended(site.process.database, site.failed)
    assert (run.state, run.execution) == ("succeeded", 2)
    assert [request["model"] for request in provider.requests] == ["broken"]
    check_invariants(await record(site.process.database.url, site.failed))


async def test_a_run_that_failed_is_forked(site: Site, provider: Provider) -> None:
    done = await site.command("fork", str(site.to_fork), "--step", "1", "--worker", "w0", "--json")
    assert done.code == 0, done.err
    fork = await ended(site.process.database, UUID(done.json["id"]))
    assert (fork.state, [step.state for step in fork.steps]) == ("succeeded", ["reused", "succeeded"])
    assert [request["model"] for request in provider.requests] == ["plain"]


async def _waiting_without_workflow(site: Site, provider: Provider, folder: Path) -> tuple[UUID, UUID]:
    """A run whose first output waits for a review, and the review; Temporal has lost the workflow meanwhile."""
    run_id = await submit_as(site.process, reviewed_pool(folder, provider, {"gate": "after"}), TWO)
    (line,) = await asked(site.process.database, run_id)
    await delete_workflow(site.process.client, run_id)
    return run_id, line.id


async def _goes_on(site: Site, provider: Provider, run_id: UUID, position: int) -> None:
    """Resumes the run and approves what is asked then, which is about the step at ``position``, to its end."""
    database = site.process.database
    resumed = await site.command("resume", str(run_id), "--json", who="alice")
    assert resumed.code == 3, resumed.err
    for expected in range(position, 2):
        (line,) = await asked(database, run_id)
        assert (line.step, line.gate) == (expected, "after")
        approved = await site.command("review", "approve", str(line.id), "--json")
        assert approved.code == 0, approved.err
    assert (await ended(database, run_id)).state == "succeeded"
    # Two steps, two calls: nothing was paid again.
    assert len(await nothing_more_is_called(provider)) == 2
    kept = await record(database.url, run_id)
    assert len(kept.entries("review.decided")) == 2
    await check_family(database, run_id)


async def test_an_approval_that_finds_no_workflow_stands_and_is_not_asked_for_again(
    site: Site, provider: Provider, tmp_path: Path
) -> None:
    """The run waits for weeks, Temporal loses its workflow, somebody approves: decided once, paid once."""
    run_id, review = await _waiting_without_workflow(site, provider, tmp_path)
    listed = await site.command("review", "list", "--json")
    assert str(review) in {one["id"] for one in listed.valid_json("review-list")}
    done = await site.command("review", "approve", str(review), "--json")
    assert done.code == 0, done.err
    assert done.valid_json("review-decision")["review_state"] == "approved"
    await reconcile(site.process.database, site.process.client)
    lost = await run_of(site.process.database, run_id)
    assert (lost.state, lost.reason) == ("failed", "workflow-lost")
    await _goes_on(site, provider, run_id, 1)


async def test_a_review_of_a_run_that_was_lost_is_withdrawn_and_asked_again_after_a_resume(
    site: Site, provider: Provider, tmp_path: Path
) -> None:
    run_id, review = await _waiting_without_workflow(site, provider, tmp_path)
    await reconcile(site.process.database, site.process.client)
    late = await site.command("review", "approve", str(review), "--json")
    assert (late.code, late.error_code) == (1, "review-closed")
    assert "Traceback" not in late.err
    run = await _shown(site, run_id)
    assert (run["state"], run["reason"]) == ("failed", "workflow-lost")
    await _goes_on(site, provider, run_id, 0)
