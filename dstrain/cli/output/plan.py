"""Prints a plan: its table, reasons, bars of memory, and the time of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from rich.text import Text

from dstrain.choices import Attention, LossKernel
from dstrain.cli.options.data_lengths import TrainingData, histogram
from dstrain.cli.options.question import PlanInputs
from dstrain.facts.cluster.cluster import Cluster, Origin
from dstrain.facts.data.lengths import Lengths
from dstrain.facts.workload import Workload
from dstrain.paths import shown
from dstrain.plan.configuration import flat
from dstrain.plan.estimate_records import Estimate, Limit, Reason, Topic
from dstrain.plan.labels import arithmetic, label, short_label
from dstrain.plan.memory.memory import Breakdown, Memory
from dstrain.plan.run_time import CHECKPOINT_BYTES_PER_S, RunTime
from dstrain.plan.search.decide import Proposal, Survey
from dstrain.plan.search.reasons import percent
from dstrain.units import GIB, counted, format_bytes, format_count, format_rate, format_seconds
from dstrain.wrapping import COLUMNS, wrapped

UNKNOWN = "-"
"""The cell of an unknown figure."""
LIMITS = {
    Limit.COMPUTE: "compute",
    Limit.MEMORY_BANDWIDTH: "GPU memory",
    Limit.LAUNCHES: "launches",
    Limit.INTRA_LINK: "GPU links",
    Limit.INTER_LINK: "network",
    Limit.CPU_OPTIMIZER: "CPU step",
    Limit.PCIE: "PCIe",
    Limit.NVME: "NVMe",
    Limit.ALLOCATOR: "allocator",
}
"""The limit of a step, as tables show it."""


_LEADING = (
    frozenset({Topic.SPEED}),
    frozenset(
        {Topic.AS_ASKED, Topic.SIMPLER, Topic.ZERO_STAGE, Topic.OFFLOAD, Topic.GRAD_CKPT, Topic.MICRO_BATCH, Topic.HPZ}
    ),
    frozenset({Topic.PEAK}),
)
"""The reasons that matter most: speed, the closest alternative, the peak."""


def plan_lines(survey: Survey, workload: Workload, *, verbose: bool, data: Sequence[str] = ()) -> list[str]:
    """Returns the choice, what it makes of the `data`, its reasons and the assumptions, in lines."""
    lines = [*subject_lines(workload), chosen_line(survey), *data, ""]
    return [*lines, *closing_lines(survey, verbose=verbose)]


def subject_lines(workload: Workload) -> list[str]:
    """Returns model and machines, one line each, and where links were measured, a line about them."""
    model, cluster, gpu = workload.model, workload.cluster, workload.cluster.gpu
    origin = {Origin.GIVEN: "", Origin.MEASURED: ", found here", Origin.ASSUMED: ", assumed"}[cluster.gpu_origin]
    active = f", {format_count(model.num_active_params)} active" if model.moe else ""
    nodes = f"{counted(cluster.num_nodes, 'node')} of {cluster.gpus_per_node}"
    return [
        f"model    {model.name}: {model.num_params:,} parameters{active}",
        f"cluster  {cluster.num_gpus} × {gpu.name} ({format_bytes(gpu.memory_bytes)}{origin}), {nodes}",
        *_link_lines(cluster),
    ]


def _link_lines(cluster: Cluster) -> list[str]:
    """Returns the measurement of the links, and its date; nothing if they are given or assumed."""
    between, inside = cluster.inter_link, cluster.intra_link
    rates = []
    if cluster.num_nodes > 1 and cluster.inter_link_origin is Origin.MEASURED:
        rates.append(f"{format_rate(between.bytes_per_s)} for each GPU between nodes")
    if cluster.gpus_per_node > 1 and cluster.intra_link_origin is Origin.MEASURED:
        rates.append(f"{format_rate(inside.bytes_per_s)} inside one")
    if not rates:
        return []
    source = between.source if cluster.inter_link_origin is Origin.MEASURED else inside.source
    return [f"links    {', '.join(rates)},", f"         {source}"]


def chosen_line(survey: Survey) -> str:
    """Returns the choice or, if nothing fits, the nearest plan."""
    configuration = survey.first.configuration
    verdict = "chosen " if survey.fits else "nearest"
    batch = configuration.batch
    stretched = f", {batch.rope_scaling}" if batch.rope_scaling else ""
    numbers = arithmetic(configuration.model.precision, configuration.step.optimizer)
    kernels = configuration.kernels
    slow = ", eager attention" if kernels.attn is Attention.EAGER else ""
    slow += f", {kernels.loss} loss" if kernels.loss is not LossKernel.FUSED else ""
    return f"{verdict}  {label(configuration)}, {numbers}, {batch.seq_len} tokens{slow}{stretched}"


def closing_lines(survey: Survey, *, verbose: bool) -> list[str]:
    """Returns reasons and notes. If nothing fits, the error that follows says why, and only -v prints them."""
    if not survey.fits and not verbose:
        return ["-v prints the reasons and notes of the nearest plan"]
    notes = [f"note     {note}" for note in survey.notes]
    return [*_reason_lines(survey, verbose=verbose), *(["", *notes] if notes else [])]


def _reason_lines(survey: Survey, *, verbose: bool) -> list[str]:
    """Returns why: the leading reasons or, if verbose, all of them and how many configurations were considered."""
    reasons = survey.proposals[0].reasons
    if not verbose:
        return [f"why (-v prints all {len(reasons)} reasons)", *(f"  - {reason.text}" for reason in leading(reasons))]
    lines = ["why", *(f"  - {reason.text}" for reason in reasons)]
    if survey.num_estimated + survey.num_excluded > 1:
        lines.append(f"  - {considered(survey)}")
    return lines


def leading(reasons: Sequence[Reason]) -> list[Reason]:
    """Returns the three reasons that matter most, in order; others take the place of those that are missing."""
    first = [next((reason for reason in reasons if reason.topic in topics), None) for topics in _LEADING]
    by_weight = [*filter(None, first), *(reason for reason in reasons if reason not in first)]
    return [reason for reason in reasons if reason in by_weight[: len(_LEADING)]]


def considered(survey: Survey) -> str:
    """Returns how many configurations were considered, and how."""
    total = survey.num_estimated + survey.num_excluded
    return (
        f"{total:,} configurations considered: {survey.num_estimated:,} estimated in full, {survey.num_excluded:,}"
        " ruled out by memory or time bounds"
    )


def table_lines(survey: Survey) -> list[str]:
    """Returns the figures of each plan, in columns of `COLUMNS` altogether."""
    heads = (
        ("", "", "GiB/", "host", "step", "tokens/", "", ""),
        ("", "plan", "GPU", "GiB", "s", "s/GPU", "MFU", "limited by"),
    )
    rows = [*heads, *(table_row(number, proposal.estimate) for number, proposal in enumerate(survey.proposals, 1))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads[0]))]
    widths[1] -= max(0, sum(widths) + 2 * (len(widths) - 1) - COLUMNS)
    is_text = (False, True, *(False,) * 5, True)
    lines = []
    for row in rows:
        cells = [
            _cut(cell, width).ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(row, widths, is_text, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def table_row(number: int, estimate: Estimate) -> tuple[str, ...]:
    """Returns the figures of a plan as they stand in a table."""
    speed = estimate.speed
    figures = (UNKNOWN,) * 4
    if speed is not None:
        step = f"{speed.step_s:.{0 if speed.step_s >= 100 else 1 if speed.step_s >= 10 else 2}f}"
        tokens = f"{speed.tokens_per_s_per_gpu:.0f}"
        figures = (step, tokens, percent(speed.mfu_ratio), LIMITS[speed.limited_by])
    device = f"{estimate.memory.device_bytes_per_gpu / GIB:.1f}"
    host = f"{estimate.memory.host_bytes_per_node / GIB:.0f}"
    return (str(number), short_label(estimate.configuration), device, host, *figures)


def plan_document(survey: Survey, workload: Workload) -> dict[str, Any]:
    """Returns the answer as JSON-ready data; unknown values are None. Units are in the names."""
    model = workload.model
    return {
        "schema": 1,
        "model": {
            "name": model.name,
            "num_params": model.num_params,
            "num_active_params": model.num_active_params,
            "num_trainable_params": survey.first.num_trainable_params,
        },
        "cluster": asdict(workload.cluster),
        "plans": [_entry(proposal) for proposal in survey.proposals],
        "chosen": 0 if survey.fits else None,
        "considered": {"estimated": survey.num_estimated, "excluded_by_bound": survey.num_excluded},
    }


_MEMORY = (
    "live_bytes_per_gpu",
    "reserved_bytes_per_gpu",
    "device_bytes_per_gpu",
    "peak_instant",
    "breakdown_bytes",
    "host_bytes_per_node",
    "nvme_bytes_per_node",
    "checkpoint_bytes",
    "load",
)
_SPEED = ("step_s", "tokens_per_s_per_gpu", "mfu_ratio", "limited_by", "uncertainty_ratio")


def estimate_document(estimate: Estimate) -> dict[str, Any]:
    """Returns a configuration and its estimate as JSON-ready data."""
    memory, speed = asdict(estimate.memory), asdict(estimate.speed) if estimate.speed else {}
    return {
        "title": label(estimate.configuration),
        **flat(estimate.configuration),
        "fits": estimate.fits,
        "memory": {name: memory[name] for name in _MEMORY},
        "speed": {name: speed.get(name) for name in _SPEED},
    }


def _entry(proposal: Proposal) -> dict[str, Any]:
    return {**estimate_document(proposal.estimate), "reasons": [reason.text for reason in proposal.reasons]}


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
    """Returns the share that rows of each power of two would cut, unless it is nothing or everything."""
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


WIDTH = 64
"""Cells of the longest bar."""
INDENT = "   "


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the memory of a GPU, with its letter and its color."""

    letter: str
    """Characters of the bar without colors."""
    name: str
    """Its name in the legend."""
    colour: str
    """Background on a terminal."""
    fields: tuple[str, ...]
    """The fields of a breakdown that it adds up."""


# fmt: off
PARTS: tuple[Part, ...] = (
    Part(letter="P", name="parameters", colour="blue", fields=("params",)),
    Part(letter="G", name="gradients", colour="cyan", fields=("grads",)),
    Part(letter="O", name="optimizer", colour="magenta", fields=("optimizer",)),
    Part(letter="B", name="engine buffers", colour="yellow", fields=("buffers",)),
    Part(letter="W", name="whole layers", colour="bright_cyan", fields=("gathered",)),
    Part(letter="A", name="activations", colour="green", fields=("activations",)),
    Part(letter="L", name="logits", colour="red", fields=("logits",)),
    Part(letter="x", name="CUDA, fragments", colour="bright_black", fields=("workspace", "fragmentation", "context")),
)
"""Resident parts first, then transient ones. `whole layers` are those that ZeRO-3 has gathered."""
# fmt: on
LOAD = Part(letter="l", name="at load", colour="white", fields=())
"""The bar of the memory while the model is loaded."""
LOAD_RATIO = 0.5
"""A load has a bar of its own from this share of the peak of training on."""


def bar_lines(survey: Survey, cluster: Cluster, *, in_colour: bool) -> list[Text]:
    """Returns a heading, a title and a bar for each plan, a second one for its load if that is large, and the legend.

    All bars have the same scale. `:` marks the memory that a plan may fill, `|` the capacity; a bar that crosses `|`
    does not fit. In color, a part is a patch that starts with its letter, else a run of letters.
    """
    capacity, usable = cluster.gpu.memory_bytes, survey.first.usable_bytes_per_gpu
    needs = [proposal.estimate.memory for proposal in survey.proposals]
    scale = max(capacity, *(max(need.device_bytes_per_gpu, need.load.device_bytes_per_gpu) for need in needs)) / WIDTH
    marks = {round(usable / scale): ":", round(capacity / scale): "|"}
    head = f"peak memory of one GPU, in GiB    : usable {usable / GIB:.1f}    | capacity {capacity / GIB:.1f}"
    lines = [Text(head)]
    estimates = [proposal.estimate for proposal in survey.proposals]
    for number, estimate in enumerate(estimates, 1):
        fits = "" if estimate.fits else " (does not fit)"
        title = f"{number:>2} {label(estimate.configuration)}{fits}"
        if len(title) > COLUMNS:
            title = f"{number:>2} {short_label(estimate.configuration)}{fits}"
        lines.append(Text(title, style="bold" if number == 1 else ""))
        lines += [_bar(bar, marks, scale, in_colour) for bar in _bars(estimate.memory)]
    shown = [part for need in needs for bar in _bars(need) for part, size in bar if size]
    first = {part.letter: size for bar in _bars(needs[0]) for part, size in bar}
    return [*lines, *_legend([part for part in (*PARTS, LOAD) if part in shown], first)]


def _bars(memory: Memory) -> list[list[tuple[Part, int]]]:
    """Returns the bars of a plan: the parts of the peak and, if it is large, the load."""
    load = memory.load.device_bytes_per_gpu
    peak = [(part, part_bytes(memory.breakdown_bytes, part)) for part in PARTS]
    return [peak, [(LOAD, load)]] if load > LOAD_RATIO * memory.device_bytes_per_gpu else [peak]


def _bar(parts: Sequence[tuple[Part, int]], marks: Mapping[int, str], scale: float, in_colour: bool) -> Text:
    """Returns one bar with its total; the ends of parts are rounded sums, so that the bar is as long as its total."""
    bar = Text(INDENT)
    cell, total = 0, 0
    for part, size in parts:
        total += size
        end = round(total / scale)
        for position in range(cell, end):
            letter = part.letter if position == cell or not in_colour else " "
            bar.append(marks.get(position, letter), style=f"black on {part.colour}")
        cell = max(cell, end)
    for position in range(cell, WIDTH + 1):
        bar.append(marks.get(position, " "))
    return bar.append(f"{total / GIB:6.1f}")


def part_bytes(parts: Breakdown, part: Part) -> int:
    """Returns the bytes of a part."""
    return sum(getattr(parts, field) for field in part.fields)


def _legend(parts: list[Part], first: Mapping[str, int]) -> list[Text]:
    """Returns the meaning of letters and colours, with the GiB of the first plan, in lines of up to 80 columns."""
    lines = [Text(INDENT)]
    for part in parts:
        words = f" {part.name} {first.get(part.letter, 0) / GIB:.1f}"
        if lines[-1].cell_len + len(INDENT) + 1 + len(words) > COLUMNS:
            lines.append(Text(INDENT))
        space = "" if lines[-1].plain == INDENT else "   "
        lines[-1].append(space).append(part.letter, style=f"black on {part.colour}").append(words)
    return lines
