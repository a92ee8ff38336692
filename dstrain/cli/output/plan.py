"""Prints a plan, as text or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dstrain.choices import Attention, LossKernel
from dstrain.facts.cluster.cluster import Cluster, Origin
from dstrain.facts.cluster.network_measurement import rate_text
from dstrain.facts.workload import Workload
from dstrain.plan.configuration import flat
from dstrain.plan.estimate_records import Estimate, Limit, Reason, Topic
from dstrain.plan.labels import arithmetic, label, short_label
from dstrain.plan.search.decide import Proposal, Survey
from dstrain.plan.search.reasons import percent
from dstrain.units import GIB, counted, format_bytes, format_count
from dstrain.wrapping import COLUMNS

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
    """Returns what was measured of the links, and when; nothing where they are given or assumed."""
    between, inside = cluster.inter_link, cluster.intra_link
    rates = []
    if cluster.num_nodes > 1 and cluster.inter_link_origin is Origin.MEASURED:
        rates.append(f"{rate_text(between.bytes_per_s)} for each GPU between nodes")
    if cluster.gpus_per_node > 1 and cluster.intra_link_origin is Origin.MEASURED:
        rates.append(f"{rate_text(inside.bytes_per_s)} inside one")
    if not rates:
        return []
    source = between.source if cluster.inter_link_origin is Origin.MEASURED else inside.source
    return [f"links    {', '.join(rates)},", f"         {source}"]


def chosen_line(survey: Survey) -> str:
    """Returns the choice or, where nothing fits, what comes nearest."""
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
