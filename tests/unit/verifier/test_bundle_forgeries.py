"""Whatever is changed in a bundle, by accident or by somebody who makes all digests fit again: never "valid"."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.verifier.archive import pack
from engine.verifier.canonical import canonical
from engine.verifier.note import sign
from engine.verifier.report import Report
from engine.verifier.verify import verify_bundle
from tests.support.bundles import (
    RUN,
    TENANT,
    PaperRun,
    Record,
    key,
    manifest_of,
    sealed,
    whole_record,
)
from tests.support.verdicts import faults_of

RECORD = whole_record()
BUNDLE = RECORD.bundle()
MEMBERS = RECORD.members()
ENTRIES = f"runs/{RUN}/entries.jsonl"
TRUST = [RECORD.verifier]
Members = dict[str, bytes]


def verify(members: Members) -> Report:
    return verify_bundle(sealed(members), TRUST)


def edit(member: str, change: Callable[[Any], None], members: Members | None = None) -> Members:
    """The members with one JSON document changed."""
    members = dict(members or MEMBERS)
    document = json.loads(members[member])
    change(document)
    members[member] = canonical(document)
    return members


def lines(change: Callable[[list[bytes]], None], member: str = ENTRIES) -> Members:
    """The members with the entries of the run changed."""
    bodies = MEMBERS[member].split(b"\n")[:-1]
    change(bodies)
    return {**MEMBERS, member: b"".join(body + b"\n" for body in bodies)}


def test_the_bundle_is_valid_as_it_is_and_says_what_is_not_proven() -> None:
    report = verify_bundle(BUNDLE, TRUST, RECORD.checkpoints[0][1])
    assert (report.verdict, report.exit_code, report.findings.faults) == ("valid", 0, [])
    assert report.log is not None
    assert report.log.complete
    assert all(attempt.rendered for run in report.runs.values() for attempt in run.attempts.values())
    assert any("never recorded" in line for line in report.not_proven)
    assert "VALID\n" in report.as_text()
    assert json.loads(json.dumps(report.as_json()))["verdict"] == "valid"


def test_a_bundle_of_one_run_is_valid_and_says_that_others_are_not_in_it() -> None:
    report = verify_bundle(RECORD.bundle([RUN]), TRUST)
    assert report.verdict == "valid"
    assert any("no later entries" in line for line in report.not_proven)
    assert any("rewritten the whole log" in line for line in report.not_proven)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(BUNDLE) - 1), st.integers(0, 7))
def test_no_flipped_bit_leaves_a_valid_bundle(at: int, bit: int) -> None:
    forged = bytearray(BUNDLE)
    forged[at] ^= 1 << bit
    faults_of(verify_bundle(bytes(forged), TRUST))


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_no_flipped_bit_in_a_member_leaves_a_valid_bundle_though_all_digests_fit(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(set(MEMBERS) - {"index.html"})))
    at = data.draw(st.integers(0, len(MEMBERS[name]) - 1))
    forged = bytearray(MEMBERS[name])
    forged[at] ^= 1 << data.draw(st.integers(0, 7))
    faults_of(verify_any({**MEMBERS, name: bytes(forged)}))


def verify_any(members: Members) -> Report:
    """Verifies members that may be broken in ways that the manifest's writer cannot read."""
    manifest = {
        **manifest_of(MEMBERS),
        "files": [row | digest_of(members[row["path"]]) for row in manifest_of(MEMBERS)["files"]],
    }
    manifest["runs"] = [
        {**head_of(members[f"runs/{row['run']}/entries.jsonl"]), "run": row["run"]} for row in manifest["runs"]
    ]
    manifest["system"] = head_of(members["system/entries.jsonl"])
    return verify_bundle(pack({**members, "manifest.json": canonical(manifest)}), TRUST)


def digest_of(content: bytes) -> dict[str, Any]:
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def head_of(content: bytes) -> dict[str, Any]:
    bodies = content.split(b"\n")[:-1] or [content]
    return {"entries": len(bodies), "head": digest_of(bodies[-1])["sha256"]}


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(BUNDLE) - 1), st.binary(max_size=20), st.integers(0, 40))
def test_no_cut_and_no_insertion_leaves_a_valid_bundle(at: int, more: bytes, less: int) -> None:
    forged = BUNDLE[:at] + more + BUNDLE[at + less :]
    if forged != BUNDLE:
        faults_of(verify_bundle(forged, TRUST))


def no(members: Members, *names: str) -> Members:
    return {name: content for name, content in members.items() if name not in names}


@pytest.mark.parametrize("name", [name for name in sorted(MEMBERS) if not name.startswith("runs/")])
def test_a_member_that_is_missing_is_noticed(name: str) -> None:
    assert verify(no(MEMBERS, name)).verdict == "invalid"


@pytest.mark.parametrize("name", ["more.json", "artifacts/00000000-0000-5000-8000-000000000001", "runs/x", "log/more"])
def test_a_member_too_many_is_noticed(name: str) -> None:
    assert "does not belong there" in faults_of(verify_bundle(pack(with_manifest(name)), TRUST))


def with_manifest(name: str) -> Members:
    manifest = manifest_of(MEMBERS)
    manifest["files"] = sorted(
        [*manifest["files"], {"path": name, **digest_of(b"x")}], key=lambda row: str(row["path"])
    )
    return {**MEMBERS, name: b"x", "manifest.json": canonical(manifest)}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda manifest: manifest.update(format="podium-bundle/2"), "only one that this verifier knows"),
        (lambda manifest: manifest.update(more=1), "fields"),
        (lambda manifest: manifest.pop("tenant"), "fields"),
        (lambda manifest: manifest.update(runs=[]), "proof.json speaks of|lacks|belong"),
        (lambda manifest: manifest["runs"].reverse(), "each run once, in order"),
        (lambda manifest: manifest["runs"].append(manifest["runs"][0]), "each run once, in order"),
        (lambda manifest: manifest["files"].pop(), "does not list the members"),
        (lambda manifest: manifest["files"].reverse(), "does not list the members"),
        (lambda manifest: manifest["files"][0].update(bytes=1), "size"),
        (lambda manifest: manifest["files"][0].update(sha256="0" * 64), "is not the file"),
        (lambda manifest: manifest["runs"][0].update(entries=1), "does not end where"),
        (lambda manifest: manifest["runs"][0].update(head="0" * 64), "does not end where"),
        (lambda manifest: manifest["log"].update(size=17), "do not speak of the same tree"),
        (lambda manifest: manifest.update(log=None), "does not belong there"),
        (lambda manifest: manifest.update(system=None), "does not belong there"),
        (lambda manifest: manifest.update(tenant=str(RUN)), "lacks|each run once"),
        (lambda manifest: manifest.update(created_at="yesterday"), "fields"),
    ],
)
def test_a_manifest_that_does_not_fit_is_noticed(change: Callable[[Any], None], reason: str) -> None:
    manifest = manifest_of(MEMBERS)
    change(manifest)
    assert re.search(reason, faults_of(verify_bundle(pack({**MEMBERS, "manifest.json": canonical(manifest)}), TRUST)))


def test_a_manifest_that_is_not_canonical_is_noticed() -> None:
    written = canonical(manifest_of(MEMBERS))
    for forged in (written + b"\n", written.replace(b'"export":null', b'"export":null,"export":null'), b"[]", b"\xff"):
        faults_of(verify_bundle(pack({**MEMBERS, "manifest.json": forged}), TRUST))


# Chains and the log (attacks 1, 2, 4, 6, 7)


def rewrite(bodies: list[bytes], at: int, old: bytes, new: bytes) -> None:
    assert old in bodies[at]
    bodies[at] = bodies[at].replace(old, new)


def test_an_edited_entry_breaks_its_chain() -> None:
    members = lines(lambda bodies: rewrite(bodies, 3, b'"worker":"alpha"', b'"worker":"gamma"'))
    faults = faults_of(verify(members))
    assert "entry 5 does not follow" in faults
    assert "entry 4 or entry 5 was changed, or one between them was removed" in faults


def test_lines_that_are_whole_only_together_are_refused() -> None:
    """Lines are read together for speed; what is no entry by itself is none, whatever stands beside it."""

    def shift(bodies: list[bytes]) -> None:
        # Two lines are one object, and the third one holds two: the numbers of lines and objects are the same.
        first, second, third = bodies[:3]
        bodies[:3] = [first[:-1] + b',"x":[{"actor":1}', b'{"actor":2}]}', second + b"," + third]

    assert "entry 1 is not canonical JSON" in faults_of(verify(lines(shift)))

    def glue(bodies: list[bytes]) -> None:
        bodies[1:3] = [bodies[1] + b"," + bodies[2]]

    assert "entry 2 is not canonical JSON" in faults_of(verify(lines(glue)))


def rechained(change: Callable[[list[dict[str, Any]]], None]) -> Members:
    """The run's entries changed and chained anew, as somebody does who knows the format."""
    documents = [json.loads(body) for body in MEMBERS[ENTRIES].split(b"\n")[:-1]]
    change(documents)
    prev, bodies = "0" * 64, []
    for number, document in enumerate(documents, start=1):
        body = canonical({**document, "seq": number, "prev": prev})
        prev = hashlib.sha256(body).hexdigest()
        bodies.append(body)
    return {**MEMBERS, ENTRIES: b"".join(body + b"\n" for body in bodies)}


def test_an_edited_entry_with_its_chain_made_anew_does_not_lead_to_the_signed_root() -> None:
    members = rechained(lambda documents: documents[3]["data"].update(number=7))
    assert "do not lead to the root that was signed" in faults_of(verify(members))


def test_swapped_entries_do_not_lead_to_the_signed_root() -> None:
    def swap(documents: list[dict[str, Any]]) -> None:
        documents[4], documents[5] = documents[5], documents[4]

    assert "do not lead to the root" in faults_of(verify(rechained(swap)))


def test_a_missing_entry_is_noticed() -> None:
    assert "says that it is number 4" in faults_of(verify(lines(lambda bodies: bodies.pop(2))))
    assert faults_of(verify(rechained(lambda documents: documents.pop(2))))
    # The last one leaves the chain whole, and the proof still knows its place.
    assert "entries that the bundle does not have" in faults_of(verify(lines(lambda bodies: bodies.pop())))


def test_the_last_entries_and_their_places_left_out_are_noticed_where_the_log_is_complete() -> None:
    members = lines(lambda bodies: bodies.pop())
    members = edit("log/proof.json", lambda proof: proof["leaves"][str(RUN)].pop(), members)
    assert "do not lead to the root" in faults_of(verify(members))


def test_a_run_left_out_of_the_log_with_its_places_is_noticed() -> None:
    other = next(name for name in MEMBERS if name.startswith("runs/") and name != ENTRIES)
    members = edit("log/proof.json", lambda proof: proof["leaves"].pop(other.split("/")[1]), MEMBERS)
    assert "does not speak of every chain" in faults_of(verify(members))


def test_a_bundle_signed_by_another_key_is_refused() -> None:
    def resign(members: Members) -> None:
        text = members["log/checkpoint"].decode().split("\n\n")[0] + "\n"
        members["log/checkpoint"] = sign(text, f"podium/{TENANT}", key(9))

    assert "no trusted key" in faults_of(verify_bundle(RECORD.bundle(change=resign), TRUST))


def test_the_checkpoint_of_another_tenant_is_refused() -> None:
    def rename(members: Members) -> None:
        text = members["log/checkpoint"].decode().split("\n\n")[0] + "\n"
        other = "podium/0192f000-0000-7000-8000-00000000bbbb"
        members["log/checkpoint"] = sign(text.replace(f"podium/{TENANT}", other), f"podium/{TENANT}", key(1))

    assert "another log" in faults_of(verify_bundle(RECORD.bundle(change=rename), TRUST))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda proof: proof["leaves"].pop(str(RUN)), "does not speak of every chain"),
        (lambda proof: proof["leaves"][str(RUN)].reverse(), "in their order"),
        (lambda proof: proof["leaves"][str(RUN)].append(99), "does not have|root"),
        (lambda proof: proof["leaves"].update({str(TENANT): [1]}), "claim the same place"),
        (lambda proof: proof["nodes"].append("0" * 64), "root"),
        (lambda proof: proof["nodes"].append("00"), "fields"),
        (lambda proof: proof.update(size=0), "same tree"),
        (lambda proof: proof.update(size=2**53 - 1), "same tree"),
        (lambda proof: proof.update(root="0" * 64), "same tree"),
        (lambda proof: proof.update(more=1), "fields"),
        (lambda proof: proof.update(leaves={}), "every chain"),
        (lambda proof: proof["leaves"].update({str(RUN): [-1] * 3}), "fields"),
        (lambda proof: proof["leaves"].update({"x": []}), "fields"),
    ],
)
def test_malformed_proofs_are_refused(change: Callable[[Any], None], reason: str) -> None:
    members = edit("log/proof.json", change)
    manifest = manifest_of(MEMBERS)
    manifest["files"] = [row | digest_of(members[row["path"]]) for row in manifest["files"]]
    report = verify_bundle(pack({**members, "manifest.json": canonical(manifest)}), TRUST)
    assert re.search(reason, faults_of(report))


def test_a_history_that_contradicts_the_checkpoint_is_refused() -> None:
    other = Record()
    PaperRun(other, task="Another past.").whole()
    forged = other.sign(8).decode()
    members = edit("log/history.json", lambda history: history["checkpoints"][0].update(note=forged))
    assert "not an extension of its own checkpoint" in faults_of(verify(members))


@pytest.mark.parametrize(
    "change",
    [
        lambda history: history["checkpoints"].append(history["checkpoints"][0]),
        lambda history: history["checkpoints"][0]["consistency"].pop(),
        lambda history: history["checkpoints"][0].update(note="nothing"),
        lambda history: history["checkpoints"][0].update(note="\ud800"),
    ],
)
def test_a_malformed_history_is_refused(change: Callable[[Any], None]) -> None:
    def forge(history: Any) -> None:
        change(history)

    try:
        members = edit("log/history.json", forge)
    except UnicodeEncodeError:
        # There is no such text in canonical form.
        return
    faults_of(verify(members))


# Contents (attack 8), pools


def some_output() -> str:
    rows = json.loads(MEMBERS["artifacts.json"])["artifacts"]
    return next(f"artifacts/{row['artifact']}" for row in rows if row["kind"] == "output")


def test_a_replaced_artifact_does_not_fit_its_commitment() -> None:
    members = {**MEMBERS, some_output(): MEMBERS[some_output()][::-1]}
    assert "not the one that was committed to" in faults_of(verify(members))


def change_row(**values: Any) -> Members:
    artifact = some_output().split("/")[1]

    def change(document: Any) -> None:
        next(row for row in document["artifacts"] if row["artifact"] == artifact).update(values)

    return edit("artifacts.json", change)


def test_a_replaced_artifact_with_another_salt_and_commitment_does_not_fit_its_entry() -> None:
    content = b"Another answer."
    row = next(
        row
        for row in json.loads(MEMBERS["artifacts.json"])["artifacts"]
        if row["artifact"] == some_output().split("/")[1]
    )
    path = f"podium/artifact/1/{row['owner']}/output/0".encode() + b"\0"
    forged = hmac.new(bytes(32), path + content, "sha256").hexdigest()
    for more in ({}, {"commitment": forged, "bytes": len(content)}):
        members = {**change_row(salt="0" * 64, **more), some_output(): content}
        assert faults_of(verify(members))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"kind": "task"}, "says something else"),
        ({"bytes": 1}, "says something else"),
        ({"ordinal": 1}, "does not belong where"),
        ({"owner": str(RUN)}, "does not belong where"),
        ({"run": str(TENANT)}, "does not belong where"),
        ({"salt": None}, "salt"),
        ({"salt": "00"}, "fields"),
        ({"state": "lost"}, "fields"),
        ({"state": "erased"}, "salt"),
    ],
)
def test_a_list_of_artifacts_that_does_not_fit_is_refused(values: dict[str, Any], reason: str) -> None:
    assert reason in faults_of(verify(change_row(**values)))


def test_withheld_artifacts_are_named_and_make_the_bundle_incomplete() -> None:
    record = whole_record()
    hidden = [one for one in record.artifacts.values() if one.kind == "output" and one.chain == RUN]
    for one in hidden:
        one.state = "redacted"
    report = verify_bundle(record.bundle(), TRUST)
    assert (report.verdict, report.exit_code) == ("incomplete", 3)
    assert set(report.findings.redacted) == {str(one.id) for one in hidden}
    assert any("exact prompt" in line for line in report.not_proven)


def test_erased_artifacts_need_an_entry_that_says_so() -> None:
    record = whole_record()
    hidden = next(one for one in record.artifacts.values() if one.kind == "output" and one.chain == RUN)
    hidden.state = "erased"
    assert "no entry says that it was" in faults_of(verify_bundle(record.bundle(), TRUST))
    record.chains[RUN].add("artifact.erased", by="dpo", erased=[str(hidden.id)], artifacts=[])
    record.sign()
    report = verify_bundle(record.bundle(), TRUST)
    assert (report.verdict, report.exit_code, report.findings.erased) == ("erased", 4, [str(hidden.id)])
    hidden.state = "redacted"
    assert "the list calls it redacted" in faults_of(verify_bundle(record.bundle(), TRUST))


def test_entries_behind_the_checkpoint_make_the_bundle_incomplete() -> None:
    record = whole_record()
    record.chains[RUN].add("run.exported", by="ann", export=str(RUN), runs=[str(RUN)])
    report = verify_bundle(record.bundle(), TRUST)
    assert (report.verdict, report.findings.unanchored) == ("incomplete", 1)


def test_without_any_checkpoint_anybody_can_have_written_it() -> None:
    record = Record()
    PaperRun(record).whole()
    report = verify_bundle(record.bundle(), TRUST)
    assert (report.verdict, report.exit_code, report.findings.unanchored) == ("invalid", 1, len(record.leaves))
    assert report.findings.faults == ["log: no signed checkpoint: anybody can have written this bundle"]
    said = report.as_text()
    assert said.startswith("INVALID\n")
    assert "hint: export it again" in said
    assert "not covered" not in said
    assert "no checkpoint" in faults_of(verify_bundle(record.bundle(), TRUST, RECORD.checkpoints[0][1]))


def test_a_genuine_checkpoint_beside_a_forged_run_makes_nothing_of_it_signed() -> None:
    """The system chain and the checkpoint are genuine and public; of the run they cover nothing."""
    record = whole_record()
    record.leaves = [leaf for leaf in record.leaves if leaf[0] != RUN]
    record.checkpoints.clear()
    record.sign()
    report = verify_bundle(record.bundle([RUN]), TRUST)
    assert (report.verdict, report.exit_code) == ("invalid", 1)
    assert "no signed checkpoint covers any entry of its runs" in faults_of(report)


def test_one_run_without_a_signature_beside_signed_ones_is_said_first() -> None:
    record = whole_record()
    PaperRun(record, run=TENANT.__class__(int=1)).whole()
    report = verify_bundle(record.bundle(), TRUST)
    assert (report.verdict, report.exit_code) == ("incomplete", 3)
    assert report.as_text().startswith(f"UNSIGNED: nothing in run {TENANT.__class__(int=1)} was checked against a key")
    assert "anybody can have written them" in report.as_text()
    assert any("ever took place" in line for line in report.as_json()["not_proven"])


def test_a_replaced_pool_is_noticed() -> None:
    name = next(name for name in MEMBERS if name.startswith("pools/"))
    changed = MEMBERS[name].replace(b"alpha-1", b"gamma-9")
    assert "not the pool document" in faults_of(verify({**MEMBERS, name: changed}))
    digest = digest_of(changed)["sha256"]
    members = {**no(MEMBERS, name), f"pools/{digest}.json": changed}
    assert "names this pool" in faults_of(verify(members))


def test_a_pool_document_of_another_kind_is_refused_without_a_crash() -> None:
    for document in (
        b"",
        b"{}",
        b"[" * 10_000,
        b'{"format":"podium-pool/1","pool":{"x":NaN}}',
        b'{"format":"podium-pool/2","pool":1}',
    ):
        record = whole_record()
        digest = digest_of(document)["sha256"]
        run = PaperRun(record, run=TENANT.__class__(int=1), pool=None)
        record.chains[run.id].bodies.clear()
        record.leaves = [leaf for leaf in record.leaves if leaf[0] != run.id]
        record.pools[digest] = document
        run.chain.add(
            "run.created",
            by="ann",
            origin="file",
            pool=digest,
            execution=1,
            artifacts=[run.chain.commit(run.id, "task", "x")],
        )
        record.sign()
        assert "not a pool document" in faults_of(verify_bundle(record.bundle(), TRUST))
