"""How long ``podium --help`` takes, beside a bare interpreter."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

from benchmarks.results import Figure
from benchmarks.rig import median

ROUNDS = 15


async def help_time() -> list[Figure]:
    """Medians of processes started in turn."""
    return await asyncio.to_thread(_measure)


def _measure() -> list[Figure]:
    ours = [sys.executable, "-m", "engine.cli.main", "--help"]
    bare = [sys.executable, "-c", "pass"]
    times: dict[str, list[float]] = {"ours": [], "bare": []}
    for _ in range(ROUNDS):
        times["bare"].append(_seconds(bare))
        times["ours"].append(_seconds(ours))
    ours_s, bare_s = median(times["ours"]), median(times["bare"])
    return [
        Figure(
            "podium --help",
            ours_s,
            "s",
            0.4,
            at_least=False,
            detail=f"{ours_s / bare_s:.1f} x a bare interpreter ({bare_s * 1000:.0f} ms)",
        )
    ]


def _seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started
