"""Attack 18, without chance: every byte of a bundle's file, one after the other, the page for people included."""

from __future__ import annotations

from engine.verifier.archive import open_archive, pack
from engine.verifier.canonical import canonical
from engine.verifier.report import Report
from engine.verifier.verify import verify_bundle
from tests.support.bundles import Record, manifest_of, whole_record
from tests.unit.verifier.test_archive import reseal

RECORD = whole_record()
BUNDLE = RECORD.bundle()
MEMBERS = {**RECORD.members(), "index.html": b"<!doctype html><title>evidence</title><p>All is well.</p>\n" * 3}
PAGE = "index.html"


def verify(data: bytes) -> Report:
    return verify_bundle(data, [RECORD.verifier])


def refused(report: Report) -> str:
    text = "\n".join(report.findings.faults)
    assert (report.exit_code, report.verdict) == (1, "invalid")
    assert text
    assert "could not cope" not in text
    return text


def test_every_byte_of_the_file_counts() -> None:
    assert verify(BUNDLE).exit_code == 0
    forged = bytearray(BUNDLE)
    for place in range(len(BUNDLE)):
        forged[place] ^= 1 << (place % 8)
        refused(verify(bytes(forged)))
        forged[place] = BUNDLE[place]


def test_a_byte_counts_though_the_digest_of_the_file_was_made_to_fit() -> None:
    """One of twenty. Whoever squeezes the same contents otherwise, in a file whose digest fits, has changed nothing that is said."""
    opened = open_archive(BUNDLE)
    contents = {name: opened.read(name) for name in opened.names}
    forged, same = bytearray(BUNDLE), 0
    for place in range(0, len(BUNDLE) - 64, 23):
        forged[place] ^= 1 << (place % 8)
        data = reseal(bytes(forged))
        if verify(data).exit_code == 0:
            same += 1
            opened = open_archive(data)
            assert {name: opened.read(name) for name in opened.names} == contents
        else:
            refused(verify(data))
        forged[place] = BUNDLE[place]
    # Bits that are left over behind the end of a squeezed member.
    assert same < len(contents)


def test_every_byte_of_the_page_counts_though_archive_and_checksums_fit() -> None:
    whole = {**MEMBERS, "manifest.json": canonical(manifest_of(MEMBERS))}
    assert verify(pack(whole)).exit_code == 0
    page = bytearray(MEMBERS[PAGE])
    for place in range(len(page)):
        page[place] ^= 1
        assert "index.html" in refused(verify(pack({**whole, PAGE: bytes(page)})))
        page[place] ^= 1


def test_a_page_that_another_manifest_names_is_not_evidence_and_the_verifier_says_so() -> None:
    """Nobody signs the page: whoever writes another one and another manifest is told apart by the file alone."""
    report = verify_with_page(b"<!doctype html><title>evidence</title><p>Nobody approved it.</p>\n")
    assert report.exit_code == 0
    assert any("index.html" in line for line in report.not_proven)
    assert any("index.html" in line for line in report.as_text().split("Not proven:")[1].splitlines())
    assert report.as_text().startswith("VALID\nindex.html was not checked: it is for reading\n")


def verify_with_page(page: bytes) -> Report:
    members = {**MEMBERS, PAGE: page}
    return verify(pack({**members, "manifest.json": canonical(manifest_of(members))}))


def test_another_record_has_another_bundle() -> None:
    """The control: the same record gives the same bytes, so what is compared above is the file and not its time."""
    assert whole_record().bundle() == BUNDLE
    assert Record(2).verifier != RECORD.verifier
