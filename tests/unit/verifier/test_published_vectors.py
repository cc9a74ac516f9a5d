"""What the specifications publish, beyond the examples in the tests of each module: RFC 8785, C2SP notes, RFC 8032.

Numbers with a fraction and keys that are not ASCII are left out of our canonical JSON, so that two programs cannot
differ about them: of those examples it is shown that they are refused.
"""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

import pytest
import rfc8785
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from engine.ledger.entry import EntryPlace, Event, entry_bytes
from engine.verifier import checkpoint
from engine.verifier.canonical import canonical, parse
from engine.verifier.faults import InvalidError
from engine.verifier.merkle import EMPTY_ROOT
from engine.verifier.note import (
    SIGNATURES_MAX,
    NoteError,
    UntrustedError,
    Verifier,
    add_signature,
    open_note,
    opened,
    parse_key,
    sign,
    unverified_text,
    verifier_of,
)
from tests.unit.ledger.test_entries import AT, RUN, TENANT

# RFC 8785, section 3.2.2.2: how each character of a string is written.
ESCAPES = {
    **{chr(code): f"\\u{code:04x}" for code in range(0x20)},
    "\b": "\\b",
    "\t": "\\t",
    "\n": "\\n",
    "\f": "\\f",
    "\r": "\\r",
    '"': '\\"',
    "\\": "\\\\",
    **{text: text for text in ("/", "'", "<", "\u007f", "\u0080", "\u2028", "\u2029", "€", "\ufb33", "\ufeff", "😂")},
}
# The ASCII keys of the RFC's own example of sorting (section 3.2.3) and of the test data that it names ("weird",
# "structures", "arrays", "unicode"), numbers as integers.
DOCUMENTS = [
    (
        r'{"\r":"Carriage Return","1":"One","</script>":"Browser Challenge","\u000a":"Newline"}',
        r'{"\n":"Newline","\r":"Carriage Return","1":"One","</script>":"Browser Challenge"}',
    ),
    (
        r'{"1":{"f":{"f":"hi","F":5},"\n":56},"10":{},"":"empty","a":{},"111":[{"e":"yes","E":"no"}],"A":{}}',
        r'{"":"empty","1":{"\n":56,"f":{"F":5,"f":"hi"}},"10":{},"111":[{"E":"no","e":"yes"}],"A":{},"a":{}}',
    ),
    (r'[56,{"d":true,"10":null,"1":[]}]', r'[56,{"1":[],"10":null,"d":true}]'),
    # Not normalised: what looks the same stays two texts.
    (r'{"Unnormalized Unicode":"A\u030a"}', '{"Unnormalized Unicode":"A\u030a"}'),
    (r'{"a":"\u00c5"}', '{"a":"\u00c5"}'),
    (r'{"value":"Control\u007f","smile":"\ud83d\ude02"}', '{"smile":"😂","value":"Control\u007f"}'),
    ("[0,-1,9007199254740991,-9007199254740991]", "[0,-1,9007199254740991,-9007199254740991]"),
]
# Keys in the order of the RFC's example: by UTF-16 code units, not by code points.
SORTED_KEYS = ["\r", "1", "\u0080", "\u00f6", "\u20ac", "\U0001f600", "\ufb33"]


@pytest.mark.parametrize("character", ESCAPES, ids=lambda character: f"U+{ord(character):04X}")
def test_each_character_has_one_spelling(character: str) -> None:
    written = f'{{"a":"{ESCAPES[character]}"}}'.encode()
    assert canonical({"a": character}) == rfc8785.dumps({"a": character}) == written
    assert parse(written) == {"a": character}
    code = character.encode("utf-16-be").hex()
    units = [code[at : at + 4] for at in range(0, len(code), 4)]
    others = {"".join(f"\\u{unit}" for unit in units), "".join(f"\\u{unit.upper()}" for unit in units)}
    for other in others - {ESCAPES[character]}:
        assert json.loads(f'"{other}"') == character
        with pytest.raises(InvalidError):
            parse(f'{{"a":"{other}"}}'.encode())


@pytest.mark.parametrize(("source", "expected"), DOCUMENTS)
def test_documents_are_written_as_published(source: str, expected: str) -> None:
    value = json.loads(source)
    assert canonical(value) == rfc8785.dumps(value) == expected.encode()
    assert parse(expected.encode()) == value
    if source != expected:
        with pytest.raises(InvalidError):
            parse(source.encode())


def test_the_order_of_the_published_example_needs_no_rule_because_such_keys_are_refused() -> None:
    published = rfc8785.dumps(dict.fromkeys(reversed(SORTED_KEYS), 1))
    assert list(json.loads(published)) == SORTED_KEYS
    assert sorted(SORTED_KEYS) != SORTED_KEYS
    for key in SORTED_KEYS:
        written = rfc8785.dumps({key: 1})
        if key.isascii():
            assert parse(written) == {key: 1}
            continue
        with pytest.raises(InvalidError):
            parse(written)
        with pytest.raises(ValueError, match=r"."):
            entry_bytes(EntryPlace(TENANT, RUN, 1, bytes(32)), Event("any", "tester", None, {key: 1}), AT)


@pytest.mark.parametrize(
    "value", [333333333.33333329, 1e30, 4.5, 2e-3, 1e-27, 0.0, -0.0, 56.0, 9007199254740992, -9007199254740992]
)
def test_numbers_that_the_rfc_has_rules_for_are_refused(value: Any) -> None:
    with pytest.raises(InvalidError):
        parse(f'{{"a":{json.dumps(value)}}}'.encode())
    with pytest.raises(ValueError, match=r"."):
        entry_bytes(EntryPlace(TENANT, RUN, 1, bytes(32)), Event("any", "tester", None, {"a": value}), AT)


@pytest.mark.parametrize("surrogate", ["\ud800", "\udc00\ud800", "a\udfff"])
def test_half_of_a_character_is_refused(surrogate: str) -> None:
    """RFC 8785, section 3.2.2.2: a lone surrogate is an error."""
    with pytest.raises(UnicodeEncodeError):
        canonical({"a": surrogate})
    with pytest.raises(InvalidError):
        parse(json.dumps({"a": surrogate}).replace(" ", "").encode())
    with pytest.raises(ValueError, match=r"."):
        entry_bytes(EntryPlace(TENANT, RUN, 1, bytes(32)), Event("any", "tester", None, {"a": surrogate}), AT)


# C2SP signed-note and tlog-checkpoint

# The first test of RFC 8032, section 7.1.
SECRET = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
PUBLIC = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
PETER = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
ENOCH = "EnochRoot+af0cfe78+ATtqJ7zOtqQtYqOo0CpvDXNlMhV3HeJDpjrASKGLWdop"
BOTH_NOTE = (
    "If you think cryptography is the answer to your problem,\n"
    "then you don't know what your problem is.\n"
    "\n"
    "\u2014 PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=\n"
    "\u2014 EnochRoot rwz+eBzmZa0SO3NbfRGzPCpDckykFXSdeX+MNtCOXm2/5n2tiOHp+vAF1aGrQ5ovTG01oOTGwnWLox33WWd1RvMc+QQ=\n"
).encode()
QUASIMODO = (
    "Ognuno sta solo sul cuor della terra\ntrafitto da un raggio di sole:\n\ned è subito sera.\n"
    "\n"
    "\u2014 quasimodo.example/salvatore "
    "NnugSzTjtVAewIS+Z/iJhUPeFDkO/5QQ2i5ddnGITLlC+EhfLW9oJKONrMouFSQU0xMcXxj99ihAQwaqP3ZekRwNtIc=\n"
).encode()
SOFA = (
    "example.com/behind-the-sofa\n20852163\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=\n"
    "\n"
    "\u2014 example.com/behind-the-sofa "
    "Az3grlgtzPICa5OS8npVmf1Myq/5IZniMp+ZJurmRDeOoRDe4URYN7u5/Zhcyv2q1gGzGku9nTo+zyWE+xeMcTOAYQ8=\n"
).encode()
KEY = Ed25519PrivateKey.from_private_bytes(SECRET)
TEXT = "A text.\n"


def test_keys_are_those_of_rfc_8032_and_their_ids_those_of_the_note_format() -> None:
    verifier = verifier_of(KEY, "example.com/log")
    assert verifier.key == PUBLIC
    assert verifier.id == hashlib.sha256(b"example.com/log\x0a\x01" + PUBLIC).digest()[:4]
    line = sign(TEXT, "example.com/log", KEY).decode().splitlines()[-1]
    raw = base64.b64decode(line.removeprefix("\u2014 example.com/log "))
    assert (raw[:4], len(raw)) == (verifier.id, 4 + 64)
    KEY.public_key().verify(raw[4:], TEXT.encode())


def test_a_published_note_with_two_signers_opens_with_either() -> None:
    peter, enoch = parse_key(PETER), parse_key(ENOCH)
    assert opened(BOTH_NOTE, [peter, enoch]).signers == (peter, enoch)
    for one in (peter, enoch):
        assert opened(BOTH_NOTE, [one]).signers == (one,)


@pytest.mark.parametrize(("note", "lines"), [(QUASIMODO, 4), (SOFA, 3)])
def test_published_notes_of_unknown_keys_are_read_and_not_believed(note: bytes, lines: int) -> None:
    """The text ends at the last empty line, whatever empty lines it has itself."""
    assert len(unverified_text(note).splitlines()) == lines
    with pytest.raises(UntrustedError, match="no trusted key"):
        open_note(note, [parse_key(PETER)])


def test_the_published_checkpoint_is_read_from_its_note() -> None:
    read = checkpoint.parse(unverified_text(SOFA))
    assert (read.origin, read.size) == ("example.com/behind-the-sofa", 20852163)
    assert base64.b64encode(read.root).decode() == "CsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I="
    empty = checkpoint.text("example.com/empty", 0, EMPTY_ROOT)
    assert empty.splitlines()[1:] == ["0", "47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU="]


def test_a_key_counts_by_name_and_id_together() -> None:
    """Signatures of keys that share only one of them with a known key are ignored, not refused."""
    own = verifier_of(KEY, "example.com/log")
    other = Ed25519PrivateKey.from_private_bytes(bytes([9]) * 32)
    note = add_signature(sign(TEXT, "example.com/log", other), "example.com/log", KEY)
    assert opened(note, [own]).signers == (own,)
    renamed = add_signature(sign(TEXT, "example.com/other", KEY), "example.com/log", KEY)
    assert opened(renamed, [own]).signers == (own,)
    with pytest.raises(UntrustedError):
        open_note(sign(TEXT, "example.com/other", KEY), [own])


def test_a_line_that_claims_a_known_name_and_id_is_checked() -> None:
    own = verifier_of(KEY, "example.com/log")
    stranger = Ed25519PrivateKey.from_private_bytes(bytes([9]) * 32)
    claimed = base64.b64encode(own.id + stranger.sign(TEXT.encode())).decode()
    with pytest.raises(NoteError, match="does not verify"):
        open_note(f"{TEXT}\n\u2014 example.com/log {claimed}\n".encode(), [own])


def test_as_many_signatures_as_a_verifier_must_accept() -> None:
    note = sign(TEXT, "example.com/log", KEY)
    for number in range(15):
        note = add_signature(note, f"witness-{number}", Ed25519PrivateKey.from_private_bytes(bytes([number + 1]) * 32))
    assert note.count("\u2014 ".encode()) == SIGNATURES_MAX == 16
    assert open_note(note, [Verifier("example.com/log", PUBLIC)]) == TEXT
