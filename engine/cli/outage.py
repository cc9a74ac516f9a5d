"""What is said when servers do not answer or cannot write: why, what becomes of the run, what to do.

Only looks. Must never start a keeper: whoever asks is already in trouble.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from engine.errors import PodiumError, UnavailableError
from engine.keeper import space

if TYPE_CHECKING:
    from engine.cli.session import Session

# What the way to a server says for itself; of the embedded ones it knows neither keeper nor home.
AWAY: Final = frozenset({"database-unreachable", "temporal-unreachable", "disk-full"})
STATUS_WAIT_S: Final = 2.0


async def shortage(home: Path | None) -> UnavailableError | None:
    """`disk-full` if the servers of this home lack space; None for servers of one's own: only their errors tell."""
    if home is None:
        return None
    found = space.shortage(home)
    if found is None and ((await _status(home)) or {}).get("disk_full"):
        found = space.full(home)
    return found


def shortage_words(short: UnavailableError, run_id: UUID) -> tuple[str, str]:
    """Message and hint for a run that lacks space."""
    return (
        f"{short.message}; run {run_id} cannot go on before there is some",
        f"{short.hint}; the run then goes on by itself",
    )


async def explained(error: UnavailableError, session: Session) -> UnavailableError:
    """The error of a server that went away under a command, in words that fit where the servers come from."""
    if error.code not in AWAY:
        return error
    record, follow = _what_becomes_of_it(session)
    home = session.services.home
    if home is None:
        if session.run_id is None and not session.unconfirmed:
            return error
        return UnavailableError(error.code, f"{error.message}; {record}", hint=follow)
    short = await shortage(home)
    if short is not None:
        return UnavailableError(short.code, f"{short.message}; {record}", hint=f"{short.hint}, then: {follow}")
    if await _status(home) is None:
        return UnavailableError(
            "keeper-gone", f"the keeper of {home} is gone; {record}", hint=f"the next command starts it again: {follow}"
        )
    name, log = ("Temporal", "temporal") if error.code.startswith("temporal") else ("PostgreSQL", "postgres")
    return UnavailableError(
        error.code,
        f"the embedded {name} does not answer; {record}",
        hint=f"{follow}; its log is {home}/logs/{log}.log",
    )


def _what_becomes_of_it(session: Session) -> tuple[str, str]:
    run_id = session.run_id
    if run_id is not None:
        goes_on = "the next command continues it" if session.services.embedded else "goes on when it is back"
        return f"run {run_id} is on record and {goes_on}", f"podium watch {run_id}"
    if session.unconfirmed:
        return "the run was not confirmed", "podium list (it shows whether there is one)"
    return "runs are on record and go on with it", "podium list"


async def _status(home: Path) -> dict[str, Any] | None:
    """What the keeper says of itself; None if there is none or it says nothing."""
    from engine.keeper.client import keeper_status

    try:
        async with asyncio.timeout(STATUS_WAIT_S):
            return await keeper_status(home)
    except (PodiumError, OSError, TimeoutError):
        return None
