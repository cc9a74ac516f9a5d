"""The archive: one way to write it, and every other file refused with the reason, whatever it is."""

from __future__ import annotations

import hashlib
import io
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.verifier import archive
from engine.verifier.archive import open_archive, pack
from engine.verifier.faults import InvalidError

MEMBERS = {
    "manifest.json": b'{"format":"podium-bundle/1"}',
    "runs/0192f000-0000-7000-8000-000000000001/entries.jsonl": b"entry " * 200,
    "artifacts/00000000-0000-5000-8000-000000000001": bytes(range(256)),
    "empty": b"",
    "log/checkpoint": b"a note\n",
}


def reseal(data: bytes) -> bytes:
    """The file with a digest that fits: what a forger does."""
    return data[:-64] + hashlib.sha256(data[:-64]).hexdigest().encode()


def test_what_was_packed_comes_back_and_other_programs_can_read_it() -> None:
    data = pack(MEMBERS)
    opened = open_archive(data)
    assert {name: opened.read(name) for name in opened.names} == MEMBERS
    with zipfile.ZipFile(io.BytesIO(data)) as other:
        assert other.testzip() is None
        assert {name: other.read(name) for name in other.namelist()} == MEMBERS


def test_the_same_members_give_the_same_bytes_in_whatever_order() -> None:
    assert pack(MEMBERS) == pack(dict(reversed(MEMBERS.items())))
    assert open_archive(pack(MEMBERS)).names[0] == "manifest.json"


def test_a_member_that_squeezes_too_well_is_stored_so_that_no_text_makes_a_bundle_unreadable() -> None:
    members = {"manifest.json": b"{}", "artifacts/zeros": bytes(5_000_000)}
    data = pack(members)
    assert len(data) > 5_000_000
    assert open_archive(data).read("artifacts/zeros") == members["artifacts/zeros"]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_flipped_bit_anywhere_is_noticed(data: st.DataObject) -> None:
    whole = bytearray(pack(MEMBERS))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(InvalidError):
        open_archive(bytes(whole))


def test_a_flipped_bit_in_a_header_is_noticed_though_the_digest_was_made_to_fit() -> None:
    whole = pack(MEMBERS)
    offset = 0
    headers: list[int] = []
    while whole[offset : offset + 4] == b"PK\x03\x04":
        packed, _, name = struct.unpack_from("<IIH", whole, offset + 18)
        headers += range(offset, offset + 30 + name)
        offset += 30 + name + packed
    for at in [*headers, *range(offset, len(whole) - 64)]:
        for bit in (1, 2, 128):
            forged = bytearray(whole)
            forged[at] ^= bit
            with pytest.raises(InvalidError):
                everything(reseal(bytes(forged)))


def everything(data: bytes) -> None:
    opened = open_archive(data)
    for name in opened.names:
        opened.read(name)


def test_a_cut_off_file_is_noticed_at_every_length() -> None:
    whole = pack(MEMBERS)
    for length in range(len(whole)):
        with pytest.raises(InvalidError):
            open_archive(whole[:length])
        if length > 64:
            with pytest.raises(InvalidError):
                everything(reseal(whole[:length]))


def test_bytes_before_between_and_behind_the_members_are_refused() -> None:
    whole = pack(MEMBERS)
    with pytest.raises(InvalidError, match="does not begin"):
        open_archive(reseal(b"x" + whole))
    with pytest.raises(InvalidError, match="directory"):
        open_archive(reseal(whole[:-64] + b"x" + whole[-64:]))


def foreign(build: Callable[[zipfile.ZipFile], None]) -> bytes:
    """A zip file by another program, with a comment like ours."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as other:
        build(other)
        other.comment = b"podium-bundle sha256 " + bytes(64)
    return reseal(file.getvalue())


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "../up",
        "a/../../up",
        "C:\\x",
        "a\\b",
        "A",
        "a b",
        "a//b",
        "a/",
        ".hidden",
        "ä",
        "a" * 129,
        "a\0b",
        "",
    ],
)
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        pack({"manifest.json": b"{}", name: b""})

    def build(file: zipfile.ZipFile) -> None:
        file.writestr(zipfile.ZipInfo(name or "/"), b"")

    with pytest.raises(InvalidError):
        open_archive(foreign(build))


def hand_made(*members: tuple[str, int, int, int, bytes]) -> bytes:
    """An archive whose headers say what they are told to: name, method, checksum, unpacked size, packed bytes."""
    parts, directory, offset = b"", [], 0
    for name, method, checksum, unpacked, packed in members:
        member = archive._Member(name, method, checksum, len(packed), unpacked, offset)
        parts += member.local() + packed
        directory.append(member.central())
        offset = len(parts)
    return reseal(parts + archive._directory(directory, offset) + bytes(64))


def deflated(content: bytes) -> bytes:
    squeezer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return squeezer.compress(content) + squeezer.flush()


def test_duplicate_members_are_refused() -> None:
    member = ("manifest.json", 0, zlib.crc32(b"{}"), 2, b"{}")
    assert open_archive(hand_made(member)).read("manifest.json") == b"{}"
    with pytest.raises(InvalidError, match="two members named"):
        open_archive(hand_made(member, member))


def test_members_out_of_order_are_refused() -> None:
    first, second = ("b", 0, 0, 0, b""), ("a", 0, 0, 0, b"")
    with pytest.raises(InvalidError, match="not in order"):
        open_archive(hand_made(first, second))


def test_a_bomb_is_refused_before_it_goes_off() -> None:
    bomb = deflated(bytes(200_000_000))
    tracemalloc.start()
    try:
        with pytest.raises(InvalidError, match="more than 100 times"):
            open_archive(hand_made(("bomb", 8, 0, 200_000_000, bomb)))
        # One that lies about its size is unpacked no further than it says.
        lying = open_archive(hand_made(("bomb", 8, 0, len(bomb) * 99, bomb)))
        with pytest.raises(InvalidError, match="does not unpack"):
            lying.read("bomb")
        assert tracemalloc.get_traced_memory()[1] < 60_000_000
    finally:
        tracemalloc.stop()


def test_many_small_bombs_together_are_refused() -> None:
    packed = deflated(bytes(1000))
    packed += bytes(3_000_000 - len(packed))
    members = [(f"bomb-{number:03}", 8, 0, 250_000_000, packed) for number in range(10)]
    with pytest.raises(InvalidError, match="larger than a bundle"):
        open_archive(hand_made(*members))


@pytest.mark.parametrize(
    ("member", "reason"),
    [
        (("a", 0, 0, 3, b"{}"), "two sizes"),
        (("a", 12, 0, 9, b"{}"), "packed in a way"),
        (("a", 8, 0, 2, deflated(b"{}")), "packed in a way"),
        (("a", 8, zlib.crc32(bytes(100)), 100, b"\xff" * 9), "cannot be unpacked"),
        (("a", 8, zlib.crc32(bytes(100)), 100, deflated(bytes(100)) + b"x"), "does not unpack"),
        (("a", 8, zlib.crc32(bytes(100)), 101, deflated(bytes(100))), "does not unpack"),
        (("a", 8, zlib.crc32(bytes(100)), 99, deflated(bytes(100))), "does not unpack"),
        (("a", 8, zlib.crc32(bytes(100)), 100, deflated(bytes(100))[:-1]), "does not unpack"),
        (("a", 8, 1, 100, deflated(bytes(100))), "checksum"),
        (("a", 0, 1, 2, b"{}"), "checksum"),
        (("a", 0, 0, 300 * 2**20, b""), "larger than a member"),
    ],
)
def test_headers_that_do_not_tell_the_truth_are_refused(member: tuple[str, int, int, int, bytes], reason: str) -> None:
    with pytest.raises(InvalidError, match=reason):
        everything(hand_made(member))


def test_other_zip_files_are_refused() -> None:
    with pytest.raises(InvalidError):
        open_archive(foreign(lambda file: file.writestr("manifest.json", b"{}")))
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as other:
        other.writestr("manifest.json", b"{}")
    with pytest.raises(InvalidError, match="damaged"):
        open_archive(file.getvalue())


@given(st.binary(max_size=400))
def test_no_bytes_crash_the_reader(data: bytes) -> None:
    with pytest.raises(InvalidError):
        open_archive(data)
    with pytest.raises(InvalidError):
        open_archive(reseal(b"PK\x03\x04" + data + bytes(64)))
