"""Reviews and a resume: what was paid for before is taken as it is, and never paid again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.orders import cancel, pause, resume
from tests.support.provider import Provider
from tests.support.reviews import asked, decide_as, every_run_is_proven, reviewed_pool, submit_as
from tests.support.runs import ended
from tests.support.stored import check_invariants, record
from tests.workflow.test_reviews_interplay import ONE, waits
from worker_pools.process import WorkerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("rule", [None, {"gate": "plan"}], ids=["no-rule", "another-rule"])
async def test_an_output_that_waited_is_not_paid_again_when_a_resumes_pool_asks_nobody_about_it(
    process: WorkerProcess, provider: Provider, tmp_path: Path, rule: dict[str, str] | None
) -> None:
    run_id = await submit_as(process, reviewed_pool(tmp_path, provider, {"gate": "answer"}), ONE)
    await asked(process.database, run_id)
    await waits(process.database, run_id)
    await cancel(process, run_id)
    await ended(process.database, run_id, timeout_s=10)
    await resume(process, run_id, reviewed_pool(tmp_path, provider, *([] if rule is None else [rule])))
    if rule is not None:
        (review,) = await asked(process.database, run_id)
        await decide_as(process, review.id, "bob")
    run = await ended(process.database, run_id, timeout_s=10)
    assert (run.state, provider.count, len(run.steps[0].attempts)) == ("succeeded", 1, 1)
    check_invariants(await record(process.database.url, run_id))


async def test_what_was_approved_when_a_cancel_came_is_accepted_by_a_resume(
    process: WorkerProcess, provider: Provider, tmp_path: Path
) -> None:
    run_id = await submit_as(process, reviewed_pool(tmp_path, provider, {"gate": "answer"}), ONE)
    (review,) = await asked(process.database, run_id)
    await waits(process.database, run_id)
    await pause(process, run_id)
    await decide_as(process, review.id, "bob")
    await cancel(process, run_id)
    assert (await ended(process.database, run_id, timeout_s=10)).state == "cancelled"
    await resume(process, run_id)
    run = await ended(process.database, run_id, timeout_s=10)
    assert (run.state, provider.count, len(run.steps[0].attempts)) == ("succeeded", 1, 1)
    check_invariants(await record(process.database.url, run_id))


async def test_every_run_of_this_module_is_valid_for_a_verifier_that_has_only_the_bundle(
    process: WorkerProcess, tmp_path: Path
) -> None:
    await every_run_is_proven(process, tmp_path)
