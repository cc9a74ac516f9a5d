"""`podium doctor`: looks at everything that a run needs and says what is wrong with it.

Only looks, with one exception that is asked for by name: `--adopt-temporal`. It makes no home where there is none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from engine.cli import terminal
from engine.errors import ExitCode, InputError

if TYPE_CHECKING:
    from engine.cli.checks import Check
    from engine.settings import Settings

STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command()
@click.option("--pool", "pool_names", multiple=True, metavar="NAME|FILE", help="Check this pool's keys; repeatable.")
@click.option("--adopt-temporal", is_flag=True, help="Accept the Temporal cluster in use when the old one is gone.")
@click.option("--adopt-keys", is_flag=True, help="Accept the key store in use when the old one is gone.")
@click.option("--json", "as_json", is_flag=True, help="Print the checks as one JSON object.")
def doctor(pool_names: tuple[str, ...], adopt_temporal: bool, adopt_keys: bool, as_json: bool) -> int:
    """Check the installation, the home, the servers and the keys. Ends with 5 if a check fails."""
    from engine.cli.session import run_async
    from engine.settings import load_settings
    from worker_pools.pool import load_pool

    settings = load_settings()
    pools = [load_pool(name) for name in pool_names or ("local",)]
    if adopt_temporal and settings.embedded:
        raise InputError(
            "servers-not-yours",
            "--adopt-temporal is for servers of your own",
            hint="the keeper looks after the embedded ones itself",
        )
    from engine.cli.checks import check_all

    checks = run_async(check_all(settings, pools, adopt=adopt_temporal, adopt_keys=adopt_keys))
    failed = any(check.status == "fail" for check in checks)
    if as_json:
        _print_json(checks, healthy=not failed)
    else:
        _print_lines(checks, settings)
    return ExitCode.UNAVAILABLE if failed else ExitCode.OK


def _print_json(checks: list[Check], *, healthy: bool) -> None:
    from dataclasses import asdict

    from engine.cli.contract import versioned

    terminal.out_json(versioned({"healthy": healthy, "checks": [asdict(check) for check in checks]}))


def _print_lines(checks: list[Check], settings: Settings) -> None:
    from rich.text import Text

    from engine.cli.render import show

    where = f"the home {settings.home}" if settings.embedded else "servers of your own"
    terminal.out(f"podium with {where}")
    for check in checks:
        line = Text(f"{check.status:<5}", STYLES[check.status])
        line.append(f"{check.name}: {terminal.inert(check.text)}", "")
        show(line)
        if check.hint:
            terminal.out(f"      {terminal.inert(check.hint)}")
