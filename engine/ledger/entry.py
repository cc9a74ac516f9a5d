"""One entry of a run's ledger, as bytes. Pure: no database, no clock.

An entry is RFC 8785 canonical JSON with ASCII keys, integers below 2^53, no floats (money is a decimal string) and
times in RFC 3339 with microseconds in UTC. ``prev`` is the SHA-256 of the entry before it, 32 zero bytes for the
first one, so the entries of a run form a chain. Text that a person or a model wrote is never in an entry; it is
committed to, see ``engine.ledger.commitment``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import rfc8785

ENTRY_VERSION = 1
GENESIS = bytes(32)
_INTEGER_MAX = 2**53 - 1


@dataclass(frozen=True, slots=True)
class EntryPlace:
    """Where an entry stands: its tenant and run, its number (from 1), and the hash of the entry before it."""

    tenant_id: UUID
    run_id: UUID
    seq: int
    prev: bytes


@dataclass(frozen=True, slots=True)
class Event:
    """What happened. ``fields`` holds identifiers, codes, integers, decimal strings and hex digests only."""

    type: str
    actor_id: str
    on_behalf_of: str | None
    fields: Mapping[str, Any]


def timestamp(moment: datetime) -> str:
    """RFC 3339 in UTC with microseconds; raises ValueError for a time without a zone."""
    if moment.tzinfo is None:
        raise ValueError("a time without a zone cannot be recorded")
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def entry_bytes(place: EntryPlace, event: Event, at: datetime) -> bytes:
    """The canonical bytes of an entry; raises ValueError for a value that has no canonical form here."""
    envelope: dict[str, Any] = {
        "version": ENTRY_VERSION,
        "tenant": str(place.tenant_id),
        "run": str(place.run_id),
        "seq": place.seq,
        "prev": place.prev.hex(),
        "type": event.type,
        "at": timestamp(at),
        "actor": event.actor_id,
        "on_behalf_of": event.on_behalf_of,
        "data": dict(event.fields),
    }
    _check(envelope)
    # For values that pass the check this is RFC 8785 (ASCII keys sort alike everywhere, and no number is a float), at a
    # twentieth of the general writer's time, which every step would pay several times. A test compares the two.
    return json.dumps(envelope, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")).encode()


def entry_hash(body: bytes) -> bytes:
    """SHA-256 of the canonical bytes: what the next entry carries as ``prev``."""
    return hashlib.sha256(body).digest()


def chain_faults(bodies: Iterable[bytes]) -> list[str]:
    """Checks a run's entries in order; returns what is wrong, in words, or an empty list. Never raises."""
    faults: list[str] = []
    prev = GENESIS
    owner: tuple[Any, Any] | None = None
    for number, body in enumerate(bodies, start=1):
        document = _document(body)
        if document is None:
            faults.append(f"entry {number} is not in canonical form")
            document = {}
        # The types count: JSON's true equals 1 in Python.
        if type(document.get("seq")) is not int or document["seq"] != number:
            faults.append(f"entry {number} does not say that it is number {number}")
        if document.get("prev") != prev.hex():
            faults.append(f"entry {number} does not follow the entry before it")
        own = (document.get("tenant"), document.get("run"))
        owner = owner or own
        if own != owner:
            faults.append(f"entry {number} belongs to another run")
        prev = entry_hash(body)
    return faults


def _document(body: bytes) -> dict[str, Any] | None:
    """The entry, if it is a JSON object in canonical form that holds only what an entry may hold."""
    try:
        document = json.loads(body)
        _check(document)
        canonical = rfc8785.dumps(document)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) and canonical == body else None


def _check(value: Any) -> None:
    """Refuses what two implementations could write differently."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not (isinstance(key, str) and key.isascii()):
                raise ValueError("keys of a ledger entry are ASCII text")
            _check(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check(inner)
    elif isinstance(value, bool) or value is None or isinstance(value, str):
        return
    elif isinstance(value, int):
        if abs(value) > _INTEGER_MAX:
            raise ValueError("an integer in a ledger entry is below 2^53")
    else:
        raise ValueError(f"{type(value).__name__} cannot stand in a ledger entry")
