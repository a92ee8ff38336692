"""Texts that the model generated in training: their record, a line of `samples.jsonl` each, and a table of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dstrain.errors import DstrainError
from dstrain.monitor.sinks.sink import Table, markdown
from dstrain.records import from_data, type_config

COLUMNS = ("prompt", "text", "tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedText:
    """Answer of the model to a prompt after a step."""

    __pydantic_config__ = type_config

    step: int
    prompt: str
    text: str
    tokens: int
    """Tokens of the text, including the end token."""
    seconds: float
    """Time of this text on its rank, with waiting for other ranks under ZeRO-3."""


def table(texts: Sequence[GeneratedText]) -> Table:
    """Returns the texts of one step as sinks show them."""
    rows = tuple((one.prompt, one.text, f"{one.tokens:,}") for one in texts)
    step = texts[-1].step if texts else 0
    return Table(name="samples", step=step, text=markdown(COLUMNS, rows) + "\n", columns=COLUMNS, rows=rows)


def newest(lines: Sequence[Mapping[str, Any]]) -> tuple[GeneratedText, ...]:
    """Returns the texts after the last step in lines of `samples.jsonl`; damaged lines are left out."""
    texts: dict[str, GeneratedText] = {}
    for line in reversed(lines):
        try:
            one = from_data(GeneratedText, line, locate=lambda _: "samples.jsonl")
        except DstrainError:
            continue
        if texts and (one.step != next(iter(texts.values())).step or one.prompt in texts):
            break
        texts[one.prompt] = one
    return tuple(reversed(texts.values()))
