"""Sealed bytes open with their own key in their own place, and nowhere else."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import replace
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import RefusedError
from engine.keystore.keys import OVERHEAD_BYTES, RunKeys, SealedPlace, new_keys, seal, unseal

RUN = UUID("01930000-0000-7000-8000-000000000001")
PLACE = SealedPlace(RUN, UUID(int=2), UUID(int=3), "output", 0, 1)
SALT = bytes(range(32))


def key() -> bytes:
    found = new_keys(RUN).key_of(PLACE.artifact_id, 1)
    assert found is not None
    return found


@given(st.binary(max_size=300))
def test_what_was_sealed_comes_back_with_its_salt(content: bytes) -> None:
    own = key()
    sealed = seal(own, PLACE, SALT, content)
    assert len(sealed) == len(content) + OVERHEAD_BYTES
    assert unseal(own, PLACE, sealed) == (SALT, content)


def test_no_byte_can_be_changed_and_nothing_can_be_cut_off() -> None:
    own = key()
    sealed = seal(own, PLACE, SALT, b"a text")
    for number in range(len(sealed)):
        changed = bytearray(sealed)
        changed[number] ^= 1
        with pytest.raises(RefusedError, match="not what was sealed"):
            unseal(own, PLACE, bytes(changed))
        with pytest.raises(RefusedError, match="not what was sealed"):
            unseal(own, PLACE, sealed[:number])


@pytest.mark.parametrize(
    "other",
    [
        {"run_id": uuid4()},
        {"artifact_id": uuid4()},
        {"owner_id": uuid4()},
        {"kind": "reasoning"},
        {"ordinal": 1},
        {"epoch": 2},
    ],
)
def test_it_opens_in_no_other_place(other: dict[str, object]) -> None:
    own = key()
    with pytest.raises(RefusedError) as refused:
        unseal(own, replace(PLACE, **other), seal(own, PLACE, SALT, b"a text"))
    assert refused.value.code == "text-damaged"


def test_the_same_text_never_looks_the_same() -> None:
    own = key()
    assert seal(own, PLACE, SALT, b"yes") != seal(own, PLACE, SALT, b"yes")


def test_the_key_is_the_hkdf_of_rfc_5869() -> None:
    keys = RunKeys(RUN, 1, bytes(range(32)))
    # Extract with an absent salt, then one block of expand, written out.
    extracted = hmac.new(bytes(32), keys.secret, hashlib.sha256).digest()
    info = b"podium/artifact-key/1/" + PLACE.artifact_id.bytes
    assert keys.key_of(PLACE.artifact_id, 1) == hmac.new(extracted, info + b"\x01", hashlib.sha256).digest()


def test_each_artifact_and_each_run_has_a_key_of_its_own() -> None:
    keys = new_keys(RUN)
    found = {keys.key_of(UUID(int=number), 1) for number in range(50)}
    assert len(found) == 50
    assert new_keys(RUN).key_of(UUID(int=1), 1) not in found


def test_the_next_epoch_has_the_kept_keys_and_no_way_to_the_others() -> None:
    first = new_keys(RUN)
    kept, gone = UUID(int=1), UUID(int=2)
    second = first.without_others({kept: 1})
    assert second.epoch == 2
    assert second.key_of(kept, 1) == first.key_of(kept, 1)
    assert second.key_of(gone, 1) is None
    later = UUID(int=3)
    third = second.without_others({kept: 1, later: 2})
    assert third.key_of(kept, 1) == first.key_of(kept, 1)
    assert third.key_of(later, 2) == second.key_of(later, 2)
    assert second.without_others({}).key_of(kept, 1) is None


def test_no_secret_is_in_the_words_for_a_log() -> None:
    keys = new_keys(RUN).without_others({UUID(int=1): 1})
    said = repr(keys)
    assert keys.secret.hex() not in said
    assert repr(keys.secret) not in said
    assert "kept" not in said
