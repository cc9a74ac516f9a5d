"""``python -m benchmarks [NAME …] [--json FILE]``: runs them one after the other and prints the table."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchmarks.command import help_time
from benchmarks.execution import dag, step_overhead, throughput
from benchmarks.ledger import appends, ledger_step
from benchmarks.load import load
from benchmarks.recovery import recovery
from benchmarks.results import Figure
from benchmarks.storage import storage
from benchmarks.verification import verification

BENCHMARKS: dict[str, Callable[[], Awaitable[list[Figure]]]] = {
    "help": help_time,
    "step": step_overhead,
    "dag": dag,
    "throughput": throughput,
    "storage": storage,
    "appends": appends,
    "ledger-step": ledger_step,
    "verification": verification,
    "recovery": recovery,
    "load": load,
}


def main() -> int:
    """Ends with 1 when a bound is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; all by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; known are {', '.join(BENCHMARKS)}")
    figures: list[Figure] = []
    load_before = os.getloadavg()[0]
    if load_before > (os.cpu_count() or 1) / 2:
        print(
            f"this machine is busy (load {load_before:.1f}): bounds in seconds say little", file=sys.stderr, flush=True
        )
    for name in arguments.names or BENCHMARKS:
        print(f"… {name}", file=sys.stderr, flush=True)
        for figure in asyncio.run(_run(name)):
            print(figure.line(), flush=True)
            figures.append(figure)
    if arguments.json is not None:
        machine = {
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "system": platform.platform(),
            # Other work on the machine: above the number of processors, bounds in seconds say little.
            "load_before": load_before,
        }
        document = {"machine": machine, "figures": [figure.as_json() for figure in figures]}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    return int(any(figure.holds is False for figure in figures))


async def _run(name: str) -> list[Figure]:
    return await BENCHMARKS[name]()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # A process that used Temporal's SDK may abort while the interpreter shuts down, so it does not.
    os._exit(code)
