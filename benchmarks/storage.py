"""Bytes: what five steps of 50 KB that read all before them leave in Postgres and in Temporal's history."""

from __future__ import annotations

import contextlib
import sqlite3

from sqlalchemy import text

from benchmarks.results import Figure
from benchmarks.rig import Rig, rig

STEPS = 5
OUTPUT_BYTES = 50_000
RUNS = 20
TABLES = ("runs", "plans", "steps", "attempts", "artifacts", "ledger_entries", "ledger_heads")


async def storage() -> list[Figure]:
    """Bytes of all columns of the run's rows before compression, over the bytes of the outputs."""
    reads = [list(range(position)) for position in range(STEPS)]
    async with rig("plain") as one:
        one.provider.script({"text_bytes": OUTPUT_BYTES}, times=None)
        _, run_id = await one.podium(one.pool, reads, [f"Write part {position}." for position in range(STEPS)])
        stored = 0
        async with one.process.database.read() as connection:
            for table in TABLES:
                column = "id" if table == "runs" else "run_id"
                # The text form of a row counts a bytea twice (hexadecimal), so its length is taken as it is.
                binary = {"artifacts": "content", "ledger_entries": "body"}.get(table)
                size = f"octet_length(t::text) - octet_length({binary})" if binary else "octet_length(t::text)"
                stored += (
                    await connection.scalar(
                        text(f"SELECT coalesce(sum({size}), 0)::bigint FROM {table} t WHERE {column} = :run"),
                        {"run": run_id},
                    )
                    or 0
                )
        outputs = sum(len(step.output or "") for step in (await one.snapshot(run_id)).steps)
        description = await one.client.get_workflow_handle(f"run-{run_id}.1").describe()
        history = description.raw_description.workflow_execution_info.history_size_bytes
        disk = await _growth(one, reads)
    return [
        Figure(
            "bytes in Postgres",
            stored / outputs,
            "x output",
            1.2,
            at_least=False,
            detail=f"{stored:,} against {outputs:,} bytes of outputs",
        ),
        Figure(
            "Temporal history a step",
            history / STEPS,
            "bytes",
            2048,
            at_least=False,
            detail=f"{history:,} bytes for {STEPS} steps of {OUTPUT_BYTES:,} bytes",
        ),
        Figure(
            "Temporal's file a run",
            disk,
            "bytes",
            None,
            at_least=False,
            detail=f"what its database grows by, over {RUNS} such runs; it goes when the retention has passed",
        ),
    ]


async def _growth(one: Rig, reads: list[list[int]]) -> float:
    """Bytes in use that Temporal's database grows by for each run, its write-ahead log included."""
    path = one.services.temporal.database_path
    sizes = []
    for runs in (0, RUNS):
        for _ in range(runs):
            await one.podium(one.pool, reads, [f"Write part {position}." for position in range(STEPS)])
        with contextlib.closing(sqlite3.connect(path)) as connection:
            pages, free, size = (
                int(connection.execute(f"PRAGMA {name}").fetchone()[0])
                for name in ("page_count", "freelist_count", "page_size")
            )
        sizes.append((pages - free) * size)
    return (sizes[1] - sizes[0]) / RUNS
