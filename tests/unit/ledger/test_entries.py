"""Entries and chains as bytes: canonical, exact, and every kind of damage is named."""

from __future__ import annotations

import hashlib
import hmac
import json
from datetime import UTC, datetime, timedelta, timezone
from uuid import UUID

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from engine.ledger.commitment import ARTIFACT_DOMAIN, commitment, new_salt
from engine.ledger.entry import GENESIS, EntryPlace, Event, chain_faults, entry_bytes, entry_hash, timestamp

TENANT, RUN = UUID(int=1), UUID(int=2)
AT = datetime(2026, 11, 30, 12, 0, 0, 123456, tzinfo=UTC)
KEYS = st.text(st.characters(max_codepoint=127), max_size=8)
SCALARS = st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text(st.characters(codec="utf-8"))
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4))


def entry(seq: int, prev: bytes, run: UUID = RUN, **fields: object) -> bytes:
    return entry_bytes(EntryPlace(TENANT, run, seq, prev), Event("step.changed", "tester", None, fields), AT)


def chain(length: int) -> list[bytes]:
    bodies: list[bytes] = []
    for number in range(1, length + 1):
        bodies.append(entry(number, entry_hash(bodies[-1]) if bodies else GENESIS, step=number))
    return bodies


@given(st.dictionaries(KEYS, VALUES, max_size=6))
def test_entries_are_written_as_rfc_8785_says(fields: dict[str, object]) -> None:
    body = entry_bytes(EntryPlace(TENANT, RUN, 1, GENESIS), Event("any", "tester", None, fields), AT)
    assert body == rfc8785.dumps(json.loads(body))
    assert json.loads(body)["data"] == fields
    assert chain_faults([body]) == []


@pytest.mark.parametrize("value", [1.5, float("nan"), 2**53, -(2**53), b"bytes", {1: 2}, {"ä": 1}, object(), "\ud800"])
def test_what_two_programs_could_write_differently_is_refused(value: object) -> None:
    with pytest.raises(ValueError):
        entry(1, GENESIS, value=value)


def test_times_are_utc_with_microseconds_and_never_without_a_zone() -> None:
    seoul = timezone(timedelta(hours=9))
    assert timestamp(datetime(2026, 1, 1, 9, 0, tzinfo=seoul)) == "2026-01-01T00:00:00.000000Z"
    with pytest.raises(ValueError):
        timestamp(datetime(2026, 1, 1))  # noqa: DTZ001  # a time without a zone is what is refused


def test_a_whole_chain_has_no_faults() -> None:
    assert chain_faults(chain(5)) == []
    assert chain_faults([]) == []


@given(st.integers(0, 4), st.data())
def test_every_changed_byte_is_a_fault(place: int, data: st.DataObject) -> None:
    bodies = chain(5)
    body = bytearray(bodies[place])
    offset = data.draw(st.integers(0, len(body) - 1))
    body[offset] ^= data.draw(st.integers(1, 255))
    bodies[place] = bytes(body)
    # Only the last entry has no successor that commits to it; there, the head does.
    assert chain_faults(bodies) != [] or place == 4
    assert entry_hash(bodies[4]) != entry_hash(chain(5)[4]) or place != 4


@pytest.mark.parametrize(
    "damage",
    [
        lambda bodies: bodies[1:],
        lambda bodies: bodies[:2] + bodies[3:],
        lambda bodies: [bodies[0], bodies[2], bodies[1], *bodies[3:]],
        lambda bodies: [*bodies, bodies[-1]],
        lambda bodies: [*bodies, entry(6, entry_hash(bodies[-1]), UUID(int=3))],
        lambda bodies: [*bodies, entry(True, entry_hash(bodies[-1]))],
        lambda bodies: [*bodies, entry(7, entry_hash(bodies[-1]))],
        lambda bodies: [*bodies, entry(6, GENESIS)],
        lambda bodies: [bodies[0] + b" ", *bodies[1:]],
    ],
)
def test_missing_moved_repeated_and_foreign_entries_are_faults(damage: object) -> None:
    assert callable(damage)
    assert chain_faults(damage(chain(5))) != []


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"nonsense", b"\xff", b"[]", b"1", b"null", b'"\\ud800"'),
        *(b'{"seq":1.0}', b'{"seq":1,"seq":1}', b'{"a":NaN}', b'{"a":' + b"9" * 5000 + b"}", b"[" * 100_000),
    ],
    ids=range(12),
)
def test_no_bytes_make_the_check_raise(body: bytes) -> None:
    assert chain_faults([body]) != []


def test_a_commitment_is_the_hmac_that_the_format_names() -> None:
    salt = bytes(range(32))
    expected = hmac.new(salt, b"podium/artifact/1/" + b"a/b/0" + b"\0" + b"text", hashlib.sha256).digest()
    assert commitment(salt, ARTIFACT_DOMAIN, "a/b/0", b"text") == expected
    assert len(new_salt()) == 32
    assert new_salt() != new_salt()
    for bad_salt, bad_path in ((bytes(31), "path"), (salt, "a\0b")):
        with pytest.raises(ValueError):
            commitment(bad_salt, ARTIFACT_DOMAIN, bad_path, b"")
