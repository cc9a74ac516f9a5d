"""The command `podium`: finds the sub-command, turns every way of ending into an exit code, and ends the process.

Must never import anything heavy at the top: `podium --help` has 0.4 s, the interpreter's own start included.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final, NoReturn, cast

import click

from engine.cli import terminal
from engine.cli.ending import report_bug, report_error, report_interrupt, report_usage
from engine.errors import BugError, ExitCode, PodiumError

# name: (module, attribute, one line for the overview). The lines are here so that the overview imports no command.
COMMANDS: Final[dict[str, tuple[str, str, str]]] = {
    "run": ("engine.cli.run", "run", "Run a task: plan it, perform the plan, print the answer."),
    "show": ("engine.cli.show", "show", "Show a run: plan, steps, attempts, costs, answer."),
    "list": ("engine.cli.listing", "list_runs", "List the newest runs."),
    "watch": ("engine.cli.watch", "watch", "Follow a run until it ends or waits for somebody."),
    "output": ("engine.cli.output", "output", "Print a run's answer or a step's output, nothing else."),
    "cancel": ("engine.cli.cancel", "cancel", "End a run; what it finished stays."),
    "pause": ("engine.cli.pause", "pause", "Start nothing new in a run until it is unpaused."),
    "unpause": ("engine.cli.unpause", "unpause", "Let a paused run go on."),
    "resume": ("engine.cli.resume", "resume", "Continue a run that failed or was cancelled."),
    "fork": ("engine.cli.fork", "fork", "Make a new run from one with edits; what they cannot reach is reused."),
    "retry": ("engine.cli.answers", "retry", "Answer a step that failed and waits: try it again."),
    "skip": ("engine.cli.answers", "skip", "Answer a step that failed and waits: leave it out."),
    "abort": ("engine.cli.answers", "abort", "Answer a step that failed and waits: give it and its run up."),
    "review": ("engine.cli.review", "review", "Review plans, steps and answers that wait for people."),
    "person": ("engine.cli.person", "person", "Say which accounts are one person."),
    "budget": ("engine.cli.budget", "budget", "Show what a run may still use, or change it."),
    "plan": ("engine.cli.plan", "plan", "Check plans."),
    "pool": ("engine.cli.pool", "pool", "Check pools."),
    "audit": ("engine.cli.audit", "audit", "Export and verify evidence; what happened to a run."),
    "erase": ("engine.cli.erase", "erase", "Erase texts of a run for good; the record of them stays."),
    "hold": ("engine.cli.hold", "hold", "Keep texts from being erased while a matter is open."),
    "retention": ("engine.cli.retention", "retention", "Erase texts that have been kept long enough."),
    "worker": ("engine.cli.worker", "worker", "Work for servers of your own, until stopped."),
    "up": ("engine.cli.up", "up", "Keep the embedded servers running, in the foreground."),
    "down": ("engine.cli.up", "down", "Stop the embedded servers."),
    "db": ("engine.cli.db", "db", "Look after the database."),
    "doctor": ("engine.cli.doctor", "doctor", "Check the installation, the servers and the keys."),
}

EXIT_CODES: Final = (
    "Exit codes: 0 ok; 1 the run failed or the request was refused; 2 bad input, usage or an invalid plan; "
    "3 waiting for a person or a secret; 4 cancelled; 5 a service is unavailable or incompatible; "
    "130 interrupted while the run goes on."
)


class LazyGroup(click.Group):
    """A group that imports a command only when it is called or when its own help is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # the signature is click's
        """The names in the overview's order: what people need first comes first."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  # the signature is click's
        """Imports the command; None for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        return cast("click.Command", getattr(import_module(module), attribute))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  # the signature is click's
        """Writes the overview without importing what it lists."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, _, summary) in COMMANDS.items()])


def _show_version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted:
        return
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("podium")
    except PackageNotFoundError:
        found = "(not installed)"
    terminal.out(f"podium {found}")
    context.exit(ExitCode.OK)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, epilog=EXIT_CODES)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show it.")
def podium() -> None:
    """Durable runs of Conductor plans.

    Without settings everything (Postgres, Temporal, a small model) runs on this machine and keeps its data in
    ./.podium or $PODIUM_HOME. PODIUM_DATABASE_URL and PODIUM_TEMPORAL_ADDRESS name servers of your own.
    """


def invoke(arguments: Sequence[str]) -> int:  # noqa: PLR0911  # one return for each way in which a command can end
    """Runs a command line and returns its exit code; reports every error and lets none through."""
    options = list(arguments)
    as_json = "--json" in (options[: options.index("--")] if "--" in options else options)
    try:
        # Without its standalone mode click leaves errors to us and gives back what the command returned.
        result = podium.main(options, prog_name="podium", standalone_mode=False)
    except BugError as error:
        return report_bug(error, as_json=as_json)
    except PodiumError as error:
        return report_error(error, as_json=as_json)
    except click.ClickException as error:
        return report_usage(error, as_json=as_json)
    except (KeyboardInterrupt, click.Abort):
        return report_interrupt()
    except SystemExit as error:
        # click ends like this when nobody reads the help any more.
        return error.code if isinstance(error.code, int) else ExitCode.OK
    except BaseException as error:  # noqa: BLE001  # nobody is above us, and a user never sees a traceback
        return report_bug(error, as_json=as_json)
    return int(result or ExitCode.OK)


def main() -> NoReturn:
    """The entry point of the command. Never returns."""
    terminal.prepare()
    code = invoke(sys.argv[1:])
    terminal.flush()
    # A process that used Temporal's SDK sometimes aborts while the interpreter is taken down, with exit code 134 or 139
    # instead of ours (temporalio/sdk-python#300). So it is not taken down: this is the only way out of the process.
    os._exit(code)


if __name__ == "__main__":
    main()
