"""Bundles of runs that were really executed: what is in them, what verifies, what a careful attacker cannot do."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import pytest_asyncio

from engine.contracts import child_run_id
from engine.evidence.timeline import cost_words
from engine.ledger.commitment import ARTIFACT_DOMAIN, commitment
from engine.ledger.entry import entry_hash
from engine.operations.forking import ForkOrder, StepEdit, propose_fork, start_fork
from engine.verifier.canonical import canonical
from engine.verifier.questions import who_saw
from engine.verifier.report import Report
from tests.support.exports import TestSigner, artifacts, entries, exported, members, repacked, verified
from tests.support.nested import CHAIN, PLANNER, SELF
from tests.support.orders import cancel, resume
from tests.support.provider import Provider
from tests.support.runs import ended, lists_plan, submit_plan
from tests.support.stored import rows
from tests.support.workflows import pool_of, provider_reaches
from worker_pools.pool import Pool
from worker_pools.process import WorkerProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOSTILE = "</pre><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"> \u202e\x1b[31m"
BUSY = {"status": 503, "headers": {"Retry-After": "0"}}
REFUSED = {"status": 401, "body": {"error": {"message": "canary of the provider"}}}
NO_PLAN = "I would rather not plan."


@dataclass
class Story:
    """A tree of runs with everything that can happen, exported once, and who signed it."""

    signer: TestSigner
    run: UUID
    child: UUID
    path: Path
    members: dict[str, bytes]

    def changed(self, tmp_path: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
        """The bundle after an attacker's change, with a manifest that fits."""
        found = dict(self.members)
        change(found)
        return repacked(found, tmp_path / "changed.zip")


def story_pool(folder: Path, provider: Provider) -> Pool:
    each = {
        "base_url": provider.base_url,
        "queue": "stand-in",
        "price": {"input_usd_per_mtok": "1", "output_usd_per_mtok": "2"},
        "timeouts": {"call_s": 20, "first_token_s": 10, "idle_s": 5},
        "attempts_max": 3,
        "parameters": {"temperature": 0.7},
    }
    broken = {**each, "name": "broken", "description": "has no key", "model": "broken", "fallbacks": ["w0"]}
    return pool_of(
        folder,
        provider.base_url,
        "plain",
        "other",
        worker={"parameters": {"temperature": 0.7}},
        conductor={"model": PLANNER},
        more=[SELF, broken],
        policy={"rounds_max": 2, "on_failed_step": "fallback", "budget": {"usd": "10"}},
    )


@pytest.fixture(scope="module")
def signer(process: WorkerProcess) -> TestSigner:
    """The one signer of the module's log."""
    return TestSigner(process.database)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def story(
    process: WorkerProcess, signer: TestSigner, session_provider: Provider, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Story]:
    """Two rounds; in the first a retry, a child run, a substitute and a hostile answer; the first plan was invalid."""
    folder = tmp_path_factory.mktemp("story")
    provider = session_provider
    provider.reset()
    plan = lists_plan(["Say one.", "Split this up.", "Try.", "Conclude."], [[], [0], [], [0, 1, 2]], [0, 2, 3, 1])
    mend = lists_plan(["Mend it."], ["all"], [1])
    provider.script(*({"text": text} for text in (NO_PLAN, plan, CHAIN, mend)), model=PLANNER)
    said = {"headers": {"x-request-id": "req_7"}, "answered_model": "plain-2"}
    provider.script({"text": HOSTILE, **said}, BUSY, model="plain")
    provider.script({**REFUSED, "headers": {"x-request-id": "req_8"}}, model="broken", times=None)
    run_id = await submit_plan(process, story_pool(folder, provider), None, "A canary task.")
    run = await ended(process.database, run_id)
    assert (run.state, run.round) == ("succeeded", 1), run
    await signer.seal()
    done = await exported(process.database, folder / "bundle.zip", run_id, seal=signer.seal)
    yield Story(signer, run_id, child_run_id(run_id, round=0, position=1), done.path, members(done.path))


async def test_a_tree_with_rounds_retries_and_substitutes_verifies(story: Story) -> None:
    report = verified(story.path, story.signer)
    assert (report.findings.faults, report.verdict) == ([], "valid"), report.as_text()
    assert set(report.runs) == {str(story.run), str(story.child)}
    prompts = [attempt for run in report.runs.values() for attempt in run.attempts.values()]
    assert len(prompts) > 8
    assert all(attempt.rendered for attempt in prompts)
    types = {entry["type"] for run in (story.run, story.child) for entry in entries(story.members, run)}
    assert types >= {"plan.rejected", "step.substituted", "child.begun", "child.ended", "run.exported", "run.closed"}


async def test_which_model_saw_the_output_of_step_0(story: Story) -> None:
    report = verified(story.path, story.signer)
    answer = who_saw(report, report.runs[str(story.run)], "0:0")
    assert {(call["worker"], call["round"], call["step"]) for call in answer["calls"]} >= {("w1", 0, 3)}
    # What its task quotes, all models of the child run that are given the task are shown too.
    assert str(story.child) in {call["run"] for call in answer["calls"]}
    never = {row["worker"] for row in answer["never_shown"]}
    assert "broken" in never
    assert "w1" not in never


async def test_the_bundle_holds_its_own_making_and_is_covered_to_its_end(story: Story) -> None:
    last = entries(story.members, story.run)[-1]
    assert (last["type"], last["actor"]) == ("run.exported", "auditor")
    assert json.loads(story.members["manifest.json"])["export"] == last["data"]["export"]
    leaves = json.loads(story.members["log/proof.json"])["leaves"]
    for run in (story.run, story.child):
        assert len(leaves[str(run)]) == len(entries(story.members, run))
    # The checkpoint before the export is proven to be a part of the log.
    assert len(json.loads(story.members["log/history.json"])["checkpoints"]) >= 1


async def test_what_it_cost_is_the_same_by_hand_in_entries_report_page_and_rows(
    process: WorkerProcess, story: Story
) -> None:
    """A dollar for a million tokens in, two for a million out; attempts that failed and those of planning included."""
    report = verified(story.path, story.signer)
    page = story.members["index.html"].decode()
    for run in (story.run, story.child):
        said = entries(story.members, run)
        closed = [entry["data"] for entry in said if entry["type"] == "attempt.closed"]
        by_hand = [
            (Decimal(one["input_tokens"] or 0) + 2 * Decimal(one["output_tokens"] or 0)) / 10**6 for one in closed
        ]
        assert [Decimal(one["cost_usd"] or 0) for one in closed] == by_hand
        assert all(isinstance(one["cost_usd"], str | None) for one in closed)
        cost = sum(by_hand, Decimal(0))
        assert cost > 0
        (end,) = [entry["data"]["totals"] for entry in said if entry["type"] == "run.closed"]
        unpriced = sum(one["cost_usd"] is None for one in closed)
        assert (Decimal(end["cost_usd"]), end["unpriced"], end["attempts"]) == (cost, unpriced, len(closed))
        (told,) = [one for one in report.as_json()["runs"] if one["run"] == str(run)]
        assert told["cost_usd"] == f"{cost.normalize():f}"
        assert f"{told['cost_usd']} USD" in report.as_text()
        assert cost_words(end["cost_usd"]) in page
        (row,) = await rows(process.database.url, "SELECT cost_usd, attempts_unpriced FROM runs WHERE id = %s", run)
        assert (row["cost_usd"], row["attempts_unpriced"]) == (cost, unpriced)


async def test_the_same_record_gives_the_same_bytes(process: WorkerProcess, story: Story) -> None:
    assert repacked(dict(story.members), story.path.with_name("again.zip")).read_bytes() == story.path.read_bytes()


def refused(report: Report) -> str:
    """All that is wrong with a bundle; it is invalid for a reason, not because the verifier broke down."""
    text = "\n".join(report.findings.faults)
    assert (report.exit_code, report.verdict) == (1, "invalid")
    assert text
    assert "could not cope" not in text
    return text


# Attack 7: swap two steps, reorder entries


def _rechained(bodies: list[dict[str, Any]]) -> bytes:
    """Entries numbered and chained anew, as an attacker does who knows the format."""
    prev, lines = bytes(32), []
    for number, entry in enumerate(bodies, start=1):
        body = canonical({**entry, "seq": number, "prev": prev.hex()})
        prev = entry_hash(body)
        lines.append(body)
    return b"".join(line + b"\n" for line in lines)


def _member(run: UUID) -> str:
    return f"runs/{run}/entries.jsonl"


@pytest.mark.parametrize("rechain", [False, True])
async def test_swapped_entries_are_found(story: Story, tmp_path: Path, rechain: bool) -> None:
    def swap(found: dict[str, bytes]) -> None:
        own = entries(found, story.run)
        sent = [number for number, entry in enumerate(own) if entry["type"] == "attempt.closed"]
        own[sent[1]], own[sent[2]] = own[sent[2]], own[sent[1]]
        lines = b"".join(canonical(entry) + b"\n" for entry in own)
        found[_member(story.run)] = _rechained(own) if rechain else lines

    reason = "do not lead to the root that was signed" if rechain else "says that it is number"
    assert reason in refused(verified(story.changed(tmp_path, swap), story.signer))


async def test_two_swapped_steps_are_found_even_without_a_log(story: Story, tmp_path: Path) -> None:
    """An attacker who drops the log and chains anew still has to explain an order that access lists forbid."""

    def swap(found: dict[str, bytes]) -> None:
        own = entries(found, story.run)
        places = [number for number, entry in enumerate(own) if entry["type"].startswith("attempt.")]
        early = next(n for n in places if own[n]["data"]["step"] == 0 and own[n]["data"].get("accepted"))
        late = next(n for n in places if own[n]["data"]["step"] == 3)
        own.insert(early, own.pop(late))
        found[_member(story.run)] = _rechained(own)
        for name in [name for name in found if name.startswith("log/")]:
            del found[name]
        manifest = json.loads(found["manifest.json"])
        manifest["log"] = None
        found["manifest.json"] = canonical(manifest)

    report = verified(story.changed(tmp_path, swap), story.signer)
    assert report.exit_code == 1
    assert any("began before step" in fault for fault in report.findings.faults), report.findings.faults


@pytest.mark.parametrize("number", [0, 3, -1])
async def test_a_missing_entry_is_found(story: Story, tmp_path: Path, number: int) -> None:
    def drop(found: dict[str, bytes]) -> None:
        own = entries(found, story.run)
        del own[number]
        found[_member(story.run)] = _rechained(own)

    # Of the proof's places one has no entry any more, or those that follow stand where others were signed.
    assert re.search("root|does not have", refused(verified(story.changed(tmp_path, drop), story.signer)))


# Attack 8: replace an artifact; replace artifact and salt


@pytest.mark.parametrize("kind", ["task", "subtask", "output", "plan", "plan_text", "prompt_manifest"])
@pytest.mark.parametrize("everything", [False, True])
async def test_a_replaced_text_is_found(story: Story, tmp_path: Path, kind: str, everything: bool) -> None:
    def replace(found: dict[str, bytes]) -> None:
        rows = artifacts(found)
        row = next(row for row in rows if row["kind"] == kind)
        content = b"X" + found[f"artifacts/{row['artifact']}"][1:]
        found[f"artifacts/{row['artifact']}"] = content
        if everything:
            salt = secrets.token_bytes(32)
            path = f"{row['owner']}/{row['kind']}/{row['ordinal']}"
            said = commitment(salt, ARTIFACT_DOMAIN, path, content).hex()
            row.update(salt=salt.hex(), bytes=len(content), commitment=said)
            found["artifacts.json"] = canonical({"artifacts": rows})

    reason = "says something else" if everything else "not the one that was committed to"
    assert reason in refused(verified(story.changed(tmp_path, replace), story.signer))


async def test_a_salt_that_was_found_for_another_text_does_not_help(story: Story, tmp_path: Path) -> None:
    """Text and salt of one artifact in the place of another: the commitment binds the place."""

    def replace(found: dict[str, bytes]) -> None:
        rows = artifacts(found)
        one, other = [row for row in rows if row["kind"] == "subtask"][:2]
        found[f"artifacts/{one['artifact']}"] = found[f"artifacts/{other['artifact']}"]
        one.update(salt=other["salt"], bytes=other["bytes"], commitment=other["commitment"])
        found["artifacts.json"] = canonical({"artifacts": rows})

    assert "says something else" in refused(verified(story.changed(tmp_path, replace), story.signer))


# Attack 18: flip any byte


async def test_no_flipped_byte_is_ever_valid(story: Story) -> None:
    data = story.path.read_bytes()
    places = sorted({*range(64), *range(len(data) - 256, len(data)), *range(0, len(data), max(1, len(data) // 200))})
    for place in places:
        flipped = bytearray(data)
        flipped[place] ^= 1 << (place % 8)
        assert "bundle: " in refused(verified(bytes(flipped), story.signer)), place


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
async def test_a_cut_bundle_is_invalid(story: Story, keep: int) -> None:
    reason = "not a bundle|damaged or cut off"
    assert re.search(reason, refused(verified(story.path.read_bytes()[:keep], story.signer)))


async def test_flipped_bytes_of_every_member_are_found_even_with_a_manifest_that_fits(
    story: Story, tmp_path: Path
) -> None:
    for name, content in story.members.items():
        if name in {"manifest.json", "index.html"} or not content:
            continue
        for place in sorted({0, len(content) // 2, len(content) - 1}):

            def flip(found: dict[str, bytes], name: str = name, place: int = place) -> None:
                changed = bytearray(found[name])
                changed[place] ^= 1
                found[name] = bytes(changed)

            assert refused(verified(story.changed(tmp_path, flip), story.signer)), (name, place)


async def test_another_signer_is_not_trusted(process: WorkerProcess, story: Story) -> None:
    assert "no trusted key" in refused(verified(story.path, TestSigner(process.database)))


async def test_what_no_checkpoint_covers_is_there_and_is_said_to_be_unanchored(
    process: WorkerProcess, story: Story, provider: Provider, tmp_path: Path
) -> None:
    """Nobody signs here: the bundle is not an older state of the run that looks complete."""
    done = await exported(process.database, tmp_path / "unsealed.zip", story.run)
    assert done.unanchored == 2
    report = verified(done.path, story.signer)
    assert (report.findings.faults, report.exit_code, report.findings.unanchored) == ([], 3, 2), report.as_text()
    assert entries(members(done.path), story.run)[-1]["data"]["export"] == str(done.id)
    # A run that is younger than the last checkpoint.
    pool = pool_of(tmp_path, provider.base_url, "plain")
    young = (await ended(process.database, await submit_plan(process, pool, lists_plan(["a"], [[]], [0])))).id
    done = await exported(process.database, tmp_path / "young.zip", young)
    assert done.unsigned
    report = verified(done.path, story.signer)
    assert report.exit_code == 1
    assert report.findings.faults == [
        "log: no signed checkpoint covers any entry of its runs: anybody can have written this bundle"
    ]
    assert b"not covered by a signed checkpoint" in members(done.path)["index.html"]


# Leaving out by order


async def test_a_redacted_bundle_verifies_as_far_as_it_goes(
    process: WorkerProcess, story: Story, tmp_path: Path
) -> None:
    done = await exported(
        process.database, tmp_path / "r.zip", story.run, redact=["output@0.0", "reason"], seal=story.signer.seal
    )
    report = verified(done.path, story.signer)
    assert (report.findings.faults, report.exit_code) == ([], 3), report.as_text()
    found = members(done.path)
    withheld = {row["artifact"]: row for row in artifacts(found) if row["state"] == "redacted"}
    # The task of the child run quotes it.
    assert {row["kind"] for row in withheld.values()} == {"output", "task"}
    assert set(report.findings.redacted) == set(withheld)
    assert all(f"artifacts/{name}" not in found for name in withheld)
    everything = b"".join(found.values())
    assert b"onerror" not in everything
    assert b"withheld at export" in found["index.html"]


async def test_of_a_bundle_without_any_text_nothing_is_readable_and_the_rest_verifies(
    process: WorkerProcess, story: Story, tmp_path: Path
) -> None:
    done = await exported(process.database, tmp_path / "r.zip", story.run, redact=["all"], seal=story.signer.seal)
    report = verified(done.path, story.signer)
    assert (report.findings.faults, report.exit_code) == ([], 3), report.as_text()
    everything = b"".join(members(done.path).values())
    for text in (
        b"A canary task.",
        b"Say one.",
        b"Mend it.",
        b"rather not plan",
        b"onerror",
        b"canary of the provider",
    ):
        assert text not in everything
    assert done.artifacts["disclosed"] == sum(row["kind"] == "prompt_manifest" for row in artifacts(members(done.path)))


# Other ways of a run


async def test_a_cancelled_and_resumed_run_verifies(
    process: WorkerProcess, signer: TestSigner, provider: Provider, tmp_path: Path
) -> None:
    provider.script({"delay_first_s": 60}, model="slow", times=1)
    pool = pool_of(tmp_path, provider.base_url, "plain", "slow")
    run_id = await submit_plan(process, pool, lists_plan(["a", "b", "c"], [[], [0], [1]], [0, 1, 0]))
    await provider_reaches(provider, 2)
    await cancel(process, run_id)
    assert (await ended(process.database, run_id)).state == "cancelled"
    done = await exported(process.database, tmp_path / "cancelled.zip", run_id, seal=signer.seal)
    report = verified(done.path, signer)
    assert (report.findings.faults, report.verdict) == ([], "valid"), report.as_text()
    await resume(process, run_id)
    assert (await ended(process.database, run_id)).state == "succeeded"
    done = await exported(process.database, tmp_path / "resumed.zip", run_id, seal=signer.seal)
    report = verified(done.path, signer)
    assert (report.findings.faults, report.verdict) == ([], "valid"), report.as_text()


async def test_a_failed_run_verifies(
    process: WorkerProcess, signer: TestSigner, provider: Provider, tmp_path: Path
) -> None:
    provider.script(REFUSED, model="broken", times=None)
    pool = pool_of(tmp_path, provider.base_url, "plain", "broken")
    run_id = await submit_plan(process, pool, lists_plan(["a", "b"], [[], [0]], [0, 1]))
    assert (await ended(process.database, run_id)).state == "failed"
    done = await exported(process.database, tmp_path / "failed.zip", run_id, seal=signer.seal)
    report = verified(done.path, signer)
    assert (report.findings.faults, report.verdict) == ([], "valid"), report.as_text()
    assert b"canary of the provider" in members(done.path)["index.html"]


@pytest.mark.parametrize("with_sources", [False, True])
async def test_a_fork_comes_with_the_chains_that_it_took_outputs_from(
    process: WorkerProcess, signer: TestSigner, provider: Provider, tmp_path: Path, with_sources: bool
) -> None:
    pool = pool_of(tmp_path, provider.base_url, "plain", "other")
    plan = lists_plan(["Say zero.", "Say one.", "Join."], [[], [], [0]], [0, 0, 1])
    source = (await ended(process.database, await submit_plan(process, pool, plan))).id
    fork = source
    for text in ("Join them.", "Join them well."):
        proposal = await propose_fork(
            process.database, ForkOrder(str(fork), "forker", edits=(StepEdit(2, subtask=text),))
        )
        fork = (await start_fork(process.database, process.client, proposal)).id
        await ended(process.database, fork)
    done = await exported(process.database, tmp_path / "fork.zip", fork, seal=signer.seal, with_sources=with_sources)
    report = verified(done.path, signer)
    assert (report.findings.faults, report.exit_code) == ([], 0 if with_sources else 3), report.as_text()
    assert str(source) in report.runs
    assert len(report.runs) == 3
    assert all(attempt.rendered for attempt in report.runs[str(fork)].attempts.values())
    found = members(done.path)
    disclosed = {row["kind"] for row in artifacts(found) if (row["run"], row["state"]) == (str(source), "disclosed")}
    # Only what the fork was shown, if the sources were not asked for.
    assert ("task" in disclosed) is with_sources
    assert {"output", "prompt_manifest"} <= disclosed


# The page for people

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


async def test_the_page_shows_plan_prompts_answers_and_who_saw_them(story: Story) -> None:
    page = story.members["index.html"].decode()
    assert page.count("<svg") == 3
    assert "equal to what was committed to before the call" in page
    assert "cannot be shown" not in page
    assert "A canary task." in page
    assert "takes over from broken" in page
    assert page.count("not the name that was asked for") == 1
    assert "req_7" in page
    assert "req_8" in page
    assert "Shown to:" in page
    assert f"the models of run {story.child}, whose task quotes it" in page
    assert "<script>" not in page
    assert "&lt;script&gt;document.title" in page
    assert "http:" not in re.sub(r"http://127\.0\.0\.1:\d+/v1", "", page)


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
async def test_a_real_browser_shows_the_page_and_runs_nothing_of_it(story: Story, tmp_path: Path) -> None:
    page = tmp_path / "index.html"
    page.write_bytes(story.members["index.html"])
    assert CHROMIUM is not None
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", profile]
    done = await asyncio.to_thread(
        subprocess.run,
        [CHROMIUM, *options, "--virtual-time-budget=2000", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "<title>Podium evidence bundle</title>" in done.stdout, done.stderr
    assert "<script>" not in done.stdout
    # A complaint of the browser about our own page would be in its console.
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    assert f"Run {story.run}" in done.stdout
