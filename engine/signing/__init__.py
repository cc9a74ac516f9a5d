"""The signer: keys and memory outside of the database, checkpoints, and anchors that carry them further away."""

from __future__ import annotations

from engine.signing.anchors import Anchor, FileAnchor, TimestampAnchor
from engine.signing.folder import AuditFolder
from engine.signing.keeping import AuditSettings, LogKeeper, log_keeper
from engine.signing.signer import Signer

__all__ = [
    "Anchor",
    "AuditFolder",
    "AuditSettings",
    "FileAnchor",
    "LogKeeper",
    "Signer",
    "TimestampAnchor",
    "log_keeper",
]
