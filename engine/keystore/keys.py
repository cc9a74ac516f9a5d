"""The keys of one run, and what is done with them. Pure: no files, no database.

A run has one random secret. The key of an artifact is HKDF-SHA256 (RFC 5869) of it with the artifact's id, so storing
an artifact costs no key. To erase some artifacts the keys of all others are written out one by one (*kept*), and
the secret gives way to a fresh one of the next *epoch*: what was derived from it and not kept is gone for good.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final
from uuid import UUID

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from engine.errors import RefusedError

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
SALT_BYTES: Final = 32
# What sealing adds to a text: nonce, the salt of its commitment, and the tag.
OVERHEAD_BYTES: Final = NONCE_BYTES + SALT_BYTES + 16
_KEY_DOMAIN: Final = b"podium/artifact-key/1/"
_SEAL_DOMAIN: Final = "podium/sealed/1"


@dataclass(frozen=True, slots=True)
class RunKeys:
    """The keys of a run: the secret of its present epoch (from 1), and the kept keys of artifacts of earlier ones."""

    run_id: UUID
    epoch: int
    secret: bytes = field(repr=False)
    kept: Mapping[UUID, bytes] = field(default_factory=lambda: MappingProxyType({}), repr=False)

    def key_of(self, artifact_id: UUID, epoch: int) -> bytes | None:
        """The 32-byte key of an artifact that was sealed in this epoch; None if it was destroyed, or is not known."""
        if epoch != self.epoch:
            return self.kept.get(artifact_id)
        derived: bytes = HKDF(SHA256(), KEY_BYTES, salt=None, info=_KEY_DOMAIN + artifact_id.bytes).derive(self.secret)
        return derived

    def without_others(self, keep: Mapping[UUID, int]) -> RunKeys:
        """The keys of the next epoch: of the artifacts so far only those of ``keep`` (id and epoch) can be opened."""
        keys = {artifact: self.key_of(artifact, epoch) for artifact, epoch in keep.items()}
        kept = {artifact: key for artifact, key in keys.items() if key is not None}
        return RunKeys(self.run_id, self.epoch + 1, secrets.token_bytes(KEY_BYTES), MappingProxyType(kept))


def new_keys(run_id: UUID) -> RunKeys:
    """Keys of a run that begins: a fresh secret."""
    return RunKeys(run_id, 1, secrets.token_bytes(KEY_BYTES))


@dataclass(frozen=True, slots=True)
class SealedPlace:
    """Where sealed bytes stand; they open nowhere else."""

    run_id: UUID
    artifact_id: UUID
    owner_id: UUID
    kind: str
    ordinal: int
    epoch: int

    @property
    def bound(self) -> bytes:
        """The associated data of the cipher."""
        ids = f"{self.run_id}/{self.epoch}/{self.artifact_id}/{self.owner_id}"
        return f"{_SEAL_DOMAIN}/{ids}/{self.kind}/{self.ordinal}".encode()


def seal(key: bytes, place: SealedPlace, salt: bytes, content: bytes) -> bytes:
    """AES-256-GCM of ``salt || content``: nonce (12 bytes), ciphertext, tag (16). The salt has 32 bytes."""
    if len(salt) != SALT_BYTES:
        raise ValueError("a commitment's salt has 32 bytes")
    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, salt + content, place.bound)


def unseal(key: bytes, place: SealedPlace, sealed: bytes) -> tuple[bytes, bytes]:
    """The salt and the content.

    Raises RefusedError ``text-damaged`` for bytes that were changed, moved here from another place, or sealed with
    another key.
    """
    try:
        opened = AESGCM(key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], place.bound)
    except (InvalidTag, ValueError):
        opened = b""
    if len(opened) < SALT_BYTES:
        raise RefusedError(
            "text-damaged",
            f"the stored {place.kind} of {place.owner_id} is not what was sealed",
            hint="`podium audit verify --database` looks at the record; restore the text from a backup",
        )
    return opened[:SALT_BYTES], opened[SALT_BYTES:]
