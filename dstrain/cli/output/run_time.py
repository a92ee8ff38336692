"""Prints what the lengths of the training data say about a plan."""

from __future__ import annotations

from dstrain.cli.options.data_lengths import TrainingData, histogram
from dstrain.cli.options.question import PlanInputs
from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.data.lengths import Lengths
from dstrain.paths import shown
from dstrain.plan.run_time import RunTime
from dstrain.plan.search.reasons import percent
from dstrain.units import format_count, format_seconds

_LOST_SHARE = 0.005
"""Share of cut samples from which a longer row is named."""


def data_lines(data: TrainingData, run: RunTime | None, asked: PlanInputs) -> list[str]:
    """Returns the lengths, what is done with them, and the time of the run; or why they are unknown."""
    if data.unknown is not None:
        return [f"data     lengths are unknown: {data.unknown}"]
    if data.lengths is None or run is None:
        return []
    each = _source_lines(data) if len(data.sources) > 1 else []
    return [*_length_lines(data.lengths, run, asked), *each, _time_line(run, asked.workload.cluster)]


def _source_lines(data: TrainingData) -> list[str]:
    """Returns a line for each data set, and the share of samples above each power of two that some exceed."""
    assert data.lengths is not None
    lines = []
    for source in data.sources:
        share, lengths = source.num_samples / data.lengths.num_samples, source.lengths
        used = f"{source.num_samples:,} from {lengths.num_samples:,}, {percent(share)}"
        lines.append(f"         - {shown(source.name)}: {used}; half ≤ {lengths.at(0.5):,}, longest {lengths.at(1):,}")
    above = {length: share for length, share in histogram(data.lengths).items() if 0 < round(100 * share) < 100}
    shares = [f"{length:,}: {percent(share)}" for length, share in above.items()]
    return [*lines, *([f"         longer than {', '.join(shares)}"] if shares else [])]


def _length_lines(lengths: Lengths, run: RunTime, asked: PlanInputs) -> list[str]:
    half, most, longest = (f"{lengths.at(share):,}" for share in (0.5, 0.95, 1.0))
    lines = [f"data     {lengths.num_samples:,} samples; tokens: half ≤ {half}, 95 % ≤ {most}, longest {longest}"]
    if asked.request.packing:
        lines.append(f"         packed: {lengths.num_samples / run.rows_per_epoch:.1f} samples in a row")
    elif run.idle_share >= _LOST_SHARE:
        lines.append(f"         {percent(run.idle_share)} of a step is padding, or waiting for the longest sample")
    if run.cut_share >= _LOST_SHARE:
        whole = 1 << (lengths.at(1 - _LOST_SHARE) - 1).bit_length()
        lines.append(f"         {percent(run.cut_share)} of the samples are cut: --seq-len {whole} keeps them whole")
    return lines


def _time_line(run: RunTime, cluster: Cluster) -> str:
    passes = f"{run.epochs:.3g} epoch{'s' if run.epochs != 1 else ''} of {format_count(run.tokens_per_epoch)} tokens"
    steps = f"{run.steps:,} steps, {passes}"
    if run.seconds is None:
        return f"time     unknown for {cluster.gpu.name}: {steps}"
    span = f"{format_seconds(run.seconds)} ± {percent(run.uncertainty_ratio)}"
    return f"time     {span}, {run.seconds * cluster.num_gpus / 3600:.1f} GPU-hours: {steps}"
