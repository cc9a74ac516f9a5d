"""Attacks 7, 8 and 18 in the real database of a run that was really executed; then as an auditor: export, verify.

The worker has stopped, so each attack has a copy of its own of the same database. Nothing of it is sealed: whoever has
the keys as well as the server can replace a sealed text just as well.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import pytest_asyncio

from engine.ledger.commitment import ARTIFACT_DOMAIN, commitment
from engine.ledger.entry import entry_hash
from engine.store.database import Database
from engine.store.log_check import LogReport, Saved, check_log
from engine.verifier.archive import MANIFEST, pack
from engine.verifier.canonical import canonical
from engine.verifier.report import Report
from tests.integration.store.test_log_attacks import bodies_of, rebuild_log, resign, rewrite
from tests.support.attacker import as_superuser, cut_log
from tests.support.exports import TestSigner, exported, members, verified
from tests.support.provider import Provider
from tests.support.runs import ended, lists_plan, submit_plan, worker_process
from tests.support.servers import TestServers, superuser_url
from tests.support.stored import execute, rows
from tests.support.workflows import pool_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

PLAN = lists_plan(["Say one.", "Say two.", "Conclude."], [[], [0], [0, 1]], [0, 1, 0])


@dataclass(frozen=True, slots=True)
class Victim:
    """A database with a run of three steps that has ended, its log signed; ``kept`` is the auditor's own checkpoint."""

    database: Database
    signer: TestSigner
    run: UUID
    kept: bytes
    folder: Path

    @property
    def url(self) -> str:
        return self.database.url

    async def log(self, saved: bytes | None = None) -> LogReport:
        """`podium audit verify --database` with the pinned key."""
        known = [] if saved is None else [Saved(saved, "the saved checkpoint")]
        return await check_log(self.database, trusted=self.signer.trust, saved=known)

    async def bundle(self, saved: bytes | None = None) -> Report:
        """A bundle of what the database holds now, as far as it was signed, and what the verifier says of it."""
        done = await exported(self.database, self.folder / "bundle.zip", self.run)
        return verified(done.path, self.signer, saved)

    async def resigned(self) -> None:
        """The attacker has the key: the log is made to fit the entries, and every checkpoint is signed anew."""
        await rebuild_log(self.url)
        await resign(self.url, self.signer.key)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def original(
    servers: TestServers, template_database: str, session_provider: Provider, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Victim]:
    folder = tmp_path_factory.mktemp("original")
    session_provider.reset()
    url = servers.new_database(template_database)
    async with worker_process(url, servers.temporal_address) as process:
        pool = pool_of(folder, session_provider.base_url, "plain", "other")
        run = await ended(process.database, await submit_plan(process, pool, PLAN, "A canary task."))
        assert run.state == "succeeded", run
    database = Database(url)
    signer = TestSigner(database)
    await signer.seal()
    # Another entry of the run, and another checkpoint.
    await exported(database, folder / "first.zip", run.id)
    await signer.seal()
    _, kept = await rows(url, "SELECT note FROM log_checkpoints ORDER BY size")
    await database.close()
    yield Victim(database, signer, run.id, bytes(kept["note"]), folder)
    servers.drop_database(url)


@pytest.fixture
def url(servers: TestServers, original: Victim) -> Iterator[str]:
    copy = servers.new_database(original.url)
    yield copy
    servers.drop_database(copy)


@pytest_asyncio.fixture(loop_scope="module")
async def victim(original: Victim, url: str, tmp_path: Path) -> AsyncIterator[Victim]:
    database = Database(url)
    yield Victim(database, original.signer, original.run, original.kept, tmp_path)
    await database.close()


def codes(report: LogReport) -> set[str]:
    return {code for code, _ in report.faults}


def refused(report: Report) -> str:
    """All that is wrong with a bundle."""
    assert report.exit_code == 1, report.as_text()
    text = "\n".join(report.findings.faults)
    assert "could not cope" not in text
    return text


def chained(documents: list[dict[str, Any]]) -> list[bytes]:
    """Entries numbered and chained anew."""
    prev, bodies = bytes(32), []
    for number, document in enumerate(documents, start=1):
        bodies.append(canonical({**document, "seq": number, "prev": prev.hex()}))
        prev = entry_hash(bodies[-1])
    return bodies


async def documents_of(victim: Victim) -> list[dict[str, Any]]:
    return [json.loads(body) for body in await bodies_of(victim.url, victim.run)]


async def test_nobody_touched_it(victim: Victim) -> None:
    assert (await victim.log(victim.kept)).faults == []
    report = await victim.bundle(victim.kept)
    # The entry about this very export is younger than the checkpoint.
    assert (report.findings.faults, report.exit_code, report.findings.unanchored) == ([], 3, 1), report.as_text()


def place_of(documents: list[dict[str, Any]], type_: str, step: int) -> int:
    """Where the first entry of a type about a step stands, from 0."""
    return next(n for n, one in enumerate(documents) if one["type"] == type_ and one["data"]["step"] == step)


async def test_attack_7_entries_of_two_steps_change_places(victim: Victim) -> None:
    documents = await documents_of(victim)
    first, second = (place_of(documents, "attempt.closed", step) for step in (0, 1))
    documents[first], documents[second] = documents[second], documents[first]
    await rewrite(victim.url, victim.run, chained(documents))
    found = await victim.log()
    assert "leaf-mismatch" in codes(found)
    assert "do not lead to the root that was signed" in refused(await victim.bundle())


async def test_attack_7_with_the_stolen_key_the_order_itself_tells(victim: Victim) -> None:
    """Step 2 reads step 0, so it cannot have been called before that was answered, whoever signs it."""
    documents = await documents_of(victim)
    early, late = place_of(documents, "attempt.sent", 0), place_of(documents, "attempt.sent", 2)
    documents.insert(early, documents.pop(late))
    await rewrite(victim.url, victim.run, chained(documents))
    await victim.resigned()
    assert "saved-checkpoint" in codes(await victim.log(victim.kept))
    text = refused(await victim.bundle())
    assert "began before step" in text
    assert "root" not in text
    assert "contradicts the saved checkpoint" in refused(await victim.bundle(victim.kept))


async def test_attack_7_two_steps_of_the_plan_change_places(victim: Victim) -> None:
    """Every entry says 1 where it said 0, and the other way round; log and signatures are made to fit."""
    documents = await documents_of(victim)
    for document in documents:
        data = document["data"]
        if data.get("step") in {0, 1}:
            data["step"] = 1 - data["step"]
    await rewrite(victim.url, victim.run, chained(documents))
    await victim.resigned()
    assert "saved-checkpoint" in codes(await victim.log(victim.kept))
    report = await victim.bundle()
    assert report.exit_code == 1
    assert "the attempt's id does not follow from its place and fence" in report.findings.faults[0]


async def replace_text(
    victim: Victim, kind: str, *, at: int = 0, salt: bytes | None = None
) -> tuple[dict[str, Any], bytes, bytes]:
    """Another text of the same length in the place of one (outputs: in the order of steps), perhaps with another salt.

    Returns the row as it was, the salt and the text.
    """
    found = await rows(
        victim.url,
        "SELECT a.* FROM artifacts a LEFT JOIN attempts ON attempts.id = a.owner_id"
        " WHERE a.run_id = %s AND kind = %s ORDER BY position, a.id",
        victim.run,
        kind,
    )
    row = found[at]
    content = b"X" + bytes(row["content"])[1:]
    assert content != bytes(row["content"])
    salt = bytes(row["salt"]) if salt is None else salt
    await execute(
        superuser_url(victim.url),
        f"SET session_replication_role = replica; UPDATE artifacts SET content = '\\x{content.hex()}',"
        f" salt = '\\x{salt.hex()}' WHERE id = '{row['id']}'",
    )
    return row, salt, content


@pytest.mark.parametrize("kind", ["task", "subtask", "output", "plan", "prompt_manifest"])
@pytest.mark.parametrize("other_salt", [False, True])
async def test_attack_8_a_text_is_replaced(victim: Victim, kind: str, other_salt: bool) -> None:
    row, _, _ = await replace_text(victim, kind, salt=secrets.token_bytes(32) if other_salt else None)
    # The log is about entries: whether texts are those that entries commit to is what a bundle shows.
    assert (await victim.log(victim.kept)).faults == []
    text = refused(await victim.bundle())
    assert f"artifact {row['id']} ({kind}): its content is not the one that was committed to" in text


@pytest.mark.parametrize("step", [0, 2])
async def test_attack_8_text_salt_and_commitment_are_replaced(victim: Victim, step: int) -> None:
    """The entry says the other text's commitment too, and its chain fits: then it is another leaf."""
    row, salt, content = await replace_text(victim, "output", at=step, salt=secrets.token_bytes(32))
    said = commitment(salt, ARTIFACT_DOMAIN, f"{row['owner_id']}/output/0", content).hex()
    documents = await documents_of(victim)
    for document in documents:
        for artifact in document["data"].get("artifacts", ()):
            if artifact["artifact"] == str(row["id"]):
                artifact["commitment"] = said
    await rewrite(victim.url, victim.run, chained(documents))
    assert "leaf-mismatch" in codes(await victim.log())
    assert "do not lead to the root that was signed" in refused(await victim.bundle())
    # With the stolen key as well: the log agrees with itself, and only who kept a checkpoint can tell.
    await victim.resigned()
    assert (await victim.log()).faults == []
    assert codes(await victim.log(victim.kept)) == {"saved-checkpoint"}
    assert "contradicts the saved checkpoint" in refused(await victim.bundle(victim.kept))
    if step == 0:
        # But for a text that later prompts quote: what was committed to before those calls is another prompt.
        assert "prompt" in refused(await victim.bundle())
    else:
        assert (await victim.bundle()).findings.faults == []


async def test_attack_14_an_old_checkpoint_is_shown_as_the_current_one(victim: Victim) -> None:
    """With the newest checkpoint and what only it covered: the exporter of an old state, as if there were no newer."""
    (old,) = await rows(victim.url, "SELECT min(size) AS size FROM log_checkpoints")
    await as_superuser(victim.url, f"DELETE FROM log_checkpoints WHERE size > {old['size']}")
    report = await victim.bundle()
    # Nobody who has kept nothing can tell that it is old; what it leaves uncovered is said to be nobody's word.
    assert (report.findings.faults, report.exit_code, report.findings.unanchored) == ([], 3, 2)
    assert report.log is not None
    assert report.log.checkpoint is not None
    assert report.log.checkpoint.size == old["size"]
    assert "the bundle is older, or entries were removed from the log" in refused(await victim.bundle(victim.kept))
    # The database as such still has all leaves, so it extends the saved one; what is not signed any more is counted.
    log = await victim.log(victim.kept)
    assert (log.faults, log.uncovered, log.waiting, log.saved_sizes) == ([], 1, 2, [old["size"] + 1])
    await cut_log(victim.url, old["size"])
    assert "saved-checkpoint" in codes(await victim.log(victim.kept))
    assert "saved-checkpoint" not in codes(await victim.log())


async def test_attack_18_no_byte_of_a_member_can_be_another_though_archive_and_checksums_fit(victim: Victim) -> None:
    """The page for people included: it has to be the one that the manifest names."""
    done = await exported(victim.database, victim.folder / "bundle.zip", victim.run)
    assert verified(done.path, victim.signer).exit_code == 3
    found = members(done.path)
    assert "index.html" in found
    for name, content in found.items():
        for place in {0, len(content) // 3, len(content) - 1}:
            changed = bytearray(content)
            changed[place] ^= 1 << (place % 7)
            text = refused(verified(pack({**found, name: bytes(changed)}), victim.signer))
            assert name in text or name == MANIFEST
