"""Bundles before and after an erasure in the live system: the older one stays valid, the newer one says what is gone."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest

from engine.store.erasing import ErasureOrder, erase
from engine.store.erasure_scope import Target
from engine.store.ids import artifact_id
from engine.store.log_check import Saved, check_log
from engine.verifier.canonical import canonical
from tests.support.exports import TestSigner, artifacts, entries, exported, members, repacked, verified
from tests.support.provider import Provider
from tests.support.runs import ended, lists_plan, submit_plan
from tests.support.sealed import BASIS
from tests.support.stored import record, rows
from tests.support.workflows import pool_of
from worker_pools.process import WorkerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORD = b"kanarie-in-an-old-bundle"
PLAN = lists_plan(["Say it.", "Conclude."], [[], [0]], [0, 1])


@pytest.fixture(scope="module")
def signer(process: WorkerProcess) -> TestSigner:
    return TestSigner(process.database)


async def finished(process: WorkerProcess, provider: Provider, folder: Path) -> tuple[UUID, UUID]:
    """A run whose first output holds the word; the run, and that output."""
    provider.script({"text": f"It is {WORD.decode()}."}, model="speaker")
    pool = pool_of(folder, provider.base_url, "speaker", "plain")
    run = await ended(process.database, await submit_plan(process, pool, PLAN))
    assert run.state == "succeeded"
    return run.id, artifact_id(run.steps[0].attempts[0].id, "output")


async def newest_checkpoint(process: WorkerProcess) -> bytes:
    found = await rows(process.database.url, "SELECT note FROM log_checkpoints ORDER BY size DESC LIMIT 1")
    return bytes(found[0]["note"])


async def test_an_older_bundle_is_as_valid_as_it_was_and_a_newer_one_names_what_is_gone(
    process: WorkerProcess, signer: TestSigner, provider: Provider, tmp_path: Path
) -> None:
    run_id, output = await finished(process, provider, tmp_path)
    before = await exported(process.database, tmp_path / "before.zip", run_id, seal=signer.seal)
    assert verified(before.path, signer).exit_code == 0
    assert WORD in b"".join(members(before.path).values())
    kept = await newest_checkpoint(process)
    order = ErasureOrder(Target(run_id, artifact_id=output), "officer", None, BASIS, copies="keep")
    await erase(process.database, order)
    # What was handed out is the auditor's own copy: an erasure here changes nothing of it, and says so nowhere in it.
    older = verified(before.path, signer, kept)
    assert (older.exit_code, older.findings.erased) == (0, [])
    after = await exported(process.database, tmp_path / "after.zip", run_id, seal=signer.seal)
    found = members(after.path)
    report = verified(after.path, signer, kept)
    assert (report.findings.faults, report.exit_code, report.verdict) == ([], 4, "erased"), report.as_text()
    assert WORD not in b"".join(found.values())
    (entry,) = [one for one in entries(found, run_id) if one["type"] == "artifact.erased"]
    gone = set(entry["data"]["erased"])
    assert str(output) in gone
    assert set(report.findings.erased) == gone == {a["artifact"] for a in artifacts(found) if a["state"] == "erased"}
    text = report.as_text()
    assert all(name in text for name in gone)
    assert text.startswith("VALID, WITH ERASED CONTENTS\n")
    page = found["index.html"].decode()
    assert f"{len(gone)} stored texts were erased; who ordered it" in page
    assert BASIS in page
    # Nothing of the older entries is another one: the newer bundle begins with the older one's.
    old_lines = members(before.path)[f"runs/{run_id}/entries.jsonl"]
    assert found[f"runs/{run_id}/entries.jsonl"].startswith(old_lines)
    # Whoever has kept a newer checkpoint is told that the older bundle is not the present state.
    late = verified(before.path, signer, await newest_checkpoint(process))
    assert late.exit_code == 1
    assert "the bundle is older" in late.findings.faults[0]


async def test_the_whole_log_is_valid_after_an_erasure(
    process: WorkerProcess, signer: TestSigner, provider: Provider, tmp_path: Path
) -> None:
    """What `podium audit verify --database` checks: entries, leaves, signatures, rows; none of them is about texts."""
    run_id, _ = await finished(process, provider, tmp_path)
    await signer.seal()
    kept = Saved(await newest_checkpoint(process), "the saved checkpoint")
    await erase(process.database, ErasureOrder(Target(run_id), "officer", None, BASIS, copies="erase"))
    await signer.seal()
    report = await check_log(process.database, trusted=signer.trust, saved=[kept])
    assert (report.faults, report.waiting, report.uncovered) == ([], 0, 0)
    assert {
        row["content"] for row in (await record(process.database.url, run_id)).artifacts if row["kind"] != "basis"
    } == {None}


async def test_a_text_from_an_older_bundle_cannot_be_slipped_into_a_newer_one(
    process: WorkerProcess, signer: TestSigner, provider: Provider, tmp_path: Path
) -> None:
    """Text and salt are genuine, and the entry commits to them: but an erased text is not in a bundle any more."""
    run_id, output = await finished(process, provider, tmp_path)
    before = await exported(process.database, tmp_path / "before.zip", run_id, seal=signer.seal)
    await erase(process.database, ErasureOrder(Target(run_id), "officer", None, BASIS, copies="erase"))
    after = await exported(process.database, tmp_path / "after.zip", run_id, seal=signer.seal)
    old, new = members(before.path), members(after.path)
    listed = artifacts(new)
    row = next(one for one in listed if one["artifact"] == str(output))
    genuine = next(one for one in artifacts(old) if one["artifact"] == str(output))
    row.update(genuine)
    new["artifacts.json"] = canonical({"artifacts": listed})
    new[f"artifacts/{output}"] = old[f"artifacts/{output}"]
    report = verified(repacked(new, tmp_path / "slipped.zip"), signer)
    assert report.exit_code == 1
    assert any("the list calls it disclosed" in fault for fault in report.findings.faults), report.findings.faults
