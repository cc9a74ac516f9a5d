"""Signed notes (C2SP signed-note, Ed25519 only): a text with the signatures of named keys under it. Pure.

    text, ending in a newline
    (an empty line)
    — key name, base64(4 bytes of key id || 64 bytes of signature)

A public key is written ``name+id+base64(0x01 || 32 bytes)``, the id being eight hexadecimal digits: the first four
bytes of SHA-256(name || 0x0A || 0x01 || public key).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

NOTE_BYTES_MAX = 64 * 1024
SIGNATURES_MAX = 16
_ED25519 = b"\x01"
_MARK = "\u2014 "
_ID_DIGITS = 8
_SIGNATURE_BYTES = 4 + 64
_CONTROL_END = " "


class NoteError(ValueError):
    """The note or key is malformed, or no trusted key signed it. The message says which, in one line."""


class UntrustedError(NoteError):
    """The note is in order, and the keys that it names as its signers are all unknown."""


@dataclass(frozen=True, slots=True)
class Verifier:
    """A public key by its name; ``key`` is the 32 bytes of RFC 8032."""

    name: str
    key: bytes

    def __post_init__(self) -> None:
        _check_name(self.name)
        if len(self.key) != 32:  # noqa: PLR2004  # the length of an Ed25519 public key
            raise NoteError("an Ed25519 public key has 32 bytes")

    @property
    def id(self) -> bytes:
        """The four bytes that its signatures begin with."""
        return hashlib.sha256(self.name.encode() + b"\n" + _ED25519 + self.key).digest()[:4]

    @property
    def key_id(self) -> str:
        """The id as eight lower-case hexadecimal digits."""
        return self.id.hex()

    def __str__(self) -> str:
        """The key's text: ``name+id+base64``."""
        return f"{self.name}+{self.key_id}+{base64.b64encode(_ED25519 + self.key).decode()}"


@dataclass(frozen=True, slots=True)
class Opened:
    """A note whose signatures were checked: its text, and the trusted keys that signed it."""

    text: str
    signers: tuple[Verifier, ...]


def verifier_of(key: Ed25519PrivateKey, name: str) -> Verifier:
    """The public side of a key under a name."""
    return Verifier(name, key.public_key().public_bytes_raw())


def parse_key(text: str) -> Verifier:
    """Reads a key's text; raises NoteError unless it is exactly as ``str(Verifier)`` writes it."""
    parts = text.split("+", 2)
    if len(parts) != 3:  # noqa: PLR2004  # name, id, key; base64 may hold plus signs itself
        raise NoteError("a public key reads name+id+base64")
    name, key_id, encoded = parts
    raw = decode_base64(encoded)
    if raw[:1] != _ED25519:
        raise NoteError("the public key is not an Ed25519 key")
    verifier = Verifier(name, raw[1:])
    if verifier.key_id != key_id:
        raise NoteError("the id of the public key does not belong to it")
    return verifier


def parse_keys(data: bytes) -> tuple[Verifier, ...]:
    """The keys of a trust file: one a line; empty lines and lines that begin with # do not count.

    Raises NoteError for anything else, a repeated key and a file without one.
    """
    if len(data) > NOTE_BYTES_MAX:
        raise NoteError("the file with public keys is too large to be one")
    try:
        lines = [line.strip() for line in data.decode("utf-8").splitlines()]
    except UnicodeDecodeError:
        raise NoteError("the file with public keys is not text") from None
    keys = tuple(parse_key(line) for line in lines if line and not line.startswith("#"))
    if not keys:
        raise NoteError("the file holds no public key")
    if len(set(keys)) != len(keys):
        raise NoteError("the file names a public key twice")
    return keys


def sign(text: str, name: str, key: Ed25519PrivateKey) -> bytes:
    """The note of a text, signed by one key. Raises NoteError for a text that cannot be signed."""
    return add_signature(text.encode() + b"\n", name, key)


def add_signature(note: bytes, name: str, key: Ed25519PrivateKey) -> bytes:
    """The note with one signature more; a note without signatures ends in an empty line."""
    text, _, _ = note.decode().rpartition("\n\n")
    text += "\n"
    _check_text(text)
    raw = verifier_of(key, name).id + key.sign(text.encode())
    return note + f"{_MARK}{name} {base64.b64encode(raw).decode()}\n".encode()


def open_note(data: bytes, verifiers: Sequence[Verifier]) -> str:
    """The text of a note that at least one of the keys signed; raises NoteError otherwise."""
    return opened(data, verifiers).text


def unverified_text(data: bytes) -> str:
    """The text of a note, whoever signed it; raises NoteError for what is no note."""
    return _parse(data)[0]


def opened(data: bytes, verifiers: Iterable[Verifier]) -> Opened:
    """As ``open_note``, with the keys that signed.

    Signatures of unknown keys are passed over. One of a known key that does not verify spoils the whole note.
    """
    text, signatures = _parse(data)
    known = {(verifier.name, verifier.id): verifier for verifier in verifiers}
    signers: list[Verifier] = []
    for name, raw in signatures:
        verifier = known.get((name, raw[:4]))
        if verifier is None:
            continue
        if verifier in signers:
            raise NoteError("a key signed the note twice")
        if not _verifies(verifier, raw[4:], text.encode()):
            raise NoteError(f"the signature of key {verifier.key_id} does not verify")
        signers.append(verifier)
    if not signers:
        ids = sorted({raw[:4].hex() for _, raw in signatures})
        raise UntrustedError(
            f"no trusted key signed the note; it names as its signer{'s' if len(ids) > 1 else ''} key {', '.join(ids)}"
        )
    return Opened(text, tuple(signers))


def decode_base64(text: str) -> bytes:
    """Standard base64 with padding; raises NoteError for every other way to write the same bytes."""
    try:
        raw = base64.b64decode(text.encode("ascii"), validate=True)
    except (UnicodeEncodeError, binascii.Error, ValueError):
        raise NoteError("it holds something that is not base64") from None
    if base64.b64encode(raw).decode() != text:
        raise NoteError("it holds base64 that is not in canonical form")
    return raw


def _parse(data: bytes) -> tuple[str, list[tuple[str, bytes]]]:
    if len(data) > NOTE_BYTES_MAX:
        raise NoteError("the note is too large to be one")
    try:
        note = data.decode("utf-8")
    except UnicodeDecodeError:
        raise NoteError("the note is not UTF-8 text") from None
    text, separator, rest = note.rpartition("\n\n")
    if not separator or not rest.endswith("\n"):
        raise NoteError("the note has no signatures")
    text += "\n"
    _check_text(text)
    lines = rest[:-1].split("\n")
    if len(lines) > SIGNATURES_MAX:
        raise NoteError("the note has too many signatures")
    return text, [_signature(line) for line in lines]


def _signature(line: str) -> tuple[str, bytes]:
    name, space, encoded = line.removeprefix(_MARK).partition(" ")
    if not line.startswith(_MARK) or not space:
        raise NoteError("the note has a malformed signature line")
    _check_name(name)
    raw = decode_base64(encoded)
    if len(raw) < 5:  # noqa: PLR2004  # an id and at least one byte
        raise NoteError("the note has a signature that is too short")
    return name, raw


def _verifies(verifier: Verifier, signature: bytes, text: bytes) -> bool:
    if len(signature) + 4 != _SIGNATURE_BYTES:
        return False
    try:
        Ed25519PublicKey.from_public_bytes(verifier.key).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True


def _check_name(name: str) -> None:
    if not name or "+" in name or any(sign.isspace() or sign < _CONTROL_END for sign in name):
        raise NoteError("a key name is not empty and holds neither white space nor a plus sign")


def _check_text(text: str) -> None:
    if len(text) < 2 or any(sign < _CONTROL_END and sign != "\n" for sign in text):  # noqa: PLR2004  # more than "\n"
        raise NoteError("the text of a note is lines without control characters")
