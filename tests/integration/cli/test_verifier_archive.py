"""The executable archive and files that are no good: each with its reason and its exit code, by a real process.

The interpreter is isolated, and an audit hook denies it the network, other processes and writing (see
`tests.unit.verifier.test_verifier_alone`). What the verifier finds in such files is in the tests of its modules.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.verifier import checkpoint as formats
from engine.verifier.archive import pack
from engine.verifier.build import archive
from engine.verifier.canonical import canonical
from engine.verifier.note import sign
from tests.support.bundles import RUN, TENANT, Record, key, manifest_of, sealed, whole_record
from tests.unit.verifier.test_archive import deflated, hand_made, reseal
from tests.unit.verifier.test_verifier_alone import alone

RECORD = whole_record()
BUNDLE = RECORD.bundle()
MEMBERS = RECORD.members()
ENTRIES = f"runs/{RUN}/entries.jsonl"
MANIFEST = ("manifest.json", 0, zlib.crc32(b"{}"), 2, b"{}")
OTHER_ORIGIN = "podium/0192f000-0000-7000-8000-00000000bbbb"


@pytest.fixture(scope="module")
def pyz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verifier") / "podium-verify.pyz"
    path.write_bytes(archive())
    (path.parent / "trust").write_text(f"{RECORD.verifier}\n")
    return path


def verdict(pyz: Path, bundle: bytes, *more: str, trust: str = "trust") -> tuple[int, str, str]:
    """Exit code, standard output and standard error for a file of these bytes."""
    path = pyz.parent / "bundle.zip"
    path.write_bytes(bundle)
    done = alone(pyz, str(path), "--trust", str(pyz.parent / trust), *more)
    assert "Traceback" not in done.stdout + done.stderr
    return done.returncode, done.stdout, done.stderr


def edited(member: str, change: Callable[[Any], Any]) -> bytes:
    """The bundle with one document changed and a manifest that fits."""
    document = json.loads(MEMBERS[member])
    change(document)
    return sealed({**MEMBERS, member: canonical(document)})


def first_entry(**changes: Any) -> bytes:
    """The bundle with other values in the envelope of the run's first entry."""
    head, _, rest = MEMBERS[ENTRIES].partition(b"\n")
    return sealed({**MEMBERS, ENTRIES: canonical({**json.loads(head), **changes}) + b"\n" + rest})


def with_manifest(**changes: Any) -> bytes:
    return pack({**MEMBERS, "manifest.json": canonical({**manifest_of(MEMBERS), **changes})})


def twice_the_same_key() -> bytes:
    written = canonical(manifest_of(MEMBERS))
    return pack({**MEMBERS, "manifest.json": written.replace(b'"export":null', b'"export":null,"export":null')})


def of_another_origin() -> bytes:
    text = MEMBERS["log/checkpoint"].decode().split("\n\n")[0] + "\n"
    note = sign(text.replace(f"podium/{TENANT}", OTHER_ORIGIN), f"podium/{TENANT}", key(1))
    return sealed({**MEMBERS, "log/checkpoint": note})


def bomb() -> bytes:
    return hand_made(MANIFEST, ("z", 8, 0, 20_000_000, deflated(bytes(20_000_000))))


BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "not a bundle"),
    "another zip": (lambda: pack({**MEMBERS, "manifest.json": b"{}"}), "only one that this verifier knows"),
    "truncated": (lambda: BUNDLE[: len(BUNDLE) // 2], "damaged or cut off"),
    "truncated, with a digest": (lambda: reseal(BUNDLE[: len(BUNDLE) // 2]), "the archive is cut off"),
    "the same member twice": (lambda: hand_made(MANIFEST, MANIFEST), "two members named"),
    "an absolute name": (
        lambda: hand_made(MANIFEST, ("/etc/passwd", 0, 0, 0, b"")),
        "a member whose name is not allowed",
    ),
    "a name that leads up": (
        lambda: hand_made(MANIFEST, ("up/../../up", 0, 0, 0, b"")),
        "a member whose name is not allowed",
    ),
    "a bomb": (bomb, "more than 100 times"),
    "the same key twice": (twice_the_same_key, "manifest.json is not canonical JSON"),
    "another version of the format": (lambda: with_manifest(format="podium-bundle/2"), "only one that this verifier"),
    "another version of an entry": (lambda: first_entry(version=2), "has version 2, which this verifier does not know"),
    "an unknown type of entry": (
        lambda: first_entry(type="run.invented"),
        "has type 'run.invented', which this verifier does not know",
    ),
    "a node too many": (
        lambda: edited("log/proof.json", lambda proof: proof["nodes"].append("0" * 64)),
        "do not lead to the root that was signed",
    ),
    "a node too short": (
        lambda: edited("log/proof.json", lambda proof: proof["nodes"].append("00")),
        "log/proof.json does not have the fields",
    ),
    "a consistency proof too short": (
        lambda: edited("log/history.json", lambda said: said["checkpoints"][0]["consistency"].pop()),
        "not an extension of its own checkpoint",
    ),
    "a consistency proof too long": (
        lambda: edited("log/history.json", lambda said: said["checkpoints"][0]["consistency"].append("0" * 64)),
        "not an extension of its own checkpoint",
    ),
    "a checkpoint of another log": (of_another_origin, "another log"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bundle_that_is_no_good_is_invalid_with_the_reason(pyz: Path, name: str) -> None:
    make, reason = BAD[name]
    code, said, error = verdict(pyz, make())
    assert (code, error) == (1, ""), said + error
    assert said.startswith("INVALID\n\n")
    assert reason in said


def test_the_exit_codes_are_those_of_the_page(pyz: Path) -> None:
    assert verdict(pyz, BUNDLE)[0] == 0
    for kind, expected in (("redacted", 3), ("erased", 4)):
        record = whole_record()
        hidden = next(one for one in record.artifacts.values() if one.kind == "output" and one.chain == RUN)
        hidden.state = kind
        if kind == "erased":
            record.chains[RUN].add("artifact.erased", by="dpo", erased=[str(hidden.id)], artifacts=[])
            record.sign()
        code, said, error = verdict(pyz, record.bundle())
        assert (code, error) == (expected, ""), said
        assert str(hidden.id) in said
    record = whole_record()
    record.chains[RUN].add("run.exported", by="ann", export=str(RUN), runs=[str(RUN)])
    code, said, _ = verdict(pyz, record.bundle())
    assert code == 3
    assert said.startswith("VALID AS FAR AS IT GOES\n")
    assert "1 of them are not covered by a signed checkpoint" in said


def test_another_key_is_a_finding_and_a_file_without_keys_is_usage(pyz: Path) -> None:
    (pyz.parent / "other").write_text(f"{Record(7).verifier}\n")
    code, said, _ = verdict(pyz, BUNDLE, trust="other")
    assert code == 1
    assert "no trusted key signed the note" in said
    for content in (b"nonsense\n", BUNDLE):
        (pyz.parent / "no-keys").write_bytes(content)
        code, said, error = verdict(pyz, BUNDLE, trust="no-keys")
        assert (code, said) == (2, "")
        assert error.startswith("error: ")
        assert "\nhint: a file as `podium audit key -o FILE` writes it" in error
    code, said, error = verdict(pyz, BUNDLE, trust="nowhere")
    assert (code, said) == (2, "")
    assert "cannot be read" in error


def test_a_saved_checkpoint_of_another_log_is_a_finding(pyz: Path) -> None:
    saved = pyz.parent / "saved"
    text = formats.text(OTHER_ORIGIN, 3, bytes(32))
    saved.write_bytes(sign(text, f"podium/{TENANT}", key(1)))
    code, said, error = verdict(pyz, BUNDLE, "--checkpoint", str(saved))
    assert (code, error) == (1, "")
    assert "another log" in said
    saved.write_bytes(RECORD.checkpoints[0][1])
    assert verdict(pyz, BUNDLE, "--checkpoint", str(saved))[0] == 0
    saved.write_bytes(b"nonsense\n")
    assert verdict(pyz, BUNDLE, "--checkpoint", str(saved))[0] == 2
