"""Click types that parse at the border."""

from __future__ import annotations

from enum import Enum
from typing import Any

import click

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


class Choice(click.ParamType[Enum]):
    """One member of an Enum by its value, with did-you-mean."""

    name = "choice"

    def __init__(self, choices: type[Enum]) -> None:
        self.choices = choices

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """Returns the values, as they stand in help."""
        return "|".join(str(member.value) for member in self.choices)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Enum:
        """Returns the member."""
        if isinstance(value, Enum):
            return value
        legal = [str(member.value) for member in self.choices]
        if str(value).lower() in legal:
            return self.choices(str(value).lower())
        near = nearest(str(value), legal)
        return self.fail(f'"{value}": {f"did you mean {near}?" if near else "legal: " + ", ".join(legal)}', param, ctx)


SIZE = Size()
"""The size type."""
