"""Every type of entry that docs/ledger.md describes: if it cannot be written, the change that it records is not made.

For each there is a moment just before, and the one transaction that would write it. The whole database is the same
after the failure as before it: states, rows, money, holds and persons. When entries are taken again, it happens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Final
from uuid import UUID, uuid4

import psycopg
import pytest

from engine.errors import RefusedError
from engine.evidence.record import append_exported
from engine.operations.reviewing import comment_review, decide_review, show_review
from engine.signing import AuditFolder, Signer
from engine.store import log
from engine.store.answers import Answer, answer_step
from engine.store.attempts import FAIL, FailurePolicy, Place, Substitute, open_attempt
from engine.store.budgets import Limits
from engine.store.children import ChildClosing, ChildOpening, begin_child, finish_child
from engine.store.closing import close_step_attempt
from engine.store.database import Database
from engine.store.drafts import StepRoute
from engine.store.erasing import erase
from engine.store.erasure_journal import ready
from engine.store.holds import Matter, place_hold, release_hold
from engine.store.orders import pause_run, request_cancel, unpause_run
from engine.store.persons import link_account
from engine.store.raising import LimitChange, change_budget
from engine.store.reading import Reading, record_read
from engine.store.resuming import resume_run
from engine.store.review_requests import request_reviews
from engine.store.run_writer import AttemptResult
from engine.store.runs import create_run
from engine.store.sampling import sampling_salt
from engine.store.settling import Settlement, settle_run
from tests.integration.store.test_answers import waiting_run
from tests.integration.store.test_fail_closed import refuse_entries
from tests.integration.store.test_log import runs_on_record
from tests.integration.store.test_orders import failed_chain, other_pool, resumption
from tests.integration.store.test_planning_crash_points import INVALID, planning
from tests.integration.store.test_planning_crash_points import close as close_planning
from tests.integration.store.test_reviews_on_record import ANSWER, gates, lines, look, proposed
from tests.integration.store.test_signer import TENANT, sealed
from tests.support.attacker import cut_log
from tests.support.budgets import budget_of, costly, run_with
from tests.support.ledger_page import ledger_page
from tests.support.orders import order, temporal_is_away
from tests.support.sealed import finished_run, order_for, sealed_database
from tests.support.servers import superuser_url
from tests.support.stored import answered, dump, ended_with, execute, new_run, opening, rows, stored_run

Act = Callable[[], Awaitable[object]]
REFUSED = AttemptResult("failed", "auth-failed", provider_status=401, cost_usd=Decimal(0))
# The whole of a sweep after the fact: what it erased is in the runs' own entries, which were written before.
NO_CHANGE: Final = {"retention.swept"}


@dataclass(frozen=True, slots=True)
class Stage:
    """An empty database and a folder."""

    database: Database
    folder: Path
    opened: list[Database] = field(default_factory=list)

    def keyed(self, name: str = "keys") -> Database:
        """The same database with a key store."""
        self.opened.append(sealed_database(self.database.url, self.folder / name))
        return self.opened[-1]

    async def close(self) -> None:
        for one in (self.database, *self.opened):
            await one.close()


Scene = Callable[[Stage], Awaitable[Act]]
SCENES: dict[str, Scene] = {}


def before(*types: str) -> Callable[[Scene], Scene]:
    """Names the entries that a scene's act would write."""

    def note(scene: Scene) -> Scene:
        SCENES.update(dict.fromkeys(types, scene))
        return scene

    return note


@before("run.created", "plan.accepted")
async def a_run_is_submitted(stage: Stage) -> Act:
    new = replace(new_run([[], [0]]), limits=Limits(usd=Decimal(1)))
    return lambda: create_run(stage.database, new)


@before("attempt.sent", "run.changed")
async def a_call_begins(stage: Stage) -> Act:
    run_id = await run_with(stage.database, stage.folder, [[]], Limits(usd=Decimal(1)))
    return lambda: open_attempt(stage.database, costly(run_id, 0))


@before("attempt.closed", "run.closed")
async def a_call_ends_the_run(stage: Stage) -> Act:
    run_id = await run_with(stage.database, stage.folder, [[]], Limits(usd=Decimal(1)))
    opened = costly(run_id, 0)
    await open_attempt(stage.database, opened)
    assert (await budget_of(stage.database, run_id))["usd_reserved"] == Decimal("0.40")
    return lambda: close_step_attempt(stage.database, answered(opened, cost_usd=Decimal("0.25"), ends_run=True))


@before("plan.rejected")
async def a_plan_is_none(stage: Stage) -> Act:
    opened = planning(await stored_run(stage.database, None))
    await open_attempt(stage.database, opened)
    return lambda: close_planning(stage.database, opened, INVALID)


@before("step.changed")
async def a_run_with_unfinished_steps_ends(stage: Stage) -> Act:
    run_id = await stored_run(stage.database, [[], [0]])
    return lambda: settle_run(stage.database, Settlement(run_id, 1, "failed", "workflow-lost"))


@before("step.substituted")
async def another_worker_takes_over(stage: Stage) -> Act:
    opened = opening(await stored_run(stage.database, [[]]), attempts_max=1)
    await open_attempt(stage.database, opened)
    policy = FailurePolicy(Substitute("gamma", "plain", "stand-in"))
    return lambda: close_step_attempt(stage.database, ended_with(opened, REFUSED, on_failure=policy))


@before("run.resumed", "run.repinned", "step.routed")
async def a_run_is_resumed_with_another_pool(stage: Stage) -> Act:
    run_id = await failed_chain(stage.database)
    routes = {name: StepRoute(f"other-{name}", "elsewhere") for name in ("alpha", "beta", "gamma")}
    pool = other_pool(stage.folder, policy={"steps_max": 7})
    wish = await resumption(stage.database, run_id, routes=routes, repin=pool)
    return lambda: resume_run(stage.database, order(run_id), wish)


@before("child.begun")
async def a_step_is_delegated(stage: Stage) -> Act:
    run_id = await stored_run(stage.database, [[]])
    return lambda: begin_child(stage.database, ChildOpening(Place(run_id, 0, 0), 1, "alpha", "Go on.", 3, FAIL))


@before("child.ended")
async def a_delegated_step_is_done(stage: Stage) -> Act:
    run_id = await stored_run(stage.database, [[]])
    place = Place(run_id, 0, 0)
    begun = await begin_child(stage.database, ChildOpening(place, 1, "alpha", "Go on.", 3, FAIL))
    assert begun.child_id is not None
    await settle_run(stage.database, Settlement(begun.child_id, 1, "failed", "x"))
    return lambda: finish_child(stage.database, ChildClosing(place, 1, ends_run=False, on_failure=FAIL))


@before("run.cancel_requested")
async def a_run_is_cancelled(stage: Stage) -> Act:
    run_id = await stored_run(stage.database, [[]])
    return lambda: request_cancel(stage.database, order(run_id, reason="canary reason"))


@before("run.paused")
async def a_run_is_paused(stage: Stage) -> Act:
    run_id = await stored_run(stage.database, [[]])
    return lambda: pause_run(stage.database, order(run_id, reason="canary reason"))


@before("run.unpaused")
async def a_pause_ends(stage: Stage) -> Act:
    run_id = await stored_run(stage.database, [[]])
    await pause_run(stage.database, order(run_id))
    return lambda: unpause_run(stage.database, order(run_id))


@before("run.budget_changed")
async def a_budget_is_changed(stage: Stage) -> Act:
    run_id = await run_with(stage.database, stage.folder, [[]], Limits(usd=Decimal(1)))
    return lambda: change_budget(stage.database, order(run_id), LimitChange(Limits(usd=Decimal(2))))


@before("operator.answered")
async def an_operator_answers(stage: Stage) -> Act:
    run_id = await waiting_run(stage.database)
    return lambda: answer_step(stage.database, order(run_id), Answer("retry", 1))


@before("review.sampled")
async def a_sample_is_drawn(stage: Stage) -> Act:
    run_id = await stored_run(stage.database, [[]])
    rules = gates({"gate": "before", "sample_percent": 1}, salt=await sampling_salt(stage.database, TENANT))
    return lambda: look(stage.database, run_id, rules, 0)


@before("review.requested")
async def people_are_asked(stage: Stage) -> Act:
    run_id = await proposed(stage.database, ANSWER)
    missing = (await look(stage.database, run_id, ANSWER, 1)).missing
    return lambda: request_reviews(stage.database, run_id, ANSWER, missing)


async def asked(stage: Stage, rules: Any = ANSWER) -> UUID:
    """A review that is open."""
    run_id = await proposed(stage.database, rules)
    await request_reviews(stage.database, run_id, rules, (await look(stage.database, run_id, rules, 1)).missing)
    (line,) = await lines(stage.database, run_id)
    return line.id


@before("review.opened")
async def a_review_is_displayed(stage: Stage) -> Act:
    review = await asked(stage)
    return lambda: show_review(stage.database, review, "bob", None)


@before("review.commented")
async def a_review_is_commented(stage: Stage) -> Act:
    review = await asked(stage)
    return lambda: comment_review(stage.database, review, actor_id="bob", on_behalf_of=None, text="canary")


@before("review.decided", "review.closed")
async def a_review_is_approved(stage: Stage) -> Act:
    review = await asked(stage)
    return lambda: decide_review(stage.database, temporal_is_away, review, "approve", actor_id="bob", reason="canary")


@before("review.bypassed")
async def the_glass_is_broken(stage: Stage) -> Act:
    review = await asked(stage, gates({"gate": "answer", "bypass": "anyone"}))
    return lambda: decide_review(stage.database, temporal_is_away, review, "bypass", actor_id="bob", reason="canary")


@before("person.linked")
async def an_account_is_linked(stage: Stage) -> Act:
    await stored_run(stage.database, [[]])
    return lambda: link_account(stage.database, TENANT, "bob-2", "bob", actor_id="admin")


@before("sampling.salt_made")
async def the_salt_is_made(stage: Stage) -> Act:
    await stored_run(stage.database, [[]])
    return lambda: sampling_salt(stage.database, TENANT)


@before("artifact.read")
async def an_answer_is_read(stage: Stage) -> Act:
    run_id = await finished_run(stage.database, ["an answer"])
    return lambda: record_read(stage.database, Reading(run_id, "anna", None, "output"))


@before("run.exported")
async def a_run_is_exported(stage: Stage) -> Act:
    run_id = await finished_run(stage.database, ["an answer"])
    return lambda: append_exported(
        stage.database, run_id, tenant=TENANT, actor_id="auditor", on_behalf_of=None, export=uuid4(), asked=[run_id],
        redacted=[],
    )  # fmt: skip


@before("artifact.erased")
async def a_run_is_erased(stage: Stage) -> Act:
    database = stage.keyed()
    run_id = await finished_run(database, ["an answer"])

    async def act() -> None:
        # Once it can be written, the first order is finished, and nothing is left for the second.
        with contextlib.suppress(RefusedError):
            await erase(database, order_for(run_id))

    return act


def matter(actor: str) -> Matter:
    return Matter(TENANT, "2026-0042", actor, None, "Doe v. Acme")


@before("erasure.refused")
async def what_is_held_is_to_be_erased(stage: Stage) -> Act:
    run_id = await finished_run(stage.database, ["an answer"])
    await place_hold(stage.database, matter("counsel"), [run_id])

    async def act() -> None:
        # The refusal is told by another error than that of an entry which cannot be written.
        with contextlib.suppress(RefusedError):
            await erase(stage.database, order_for(run_id))

    return act


@before("hold.placed")
async def a_run_is_held(stage: Stage) -> Act:
    run_id = await finished_run(stage.database, ["an answer"])
    return lambda: place_hold(stage.database, matter("counsel"), [run_id])


@before("hold.widened")
async def more_runs_are_held(stage: Stage) -> Act:
    first, second = [await finished_run(stage.database, [text]) for text in ("one", "two")]
    await place_hold(stage.database, matter("counsel"), [first])
    return lambda: place_hold(stage.database, matter("counsel"), [second])


@before("hold.release_asked")
async def a_release_is_asked_for(stage: Stage) -> Act:
    await place_hold(stage.database, matter("counsel"), [await finished_run(stage.database, ["an answer"])])
    return lambda: release_hold(stage.database, matter("ada"))


@before("hold.released")
async def a_release_is_confirmed(stage: Stage) -> Act:
    await place_hold(stage.database, matter("counsel"), [await finished_run(stage.database, ["an answer"])])
    await release_hold(stage.database, matter("ada"))
    return lambda: release_hold(stage.database, matter("bob"))


@before("keys.adopted")
async def another_key_store_is_adopted(stage: Stage) -> Act:
    await ready(stage.keyed())
    other = stage.keyed("other-keys")
    return lambda: ready(other, adopt=True)


@before("key.created")
async def the_log_gets_its_first_key(stage: Stage) -> Act:
    await runs_on_record(stage.database)
    await log.extend_log(stage.database)
    return lambda: sealed(stage.database, Signer(AuditFolder(stage.folder / "audit")))


@before("key.rotated")
async def the_key_is_replaced(stage: Stage) -> Act:
    signer = Signer(AuditFolder(stage.folder / "audit"))
    await runs_on_record(stage.database)
    await sealed(stage.database, signer)
    return lambda: signer.rotate(stage.database, TENANT, actor_id="operator", on_behalf_of=None, overlap_days=1)


@before("log.restored")
async def a_restored_log_is_accepted(stage: Stage) -> Act:
    signer = Signer(AuditFolder(stage.folder / "audit"))
    await runs_on_record(stage.database)
    kept = await sealed(stage.database, signer)
    await runs_on_record(stage.database)
    await sealed(stage.database, signer)
    await cut_log(stage.database.url, kept.size)
    return lambda: signer.accept_restored(stage.database, TENANT, actor_id="operator", on_behalf_of=None)


def test_there_is_a_scene_for_every_type_that_changes_anything() -> None:
    assert ledger_page().keys() - NO_CHANGE == SCENES.keys()


async def everything(url: str, type_: str) -> str:
    """All rows of all tables, but what an erasure writes down as its intent, until it is done, in steps of its own."""
    if type_ != "artifact.erased":
        return await dump(superuser_url(url))
    texts = await rows(
        url, "SELECT id, content, salt, erased_at FROM artifacts WHERE kind NOT LIKE 'basis%%' ORDER BY id"
    )
    runs = [{**row, "key_epoch": None} for row in await rows(url, "SELECT * FROM runs")]
    return f"{await dump(superuser_url(url), without=('erasures', 'artifacts', 'runs'))}\n{texts}\n{runs}"


@pytest.mark.parametrize("type_", sorted(SCENES))
async def test_without_its_entry_nothing_changes_and_with_it_everything(
    own_database_url: str, tmp_path: Path, type_: str
) -> None:
    database = Database(own_database_url)
    stage = Stage(database, tmp_path)
    act = await SCENES[type_](stage)
    count = "SELECT count(*) AS n FROM ledger_entries WHERE type = %s"
    entries = (await rows(database.url, count, type_))[0]["n"]
    then = await everything(database.url, type_)
    await refuse_entries(database.url, type_)
    for _ in range(2):
        with pytest.raises(psycopg.errors.CheckViolation):
            await act()
        assert await everything(database.url, type_) == then
    await execute(superuser_url(database.url), "ALTER TABLE ledger_entries DROP CONSTRAINT refused")
    await act()
    assert (await rows(database.url, count, type_))[0]["n"] > entries
    assert await everything(database.url, type_) != then
    await stage.close()
