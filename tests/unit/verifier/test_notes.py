"""Signed notes, checkpoints and rotations: the examples of the specifications, and everything that is not canonical."""

from __future__ import annotations

import base64

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from engine.verifier import checkpoint
from engine.verifier.merkle import EMPTY_ROOT, leaf_hash
from engine.verifier.note import (
    NoteError,
    add_signature,
    decode_base64,
    open_note,
    opened,
    parse_key,
    parse_keys,
    sign,
    verifier_of,
)
from engine.verifier.rotation import KeyHistory, Rotation, key_history, parse_rotation, rotation_text

# The example key and note of golang.org/x/mod/sumdb/note, from which C2SP signed-note comes.
PETER = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
PETER_NOTE = (
    "If you think cryptography is the answer to your problem,\n"
    "then you don't know what your problem is.\n"
    "\n"
    "\u2014 PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=\n"
).encode()
# The example checkpoint of C2SP tlog-checkpoint, without its signature.
BEHIND_THE_SOFA = "example.com/behind-the-sofa\n20852163\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=\n"
NAME = "podium/log"
ORIGIN = "podium/log"
KEY = Ed25519PrivateKey.from_private_bytes(bytes([1]) * 32)
OTHER = Ed25519PrivateKey.from_private_bytes(bytes([2]) * 32)
VERIFIER = verifier_of(KEY, NAME)
TEXT = "A text.\n\nOf two parts.\n"


def test_the_published_note_opens_with_the_published_key() -> None:
    verifier = parse_key(PETER)
    assert str(verifier) == PETER
    assert open_note(PETER_NOTE, [verifier]).startswith("If you think cryptography")
    with pytest.raises(NoteError, match="no trusted key"):
        open_note(PETER_NOTE, [VERIFIER])


def test_the_published_checkpoint_is_read_and_written_the_same() -> None:
    read = checkpoint.parse(BEHIND_THE_SOFA)
    assert (read.origin, read.size, len(read.root)) == ("example.com/behind-the-sofa", 20852163, 32)
    assert checkpoint.text(read.origin, read.size, read.root) == BEHIND_THE_SOFA


def test_a_note_comes_back_and_names_its_signers() -> None:
    note = add_signature(sign(TEXT, NAME, KEY), "witness", OTHER)
    assert open_note(note, [VERIFIER]) == TEXT
    witness = verifier_of(OTHER, "witness")
    assert opened(note, [VERIFIER, witness]).signers == (VERIFIER, witness)


def test_a_bad_signature_of_a_known_key_spoils_the_whole_note() -> None:
    note = sign(TEXT, NAME, KEY).decode()
    head, _, line = note.rpartition("\u2014 ")
    raw = bytearray(base64.b64decode(line.split(" ")[1]))
    raw[-1] ^= 1
    forged = f"{head}\u2014 {NAME} {base64.b64encode(raw).decode()}\n".encode()
    good = add_signature(forged, "witness", OTHER)
    with pytest.raises(NoteError, match="does not verify"):
        open_note(good, [VERIFIER, verifier_of(OTHER, "witness")])
    assert open_note(good, [verifier_of(OTHER, "witness")]) == TEXT


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no signatures"),
        (b"text\n", "no signatures"),
        (b"text\n\nline without the mark\n", "malformed"),
        ("text\n\n\u2014 name\n".encode(), "malformed"),
        ("text\n\n\u2014 na+me AAAAAAAA\n".encode(), "key name"),
        ("text\n\n\u2014 name AAAA\n".encode(), "too short"),
        ("text\n\n\u2014 name AAAAAB==\n".encode(), "canonical"),
        ("text\n\n\u2014 name AAAAAA\n".encode(), "base64"),
        ("text\n\n\u2014 name AAAA AAA=\n".encode(), "base64"),
        ("text\n\n\u2014 name AAAAAAA=".encode(), "no signatures"),
        ("te\rxt\n\n\u2014 name AAAAAAA=\n".encode(), "control characters"),
        (b"\xff\xfe", "UTF-8"),
        (b"t\n\n" + "\u2014 name AAAAAAA=\n".encode() * 17, "too many"),
        (b"x" * 70_000, "too large"),
    ],
)
def test_malformed_notes_are_refused_with_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(NoteError, match=reason):
        open_note(data, [VERIFIER])


def test_every_byte_of_a_note_counts() -> None:
    note = sign(TEXT, NAME, KEY)
    for at in range(len(note)):
        for bit in (1, 128):
            forged = bytearray(note)
            forged[at] ^= bit
            with pytest.raises(NoteError):
                open_note(bytes(forged), [VERIFIER])


@given(st.binary(max_size=300))
def test_no_bytes_crash_the_readers(data: bytes) -> None:
    for read in (lambda: open_note(data, [VERIFIER]), lambda: parse_keys(data), lambda: parse_rotation(data)):
        with pytest.raises(NoteError):
            read()


@pytest.mark.parametrize("text", ["QQ", "QQ=", "QR==", "Q Q=", "QQ==\n", "-_==", "ÄÄ=="])
def test_base64_has_one_spelling(text: str) -> None:
    with pytest.raises(NoteError):
        decode_base64(text)
    assert decode_base64("QQ==") == b"A"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("name", "reads name"),
        ("name+00000000+AQ==", "32 bytes"),
        (str(VERIFIER).replace(VERIFIER.key_id, "00000000"), "does not belong"),
        (str(VERIFIER).replace("+A", "+B", 1), "not an Ed25519"),
        (" " + str(VERIFIER), "white space"),
    ],
)
def test_malformed_keys_are_refused(text: str, reason: str) -> None:
    with pytest.raises(NoteError, match=reason):
        parse_key(text)


def test_a_trust_file_has_keys_comments_and_nothing_else() -> None:
    other = verifier_of(OTHER, NAME)
    assert parse_keys(f"# the log\n\n{VERIFIER}\n  {other}\n".encode()) == (VERIFIER, other)
    with pytest.raises(NoteError, match="twice"):
        parse_keys(f"{VERIFIER}\n{VERIFIER}\n".encode())
    with pytest.raises(NoteError, match="no public key"):
        parse_keys(b"# nothing\n")
    with pytest.raises(NoteError, match="reads name"):
        parse_keys(f"{VERIFIER}\nsurprise\n".encode())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "origin\n1\n",
        "origin\n01\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=\n",
        "origin\n+1\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=\n",
        "origin\n١\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=\n",
        "origin\n1\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=",
        "origin\n1\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I\n",
        "origin\n1\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxqw==\n",
        "origin\n0\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=\n",
        "\n1\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=\n",
        "origin\n1\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=\n\n",
        f"origin\n{10**20}\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=\n",
    ],
)
def test_checkpoints_in_another_form_are_refused(text: str) -> None:
    with pytest.raises(NoteError):
        checkpoint.parse(text)


def test_a_checkpoint_that_could_not_be_read_back_is_not_written() -> None:
    assert checkpoint.text(ORIGIN, 0, EMPTY_ROOT)
    for origin, size, root in (("two\nlines", 1, EMPTY_ROOT), (ORIGIN, -1, EMPTY_ROOT), (ORIGIN, 1, b"short")):
        with pytest.raises(NoteError):
            checkpoint.text(origin, size, root)


def test_a_checkpoint_of_another_log_is_refused() -> None:
    note = sign(checkpoint.text(ORIGIN, 1, leaf_hash(b"")), NAME, KEY)
    assert checkpoint.open_checkpoint(note, [VERIFIER], origin=ORIGIN).checkpoint.size == 1
    with pytest.raises(NoteError, match="another log"):
        checkpoint.open_checkpoint(note, [VERIFIER], origin="podium/other")


def rotated(old: Ed25519PrivateKey, new: Ed25519PrivateKey, size: int = 5) -> bytes:
    text = rotation_text(Rotation(ORIGIN, verifier_of(old, NAME), verifier_of(new, NAME), size))
    return add_signature(sign(text, NAME, old), NAME, new)


def test_a_rotation_is_signed_by_both_keys() -> None:
    rotation = parse_rotation(rotated(KEY, OTHER))
    assert (rotation.old, rotation.new, rotation.size) == (VERIFIER, verifier_of(OTHER, NAME), 5)
    text = rotation_text(rotation)
    for one in (KEY, OTHER):
        with pytest.raises(NoteError, match="both keys"):
            parse_rotation(sign(text, NAME, one))
    third = Ed25519PrivateKey.from_private_bytes(bytes([3]) * 32)
    with pytest.raises(NoteError, match="both keys"):
        parse_rotation(add_signature(sign(text, NAME, KEY), NAME, third))


def test_a_key_signs_between_its_rotations_only() -> None:
    first, second = VERIFIER, verifier_of(OTHER, NAME)
    rotation = parse_rotation(rotated(KEY, OTHER))
    for trusted in (first, second):
        history = key_history([trusted], [rotation], ORIGIN)
        assert set(history.keys()) == {first, second}
        assert (history.allows(first, 5), history.allows(first, 6)) == (True, False)
        assert (history.allows(second, 4), history.allows(second, 5)) == (False, True)
    stranger = verifier_of(Ed25519PrivateKey.from_private_bytes(bytes([3]) * 32), NAME)
    assert KeyHistory((stranger,), (rotation,)).keys() == (stranger,)


def test_rotations_follow_each_other() -> None:
    there, back = parse_rotation(rotated(KEY, OTHER)), parse_rotation(rotated(OTHER, KEY, 9))
    with pytest.raises(NoteError, match="twice"):
        key_history([VERIFIER], [there, back], ORIGIN)
    with pytest.raises(NoteError, match="follow"):
        key_history([VERIFIER], [there, there], ORIGIN)
    with pytest.raises(NoteError, match="another log"):
        key_history([VERIFIER], [there], "podium/other")
