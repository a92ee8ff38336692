"""Predictions of published runs: the figures that a score needs, and the file that keeps them."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from benchmarks.published.pytorch.estimate import assess
from benchmarks.published.question import Question, ask
from benchmarks.published.rows import Row
from benchmarks.published.scope import is_asked
from dstrain.errors import DstrainError
from dstrain.facts.workload import Workload
from dstrain.plan.estimate_records import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Predicted figures of one run."""

    live_bytes_per_gpu: int
    """Bytes of tensors at the peak."""
    reserved_bytes_per_gpu: int
    """Bytes that the allocator holds at the peak."""
    device_bytes_per_gpu: int
    """Bytes that nvidia-smi shows at the peak."""
    tokens_per_s_per_gpu: float | None
    """Throughput, or None if the planner predicts none."""


Prediction = Figures | str
"""Figures, or why the planner refuses."""

COLUMNS = ("id", *(field.name for field in fields(Figures)), "refusal")
"""Columns of the file."""


def estimate(question: Question) -> Estimate:
    """Returns the planner's estimate. Raises DstrainError if the planner refuses."""
    return assess(Workload(model=question.model, cluster=question.cluster), question.configuration)


def predicted(row: Row) -> Prediction | None:
    """Returns the planner's prediction, or None for a row out of scope."""
    if not is_asked(row):
        return None
    question = ask(row)
    try:
        found = estimate(question)
    except DstrainError as error:
        return str(error)
    return Figures(
        live_bytes_per_gpu=found.memory.live_bytes_per_gpu,
        reserved_bytes_per_gpu=found.memory.reserved_bytes_per_gpu,
        device_bytes_per_gpu=found.memory.device_bytes_per_gpu,
        tokens_per_s_per_gpu=None if found.speed is None else found.speed.tokens_per_s_per_gpu,
    )


def to_csv(predictions: Mapping[str, Prediction]) -> str:
    """Returns predictions by row as CSV; throughput has nine digits, as the last ones differ between Python releases.

    >>> print(to_csv({"a": "no", "b": Figures(live_bytes_per_gpu=1, reserved_bytes_per_gpu=2, device_bytes_per_gpu=3,
    ...                                       tokens_per_s_per_gpu=10 / 3)}).splitlines()[1:])
    ['a,,,,,no', 'b,1,2,3,3.33333333,']
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row, prediction in predictions.items():
        if isinstance(prediction, str):
            writer.writerow([row, *("" for _ in fields(Figures)), prediction])
        else:
            *memory, speed = astuple(prediction)
            writer.writerow([row, *memory, "" if speed is None else f"{speed:.9g}", ""])
    return out.getvalue()


def read_csv(path: Path) -> dict[str, Prediction]:
    """Returns the predictions of a file, by row."""
    with path.open(encoding="utf-8", newline="") as stream:
        return {record["id"]: record["refusal"] or _figures(record) for record in csv.DictReader(stream)}


def _figures(record: Mapping[str, str]) -> Figures:
    speed = record["tokens_per_s_per_gpu"]
    return Figures(
        live_bytes_per_gpu=int(record["live_bytes_per_gpu"]),
        reserved_bytes_per_gpu=int(record["reserved_bytes_per_gpu"]),
        device_bytes_per_gpu=int(record["device_bytes_per_gpu"]),
        tokens_per_s_per_gpu=float(speed) if speed else None,
    )
