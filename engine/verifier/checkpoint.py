"""Checkpoints of the log (C2SP tlog-checkpoint): the text that a signed note carries. Pure.

origin
number of leaves, decimal
base64(root hash)
extension lines, usually none
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.verifier.merkle import EMPTY_ROOT, HASH_BYTES, SIZE_MAX
from engine.verifier.note import NoteError, Verifier, decode_base64, opened

_DIGITS_MAX = 16


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The log named ``origin`` had ``size`` leaves and this root (32 bytes)."""

    origin: str
    size: int
    root: bytes
    extensions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SignedCheckpoint:
    """A checkpoint with the trusted keys that signed it, and the note as it came."""

    checkpoint: Checkpoint
    signers: tuple[Verifier, ...]
    note: bytes


def origin_of(tenant: str) -> str:
    """The origin of a tenant's log, which is also the name of its keys."""
    return f"podium/{tenant}"


def text(origin: str, size: int, root: bytes, extensions: Sequence[str] = ()) -> str:
    """The text to sign. Raises NoteError for what ``parse`` would not read back."""
    written = "\n".join([origin, str(size), base64.b64encode(root).decode(), *extensions]) + "\n"
    if parse(written) != Checkpoint(origin, size, root, tuple(extensions)):
        raise NoteError("a checkpoint cannot hold these values")
    return written


def parse(written: str) -> Checkpoint:
    """Reads the text of a checkpoint; raises NoteError for anything that is not in canonical form."""
    lines = written.split("\n")
    if len(lines) < 4 or lines.pop() != "" or not all(lines):  # noqa: PLR2004  # three lines and the end
        raise NoteError("a checkpoint is at least three lines, none of them empty")
    origin, digits, encoded, *extensions = lines
    if not (digits.isascii() and digits.isdigit()) or len(digits) > _DIGITS_MAX or str(int(digits)) != digits:
        raise NoteError("the size of a checkpoint is a plain decimal number")
    size, root = int(digits), decode_base64(encoded)
    if size > SIZE_MAX or len(root) != HASH_BYTES:
        raise NoteError("a checkpoint has a size and a root of 32 bytes")
    if size == 0 and root != EMPTY_ROOT:
        raise NoteError("the checkpoint of an empty log has the root of an empty tree")
    return Checkpoint(origin, size, root, tuple(extensions))


def open_checkpoint(data: bytes, verifiers: Iterable[Verifier], *, origin: str | None = None) -> SignedCheckpoint:
    """Reads a signed checkpoint; raises NoteError unless a given key signed it (and it is of that log)."""
    note = opened(data, verifiers)
    checkpoint = parse(note.text)
    if origin is not None and checkpoint.origin != origin:
        raise NoteError("the checkpoint belongs to another log")
    return SignedCheckpoint(checkpoint, note.signers, data)
