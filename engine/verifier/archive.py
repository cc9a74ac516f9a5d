"""The bundle's zip file: written in one way only, and read only if it was written so. Bounded in size and time.

The reader trusts nothing that the file says of itself: it walks the members, writes down what the directory at the end
must then be, and compares bytes. So there is no second name, offset or size by which another program could see other
contents, and the digest in the archive comment covers every byte.
"""

from __future__ import annotations

import hashlib
import io
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import BinaryIO

from engine.verifier.faults import InvalidError

MANIFEST = "manifest.json"
MEMBERS_MAX = 65_534
MEMBER_BYTES_MAX = 256 * 2**20
TOTAL_BYTES_MAX = 2 * 2**30
RATIO_MAX = 100
_NAME_BYTES_MAX = 128
_CACHE_BYTES_MAX = 64 * 2**20

_NAME = re.compile(r"[a-z0-9-]+(\.[a-z]+)?(/[a-z0-9-]+(\.[a-z]+)?)*")
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_LOCAL_MARK, _CENTRAL_MARK, _END_MARK = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
_VERSION = 20
# 1980-01-01 00:00: the first moment that the format knows.
_TIME, _DATE = 0, 0x21
_STORED, _DEFLATED = 0, 8
_COMMENT = b"podium-bundle sha256 "
_DIGITS = 64


@dataclass(frozen=True, slots=True)
class _Member:
    name: str
    method: int
    checksum: int
    packed: int
    unpacked: int
    offset: int

    def local(self) -> bytes:
        name = self.name.encode()
        sizes = (self.checksum, self.packed, self.unpacked, len(name), 0)
        return _LOCAL.pack(_LOCAL_MARK, _VERSION, 0, self.method, _TIME, _DATE, *sizes) + name

    def central(self) -> bytes:
        name = self.name.encode()
        sizes = (self.checksum, self.packed, self.unpacked, len(name), 0, 0, 0, 0, 0, self.offset)
        return _CENTRAL.pack(_CENTRAL_MARK, _VERSION, _VERSION, 0, self.method, _TIME, _DATE, *sizes) + name

    @property
    def start(self) -> int:
        """Where its packed bytes begin."""
        return self.offset + _LOCAL.size + len(self.name.encode())


@dataclass(frozen=True, slots=True)
class Packed:
    """A member on its way into an archive, compressed: ``unpacked`` and ``checksum`` are those of its bytes before."""

    name: str
    method: int
    checksum: int
    unpacked: int
    content: bytes


def packed(name: str, content: bytes) -> Packed:
    """Compresses a member. Raises ValueError for a name or a size that the format does not allow."""
    if not _is_name(name) or len(content) > MEMBER_BYTES_MAX:
        raise ValueError(f"a bundle cannot hold {name!r} of {len(content)} bytes")
    method, squeezed = _compressed(content)
    return Packed(name, method, zlib.crc32(content), len(content), squeezed)


def pack(members: Mapping[str, bytes]) -> bytes:
    """The archive of these members (names to bytes). Raises ValueError for what the format does not allow."""
    target = io.BytesIO()
    write_archive(target, (packed(name, members[name]) for name in _ordered(members)))
    return target.getvalue()


def write_archive(target: BinaryIO, members: Iterable[Packed]) -> None:
    """Writes an archive one member after the other, so that it never is in memory whole.

    The members come in the format's order, the manifest first; raises ValueError if they do not, or are too much.
    """
    digest = hashlib.sha256()

    def write(data: bytes) -> None:
        digest.update(data)
        target.write(data)

    directory: list[bytes] = []
    offset = total = 0
    before: tuple[bool, str] | None = None
    for each in members:
        place = _place(each.name)
        if before is not None and place <= before:
            raise ValueError("the members of a bundle are given in its order")
        before = place
        total += each.unpacked
        if len(directory) >= MEMBERS_MAX or total > TOTAL_BYTES_MAX:
            raise ValueError("that is too much for one bundle")
        member = _Member(each.name, each.method, each.checksum, len(each.content), each.unpacked, offset)
        write(member.local())
        write(each.content)
        offset = member.start + member.packed
        directory.append(member.central())
    write(_directory(directory, offset))
    target.write(digest.hexdigest().encode())


def _place(name: str) -> tuple[bool, str]:
    return name != MANIFEST, name


def _ordered(names: Iterable[str]) -> list[str]:
    return sorted(names, key=_place)


def _is_name(name: str) -> bool:
    return len(name) <= _NAME_BYTES_MAX and _NAME.fullmatch(name) is not None


def _compressed(content: bytes) -> tuple[int, bytes]:
    squeezer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = squeezer.compress(content) + squeezer.flush()
    if len(packed) >= len(content) or len(content) > RATIO_MAX * len(packed):
        return _STORED, content
    return _DEFLATED, packed


def _directory(entries: list[bytes], offset: int) -> bytes:
    """Everything behind the members, but for the digits of the digest."""
    size, count = sum(map(len, entries)), len(entries)
    end = _END.pack(_END_MARK, 0, 0, count, count, size, offset, len(_COMMENT) + _DIGITS)
    return b"".join((*entries, end, _COMMENT))


@dataclass(slots=True)
class Archive:
    """A bundle that was checked from its first to its last byte, but for the contents; these are unpacked on demand."""

    data: bytes
    members: Mapping[str, _Member]
    _cache: dict[str, bytes] = field(default_factory=dict)
    _cached_bytes: int = 0

    @property
    def names(self) -> list[str]:
        """The members' names in their order."""
        return list(self.members)

    def size(self, name: str) -> int:
        """How many bytes a member has, unpacked."""
        return self.members[name].unpacked

    def read(self, name: str) -> bytes:
        """A member's bytes. Raises InvalidError if there is none, or if its header does not tell the truth."""
        member = self.members.get(name)
        if member is None:
            raise InvalidError(f"the bundle has no {name}")
        content = self._cache.get(name)
        if content is not None:
            return content
        content = _unpacked(member, memoryview(self.data)[member.start : member.start + member.packed])
        if self._cached_bytes + len(content) <= _CACHE_BYTES_MAX:
            self._cache[name] = content
            self._cached_bytes += len(content)
        return content


def open_archive(data: bytes) -> Archive:
    """Reads an archive's structure. Raises InvalidError for anything that ``pack`` would not have written."""
    if len(data) > TOTAL_BYTES_MAX:
        raise InvalidError("the file is too large to be a bundle")
    if data[:4] != _LOCAL_MARK:
        raise InvalidError("the file is not a bundle: it does not begin like one")
    if data[-_DIGITS:] != hashlib.sha256(data[:-_DIGITS]).hexdigest().encode():
        raise InvalidError("the file is damaged or cut off: the digest at its end does not fit")
    members: dict[str, _Member] = {}
    total = 0
    for member in _walk(data):
        if member.name in members:
            raise InvalidError(f"the bundle has two members named {member.name}")
        members[member.name] = member
        total += member.unpacked
        if len(members) > MEMBERS_MAX or total > TOTAL_BYTES_MAX:
            raise InvalidError("the bundle is larger than a bundle may be")
    if list(members) != _ordered(members):
        raise InvalidError("the members of the bundle are not in order")
    last = list(members.values())[-1]
    offset = last.start + last.packed
    if data[offset:-_DIGITS] != _directory([member.central() for member in members.values()], offset):
        raise InvalidError("the directory of the archive does not fit its members")
    return Archive(data, members)


def _walk(data: bytes) -> Iterator[_Member]:
    """The members as their own headers say, from the first byte on."""
    offset = 0
    while data[offset : offset + 4] == _LOCAL_MARK:
        if len(data) < offset + _LOCAL.size:
            raise InvalidError("the archive is cut off")
        _, _, _, method, _, _, checksum, packed, unpacked, length, _ = _LOCAL.unpack_from(data, offset)
        raw = data[offset + _LOCAL.size : offset + _LOCAL.size + length]
        name = raw.decode("ascii", "replace")
        if not _is_name(name):
            raise InvalidError("the archive has a member whose name is not allowed")
        member = _Member(name, method, checksum, packed, unpacked, offset)
        if data[offset : member.start] != member.local():
            raise InvalidError(f"the header of {name} has values that a bundle does not have")
        _check_sizes(member)
        offset = member.start + packed
        if offset > len(data):
            raise InvalidError("the archive is cut off")
        yield member


def _check_sizes(member: _Member) -> None:
    if member.unpacked > MEMBER_BYTES_MAX:
        raise InvalidError(f"{member.name} is larger than a member may be")
    if member.method == _STORED:
        if member.packed != member.unpacked:
            raise InvalidError(f"{member.name} has two sizes")
    elif member.method != _DEFLATED or member.unpacked <= member.packed:
        raise InvalidError(f"{member.name} is packed in a way that a bundle does not use")
    elif member.unpacked > RATIO_MAX * member.packed:
        raise InvalidError(f"{member.name} would unpack to more than {RATIO_MAX} times its size")


def _unpacked(member: _Member, packed: memoryview) -> bytes:
    if member.method == _STORED:
        content = bytes(packed)
    else:
        inflater = zlib.decompressobj(-15)
        try:
            content = inflater.decompress(packed, member.unpacked + 1)
        except zlib.error:
            raise InvalidError(f"{member.name} cannot be unpacked") from None
        if not inflater.eof or inflater.unused_data or len(content) != member.unpacked:
            raise InvalidError(f"{member.name} does not unpack to what its header says")
    if zlib.crc32(content) != member.checksum:
        raise InvalidError(f"{member.name} does not have the checksum that its header says")
    return content
