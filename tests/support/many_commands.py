"""Runs command lines of `podium`, several at a time, each in a child that ends exactly as the command ends.

The children are forked from a process that has imported everything, so that two hundred of them are quick. Nothing
has used Temporal's SDK before the fork. A child whose `main` came back would go on to the interpreter's own end, which
is where a process that used the SDK sometimes aborts.

Standard input: a JSON array of argument lists. Standard output: a JSON array of exit codes (negative: a signal).
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module

from engine.cli.main import COMMANDS, main

AT_ONCE = 4


def spawn(arguments: list[str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    sys.argv = ["podium", *arguments]
    main()
    raise AssertionError("the command came back")


def run_all(commands: list[list[str]]) -> list[int]:
    codes: dict[int, int] = {}
    waiting: dict[int, int] = {}
    for number, arguments in enumerate(commands):
        if len(waiting) == AT_ONCE:
            reap(waiting, codes)
        waiting[spawn(arguments)] = number
    while waiting:
        reap(waiting, codes)
    return [codes[number] for number in range(len(commands))]


def reap(waiting: dict[int, int], codes: dict[int, int]) -> None:
    pid, status = os.wait()
    codes[waiting.pop(pid)] = os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    for module, _, _ in COMMANDS.values():
        import_module(module)
    for module in (
        "service",
        "temporal_client",
        "keeper.client",
        "store.schema",
        "cli.checks",
        "cli.views",
        "cli.tables",
    ):
        import_module(f"engine.{module}")
    given = json.loads(sys.stdin.read())
    print(json.dumps(run_all(given)))
