"""Click commands that suggest the closest match for an unknown command, or list their options in sections."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

from dstrain import removed
from dstrain.errors import did_you_mean

F = TypeVar("F", bound=Callable[..., Any])


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


class Sectioned(click.Command):
    """A command whose help lists its options in sections."""

    def __init__(self, *arguments: Any, sections: Mapping[str, Sequence[str]], **attributes: Any) -> None:
        """`sections` has the names of their options; an option in none of them is listed last."""
        super().__init__(*arguments, **attributes)
        self.sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the options by section, in the order of the section."""
        records = {
            param.name: record for param in self.get_params(ctx) if (record := param.get_help_record(ctx)) is not None
        }
        for title, names in self.sections.items():
            if rows := [records.pop(name) for name in names if name in records]:
                with formatter.section(title):
                    formatter.write_dl(rows)
        with formatter.section("Output"):
            formatter.write_dl(list(records.values()))


def options(*listed: Callable[[F], F]) -> Callable[[F], F]:
    """Adds options to a command, in this order."""

    def add(function: F) -> F:
        for option in reversed(listed):
            function = option(function)
        return function

    return add


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
