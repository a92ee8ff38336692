"""A Click group that suggests the closest match for an unknown command."""

from __future__ import annotations

import click

from dstrain.errors import did_you_mean


class Group(click.Group):
    """A group of commands."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Returns the command and its arguments. Raises UsageError for an unknown one and suggests the closest."""
        names = self.list_commands(ctx)
        if args and args[0] not in names and not args[0].startswith("-"):
            raise click.UsageError(f"No such command '{args[0]}'. {did_you_mean(args[0], names)}", ctx)
        return super().resolve_command(ctx, args)
