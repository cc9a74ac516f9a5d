"""Rotation of the log's key: the statement that old and new key sign together, and what follows from it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from engine.verifier.note import NoteError, Verifier, opened, parse_key

_TITLE = "podium key rotation"
_DIGITS_MAX = 16


@dataclass(frozen=True, slots=True)
class Rotation:
    """From the log's ``size`` on ``new`` signs; a checkpoint of exactly this size may be signed by both."""

    origin: str
    old: Verifier
    new: Verifier
    size: int


def rotation_text(rotation: Rotation) -> str:
    """The text that both keys sign: ``note.sign(text, name, old)``, then ``note.add_signature(note, name, new)``."""
    return f"{_TITLE}\n{rotation.origin}\n{rotation.old}\n{rotation.new}\n{rotation.size}\n"


def parse_rotation(data: bytes) -> Rotation:
    """Reads a statement and checks both signatures; raises NoteError. Whether a key is trusted is another question."""
    text = data.decode("utf-8", "replace")
    lines = text.split("\n")
    if len(lines) < 7 or lines[0] != _TITLE:  # noqa: PLR2004  # five lines, an empty one, signatures
        raise NoteError("it is not a statement of key rotation")
    _, origin, old, new, digits = lines[:5]
    if not (digits.isascii() and digits.isdigit()) or len(digits) > _DIGITS_MAX or str(int(digits)) != digits:
        raise NoteError("the size of a rotation is a plain decimal number")
    rotation = Rotation(origin, parse_key(old), parse_key(new), int(digits))
    note = opened(data, [rotation.old, rotation.new])
    if note.text != rotation_text(rotation):
        raise NoteError("it is not a statement of key rotation in canonical form")
    if rotation.old == rotation.new or set(note.signers) != {rotation.old, rotation.new}:
        raise NoteError("a rotation is signed by both keys")
    return rotation


@dataclass(frozen=True, slots=True)
class KeyHistory:
    """Which keys may have signed which checkpoints, from trusted keys and rotations in order."""

    trusted: tuple[Verifier, ...]
    rotations: tuple[Rotation, ...]

    def keys(self) -> tuple[Verifier, ...]:
        """The trusted keys, and those that rotations connect with them."""
        known = list(self.trusted)
        # Forwards and backwards: each statement is signed by both of its keys.
        for rotation in (*self.rotations, *reversed(self.rotations)):
            if rotation.old in known and rotation.new not in known:
                known.append(rotation.new)
            elif rotation.new in known and rotation.old not in known:
                known.append(rotation.old)
        return tuple(known)

    def allows(self, key: Verifier, size: int) -> bool:
        """Whether a checkpoint of this size may be signed by the key: not before it came, not after it went."""
        begins = [rotation.size for rotation in self.rotations if rotation.new == key]
        ends = [rotation.size for rotation in self.rotations if rotation.old == key]
        return all(size >= begin for begin in begins) and all(size <= end for end in ends)

    def signer(self, signers: Iterable[Verifier], size: int) -> Verifier | None:
        """The first of the keys that may sign a checkpoint of this size."""
        return next((key for key in signers if self.allows(key, size)), None)


def key_history(trusted: Sequence[Verifier], rotations: Sequence[Rotation], origin: str) -> KeyHistory:
    """Checks that rotations are of this log and follow each other; raises NoteError."""
    for before, after in pairwise(rotations):
        if before.new != after.old or before.size > after.size:
            raise NoteError("the rotations of the key do not follow each other")
    if any(rotation.origin != origin for rotation in rotations):
        raise NoteError("a rotation belongs to another log")
    olds = [rotation.old for rotation in rotations]
    if len(set(olds)) != len(olds) or (rotations and rotations[-1].new in olds):
        raise NoteError("a key was taken into service twice")
    return KeyHistory(tuple(trusted), tuple(rotations))
