"""Reads how long the samples of `--data` are, as far as this machine can tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.choices import DataFormat
from dstrain.errors import DstrainError
from dstrain.facts.data.datafile import files_of, is_file_name
from dstrain.facts.data.job_reading import FORMATS
from dstrain.facts.data.lengths import Lengths, read_lengths
from dstrain.facts.data.sample_formats import Reading
from dstrain.facts.model.hub_config import tokenizer_file
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.workload import Workload
from dstrain.job.schema import Job
from dstrain.job.yaml_source import parse_yaml
from dstrain.plan import run_time
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.request import Request
from dstrain.plan.run_time import RunTime


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    """What is known of the training data."""

    lengths: Lengths | None = None
    """Their lengths; None if they are not known."""
    epochs: float = 0.0
    """Passes over them."""
    max_steps: int | None = None
    """Steps that end the run instead of the epochs; None: none are given."""
    unknown: str | None = None
    """Why they are not known, in words; None if no data are named."""

    def decide(self, request: Request, model: ModelFacts) -> Request:
        """Returns the request with what the lengths decide."""
        if self.lengths is None:
            return request
        return run_time.with_lengths(request, model, self.lengths, epochs=self.epochs, max_steps=self.max_steps)

    def run_time(self, workload: Workload, chosen: Estimate) -> RunTime | None:
        """Returns how long a plan trains them; None if it is not known."""
        if self.lengths is None:
            return None
        return run_time.run_time(workload, chosen, self.lengths, epochs=self.epochs, max_steps=self.max_steps)


def read(options: Mapping[str, Any], model: ModelFacts, *, job: Path) -> TrainingData:
    """Returns what is known of `--data`; epochs and steps are those of the job file, if there is one.

    What cannot be read is no error here: `dstrain run` checks the data, and their file may be on another machine.
    """
    data = options["data"]
    if data is None:
        return TrainingData()
    if not is_file_name(data):
        return TrainingData(unknown=f"{data} is read on the hub when it trains")
    tokenizer = tokenizer_file(model.source, options["hub"])
    reading = Reading(format=FORMATS.get(options["task"], DataFormat.AUTO))
    try:
        missing = [str(file) for file in files_of(data) if not file.exists()]
        if missing:
            return TrainingData(unknown=f"{missing[0]} is not here")
        if tokenizer is None:
            return TrainingData(unknown=f"the tokenizer of {model.source} is not here: hf download {model.source}")
        epochs, max_steps = _passes(job)
        lengths = read_lengths(data, reading, tokenizer)
        return TrainingData(lengths=lengths, epochs=epochs, max_steps=max_steps)
    except DstrainError as error:
        return TrainingData(unknown=error.problem)


def _passes(job: Path) -> tuple[float, int | None]:
    """Returns the epochs of a job file, and the steps that end it instead; the defaults where it has no number."""
    default = Job(model="", output_dir="").num_train_epochs
    if not job.is_file():
        return default, None
    data = parse_yaml(job.read_text(encoding="utf-8"), str(job))[0]
    epochs, max_steps = data.get("num_train_epochs"), data.get("max_steps")
    return (
        float(epochs) if isinstance(epochs, int | float) and epochs > 0 else default,
        max_steps if isinstance(max_steps, int) and max_steps > 0 else None,
    )
