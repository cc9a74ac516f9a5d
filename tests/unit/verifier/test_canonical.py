"""Canonical JSON: the examples of RFC 8785 without floats, the library of that name, and everything that is refused."""

from __future__ import annotations

import json

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from engine.verifier.canonical import canonical, hex_bytes, parse
from engine.verifier.faults import InvalidError

KEYS = st.text(st.characters(max_codepoint=127), max_size=5)
SCALARS = st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=12
)


def test_the_example_of_rfc_8785_section_3_2_without_its_numbers() -> None:
    source = r'{"string": "€$\u000F\u000aA\u0027\u0042\u0022\u005c\\\"\/", "literals": [null, true, false]}'
    written = rb'{"literals":[null,true,false],"string":"\xe2\x82\xac$\u000f\nA' + rb"'" + rb'B\"\\\\\"/"}'
    expected = written.replace(rb"\xe2\x82\xac", "€".encode())
    assert canonical(json.loads(source)) == expected
    assert parse(expected) == json.loads(source)


@given(VALUES)
def test_it_writes_what_the_library_writes_and_reads_it_back(value: object) -> None:
    try:
        expected = rfc8785.dumps(value)  # type: ignore[arg-type]  # whatever it is
    except UnicodeEncodeError:
        return
    assert canonical(value) == expected
    assert parse(expected) == value


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b" {}",
        b"{}\n",
        b'{"a":1,"a":1}',
        b'{"b":1,"a":1}',
        b'{"a": 1}',
        b'{"a":1.0}',
        b'{"a":1e2}',
        b'{"a":-0}',
        b'{"a":01}',
        b'{"a":9007199254740992}',
        b'{"a":' + b"9" * 5000 + b"}",
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":"\\u0041"}',
        b'{"a":"\\/"}',
        b'{"a":"\\u000F"}',
        b'{"a":"\\ud800"}',
        b'{"a":"\xed\xa0\x80"}',
        b"\xef\xbb\xbf{}",
        b"\xff",
        b"[" * 100_000,
        b"[" * 5_000 + b"]" * 5_000,
        '{"ä":1}'.encode(),
        b"{'a':1}",
        b'{"a":1}{"a":1}',
        b'{"a":"\n"}',
    ],
)
def test_every_other_spelling_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidError):
        parse(text)


@pytest.mark.parametrize("text", [None, 1, "", "0", "AA", "0g", " 0", "0x", "000", b"00", "０0"])
def test_hexadecimal_digits_are_lower_case_and_of_the_right_number(text: object) -> None:
    assert hex_bytes(text, 1) is None
    assert hex_bytes("0a", 1) == b"\n"
