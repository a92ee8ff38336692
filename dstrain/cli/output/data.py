"""Prints a sample as the model sees it, and the counts of its data set."""

from __future__ import annotations

import os

import click

from dstrain.choices import OnLongSample
from dstrain.facts.data.shown import Piece, ShownData, ShownSample, marked, printable
from dstrain.job.schema import Job
from dstrain.paths import shown
from dstrain.units import counted


def lines(data: ShownData, job: Job, *, in_color: bool) -> list[str]:
    """Returns the sample and the counts of a data set; without color, text with loss stands between ⟦ and ⟧."""
    in_color = in_color and "NO_COLOR" not in os.environ
    shown_lines = [line for sample in data.samples for line in _sample(sample, job, in_color=in_color)]
    return [*shown_lines, *_counts(data, job)]


def _sample(sample: ShownSample, job: Job, *, in_color: bool) -> list[str]:
    cut = f", {sample.num_cut:,} more were cut off by seq_len {job.seq_len:,}" if sample.num_cut else ""
    untaught = "; it is dropped, as it has nothing to learn" if not sample.num_learned else ""
    legend = "green text has loss" if in_color else "text between ⟦ and ⟧ has loss"
    return [
        f"sample {sample.number:,}, {shown(sample.place)} ({legend})",
        _colored(sample.pieces) if in_color else marked(sample.pieces),
        f"── end of sample: {counted(sample.num_tokens, 'token')}, {sample.num_learned:,} with loss{cut}{untaught}",
        "",
    ]


def _counts(data: ShownData, job: Job) -> list[str]:
    scope = "all" if data.is_complete else "the first"
    kept = data.num_samples - data.num_untaught
    lines = [f"{shown(data.name)}, {scope} {counted(data.num_samples, 'sample')}"]
    if kept:
        mean = data.num_tokens / kept
        lines += [
            f"  tokens     {data.num_tokens:,} ({mean:.0f} per sample, {data.max_tokens:,} at most)",
            f"  with loss  {data.num_learned:,} ({data.num_learned / data.num_tokens:.1%})",
        ]
    if data.num_untaught:
        lines.append(f"  dropped    {counted(data.num_untaught, 'sample')} without a token to learn")
    if data.num_long:
        done = "dropped" if job.on_long_sample is OnLongSample.DROP else "truncated"
        share = data.num_long / data.num_samples
        lines.append(
            f"  {done:<9}  {counted(data.num_long, 'sample')} ({share:.1%}) longer than seq_len {job.seq_len:,}"
        )
    return [*lines, *(f"  note       {note}" for note in data.notes), ""]


def _colored(pieces: tuple[Piece, ...]) -> str:
    return "".join(
        click.style(printable(piece.text), fg="green" if piece.is_learned else None, bold=piece.is_special or None)
        for piece in pieces
    )
