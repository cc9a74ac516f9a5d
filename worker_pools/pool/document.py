"""The pinned form of a pool: canonical JSON with its templates' texts, from which a run is executed.

A run reads its pool from here and never from files again, so that editing a file cannot change a run under way.
The document holds the names of secrets, never their values.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import rfc8785
from pydantic import ValidationError

from engine.errors import BugError
from worker_pools.pool.model import Pool

DOCUMENT_FORMAT = "podium-pool/1"


def pool_document(pool: Pool) -> bytes:
    """The pool as canonical JSON (RFC 8785), UTF-8. Equal pools give equal bytes."""
    content: dict[str, Any] = {"format": DOCUMENT_FORMAT, "pool": pool.model_dump(mode="json")}
    return rfc8785.dumps(content)


def pool_digest(document: bytes) -> str:
    """SHA-256 of a pool document, 64 lower-case hexadecimal digits."""
    return hashlib.sha256(document).hexdigest()


def pool_from_document(document: bytes) -> Pool:
    """The pool of a document made by `pool_document`. Raises BugError `pool-document-unreadable` for anything else."""
    try:
        content = json.loads(document)
        if content["format"] == DOCUMENT_FORMAT:
            return Pool.model_validate(content["pool"])
    except (ValueError, KeyError, TypeError, ValidationError):
        # What went wrong may quote the document; the code says enough, and the bytes are kept.
        pass
    raise BugError("pool-document-unreadable", "a stored pool cannot be read by this version of Podium")
