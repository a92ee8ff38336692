"""A Click group that suggests the closest match for an unknown command."""

from __future__ import annotations

import click

from dstrain import removed
from dstrain.errors import did_you_mean


class Group(click.Group):
    """A group of commands."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Returns the command and its arguments. Raises UsageError for an unknown one, with the closest or the way that
        remains."""
        names = self.list_commands(ctx)
        path = " ".join([*ctx.command_path.split()[1:], *args[:1]])
        if args and path in removed.COMMANDS:
            raise click.UsageError(f"'{path}' is gone. {removed.COMMANDS[path]}", ctx)
        if args and args[0] not in names and not args[0].startswith("-"):
            raise click.UsageError(f"No such command '{args[0]}'. {did_you_mean(args[0], names)}", ctx)
        return super().resolve_command(ctx, args)


def explained(error: click.ClickException) -> click.ClickException:
    """Returns the error, with the way that remains if the option is one of an earlier version."""
    if not isinstance(error, click.NoSuchOption) or error.ctx is None:
        return error
    path = " ".join([*error.ctx.command_path.split()[1:], error.option_name])
    return (
        click.UsageError(f"'{path}' is gone. {removed.COMMANDS[path]}", error.ctx)
        if path in removed.COMMANDS
        else error
    )
