"""Reviews, persons, holds and erasures as an auditor finds them in a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from engine.errors import RefusedError
from engine.operations.reviewing import show_review
from engine.store.holds import Matter, place_hold
from engine.verifier.canonical import canonical
from engine.verifier.questions import who_approved, who_saw
from tests.support.exports import TENANT, TestSigner, artifacts, entries, exported, members, repacked, verified
from tests.support.provider import Provider
from tests.support.reviews import asked, decide_as, reviewed_pool, submit_as
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
    assert verified(repacked(found, tmp_path / "changed.zip"), signer).exit_code == 1


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
