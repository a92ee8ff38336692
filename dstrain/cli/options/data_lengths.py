"""Reads how long the samples of `--data` are, as far as this machine can tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dstrain.choices import Hub
from dstrain.cli.options.question import PlanInputs, plan_inputs
from dstrain.errors import DstrainError
from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.data.datafile import files_of, is_file_name, reading_for
from dstrain.facts.data.lengths import SAMPLED_ROWS, Lengths, eye_of, media_in, mixed, read_lengths
from dstrain.facts.data.rows import count_rows
from dstrain.facts.model import model_files
from dstrain.facts.model.hub_config import tokenizer_file
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.workload import Workload
from dstrain.job.data_source import epoch_counts, held_out_counts, weights_of
from dstrain.job.file import is_local, read_job
from dstrain.job.schema import Job
from dstrain.paths import shown
from dstrain.plan import run_time
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.run_time import RunTime
from dstrain.plan.search.decide import choice
from dstrain.plan.search.infeasible import Way, ways_that_fit
from dstrain.plan.search.search_space import row_tokens
from dstrain.train.data.rendering import measure_of

_FEWEST_ROWS = 200
"""Rows that are read of a data set, however many there are: a share of them is known to 7 points, 19 times of 20."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLengths:
    """The known facts of one data set."""

    name: str
    lengths: Lengths
    num_samples: int
    """Its samples in an epoch."""

    def document(self) -> dict[str, Any]:
        """Returns it as JSON-ready data."""
        tokens = {"half": self.lengths.at(0.5), "95 %": self.lengths.at(0.95), "longest": self.lengths.at(1)}
        samples = {**_samples(self.lengths), "samples_per_epoch": self.num_samples}
        return {"path": self.name, **samples, "tokens": tokens}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    """The known facts of the training data."""

    lengths: Lengths | None = None
    """The lengths of an epoch; None if they are not known."""
    sources: tuple[SourceLengths, ...] = ()
    """The facts of each data set."""
    job: Job | None = None
    """The job that trains on them; None if they are not known."""
    eval_samples: int = 0
    """Samples of an evaluation; 0 also if their number is not known."""
    has_media: bool = False
    """Whether they have images or videos, though their lengths are not known."""
    unknown: str | None = None
    """Why they are not known, in words; None if no data are named."""

    def decide(self, inputs: PlanInputs) -> PlanInputs:
        """Returns the planner's inputs with what the lengths decide, and what they say of rows."""
        if self.has_media:
            inputs = replace(inputs, request=run_time.for_media(inputs.request, inputs.workload.model))
        if self.lengths is None or self.job is None:
            return inputs
        epochs, max_steps, model = self.job.num_train_epochs, self.job.max_steps, inputs.workload.model
        request = run_time.with_lengths(inputs.request, model, self.lengths, epochs=epochs, max_steps=max_steps)
        contents = self.lengths.contents(row_tokens(request, model))
        return replace(inputs, request=request, workload=replace(inputs.workload, contents=contents))

    def run_time(self, workload: Workload, chosen: Estimate) -> RunTime | None:
        """Returns how long a plan trains them; None if it is not known."""
        if self.lengths is None or self.job is None:
            return None
        return run_time.run_time(workload, chosen, self.lengths, self.job, eval_samples=self.eval_samples)

    def document(self, trained: RunTime | None) -> dict[str, Any]:
        """Returns the lengths and the run as JSON-ready data, as far as they are known."""
        if self.lengths is None:
            return {} if self.unknown is None else {"data": {"unknown": self.unknown}}
        sources = [source.document() for source in self.sources]
        known = {**_samples(self.lengths), "longer_than": histogram(self.lengths), "sources": sources}
        return {"data": known, **({} if trained is None else {"run": asdict(trained)})}


def _samples(lengths: Lengths) -> dict[str, Any]:
    """Returns the number of samples as JSON-ready data, with its basis if it is estimated."""
    estimate = {} if lengths.estimate is None else {"samples_estimated_from": asdict(lengths.estimate)}
    return {"samples": lengths.num_samples, **estimate}


def histogram(lengths: Lengths) -> dict[int, float]:
    """Returns the share of samples, 0…1, that are longer than each power of two, up to the longest.

    >>> histogram(Lengths(tokens=(100, 200, 300, 600), num_samples=4))
    {64: 1.0, 128: 0.75, 256: 0.5, 512: 0.25, 1024: 0.0}
    """
    first, last = ((length - 1).bit_length() for length in (lengths.tokens[0], lengths.tokens[-1]))
    return {1 << power: lengths.share_longer(1 << power) for power in range(max(0, first - 1), last + 1)}


def read(
    options: Mapping[str, Any], model: ModelFacts, *, job: Path | None = None, keeps_list: bool = False
) -> TrainingData:
    """Returns the known facts of `--data`; epochs, steps and all else come from the job file, if there is one.

    With `keeps_list` the data sets come from the job file, which its user may have edited. Unreadable data are no
    error here: `dstrain run` checks the data, and their file may be on another machine.
    """
    try:
        asked = _asked(options, job, keeps_list=keeps_list)
        return TrainingData() if not asked.train_sources else _read(asked, model, options["hub"])
    except DstrainError as error:
        return TrainingData(unknown=error.problem)


def _asked(options: Mapping[str, Any], path: Path | None, *, keeps_list: bool) -> Job:
    """Returns the job whose data are read. Raises InvalidConfig if a job file is invalid."""
    data = options["data"]
    if data is not None and is_job_file(data):
        job = read_job(Path(data), is_only_read=True).job
        return replace(job, task=options["task"], image_patches=options["image_patches"] or job.image_patches)
    is_read = path is not None and path.is_file() and (data is not None or keeps_list)
    job = replace(
        read_job(path, is_only_read=True).job if is_read and path else Job(model="", output_dir=""),
        task=options["task"],
    )
    job = replace(
        job,
        eval_data=options.get("eval_data") or job.eval_data,
        image_patches=options["image_patches"] or job.image_patches,
    )
    return job if keeps_list and job.data is not None else replace(job, data=data)


def is_job_file(data: str) -> bool:
    """Returns whether `--data` names a job file, whose data sets are meant.

    >>> is_job_file("runs/job.yaml"), is_job_file("train.jsonl")
    (True, False)
    """
    return data.endswith((".yaml", ".yml"))


def _read(job: Job, model: ModelFacts, hub: Hub) -> TrainingData:
    """Returns the lengths of a job's data sets, mixed as in an epoch. Raises InvalidConfig if one cannot be read."""
    sources, found = job.train_sources, []
    for source in sources:
        if not is_file_name(source.path):
            return TrainingData(unknown=f"{source.path} is read on the hub when it trains")
        if missing := [file for file in files_of(source.path) if not file.exists()]:
            return TrainingData(unknown=f"{missing[0]} is not here")
    if (problem := _lacks_processor(job, model)) is not None:
        return TrainingData(unknown=problem)
    tokenizer = tokenizer_file(model.source, hub)
    if tokenizer is None:
        return _without_tokenizer(job, model)
    # many data sets take as long as one: they share the sample
    rows = max(_FEWEST_ROWS, SAMPLED_ROWS // len(sources))
    image_tokens = model.vision.num_tokens(job.image_patches) if job.image_patches and model.vision else None
    sees = eye_of(model.source, hub, max_pixels=job.max_pixels, min_pixels=job.min_pixels)
    options: dict[str, Any] = {"sampled_rows": rows, "loss_on": job.loss_on, "image_tokens": image_tokens, "sees": sees}
    options["measure"] = measure_of(job, model.source, hub, tokenizer)
    for source in sources:
        reading = reading_for(source, job)
        lengths = read_lengths(source.path, reading, tokenizer, **options)
        if source.max_samples is not None and source.max_samples <= lengths.num_samples:
            lengths = replace(lengths, num_samples=source.max_samples, estimate=None)
        found.append(lengths)
    # the same arithmetic as that of the ranks: held out first, then mixed by weights
    counts = [lengths.num_samples for lengths in found]
    held_out = held_out_counts(counts, job.val_split) if job.val_split is not None else [0] * len(counts)
    counts = [size - out for size, out in zip(counts, held_out, strict=True)]
    weights = weights_of(sources)
    if weights is not None:
        counts = epoch_counts(counts, weights, job.stopping_strategy)
    return TrainingData(
        lengths=mixed(found, counts),
        sources=tuple(
            SourceLengths(name=source.path, lengths=lengths, num_samples=count)
            for source, lengths, count in zip(sources, found, counts, strict=True)
        ),
        job=job,
        eval_samples=sum(held_out) or _eval_samples(job),
    )


def _without_tokenizer(job: Job, model: ModelFacts) -> TrainingData:
    """Returns the facts that rows show without their lengths."""
    download = "" if is_local(model.source) else f": hf download {model.source}"
    return TrainingData(
        has_media=any(media_in(source.path, reading_for(source, job)) for source in job.train_sources),
        unknown=f"the tokenizer of {model.source} is not here{download}",
    )


def _lacks_processor(job: Job, model: ModelFacts) -> str | None:
    """Returns that the data have media and the model no processor for them, as `dstrain run` says it."""
    folder = Path(model.source)
    if model_files.has_processor(folder) if folder.is_dir() else model.has_tower:
        return None
    for source in job.train_sources:
        if named := media_in(source.path, reading_for(source, job)):
            return model_files.lacks_processor(shown(source.path), named, shown(model.source))
    return None


def planned_steps(job: Job, workload: Workload, estimate: Estimate) -> int | None:
    """Returns the optimizer steps of a job; None if its data cannot be read here."""
    if job.max_steps is not None:
        return job.max_steps
    try:
        trained = _read(job, workload.model, job.hub).run_time(workload, estimate)
    except DstrainError:
        return None
    return None if trained is None else trained.steps


def _eval_samples(job: Job) -> int:
    """Returns the samples of the evaluation data; 0 if they are not here, or somebody else's to read."""
    total = 0
    for source in job.eval_sources:
        files = files_of(source.path) if is_file_name(source.path) else []
        if not files or not all(file.exists() for file in files):
            return 0
        rows = count_rows(files).number
        total += rows if source.max_samples is None else min(rows, source.max_samples)
    return total


def ways(
    options: Mapping[str, Any], inputs: PlanInputs, data: TrainingData, *, last: Cluster | None = None
) -> tuple[Way, ...]:
    """Returns changes of a command's options that fit; each is asked and answered as if it were typed.

    `last` is the cluster of the last run (`plan_inputs`).
    """

    def judge(changes: Mapping[str, Any], *_: object) -> Estimate:
        again = data.decide(plan_inputs({**options, **changes}, last=last, is_first=False))
        return choice(again.workload, again.request)

    hosts = {name: options[name] for name in ("hosts", "hostfile") if options[name]}
    return ways_that_fit(inputs.workload, inputs.request, judge, hosts=hosts)
