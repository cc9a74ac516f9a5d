"""Whether a command line is one that `podium` understands, without performing it."""

from __future__ import annotations

from collections.abc import Sequence

import click

from engine.cli.main import podium


def check_command_line(arguments: Sequence[str]) -> None:
    """Parses `podium ARGUMENTS` down to the last sub-command; raises click.ClickException where it makes no sense."""
    command: click.Command = podium
    rest = list(arguments)
    context: click.Context | None = None
    while True:
        try:
            context = command.make_context(command.name or "podium", rest, parent=context)
        except click.exceptions.Exit:
            # `--help` and `--version` have said what there is to say.
            return
        if not isinstance(command, click.Group):
            return
        # What a group does not take for itself is the name of a sub-command and its arguments.
        _, found, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert found is not None
        command = found
