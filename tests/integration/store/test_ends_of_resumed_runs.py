"""A run that lost its workflow when every step was done: a resume has nothing to call, and ends it well."""

from __future__ import annotations

from engine.store.database import Database
from engine.store.settling import Settlement, settle_run
from tests.integration.store.test_forks import answer
from tests.integration.store.test_orders import order, resume
from tests.support.stored import check_invariants, record, stored_run


async def test_a_run_whose_steps_were_all_done_is_resumed_and_succeeds(database: Database) -> None:
    run_id = await stored_run(database, [[], []])
    await answer(database, run_id, 0, 1)
    assert (await settle_run(database, Settlement(run_id, 1, "failed", "workflow-lost"))).state == "failed"
    await resume(database, order(run_id))
    for _ in range(2):
        # As often as Temporal asks.
        settled = await settle_run(database, Settlement(run_id, 2, "succeeded", None))
        assert (settled.state, settled.code) == ("succeeded", None)
    kept = await record(database.url, run_id)
    check_invariants(kept)
    assert kept.run["state"] == "succeeded"
    assert len(kept.attempts) == 2
