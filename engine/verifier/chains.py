"""The chains of a bundle: entries numbered from 1, each with the hash of the one before it, in canonical form."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from engine.verifier.bundle import Bundle, ChainHead
from engine.verifier.canonical import parse
from engine.verifier.entry_types import COMMITTED, SHAPES, is_system_type
from engine.verifier.faults import Findings, InvalidError
from engine.verifier.shapes import is_text, is_time

ENTRY_VERSION: Final = 1
GENESIS: Final = "0" * 64
ENTRY_BYTES_MAX: Final = 2**20
# An entry of n bytes has at most 64 + n / 16 lists and objects; ours have less than half of that. Empty lists take two
# bytes and thirty times as much memory.
_NESTED_MIN, _BYTES_PER_NESTED = 64, 16

_ENVELOPE: Final = {"version", "tenant", "run", "seq", "prev", "type", "at", "actor", "on_behalf_of", "data"}

_MARK: Final = b'{"actor":'
_BATCH: Final = 256


@dataclass(slots=True)
class Entry:
    """One entry that is in its place. ``hash`` is the SHA-256 of its bytes, ``leaf`` its hash as a leaf of the log.

    Nothing changes it; freezing it would double the time that it takes to make one.
    """

    chain: str
    seq: int
    type: str
    at: str
    actor: str
    on_behalf_of: str | None
    data: dict[str, Any]
    hash: str
    leaf: bytes

    def __str__(self) -> str:
        """The entry for people: ``run 0190ab12 entry 7``."""
        return f"run {self.chain[:8]} entry {self.seq}"


def read_chains(bundle: Bundle, findings: Findings) -> dict[str, list[Entry]]:
    """All chains by their ids. A chain that is broken is recorded, and left out from where it breaks."""
    return {head.chain: _read(bundle, head, findings) for head in bundle.chains}


def _read(bundle: Bundle, head: ChainHead, findings: Findings) -> list[Entry]:
    entries: list[Entry] = []
    prev = GENESIS
    try:
        for body, document in _documents(bundle.archive.read(head.member)):
            entry = _entry(body, document, bundle, head, number=len(entries) + 1, prev=prev)
            entries.append(entry)
            prev = entry.hash
    except InvalidError as error:
        findings.fault(head.member, str(error))
        return entries
    if len(entries) != head.entries or prev != head.head:
        findings.fault(head.member, "the chain does not end where the manifest says")
    return entries


def _is_envelope(document: dict[str, Any]) -> bool:
    """Whether the fields of an envelope have the right types, as far as they are not compared with known values."""
    return (
        type(document["version"]) is int
        and type(document["seq"]) is int
        and is_text(document["type"])
        and is_time(document["at"])
        and is_text(document["actor"])
        and (document["on_behalf_of"] is None or is_text(document["on_behalf_of"]))
        and type(document["data"]) is dict
    )


def _documents(data: bytes) -> Iterator[tuple[bytes, Any]]:
    """The lines of a member with what they hold; None for a line whose value has to be read by itself."""
    if not data.endswith(b"\n"):
        raise InvalidError("it does not end in a newline")
    bodies = data[:-1].split(b"\n")
    for number, body in enumerate(bodies, start=1):
        if len(body) > ENTRY_BYTES_MAX:
            raise InvalidError(f"entry {number} is larger than an entry may be")
        if body.count(b"[") + body.count(b"{") > _NESTED_MIN + len(body) // _BYTES_PER_NESTED:
            raise InvalidError(f"entry {number} holds more lists and objects than an entry of its size may")
    for start in range(0, len(bodies), _BATCH):
        batch = bodies[start : start + _BATCH]
        yield from zip(batch, _read_together(batch) or [None] * len(batch), strict=True)


def _read_together(bodies: list[bytes]) -> list[Any] | None:
    """What lines hold, read as one JSON list, which takes less time and memory; None if that could be misleading.

    Every entry in canonical form begins with the mark. If each line does, and the mark is nowhere else, and as many
    objects with the fields of an entry come out as there are lines, then each object begins where its line does.
    """
    together = b",".join(bodies)
    if together.count(_MARK) != len(bodies) or not all(body.startswith(_MARK) for body in bodies):
        return None
    try:
        documents: list[Any] = parse(b"[" + together + b"]")
    except InvalidError:
        return None
    if len(documents) != len(bodies):
        return None
    return documents if all(type(one) is dict and one.keys() == _ENVELOPE for one in documents) else None


def _broken(number: int) -> str:
    """Why an entry may not name the one before it: the link says only that the two do not belong together."""
    if number == 1:
        return "entry 1 does not follow the entry before it: it is changed, or entries before it were removed"
    before = number - 1
    return (
        f"entry {number} does not follow the entry before it: entry {before} or entry {number} was changed, or one "
        "between them was removed"
    )


def _entry(body: bytes, document: Any, bundle: Bundle, head: ChainHead, *, number: int, prev: str) -> Entry:
    if document is None:
        try:
            document = parse(body)
        except InvalidError as error:
            raise InvalidError(f"entry {number} {error}") from None
    if type(document) is not dict or document.keys() != _ENVELOPE or not _is_envelope(document):
        raise InvalidError(f"entry {number} does not have the fields of an entry")
    if document["version"] != ENTRY_VERSION:
        raise InvalidError(f"entry {number} has version {document['version']}, which this verifier does not know")
    if document["seq"] != number:
        raise InvalidError(f"entry {number} says that it is number {document['seq']}")
    if document["prev"] != prev:
        raise InvalidError(_broken(number))
    if document["tenant"] != bundle.tenant or document["run"] != head.chain:
        raise InvalidError(f"entry {number} belongs to another chain")
    type_, data = document["type"], document["data"]
    shape = SHAPES.get(type_)
    if shape is None:
        raise InvalidError(f"entry {number} has type {type_!r}, which this verifier does not know")
    if not (shape(data) and COMMITTED(data.get("artifacts", []))):
        raise InvalidError(f"entry {number} ({type_}) does not have the fields of its type")
    if is_system_type(type_) == (head.chain != bundle.tenant):
        raise InvalidError(f"entry {number} ({type_}) does not belong in this chain")
    return Entry(
        head.chain,
        number,
        type_,
        document["at"],
        document["actor"],
        document["on_behalf_of"],
        data,
        hashlib.sha256(body).hexdigest(),
        hashlib.sha256(b"\x00" + body).digest(),
    )
