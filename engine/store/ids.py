"""Identifiers: run ids are UUIDv7 (RFC 9562), made here because PostgreSQL 15 has no function for it."""

from __future__ import annotations

import secrets
import time
from uuid import UUID, uuid5


def new_run_id() -> UUID:
    """A UUIDv7: 48 bits of milliseconds since 1970, then 74 random bits, so ids sort by time of creation."""
    milliseconds = time.time_ns() // 1_000_000
    value = (milliseconds & (2**48 - 1)) << 80 | secrets.randbits(80)
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return UUID(int=value)


def plan_id(run_id: UUID, round_number: int) -> UUID:
    """The id of a round's plan: derived, so that writing it twice cannot make two."""
    return uuid5(run_id, f"plan/{round_number}")


def step_id(run_id: UUID, round_number: int, position: int) -> UUID:
    """The id of a step: derived from its place."""
    return uuid5(run_id, f"step/{round_number}/{position}")


def artifact_id(owner_id: UUID, kind: str, ordinal: int = 0) -> UUID:
    """The id of an artifact: derived from its owner, kind and order among the parts."""
    return uuid5(owner_id, f"artifact/{kind}/{ordinal}")
