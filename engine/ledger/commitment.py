"""Salted commitments to text: how the ledger proves what was said without holding it. Pure.

A bare hash of a short text is guessed in minutes. HMAC-SHA256 under a fresh 32-byte salt is not, and once the salt
is destroyed with the text, nothing about the text can be learned from the entry that is left.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

SALT_BYTES = 32
ARTIFACT_DOMAIN = b"podium/artifact/1/"
PROMPT_DOMAIN = b"podium/prompt/1/"


def new_salt() -> bytes:
    """32 fresh random bytes."""
    return secrets.token_bytes(SALT_BYTES)


def commitment(salt: bytes, domain: bytes, path: str, content: bytes) -> bytes:
    """HMAC-SHA256(salt, domain || path || 0x00 || content): 32 bytes. ``path`` must not hold a NUL."""
    if len(salt) != SALT_BYTES or "\0" in path:
        raise ValueError("a commitment needs a 32-byte salt and a path without NUL")
    return hmac.new(salt, domain + path.encode() + b"\0" + content, hashlib.sha256).digest()
