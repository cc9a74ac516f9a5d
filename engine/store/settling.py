"""Settling: the end of a run that its last step's Close did not write, and the notes that a run waits."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from engine.store import queries
from engine.store.attempts import mark_seen
from engine.store.database import Connection, Database
from engine.store.run_writer import AttemptResult, lock_run
from engine.store.states import RUN_ENDED, STEP_LIVE, RunState, StepState


@dataclass(frozen=True, slots=True)
class Settlement:
    """How a run is to end: its state, our code for the reason, and what becomes of attempts still open."""

    run_id: UUID
    execution: int
    state: RunState
    code: str | None


@dataclass(frozen=True, slots=True)
class Settled:
    """The state that the run is in now; another one than asked for if it had ended before."""

    state: RunState
    code: str | None


async def settle_run(database: Database, settlement: Settlement) -> Settled:
    """Ends a run: closes open attempts as unknown, live steps as cancelled, then the run. Idempotent.

    A settlement by an execution that is no longer the run's changes nothing.
    """

    async def work(connection: Connection) -> Settled:
        writer, (attempts, steps) = await lock_run(
            connection,
            settlement.run_id,
            (queries.READ_OPEN_ATTEMPTS, (settlement.run_id,)),
            (_ALL_STEPS, (settlement.run_id,)),
        )
        run = writer.run
        if run["state"] in RUN_ENDED or run["execution"] != settlement.execution:
            return Settled(run["state"], run["reason"])
        mark_seen(writer, settlement.execution)
        for attempt in attempts:
            # Nobody will report on it any more; if somebody does, it is recorded as superseded.
            writer.close_attempt(attempt, AttemptResult("unknown", "outcome-lost"), [])
        for step in steps:
            if step["state"] in STEP_LIVE:
                writer.set_step_state(step, "cancelled", settlement.code or f"run-{settlement.state}")
        writer.set_run_state(settlement.state, settlement.code)
        await writer.flush()
        return Settled(settlement.state, settlement.code)

    return await database.write(work)


async def note_waiting(database: Database, run_id: UUID, round_number: int, position: int | None, code: str) -> None:
    """Shows that a step (or, with None, the planning) waits, and for what; a run that has ended stays as it is."""

    async def work(connection: Connection) -> None:
        writer, (steps,) = await lock_run(connection, run_id, (queries.READ_STEPS, (run_id, round_number)))
        if writer.run["state"] in RUN_ENDED:
            return
        waiting: StepState = "waiting"
        for step in steps:
            if step["position"] == position and step["state"] in STEP_LIVE:
                writer.set_step_state(step, waiting, code)
        others_run = any(step["state"] == "running" and step["position"] != position for step in steps)
        if not others_run:
            writer.set_run_state("waiting", code)
        await writer.flush()

    await database.write(work)


_ALL_STEPS = "SELECT round, position, state, reason FROM steps WHERE run_id = %s ORDER BY round, position"
