"""What a run shows when nothing of it can go on: that it waits, for what, and since when.

Only shows. What may be called is decided by Open, from orders, budgets and the states of steps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from engine.store import queries
from engine.store.exchange import Connection, exchange
from engine.store.lineage import FAMILY
from engine.store.run_writer import RunWriter
from engine.store.states import RUN_LIVE

# What a step waits for after it failed under the policy `wait`: an operator's answer.
OPERATOR: Final = "operator"
PAUSED: Final = "paused"
BUDGET: Final = "budget"
# What ends only when somebody answers, raises a limit or gives a key.
BUDGET_REASONS: Final = frozenset({f"{BUDGET}-usd", f"{BUDGET}-tokens", f"{BUDGET}-calls"})

# Calls of the run and of everything below it, but for attempts that the same transaction closes.
READ_CALLS: Final = f"""{FAMILY}
    SELECT attempts.id FROM attempts JOIN family ON attempts.run_id = family.id
    WHERE attempts.state = 'sent' AND attempts.id <> ALL(%s::uuid[]) LIMIT 1
"""  # noqa: S608  # a constant
# Entries that may say that a step or its run began to wait, newest first. An entry is canonical JSON.
WAIT_ENTRIES: Final = """
    SELECT type, at, body FROM ledger_entries
    WHERE run_id = :run_id AND position(convert_to('"waiting"', 'UTF8') IN body) > 0
    ORDER BY seq DESC
"""


def waits_for(unfinished: Sequence[Mapping[str, Any]]) -> str | None:
    """What a run waits for, if nothing of it runs and nothing can begin before that came; else None.

    ``unfinished`` are the present round's steps that are neither finished nor left out, with ``position``, ``state``,
    ``reason`` and ``reads``.
    """
    left = {row["position"] for row in unfinished}
    for row in unfinished:
        if row["state"] == "running" or (row["state"] == "pending" and left.isdisjoint(row["reads"])):
            return None
    return next((str(row["reason"]) for row in unfinished if row["state"] == "waiting"), None)


def show_waiting(writer: RunWriter, unfinished: Sequence[Mapping[str, Any]], *, after_call: bool = True) -> None:
    """Shows the run as waiting if nothing of it runs or can begin before somebody has done something.

    After a call what it had reserved is free, so steps that wait for the budget are looked at again first.
    """
    if writer.run["state"] not in RUN_LIVE:
        return
    if writer.run["paused_at"] is not None:
        if unfinished and not any(row["state"] == "running" for row in unfinished):
            writer.set_run_state("waiting", PAUSED)
        return
    if after_call and any(row["state"] == "waiting" and row["reason"] in BUDGET_REASONS for row in unfinished):
        return
    reason = waits_for(unfinished)
    if reason is not None:
        writer.set_run_state("waiting", reason)


async def show_held(connection: Connection, writer: RunWriter, place: tuple[int, int | None], code: str | None) -> None:
    """Shows what an Open that was held has found: a pause, an empty budget, or that an operator has to answer.

    ``place`` is the round and the position; for planning (None) there is nothing else that could go on.
    """
    round_number, position = place
    if code == PAUSED:
        (calls,) = await exchange(connection, [(READ_CALLS, (writer.run_id, writer.closed_attempts))])
        # While a call is in flight the run still runs; the end of the call shows the pause.
        if not calls and writer.run["state"] != "waiting":
            writer.set_run_state("waiting", PAUSED)
        return
    if position is None:
        writer.set_run_state("waiting", code)
        return
    (rows,) = await exchange(connection, [(queries.READ_UNFINISHED, (writer.run_id, round_number))])
    # The step's own row is as it was before this transaction.
    own = {"state": "waiting", "reason": code}
    if not rows:
        # Every step is done, and yet the run may not end: its answer waits for people.
        writer.set_run_state("waiting", code)
        return
    present = [{**row, **own} if row["position"] == position else row for row in rows]
    show_waiting(writer, present, after_call=False)


def waiting_since(entries: Sequence[Any], steps: Sequence[tuple[int, int]]) -> dict[tuple[int, int] | None, datetime]:
    """Since when each of the waiting ``steps`` (round and position) waits, and under None since when the run does.

    ``entries`` are the rows of `WAIT_ENTRIES`. What the record does not say is left out.
    """
    found: dict[tuple[int, int] | None, datetime] = {}
    for row in entries:
        if len(found) > len(steps):
            break
        data = json.loads(bytes(row.body))["data"]
        if row.type == "run.changed":
            found.setdefault(None, row.at)
            continue
        moved = data if row.type == "step.changed" else data.get("moved") or {}
        place = (data.get("round"), data.get("step"))
        if moved.get("state") == "waiting" and place in steps:
            found.setdefault(place, row.at)
    return found
