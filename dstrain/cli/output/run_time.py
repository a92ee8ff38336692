"""Prints what the lengths of the training data say about a plan."""

from __future__ import annotations

from datetime import datetime, timedelta

from dstrain.cli.options.data_lengths import TrainingData, histogram
from dstrain.cli.options.question import PlanInputs
from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.data.lengths import Lengths
from dstrain.paths import shown
from dstrain.plan.run_time import CHECKPOINT_BYTES_PER_S, RunTime
from dstrain.plan.search.reasons import percent
from dstrain.units import counted, format_bytes, format_count, format_seconds
from dstrain.wrapping import wrapped

_LOST_SHARE = 0.005
"""Share of cut samples from which a longer row is named."""
_WORTH_PACKING = 1.2
"""How many times fewer tokens a run that shares no rows says that it would compute with packing, at least."""


_LONG_S = 3600
"""Seconds of a run whose end is named."""


def data_lines(data: TrainingData, run: RunTime | None, asked: PlanInputs) -> list[str]:
    """Returns the lengths, what is done with them, and the time of the run; or why they are unknown."""
    if data.unknown is not None:
        return [f"data     lengths are unknown: {data.unknown}"]
    if data.lengths is None or run is None:
        return []
    each = _source_lines(data) if len(data.sources) > 1 else []
    lines = [*_length_lines(data.lengths, run, asked), *each, *_histogram_lines(data.lengths)]
    lines += time_lines(run, asked.workload.cluster)
    is_left_out = run.seconds is not None and data.job is not None and data.job.has_eval and not data.eval_samples
    lines += ["         without evaluations: how many samples they have is unknown"] if is_left_out else []
    if run.seconds is not None and data.job is not None:
        lines += ["         at most: early_stopping may end it earlier"] if data.job.early_stopping else []
        lines += ["         without the time of generated samples, which is not planned"] if data.job.samples else []
    return lines


def _source_lines(data: TrainingData) -> list[str]:
    """Returns a line for each data set."""
    assert data.lengths is not None
    lines = []
    for source in data.sources:
        share, lengths = source.num_samples / data.lengths.num_samples, source.lengths
        used = f"{_number(source.num_samples, lengths)} from {_number(lengths.num_samples, lengths)}, {percent(share)}"
        lines.append(f"         - {shown(source.name)}: {used}; half ≤ {lengths.at(0.5):,}, longest {lengths.at(1):,}")
    return lines


def _length_lines(lengths: Lengths, run: RunTime, asked: PlanInputs) -> list[str]:
    half, most, longest = (f"{lengths.at(share):,}" for share in (0.5, 0.95, 1.0))
    samples = f"{_number(lengths.num_samples, lengths)} sample{'s' if lengths.num_samples != 1 else ''}"
    lines = [f"data     {samples}; tokens: half ≤ {half}, 95 % ≤ {most}, longest {longest}"]
    if (basis := lengths.estimate) is not None:
        read, total = format_bytes(basis.read_bytes), format_bytes(basis.total_bytes)
        lines.append(f"         samples are estimated (± {100 * basis.error_ratio:.2g} %) from {read} of {total}")
    if asked.request.packing:
        labels = f", {percent(lengths.target_share)} of the tokens with a label" if lengths.target_share < 1 else ""
        lines.append(f"         packed: {lengths.num_samples / run.rows_per_epoch:.1f} samples in a row{labels}")
        lines.append(f"         rows of one sample each, padded, would have {run.padded_ratio:.1f} × as many tokens")
    elif run.idle_share >= _LOST_SHARE:
        lines.append(f"         {percent(run.idle_share)} of a step is padding, or waiting for the longest sample")
        if run.packed_ratio >= _WORTH_PACKING:
            steps = f"{counted(run.packed_steps, 'step')} in place of {run.steps:,}"
            option = f"--packing --seq-len {run.seq_len}"
            lines.append(f"         {option}: {run.packed_ratio:.1f} × fewer tokens, {steps}")
    if run.cut_share >= _LOST_SHARE:
        lines.append(f"         {percent(run.cut_share)} of the samples are cut: {_longer(lengths)}")
    return lines


def _longer(lengths: Lengths) -> str:
    """Returns rows in which next to no sample is cut.

    >>> _longer(Lengths(tokens=(100, 5000), num_samples=2))
    '--seq-len 8192 keeps them whole'
    >>> _longer(Lengths(tokens=(100,) * 999 + (9000,), num_samples=1000))
    '--seq-len 128 cuts 0.1 %'
    """
    whole = 1 << (lengths.at(1 - _LOST_SHARE) - 1).bit_length()
    is_all = lengths.at(1) <= whole
    return f"--seq-len {whole} {'keeps them whole' if is_all else f'cuts {100 * lengths.share_longer(whole):.2g} %'}"


def _histogram_lines(lengths: Lengths) -> list[str]:
    """Returns what rows of each power of two would cut, as far as that is between nothing and everything."""
    above = {length: share for length, share in histogram(lengths).items() if 0 < round(100 * share) < 100}
    if not above:
        return []
    shares = ", ".join(f"{length:,}: {percent(share)}" for length, share in above.items())
    return wrapped(f"         longer than {shares}").splitlines()


def _number(samples: int, lengths: Lengths) -> str:
    """Returns a number of samples as exactly as it is known."""
    return f"{samples:,}" if lengths.estimate is None else f"about {format_count(samples)}"


def time_lines(run: RunTime, cluster: Cluster) -> list[str]:
    """Returns how long a run takes, and how many steps."""
    passes = f"{run.epochs:.3g} epoch{'s' if run.epochs != 1 else ''} of {format_count(run.tokens_per_epoch)} tokens"
    steps = f"{counted(run.steps, 'step')}, {passes}"
    if run.seconds is None:
        return [f"time     unknown for {cluster.gpu.name}: {steps}"]
    span = f"{format_seconds(run.seconds)} ± {percent(run.uncertainty_ratio)}"
    lines = [f"time     {span}, {run.seconds * cluster.num_gpus / 3600:.1f} GPU-hours: {steps}"]
    parts = []
    if run.checkpoints:
        size, rate = format_bytes(run.checkpoint_bytes), CHECKPOINT_BYTES_PER_S / 1e9
        written = f"{format_seconds(run.checkpoint_s)} at {rate:g} GB/s of each node"
        parts.append(f"{counted(run.checkpoints, 'checkpoint')} of {size} ({written})")
    if run.evaluations:
        parts.append(f"{counted(run.evaluations, 'evaluation')} ({format_seconds(run.evaluation_s)})")
    if run.seconds >= _LONG_S:
        end = datetime.now().astimezone() + timedelta(seconds=run.seconds)
        lines.append(f"         started now, it ends on {end:%Y-%m-%d} at {end:%H:%M}")
    return [*lines, f"         of it {' and '.join(parts)}"] if parts else lines
