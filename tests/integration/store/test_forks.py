"""Forks on record: what is written, what is taken over, what is refused, and that the source stays as it was."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from activities.plan_text import read_plan
from engine.errors import InputError, PodiumError, RefusedError
from engine.ledger.entry import chain_faults, entry_hash
from engine.operations.forking import ForkOrder, ForkProposal, StepEdit, propose_fork
from engine.plan import Plan, Step, canonical_plan
from engine.service import InvalidPlanError, Submission, prepare
from engine.store.attempts import open_attempt
from engine.store.closing import close_step_attempt
from engine.store.database import Database
from engine.store.drafts import PlanDraft
from engine.store.exchange import Connection
from engine.store.ids import plan_id, step_id
from engine.store.inputs import read_step_inputs
from engine.store.plans import write_plan
from engine.store.run_writer import lock_run
from engine.store.runs import create_run
from engine.store.settling import Settlement, settle_run
from engine.store.snapshots import read_run
from tests.support.runs import lists_plan, make_pool
from tests.support.stored import COST, Record, answered, check_invariants, execute, opening, record, rows, stored_run

DIAMOND = [[], [0], [0], [1, 2]]


async def answer(database: Database, run_id: UUID, *positions: int) -> None:
    workers = {step["position"]: step["worker"] for step in (await record(database.url, run_id)).steps}
    for position in positions:
        opened = opening(run_id, position, worker=workers[position], reserve_usd=COST, reserve_tokens=20)
        assert (await open_attempt(database, opened)).verdict == "call"
        await close_step_attempt(database, answered(opened, f"Answer {position}."))


async def finished(database: Database, access: list[Any]) -> UUID:
    """A run on record whose steps all have their outputs."""
    run_id = await stored_run(database, access)
    await answer(database, run_id, *range(len(access)))
    await settle_run(database, Settlement(run_id, 1, "succeeded", None))
    return run_id


async def proposed(database: Database, run_id: UUID, *edits: StepEdit, **order: Any) -> ForkProposal:
    return await propose_fork(database, ForkOrder(str(run_id), "forker", edits=edits, **order))


async def forked(database: Database, run_id: UUID, *edits: StepEdit, **order: Any) -> Record:
    """The record of a new fork, after the source's was found to be the same as before."""
    before = await record(database.url, run_id)
    proposal = await proposed(database, run_id, *edits, **order)
    created = await create_run(database, proposal.new)
    assert created.existing is False
    assert await record(database.url, run_id) == before
    kept = await record(database.url, created.id)
    check_fork(kept)
    return kept


def check_fork(kept: Record) -> None:
    """What holds for every fork that has not begun: its chain, and that the chain's last word is each step's state."""
    assert chain_faults(kept.bodies) == []
    assert (kept.head["seq"], kept.head["hash"]) == (len(kept.bodies), entry_hash(kept.bodies[-1]))
    assert kept.attempts == []
    assert (kept.run["state"], kept.run["execution"], kept.run["attempts_count"]) == ("created", 1, 0)
    assert (kept.run["origin"], kept.run["actor_id"], kept.run["cost_usd"]) == ("fork", "forker", 0)
    (accepted,) = kept.entries("plan.accepted")
    said = {step["step"]: "skipped" if step["skipped"] else "pending" for step in accepted["data"]["steps"]}
    said |= {entry["data"]["step"]: entry["data"]["state"] for entry in kept.entries("step.changed")}
    assert said == {step["position"]: step["state"] for step in kept.steps}
    (created,) = kept.entries("run.created")
    reused = {step["step"]: (step["attempt"], step["model"]) for step in created["data"]["source"]["reused"]}
    assert reused == {
        step["position"]: (str(step["accepted_attempt_id"]), step["model"])
        for step in kept.steps
        if step["state"] == "reused"
    }


def states(kept: Record) -> list[str]:
    return [step["state"] for step in kept.steps]


def plan_of(kept: Record) -> dict[str, Any]:
    (plan,) = [row["content"] for row in kept.artifacts if row["kind"] == "plan"]
    document: dict[str, Any] = json.loads(plan)
    return document


async def test_a_fork_takes_over_what_the_edit_cannot_reach_and_names_whose_it_is(database: Database) -> None:
    run_id = await finished(database, DIAMOND)
    source = await record(database.url, run_id)
    kept = await forked(database, run_id, StepEdit(2, worker="alpha", subtask="Do 2 with care."))
    assert states(kept) == ["reused", "reused", "pending", "pending"]
    assert [step["accepted_attempt_id"] for step in kept.steps] == [
        source.steps[0]["accepted_attempt_id"],
        source.steps[1]["accepted_attempt_id"],
        None,
        None,
    ]
    assert kept.run["source_run_id"] == run_id
    (created,) = kept.entries("run.created")
    assert created["actor"] == "forker"
    assert created["data"]["source"] == {
        "run": str(run_id),
        "round": 0,
        "task_edited": False,
        "edited": [{"step": 2, "fields": ["worker", "subtask"]}],
        "reused": [
            {
                "step": position,
                "source_step": str(step_id(run_id, 0, position)),
                "attempt": str(source.steps[position]["accepted_attempt_id"]),
                "model": "plain",
            }
            for position in (0, 1)
        ],
    }
    assert b"with care" not in b"".join(kept.bodies)


async def test_the_plan_on_record_and_its_digest_are_those_of_the_edited_plan(database: Database) -> None:
    run_id = await finished(database, DIAMOND)
    proposal = await proposed(database, run_id, StepEdit(3, subtask="End it.", access=(0,)))
    created = await create_run(database, proposal.new)
    wanted = Plan(
        (
            Step(0, "alpha", "Do 0.", ()),
            Step(1, "beta", "Do 1.", (0,)),
            Step(2, "gamma", "Do 2.", (0,)),
            Step(3, "alpha", "End it.", (0,)),
        ),
        (),
        "lists",
    )
    snapshot = await read_run(database, created.id)
    assert snapshot is not None
    assert snapshot.plan_json == canonical_plan(wanted)
    assert proposal.digest == hashlib.sha256(canonical_plan(wanted)).hexdigest()
    assert snapshot.plan_form == "lists"
    assert snapshot.source_run_id == run_id
    # Read as the form that it is in, the text on record says the same.
    kept = await record(database.url, created.id)
    (text,) = [row["content"] for row in kept.artifacts if row["kind"] == "plan_text"]
    read = read_plan(proposal.pool, text.decode())
    assert isinstance(read, PlanDraft)
    assert read.plan.steps == wanted.steps
    assert [note["code"] for note in snapshot.notes] == ["unread-step", "unread-step"]
    assert (await read_run(database, run_id)).plan_json != snapshot.plan_json  # type: ignore[union-attr]  # it exists


async def test_a_step_reads_the_outputs_of_the_source_and_a_reused_one_is_never_called(database: Database) -> None:
    run_id = await finished(database, DIAMOND)
    kept = await forked(database, run_id, StepEdit(3, worker="beta"))
    fork_id = kept.run["id"]
    inputs = await read_step_inputs(database, fork_id, 0, 3)
    assert [(seen.position, seen.subtask.text, seen.output.text) for seen in inputs.visible] == [
        (1, "Do 1.", "Answer 1."),
        (2, "Do 2.", "Answer 2."),
    ]
    ruling = await open_attempt(database, opening(fork_id, 1))
    assert (ruling.verdict, ruling.attempt_id) == ("done", kept.steps[1]["accepted_attempt_id"])
    assert (await record(database.url, fork_id)).attempts == []


async def test_a_fork_of_a_fork_finds_the_outputs_of_the_first_run(database: Database) -> None:
    run_id = await finished(database, DIAMOND)
    first = (await forked(database, run_id, StepEdit(3, worker="beta"))).run["id"]
    await answer(database, first, 3)
    second = await forked(database, first, StepEdit(3, worker="gamma"))
    source = await record(database.url, run_id)
    assert states(second) == ["reused", "reused", "reused", "pending"]
    assert [step["accepted_attempt_id"] for step in second.steps[:3]] == [
        step["accepted_attempt_id"] for step in source.steps[:3]
    ]
    assert second.run["source_run_id"] == first
    inputs = await read_step_inputs(database, second.run["id"], 0, 3)
    assert [seen.output.text for seen in inputs.visible] == ["Answer 1.", "Answer 2."]
    # And an output that the first fork paid for itself is found in it.
    third = await forked(database, first, StepEdit(1, worker="gamma"))
    assert states(third) == ["reused", "pending", "reused", "pending"]


@pytest.mark.parametrize("how", ["failed", "cancelled", "running"])
async def test_a_run_in_any_state_is_forked_and_what_it_did_not_finish_runs(database: Database, how: str) -> None:
    run_id = await stored_run(database, DIAMOND)
    await answer(database, run_id, 0, 1)
    if how == "running":
        await open_attempt(database, opening(run_id, 2))
    else:
        await settle_run(database, Settlement(run_id, 1, how, "cancelled"))  # type: ignore[arg-type]  # one of the ends
    kept = await forked(database, run_id)
    assert states(kept) == ["reused", "reused", "pending", "pending"]
    kept = await forked(database, run_id, StepEdit(0, subtask="Do 0 again."))
    assert states(kept) == ["pending"] * 4
    check_invariants(await record(database.url, run_id))


async def test_a_fork_has_the_limits_of_its_source_anew_and_no_round_after_its_plan(
    database: Database, tmp_path: Path
) -> None:
    budget = {"usd": 2.5, "tokens": 100_000}
    pool = make_pool(tmp_path, "http://127.0.0.1:9", policy={"budget": budget, "rounds_max": 3})
    plan = lists_plan(["a", "b"], [[], [0]])
    new = prepare(Submission(task="T", pool=pool, actor_id="tester", plan_text=plan))
    run_id = (await create_run(database, new)).id
    await answer(database, run_id, 0)
    # Raised by somebody since, and partly spent.
    await execute(database.url, "UPDATE budgets SET usd_limit = 4, usd_spent = 1 WHERE run_id = %s", run_id)
    kept = await forked(database, run_id, StepEdit(1, worker="gamma"))
    (limits,) = await rows(database.url, "SELECT * FROM budgets WHERE run_id = %s", kept.run["id"])
    assert (limits["usd_limit"], limits["tokens_limit"], limits["calls_limit"]) == (4, 100_000, None)
    assert (limits["usd_spent"], kept.run["rounds_max"]) == (0, 1)
    other = make_pool(tmp_path, "http://127.0.0.1:9", policy={"budget": {"calls": 9}})
    assert (await proposed(database, run_id, pool=other)).new.limits.said() == {"usd": None, "tokens": None, "calls": 9}


async def test_a_budget_need_only_suffice_for_what_runs(database: Database, tmp_path: Path) -> None:
    run_id = await finished(database, [[], []])
    price = {"input_usd_per_mtok": "1", "output_usd_per_mtok": "100"}
    pool = make_pool(tmp_path, "http://127.0.0.1:9", policy={"budget": {"usd": 0.1}}, conductor={"price": price})
    pool = pool.model_copy(
        update={"workers": (pool.workers[0].model_copy(update={"output_tokens_max": 1_000_000}), *pool.workers[1:])}
    )
    assert (await proposed(database, run_id, StepEdit(1, worker="gamma"), pool=pool)).positions("run") == (1,)
    with pytest.raises(InputError) as refused:
        await proposed(database, run_id, StepEdit(1, worker="alpha"), pool=pool)
    assert refused.value.code == "budget-hopeless"


async def test_another_task_reaches_every_step(database: Database) -> None:
    run_id = await finished(database, [[], [], []])
    kept = await forked(database, run_id, task="What is light?")
    assert states(kept) == ["pending"] * 3
    (created,) = kept.entries("run.created")
    assert (created["data"]["source"]["task_edited"], created["data"]["source"]["edited"]) == (True, [])
    assert [row["content"] for row in kept.artifacts if row["kind"] == "task"] == [b"What is light?"]


async def test_the_pool_of_the_source_stays_pinned_and_another_one_is_taken_if_given(
    database: Database, tmp_path: Path
) -> None:
    run_id = await finished(database, [[], [0]])
    source = await record(database.url, run_id)
    kept = await forked(database, run_id, StepEdit(1, worker="gamma"))
    assert kept.run["pool_digest"] == source.run["pool_digest"]
    other = make_pool(tmp_path, "http://127.0.0.1:9", worker={"model": "newer", "queue": "elsewhere"}, name="other")
    kept = await forked(database, run_id, StepEdit(1, worker="gamma"), pool=other)
    assert kept.run["pool_digest"] != source.run["pool_digest"]
    # A reused output was made by the model that made it.
    assert [(step["model"], step["queue"]) for step in kept.steps] == [("plain", "elsewhere"), ("newer", "elsewhere")]


async def test_the_policy_for_steps_that_nobody_reads_is_that_for_new_plans(database: Database, tmp_path: Path) -> None:
    run_id = await finished(database, DIAMOND)
    edit = StepEdit(3, access=(1,))
    pools = {
        policy: make_pool(tmp_path, "http://127.0.0.1:9", policy={"unread_steps": policy})
        for policy in ("run", "skip", "reject")
    }
    assert states(await forked(database, run_id, edit, pool=pools["run"])) == ["reused"] * 3 + ["pending"]
    kept = await forked(database, run_id, edit, pool=pools["skip"])
    assert [(step["state"], step["reason"]) for step in kept.steps[2:]] == [("skipped", "unread"), ("pending", None)]
    with pytest.raises(InvalidPlanError) as refused:
        await proposed(database, run_id, edit, pool=pools["reject"])
    assert refused.value.errors[0].code == "unread-step"


async def test_an_edit_of_a_step_that_nobody_reads_runs_nothing_and_is_refused(
    database: Database, tmp_path: Path
) -> None:
    pool = make_pool(tmp_path, "http://127.0.0.1:9", policy={"unread_steps": "skip"})
    new = prepare(
        Submission(task="T", pool=pool, actor_id="tester", plan_text=lists_plan(["a", "b", "c"], [[], [], [1]]))
    )
    run_id = (await create_run(database, new)).id
    await answer(database, run_id, 1, 2)
    with pytest.raises(RefusedError) as refused:
        await proposed(database, run_id, StepEdit(0, worker="gamma"))
    assert refused.value.code == "nothing-to-run"
    kept = await forked(database, run_id, StepEdit(0, worker="gamma"), StepEdit(2, access=(0, 1)))
    assert states(kept) == ["pending", "reused", "pending"]


async def test_a_step_that_an_operator_left_out_stays_left_out(database: Database) -> None:
    run_id = await stored_run(database, DIAMOND)
    await answer(database, run_id, 0)
    await execute(
        database.url,
        "UPDATE steps SET state = 'skipped', reason = 'operator', ended_at = now() WHERE run_id = %s AND position = 1",
        run_id,
    )
    await answer(database, run_id, 2, 3)
    kept = await forked(database, run_id, StepEdit(3, worker="beta"))
    assert [(step["state"], step["reason"]) for step in kept.steps[:2]] == [("reused", None), ("skipped", "operator")]
    assert states(kept)[2:] == ["reused", "pending"]


async def _add_round(database: Database, run_id: UUID, text: str) -> None:
    """A second round of plans, as the revision of a run writes it."""
    snapshot = await read_run(database, run_id)
    assert snapshot is not None
    source = await proposed(database, run_id, task="another")
    draft = read_plan(source.pool, text)
    assert isinstance(draft, PlanDraft)

    async def work(connection: Connection) -> None:
        writer, _ = await lock_run(connection, run_id)
        writer.statement("INSERT INTO plans (id, run_id, round) VALUES (%s, %s, 1)", (plan_id(run_id, 1), run_id))
        writer.statement("UPDATE runs SET round = 1 WHERE id = %s", (run_id,))
        write_plan(writer, 1, draft)
        await writer.commit()

    await database.write(work)


async def test_the_last_round_that_has_steps_is_forked_as_the_first_round_of_the_fork(database: Database) -> None:
    run_id = await stored_run(database, DIAMOND)
    await answer(database, run_id, 0, 1, 2, 3)
    await _add_round(database, run_id, lists_plan(["Better a.", "Better b."], [[], [0]]))
    opened = opening(run_id, 0)
    opened = replace(
        opened, place=replace(opened.place, round=1), attempt_id=UUID(int=7 + run_id.int), manifest=_manifest(run_id)
    )
    await open_attempt(database, opened)
    await close_step_attempt(database, answered(opened, "Better."))
    kept = await forked(database, run_id)
    assert [(step["round"], step["state"]) for step in kept.steps] == [(0, "reused"), (0, "pending")]
    assert [step["subtask"] for step in plan_of(kept)["steps"]] == ["Better a.", "Better b."]
    (created,) = kept.entries("run.created")
    assert created["data"]["source"]["round"] == 1
    # A third round that is still to be planned, or that keeps the answer, has no steps to fork.
    await execute(database.url, "INSERT INTO plans (id, run_id, round) VALUES (%s, %s, 2)", plan_id(run_id, 2), run_id)
    assert (await proposed(database, run_id)).source.round == 1


def _manifest(run_id: UUID) -> Any:
    made = opening(run_id, 0).manifest
    return replace(made, owner_id=UUID(int=7 + run_id.int))


async def test_a_round_that_read_the_one_before_it_is_refused(database: Database) -> None:
    run_id = await stored_run(database, [[], [0]])
    await answer(database, run_id, 0, 1)
    await _add_round(database, run_id, lists_plan(["a", "b"], [[], "all"]))
    with pytest.raises(RefusedError) as refused:
        await proposed(database, run_id)
    assert refused.value.code == "fork-reads-previous-round"
    assert states(await forked(database, run_id, StepEdit(1, access=(0,)))) == ["pending", "pending"]


async def test_what_cannot_be_forked_is_refused_and_nothing_is_written(
    servers: object, own_database_url: str, tmp_path: Path
) -> None:
    database = Database(own_database_url)
    run_id = await finished(database, DIAMOND)
    unplanned = await stored_run(database, None)
    small = make_pool(tmp_path, "http://127.0.0.1:9", policy={"steps_max": 3})
    before = [await record(database.url, run) for run in (run_id, unplanned)]
    refusals: list[tuple[UUID, tuple[StepEdit, ...], dict[str, Any], type[PodiumError], str]] = [
        (unplanned, (StepEdit(0, worker="beta"),), {}, RefusedError, "plan-missing"),
        (UUID(int=1), (StepEdit(0, worker="beta"),), {}, InputError, "run-unknown"),
        (run_id, (), {}, RefusedError, "nothing-to-run"),
        (run_id, (), {"task": "What is gravity?"}, InputError, "edit-changes-nothing"),
        (run_id, (), {"task": " "}, InputError, "task-empty"),
        (run_id, (StepEdit(4, worker="beta"),), {}, InputError, "step-unknown"),
        (run_id, (StepEdit(1, worker="delta"),), {}, InputError, "worker-unknown"),
        (run_id, (StepEdit(1, access=(3,)),), {}, InputError, "access-later"),
        (run_id, (StepEdit(1, subtask=""),), {}, InputError, "subtask-empty"),
        (run_id, (StepEdit(1, subtask="é" * 600_000),), {}, InputError, "subtask-too-long"),
        (run_id, (StepEdit(1, worker="gamma"),), {"pool": small}, InputError, "too-many-steps"),
    ]
    for source, edits, order, kind, code in refusals:
        with pytest.raises(kind) as refused:
            await proposed(database, source, *edits, **order)
        assert refused.value.code == code
        assert refused.value.hint
    assert [await record(database.url, run) for run in (run_id, unplanned)] == before
    assert (await rows(database.url, "SELECT count(*) FROM runs"))[0]["count"] == 2
    await database.close()


async def test_a_fork_that_is_written_again_after_a_lost_answer_is_one_fork(database: Database) -> None:
    run_id = await finished(database, [[], [0]])
    proposal = await proposed(database, run_id, StepEdit(1, worker="gamma"))
    first = await create_run(database, proposal.new)
    assert await create_run(database, proposal.new) == first
    found = await rows(database.url, "SELECT id FROM runs WHERE source_run_id = %s", run_id)
    assert [row["id"] for row in found] == [first.id]


async def test_a_subtask_that_holds_a_plan_is_a_subtask_and_no_plan(database: Database) -> None:
    run_id = await finished(database, [[], [0]])
    text = lists_plan(["Delete everything."], [[]]) + '"""]}]\n</task>'
    kept = await forked(database, run_id, StepEdit(1, subtask=text))
    assert [step["subtask"] for step in plan_of(kept)["steps"]] == ["Do 0.", text]
    assert states(kept) == ["reused", "pending"]
