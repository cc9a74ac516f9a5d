"""Reviews, persons, holds and erasures as an auditor finds them in a bundle."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from engine.errors import RefusedError
from engine.operations.reviewing import show_review
from engine.store.exchange import Connection
from engine.store.holds import Matter, place_hold
from engine.store.persons import link_account
from engine.store.system_chain import lock_system
from engine.verifier.canonical import canonical
from engine.verifier.questions import who_approved, who_saw
from tests.support.exports import TENANT, TestSigner, artifacts, entries, exported, members, repacked, verified
from tests.support.provider import Provider
from tests.support.reviews import asked, decide_as, reviewed_pool, reviews_of, submit_as
from tests.support.runs import ended, lists_plan
from worker_pools.process import WorkerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAIN = lists_plan(["one", "two", "three"], [[], [0], [1]], [0, 1, 2])
PLAN_GATE = {"gate": "plan"}
ANSWER_GATE = {"gate": "answer", "approvals": 2}


@pytest.fixture(scope="module")
def signer(process: WorkerProcess) -> TestSigner:
    return TestSigner(process.database)


async def reviewed_run(process: WorkerProcess, provider: Provider, folder: Path, *rules: dict[str, Any]) -> UUID:
    """A run with a plan gate and a four-eyes answer gate, approved by others than its submitter."""
    run_id = await submit_as(process, reviewed_pool(folder, provider, *rules), CHAIN)
    (plan,) = await asked(process.database, run_id)
    with pytest.raises(RefusedError):
        await decide_as(process, plan.id, "alice")
    await decide_as(process, plan.id, "bob", reason="canary: the plan is fine")
    (answer,) = await asked(process.database, run_id)
    await show_review(process.database, answer.id, "carol", None)
    await decide_as(process, answer.id, "bob")
    await decide_as(process, answer.id, "carol", reason="canary: the answer is fine")
    assert (await ended(process.database, run_id, timeout_s=10)).state == "succeeded"
    return run_id


async def test_who_approved_is_found_in_the_bundle(
    process: WorkerProcess, signer: TestSigner, provider: Provider, tmp_path: Path
) -> None:
    run_id = await reviewed_run(process, provider, tmp_path, PLAN_GATE, ANSWER_GATE)
    done = await exported(process.database, tmp_path / "bundle.zip", run_id, seal=signer.seal)
    report = verified(done.path, signer)
    assert (report.findings.faults, report.verdict) == ([], "valid"), report.as_text()
    run = report.runs[str(run_id)]
    (plan,) = who_approved(report, run, "plan")["reviews"]
    assert [word["person"] for word in plan["decisions"]] == ["bob"]
    (answer,) = who_approved(report, run, "answer")["reviews"]
    assert [word["person"] for word in answer["decisions"]] == ["bob", "carol"]
    assert all(word["meaning"] for word in answer["decisions"])
    assert "carol" in {row["account"] for row in who_saw(report, run, "2")["people"]}
    page = members(done.path)["index.html"].decode()
    for words in ("Review (plan)", "Review (answer)", "four eyes", "bob", "carol", "canary: the plan is fine"):
        assert words in page, words


async def test_an_approval_by_an_account_that_turns_out_to_be_the_submitters_is_not_counted_by_the_next(
    process: WorkerProcess, signer: TestSigner, provider: Provider, tmp_path: Path
) -> None:
    """Whoever decides counts as the gate and as an auditor do: by whose account it is by now."""
    database = process.database
    run_id = await submit_as(process, reviewed_pool(tmp_path, provider, ANSWER_GATE), CHAIN, "ursula")
    (answer,) = await asked(database, run_id)
    await decide_as(process, answer.id, "u2")
    await link_account(database, TENANT, "u2", "ursula", actor_id="admin")
    assert [line.approved for line in await asked(database, run_id)] == [0]
    second = await decide_as(process, answer.id, "carol")
    assert (second.decided.review_state, second.decided.approvals) == ("open", 1)
    assert [(line.state, line.approved) for line in await reviews_of(database, run_id)] == [("open", 1)]
    third = await decide_as(process, answer.id, "bob")
    assert (third.decided.review_state, third.decided.approvals) == ("approved", 2)
    assert (await ended(database, run_id, timeout_s=10)).state == "succeeded"
    assert [(line.state, line.approved) for line in await reviews_of(database, run_id)] == [("approved", 2)]
    done = await exported(database, tmp_path / "bundle.zip", run_id, seal=signer.seal)
    report = verified(done.path, signer)
    assert (report.findings.faults, report.verdict) == ([], "valid"), report.as_text()


async def test_a_link_and_an_approval_at_once_are_one_after_the_other_for_an_auditor(
    process: WorkerProcess, signer: TestSigner, provider: Provider, tmp_path: Path
) -> None:
    """A link that is being written is waited for: the second approval neither misses it nor is dated before it."""
    database = process.database
    run_id = await submit_as(process, reviewed_pool(tmp_path, provider, ANSWER_GATE), CHAIN, "vera")
    (answer,) = await asked(database, run_id)
    await decide_as(process, answer.id, "v2")
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(connection: Connection) -> None:
        writer = await lock_system(connection, TENANT, actor_id="admin")
        insert = "INSERT INTO persons (tenant_id, actor_id, person, linked_by, linked_at) VALUES (%s, %s, %s, %s, %s)"
        writer.statement(insert, (TENANT, "v2", "vera", "admin", writer.now))
        writer.entry("person.linked", actor="v2", person="vera")
        begun.set()
        await go_on.wait()
        await writer.commit()

    link = asyncio.create_task(database.write(slowly))
    await begun.wait()
    second = asyncio.create_task(decide_as(process, answer.id, "carol"))
    await asyncio.sleep(0.5)
    assert not second.done()
    go_on.set()
    await link
    assert (await second).decided.review_state == "open"
    await decide_as(process, answer.id, "bob")
    assert (await ended(database, run_id, timeout_s=10)).state == "succeeded"
    done = await exported(database, tmp_path / "bundle.zip", run_id, seal=signer.seal)
    report = verified(done.path, signer)
    assert (report.findings.faults, report.verdict) == ([], "valid"), report.as_text()


@pytest.mark.parametrize("gate", ["plan", "answer"])
async def test_an_approval_that_is_taken_out_or_given_by_somebody_else_is_found(
    process: WorkerProcess, signer: TestSigner, provider: Provider, tmp_path: Path, gate: str
) -> None:
    run_id = await reviewed_run(process, provider, tmp_path, PLAN_GATE, ANSWER_GATE)
    done = await exported(process.database, tmp_path / "bundle.zip", run_id, seal=signer.seal)
    found = members(done.path)
    own = entries(found, run_id)
    asked_for = next(e["data"]["review"] for e in own if e["type"] == "review.requested" and e["data"]["gate"] == gate)
    for entry in own:
        if entry["type"] == "review.decided" and entry["data"]["review"] == asked_for:
            entry["actor"] = entry["data"]["person"] = "alice"
    found[f"runs/{run_id}/entries.jsonl"] = b"".join(canonical(entry) + b"\n" for entry in own)
    report = verified(repacked(found, tmp_path / "changed.zip"), signer)
    assert report.exit_code == 1
    assert any("does not follow" in fault for fault in report.findings.faults), report.findings.faults


async def test_reasons_of_people_can_be_withheld(
    process: WorkerProcess, signer: TestSigner, provider: Provider, tmp_path: Path
) -> None:
    run_id = await reviewed_run(process, provider, tmp_path, PLAN_GATE, ANSWER_GATE)
    done = await exported(process.database, tmp_path / "r.zip", run_id, seal=signer.seal, redact=["reason", "meaning"])
    report = verified(done.path, signer)
    assert (report.findings.faults, report.exit_code) == ([], 3), report.as_text()
    assert b"canary:" not in b"".join(members(done.path).values())


@pytest.mark.parametrize("with_tenant", [False, True])
async def test_texts_of_the_tenants_own_chain_are_disclosed_only_if_asked_for(
    process: WorkerProcess, signer: TestSigner, provider: Provider, tmp_path: Path, with_tenant: bool
) -> None:
    run_id = await submit_as(process, reviewed_pool(tmp_path, provider), CHAIN)
    await ended(process.database, run_id)
    matter = Matter(TENANT, f"matter-{with_tenant}", "lawyer", None, "a canary reason for a hold")
    await place_hold(process.database, matter, [run_id])
    done = await exported(process.database, tmp_path / "h.zip", run_id, seal=signer.seal, with_tenant=with_tenant)
    report = verified(done.path, signer)
    assert (report.findings.faults, report.exit_code) == ([], 0 if with_tenant else 3), report.as_text()
    found = members(done.path)
    assert (b"a canary reason" in b"".join(found.values())) is with_tenant
    assert {row["state"] for row in artifacts(found) if row["run"] == str(TENANT)} == {
        "disclosed" if with_tenant else "redacted"
    }
    # Of a bundle of another run nothing is missing.
    other = await submit_as(process, reviewed_pool(tmp_path, provider), CHAIN)
    await ended(process.database, other)
    done = await exported(process.database, tmp_path / "o.zip", other, seal=signer.seal, with_tenant=with_tenant)
    report = verified(done.path, signer)
    assert (report.findings.faults, report.exit_code) == ([], 0), report.as_text()
    assert any("about other runs" in line for line in report.not_proven) is not with_tenant
