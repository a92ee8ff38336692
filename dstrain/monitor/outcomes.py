"""Records of the checks before the first step, of the best model, and of generated texts, which reports show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from dstrain.errors import DstrainError
from dstrain.findings import SIGNS, Severity
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


Figures = Mapping[str, float | tuple[float | None, ...] | None]


class CheckName(StrEnum):
    """The checks, in this order."""

    LABELS = "labels"
    """Two samples are shown with the text that has loss."""
    WORST_BATCH = "worst batch"
    """Forward and backward of the heaviest micro-batch fit into memory."""
    FIRST_LOSS = "first loss"
    """The loss of that micro-batch is not far above a guessing model's."""
    GRADIENTS = "gradients"
    """Loss and gradients are finite on every rank."""
    TEMPLATE = "chat template"
    """The model knows the job's chat template as well as its own, if the job names one."""
    PACKING = "packing"
    """A packed row has the loss of its samples."""
    EVALUATION = "evaluation"
    """The heaviest micro-batch of an evaluation fits into memory."""
    GENERATION = "generation"
    """The model generates from the longest prompt of `samples`, if the job has any."""
    SAVING = "saving"
    """A checkpoint can be written, and those that exist at once fit on the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check of a run."""

    __pydantic_config__ = type_config

    name: CheckName
    passed: bool | None
    """None: it was skipped."""
    text: str
    """The finding or, of a skipped check, the reason, in words."""
    examples: tuple[str, ...] = ()
    """Samples, with marks around the text that has loss."""
    seconds: float = 0.0
    """Time that it took on rank 0; 0 if an earlier check has measured what it needs."""
    figures: Figures = field(default_factory=dict)
    """Measurements by name: losses, norms of each rank, tokens. None: not finite."""

    @property
    def line(self) -> str:
        """Returns the check as a line of text.

        >>> Check(name=CheckName.GRADIENTS, passed=True, text="norm 1.2 on 2 ranks", seconds=0.04).line
        '✓ gradients: norm 1.2 on 2 ranks (0.04 s)'
        """
        mark = "-" if self.passed is None else SIGNS[Severity.OK if self.passed else Severity.ERROR]
        took = f" ({self.seconds:.2g} s)" if self.seconds else ""
        return f"{mark} {self.name}: {self.text}{took}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """The checks before the first step of the last start."""

    __pydantic_config__ = type_config

    schema: int = 1
    """Version of the file."""
    step: int
    """Optimizer steps done before; above 0 in a run that was resumed."""
    checks: tuple[Check, ...]
    seconds: float
    """Time of all checks on rank 0."""
    limit_s: float
    """Time after which no further check begins."""


def finite(figures: Figures) -> Figures:
    """Returns figures with None, which JSON can say, in place of those that are not finite."""

    def valid(value: float | None) -> float | None:
        return value if value is None or math.isfinite(value) else None

    return {
        key: tuple(map(valid, value)) if isinstance(value, tuple) else valid(value) for key, value in figures.items()
    }
