"""Recording that somebody reads stored text, where the run's pool asks for it (`policy.reads`).

Must never keep an owner from reading unless the pool says so: with `recorded` a read goes on with a warning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from uuid import UUID

from engine.cli import terminal
from engine.errors import PodiumError, RefusedError

if TYPE_CHECKING:
    from engine.cli.session import Session
    from engine.evidence.record import Told
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
    await _note(session, run.id, pool, command, place=place)


async def note_log_read(session: Session, told: Sequence[Told]) -> None:
    """Records, run by run, which texts a timeline is about to show, as far as there are any. Raises as `note_read`."""
    from engine.cli.session import pinned_pool
    from engine.store.inputs import read_pinned

    read: dict[str, list[str]] = {}
    for one in told:
        shown = [said.artifact for said in one.said if said.text is not None]
        if shown:
            read.setdefault(one.line.run, []).extend(shown)
    for run, artifacts in read.items():
        _, digest = await read_pinned(session.database, UUID(run))
        pool = await pinned_pool(session.database, digest)
        await _note(session, UUID(run), pool, "audit log", artifacts=list(dict.fromkeys(artifacts)))


async def _note(
    session: Session,
    run_id: UUID,
    pool: Pool | None,
    command: ReadCommand,
    *,
    place: tuple[int, int] | None = None,
    artifacts: Sequence[str] | None = None,
) -> None:
    wanted = "unrecorded" if pool is None else pool.policy.reads
    if wanted == "unrecorded":
        return
    from engine.store.reading import Reading, record_read

    settings = session.settings
    reading = Reading(run_id, settings.actor_id, settings.on_behalf_of, command, place, artifacts)
    try:
        await record_read(session.database, reading)
    except PodiumError as error:
        if wanted == "required":
            raise RefusedError(
                "read-not-recorded",
                f"the pool of run {run_id} requires that reads are recorded, and that failed: {error.message}",
                hint=error.hint,
            ) from None
        terminal.err(f"warning: this read could not be recorded: {terminal.inert(error.message)}")
