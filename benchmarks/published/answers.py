"""What is predicted of published runs, beside what was measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from benchmarks.published.figures import Figures, Prediction
from benchmarks.published.rows import Basis, Outcome, Publisher, Row, is_time
from benchmarks.published.scope import Scope, scope
from benchmarks.published.shelf import find_gpu, gpus_at_work
from benchmarks.published.variants import packs

ALPACA_SAMPLES = 2000
"""Samples of one epoch of LitGPT's Alpaca2k. Source: litgpt/data/alpaca_2k.py."""


class Side(StrEnum):
    """Which errors count."""

    BOTH = "both"
    TOO_LOW = "too low"
    TOO_HIGH = "too high"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One figure, published and predicted."""

    id: str
    """The row."""
    table: str
    """The published table."""
    basis: str
    """What the figure counts."""
    quality: str
    """The row's quality, A, B or C."""
    measured: float
    """The published value."""
    predicted: float
    """The predicted value."""
    side: Side
    """Which errors count: only one side if the published sample length is an upper bound."""

    @property
    def error_ratio(self) -> float:
        """Predicted / measured − 1."""
        return self.predicted / self.measured - 1

    @property
    def counted_error(self) -> float:
        """The counted error: 0 on the side that does not count."""
        error = self.error_ratio
        if (self.side is Side.TOO_LOW and error > 0) or (self.side is Side.TOO_HIGH and error < 0):
            return 0.0
        return error


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a run fitted, and whether the planner says so."""

    id: str
    """The row."""
    table: str
    """The published table."""
    fitted: bool
    """Whether the run fitted."""
    predicted_ratio: float
    """Predicted memory of one GPU over its capacity; a run fits up to 1."""
    side: Side
    """`too low`: the length of samples is an upper bound, so that a run may fit although the prediction does not."""

    @property
    def says_fits(self) -> bool:
        """Whether the planner predicts that the run fits."""
        return self.predicted_ratio <= 1

    @property
    def counts(self) -> bool:
        """Whether the verdict can be judged right or wrong."""
        return self.side is Side.BOTH or self.says_fits or not self.fitted


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Everything about one row."""

    row: Row
    """The row."""
    scope: Scope
    """Parts of the row that are out of scope."""
    prediction: Prediction | None
    """Figures, or why the planner refused; None if the row is out of scope."""
    memory: tuple[Comparison, ...]
    """Comparisons of memory."""
    speed: Comparison | None
    """Tokens per second of one GPU."""
    verdict: Verdict | None
    """Verdict on whether the run fits."""


def answer(row: Row, prediction: Prediction | None) -> Answer:
    """Returns a row's measurements beside a prediction; None if the row is out of scope."""
    out = scope(row)
    figures = prediction if isinstance(prediction, Figures) else None
    return Answer(
        row=row,
        scope=out,
        prediction=prediction,
        memory=tuple(_memory(row, figures)) if figures and out.memory is None else (),
        speed=_speed(row, figures) if figures and out.speed is None else None,
        verdict=_verdict(row, figures) if figures and out.memory is None else None,
    )


def table_of(row: Row) -> str:
    """Returns the name of the table that a row is from: project, and title or file; swift's scripts are one table.

    The project is the repository, or the word after the last slash if the row names no repository.
    """
    if row.source.endswith(".sh"):
        return "ms-swift scripts"
    place, _, title = row.source.partition(" ")
    parts = place.split("/")
    if title.startswith("issue"):
        return "issues"
    project = parts[1].split("@")[0] if len(parts) > 1 else place
    words = title.split(" ")
    file = next((word for word in words if "." in word), "").split("/")[-1]
    after = title.partition('"')[2].rstrip('"') or " ".join(words[1:])
    return " ".join(filter(None, (project, after or file.removesuffix(".md"))))


def _memory(row: Row, figures: Figures) -> Iterable[Comparison]:
    """Yields a comparison for every peak that a row publishes."""
    unknown = figures.reserved_bytes_per_gpu if row.publisher is Publisher.TORCHTUNE else figures.device_bytes_per_gpu
    published = (
        (Basis.ALLOCATED, row.allocated_bytes, figures.live_bytes_per_gpu),
        (Basis.RESERVED, row.peak_bytes if row.basis is Basis.RESERVED else None, figures.reserved_bytes_per_gpu),
        (
            Basis.NVIDIA_SMI,
            row.nvidia_smi_bytes if row.outcome is Outcome.FITS else None,
            figures.device_bytes_per_gpu,
        ),
        (Basis.UNKNOWN, row.peak_bytes if row.basis is Basis.UNKNOWN else None, unknown),
    )
    for basis, measured, predicted in published:
        if measured is not None:
            yield Comparison(
                id=row.id,
                table=table_of(row),
                basis=str(basis),
                quality=row.quality,
                measured=measured,
                predicted=predicted,
                side=Side.TOO_LOW if is_bound(row) else Side.BOTH,
            )


def _verdict(row: Row, figures: Figures) -> Verdict | None:
    """Returns the verdict, or None if the GPU or the run's outcome is unknown."""
    gpu = find_gpu(row.gpu)
    if gpu is None or gpu.memory_bytes == 0 or row.outcome is Outcome.UNKNOWN:
        return None
    return Verdict(
        id=row.id,
        table=table_of(row),
        fitted=row.outcome is Outcome.FITS,
        predicted_ratio=figures.device_bytes_per_gpu / gpu.memory_bytes,
        side=Side.TOO_LOW if is_bound(row) else Side.BOTH,
    )


def _speed(row: Row, figures: Figures) -> Comparison | None:
    """Returns the comparison of speed, or None if the planner predicts none."""
    measured = tokens_per_s_per_gpu(row)
    if figures.tokens_per_s_per_gpu is None or measured is None:
        return None
    return Comparison(
        id=row.id,
        table=table_of(row),
        basis="tokens/s/GPU",
        quality=row.quality,
        measured=measured,
        predicted=figures.tokens_per_s_per_gpu,
        side=Side.TOO_HIGH if is_bound(row) else Side.BOTH,
    )


def is_bound(row: Row) -> bool:
    """Returns whether the stated length is only an upper bound: samples vary, and are not packed into full rows, which
    rows without padding are not."""
    return row.lengths_vary and not (row.publisher is Publisher.SWIFT and packs(row) and not row.says("padding_free"))


def tokens_per_s_per_gpu(row: Row) -> float | None:
    """Returns the published throughput in tokens per second of one GPU, at most where lengths vary.

    A time is turned with the samples that it is for: 1000 micro-batches, the epochs of Alpaca2k, or one step.
    """
    if row.throughput is None or row.seq_len is None or row.micro_batch is None:
        return None
    gpus = gpus_at_work(row)
    unit = row.throughput_unit
    if unit == "tokens/s/GPU":
        return row.throughput
    if unit == "tokens/s":
        return row.throughput / gpus
    if unit == "samples/s":
        return row.throughput * row.seq_len / gpus
    if not is_time(unit):
        return None
    return _tokens_of_time(row, gpus) / row.throughput


def _tokens_of_time(row: Row, gpus: int) -> float:
    """Returns the tokens of one GPU in the time that a row publishes."""
    assert row.seq_len is not None
    assert row.micro_batch is not None
    if row.throughput_unit.startswith("min per 1k iterations"):
        return 1000.0 * row.micro_batch * row.seq_len
    if "Alpaca2k" in row.throughput_unit:
        epochs = int(row.throughput_unit.split(", ")[1].split()[0])
        return float(ALPACA_SAMPLES * epochs * row.seq_len) / gpus
    sharing = int(row.noted("sequence_parallel_size") or 1)
    return row.micro_batch * row.seq_len * (row.grad_accum or 1) / sharing
