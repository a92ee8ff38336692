"""Click parameter types that parse values and complete them in the shell."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from enum import Enum, StrEnum
from typing import Any

import click
from click.shell_completion import CompletionItem

from dstrain import removed
from dstrain.errors import InvalidConfig, nearest
from dstrain.units import parse_bytes


class Size(click.ParamType[int]):
    """Bytes: `80GiB`, `2TB`."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Returns bytes."""
        if isinstance(value, int):
            return value
        try:
            return parse_bytes(value)
        except InvalidConfig as error:
            return self.fail(str(error).replace("\n", ". "), param, ctx)


class Release(click.ParamType[str]):
    """A release of a package: `0.18.9`."""

    name = "version"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Returns the release as it was typed."""
        if re.fullmatch(r"\d+(\.\d+){1,3}\S*", str(value)):
            return str(value)
        return self.fail(f'"{value}" is not a release such as 0.18.9', param, ctx)


class OnConflict(StrEnum):
    """Whose value to take for a key that you and dstrain both changed."""

    KEEP = "keep"
    NEW = "new"
    ASK = "ask"


class Choice(click.ParamType[Enum]):
    """One of several members of an Enum by its value, with did-you-mean."""

    name = "choice"

    def __init__(self, choices: Iterable[Enum]) -> None:
        self.choices = {str(member.value): member for member in choices}

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Returns the values for the help text."""
        return "|".join(self.choices)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Enum:
        """Returns the member."""
        if isinstance(value, Enum):
            return value
        if (member := self.choices.get(str(value).lower())) is not None:
            return member
        if ctx is not None and param is not None:
            path = f"{' '.join(ctx.command_path.split()[1:])} {param.opts[0]}={value}"
            if path in removed.COMMANDS:
                return self.fail(f'"{value}" is gone. {removed.COMMANDS[path]}', param, ctx)
        near = nearest(str(value), list(self.choices))
        legal = ", ".join(self.choices)
        return self.fail(f'"{value}": {f"did you mean {near}?" if near else f"legal: {legal}"}', param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Returns the values that start with `incomplete`."""
        return _beginning(self.choices, incomplete)


class Named(click.ParamType[str]):
    """A name from a table, or another value that the verb accepts, such as a file."""

    name = "text"

    def __init__(self, names: Callable[[], Iterable[str]], *, or_file: bool = False) -> None:
        """`names` returns the names of the table; with `or_file`, a path is legal too."""
        self.names = names
        self.or_file = or_file

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Returns the names that start with `incomplete`; without any, the shell completes a path."""
        items = _beginning(self.names(), incomplete)
        return items or ([CompletionItem(incomplete, type="file")] if self.or_file else [])


def _beginning(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(incomplete.lower())]


SIZE = Size()
"""The size type."""
