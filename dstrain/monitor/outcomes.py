"""Records of a training result: the best model in `summary.json`, and generated texts in `samples.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dstrain.errors import DstrainError
from dstrain.monitor.sinks.sink import Table, markdown
from dstrain.records import from_data, type_config


@dataclass(frozen=True, slots=True, kw_only=True)
class BestModel:
    """The model of the lowest evaluation loss, and the end of its run."""

    __pydantic_config__ = type_config

    step: int
    """Optimizer steps of the model."""
    loss: float
    """Its evaluation loss."""
    stopped_at: int | None = None
    """The step at which the run stopped early; None if it did not."""
    evaluations: int | None = None
    """Evaluations without a lower loss that stopped it."""

    @property
    def text(self) -> str:
        """The end of the run in words.

        >>> BestModel(step=8, loss=3.1234).text
        'the evaluation loss was best at step 8: 3.1234'
        >>> print(BestModel(step=8, loss=3.1234, stopped_at=12, evaluations=2).text)
        stopped early at step 12: the evaluation loss did not improve for 2 evaluations; best 3.1234 at step 8
        """
        if self.stopped_at is None:
            return f"the evaluation loss was best at step {self.step:,}: {self.loss:.4f}"
        often = f"{self.evaluations} evaluations" if self.evaluations != 1 else "an evaluation"
        return (
            f"stopped early at step {self.stopped_at:,}: the evaluation loss did not improve for {often}; "
            f"best {self.loss:.4f} at step {self.step:,}"
        )


def best_model(summary: Mapping[str, Any]) -> BestModel | None:
    """Returns the best model that a summary records; None if it records none that can be read."""
    try:
        return from_data(BestModel, summary["best"], locate=lambda _: "summary.json")
    except (KeyError, TypeError, DstrainError):
        return None


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
