"""That a person read stored text: one entry in the run's chain, where the run's pool asks for it.

Must never hold what was read: the entry names artifacts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal
from uuid import UUID

from engine.store.database import Database
from engine.store.exchange import Connection
from engine.store.ids import artifact_id
from engine.store.run_writer import lock_run

ReadCommand = Literal["output", "show", "watch", "audit log"]

# Outputs that steps have, whichever run made them.
_READ_OUTPUTS: Final = """
    SELECT round, position, accepted_attempt_id FROM steps
    WHERE run_id = %s AND accepted_attempt_id IS NOT NULL ORDER BY round, position
"""
# What `podium show` prints beside them.
_READ_SHOWN: Final = """
    SELECT id FROM artifacts
    WHERE run_id = %s AND kind IN ('task', 'plan', 'plan_text', 'plan_remarks', 'subtask', 'provider_message')
    ORDER BY id
"""


@dataclass(frozen=True, slots=True)
class Reading:
    """Who reads what of a run. With ``place`` (round and step) one output; else the answer, or for ``show`` all.

    ``artifacts`` are the ids of what is read, for a command that has found them itself.
    """

    run_id: UUID
    actor_id: str
    on_behalf_of: str | None
    command: ReadCommand
    place: tuple[int, int] | None = None
    artifacts: Sequence[str] | None = None


async def record_read(database: Database, reading: Reading) -> None:
    """Writes ``artifact.read``; nothing if there is nothing to read."""

    async def work(connection: Connection) -> None:
        writer, (outputs, shown) = await lock_run(
            connection,
            reading.run_id,
            (_READ_OUTPUTS, (reading.run_id,)),
            (_READ_SHOWN, (reading.run_id,)),
            actor_id=reading.actor_id,
        )
        writer.on_behalf_of = reading.on_behalf_of
        wanted = outputs
        if reading.place is not None:
            wanted = [row for row in outputs if (row["round"], row["position"]) == reading.place]
        elif reading.command != "show":
            # The answer is the last output there is.
            wanted = outputs[-1:]
        read = [str(artifact_id(row["accepted_attempt_id"], "output")) for row in wanted]
        if reading.command == "show":
            read += [str(row["id"]) for row in shown]
        if reading.artifacts is not None:
            read = list(reading.artifacts)
        if read:
            writer.entry("artifact.read", command=reading.command, read=read)
            await writer.commit()

    await database.write(work)
