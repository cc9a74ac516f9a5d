"""Recording that somebody reads stored text, where the run's pool asks for it (`policy.reads`).

Must never keep an owner from reading unless the pool says so: with `recorded` a read goes on with a warning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.cli import terminal
from engine.errors import PodiumError, RefusedError

if TYPE_CHECKING:
    from engine.cli.session import Session
    from engine.store.reading import ReadCommand
    from engine.store.snapshots import RunSnapshot
    from worker_pools.pool import Pool


async def note_read(
    session: Session,
    run: RunSnapshot,
    pool: Pool | None,
    command: ReadCommand,
    place: tuple[int, int] | None = None,
) -> None:
    """Records the read before anything is shown. Raises RefusedError ``read-not-recorded`` if the pool requires it.

    A pool that this version cannot read asks for nothing.
    """
    wanted = "unrecorded" if pool is None else pool.policy.reads
    if wanted == "unrecorded":
        return
    from engine.store.reading import Reading, record_read

    settings = session.settings
    try:
        await record_read(session.database, Reading(run.id, settings.actor_id, settings.on_behalf_of, command, place))
    except PodiumError as error:
        if wanted == "required":
            raise RefusedError(
                "read-not-recorded",
                f"the pool of run {run.id} requires that reads are recorded, and that failed: {error.message}",
                hint=error.hint,
            ) from None
        terminal.err(f"warning: this read could not be recorded: {terminal.inert(error.message)}")
