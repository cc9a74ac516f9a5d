"""A stand-in for the keeper that tests can kill: it holds a home and runs servers until its standard input ends.

    python -m tests.support.holder HOME [postgres] [temporal] [no-namespaces]

It prints one JSON line when everything runs: `{"pid", "postgres": {"pid", "url", "migration_url"}, "temporal": {"pid", "address",
"cluster_id", "was_new_file"}}`, or `{"code", "message", "hint"}` and ends with the error's exit code.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from engine.errors import PodiumError
from engine.keeper.home import lock_home, open_home
from engine.keeper.postgres import PostgresServer
from engine.keeper.temporal import TemporalServer


async def hold(path: Path, wanted: set[str]) -> None:
    home = open_home(path)
    lock = lock_home(home)
    assert lock is not None, "the home is locked"
    facts: dict[str, Any] = {"pid": os.getpid()}
    postgres = PostgresServer(home, namespaces="no-namespaces" not in wanted)
    temporal = TemporalServer(home)
    if "postgres" in wanted:
        await postgres.start()
        facts["postgres"] = {"pid": postgres.pid, "url": postgres.url, "migration_url": postgres.migration_url}
    if "temporal" in wanted:
        await temporal.start()
        facts["temporal"] = {
            "pid": temporal.pid,
            "address": temporal.address,
            "cluster_id": temporal.cluster_id,
            "was_new_file": temporal.was_new_file,
        }
    print(json.dumps(facts), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await postgres.stop()
    await temporal.stop()
    lock.release()


def main() -> None:
    code = 0
    try:
        asyncio.run(hold(Path(sys.argv[1]), set(sys.argv[2:])))
    except PodiumError as error:
        print(json.dumps({"code": error.code, "message": error.message, "hint": error.hint}), flush=True)
        code = int(error.exit_code)
    # A process that used Temporal's SDK sometimes aborts when the interpreter shuts down.
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
