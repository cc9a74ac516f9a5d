"""The long form: `python -m tests.support.crash [--kills N] [--runs N] [--seed N]`. Ends with 1 if a promise was broken.

The seed decides who is killed and when; PODIUM_CRASH_SEED sets it too. What the processes do meanwhile is theirs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys

from tests.support.crash.suite import CrashTest, crash


def main() -> int:
    parser = argparse.ArgumentParser(prog="crash", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="processes to kill (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=50, help="runs in flight at a time (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=3, help="worker processes (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=int(os.environ.get("PODIUM_CRASH_SEED") or random.randrange(10**6)))
    arguments = parser.parse_args()
    test = CrashTest(
        seed=arguments.seed, kills=arguments.kills, runs=arguments.runs, workers=arguments.workers, top_up=True
    )
    verdict = asyncio.run(crash(test))
    print(verdict.report)
    print(
        f"seed {test.seed}: {len(verdict.faults)} faults" if verdict.faults else f"seed {test.seed}: all promises kept"
    )
    return int(bool(verdict.faults))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # A process that used Temporal's SDK sometimes aborts when the interpreter shuts down.
    os._exit(code)
