"""Prints a plan, as text or JSON."""

from __future__ import annotations

import re
import textwrap
from dataclasses import asdict
from typing import Any

from dstrain.facts.cluster.cluster import Cluster, Origin
from dstrain.facts.cluster.network_measurement import rate_text
from dstrain.facts.workload import Workload
from dstrain.plan.configuration import flat
from dstrain.plan.estimate_records import Estimate, Limit
from dstrain.plan.labels import label, short_label
from dstrain.plan.search.decide import Proposal, Survey
from dstrain.plan.search.reasons import percent
from dstrain.units import GIB, format_bytes, format_count

COLUMNS = 80
"""Columns of a terminal that everything fits into."""
_LEAD = re.compile(r"\w+ {2,}|\s*(- )?")
_QUANTITY = re.compile(r"(\d) ([KMGT]?i?B|[KMT]|%|s|GPUs)(?!\w)")
UNKNOWN = "-"
"""What stands in a table where a figure is not known."""
LIMITS = {
    Limit.COMPUTE: "compute",
    Limit.MEMORY_BANDWIDTH: "GPU memory",
    Limit.LAUNCHES: "launches",
    Limit.INTRA_LINK: "GPU links",
    Limit.INTER_LINK: "network",
    Limit.CPU_OPTIMIZER: "CPU step",
    Limit.PCIE: "PCIe",
    Limit.NVME: "NVMe",
}
"""What a step waits for, as it stands in a table."""


def plan_lines(found: Survey, workload: Workload) -> list[str]:
    """Returns what was chosen and why, in lines."""
    return [*subject_lines(workload), chosen_line(found), "", *reason_lines(found)]


def subject_lines(workload: Workload) -> list[str]:
    """Returns model and machines, one line each, and where links were measured, a line about them."""
    model, cluster, gpu = workload.model, workload.cluster, workload.cluster.gpu
    origin = {Origin.GIVEN: "", Origin.MEASURED: ", found here", Origin.ASSUMED: ", assumed"}[cluster.gpu_origin]
    active = f", {format_count(model.num_active_params)} active" if model.moe else ""
    nodes = f"{cluster.num_nodes} node{'s' if cluster.num_nodes > 1 else ''} of {cluster.gpus_per_node}"
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


def chosen_line(found: Survey) -> str:
    """Returns the choice or, where nothing fits, what comes nearest."""
    configuration = found.first.configuration
    verdict = "chosen " if found.fits else "nearest"
    return f"{verdict}  {label(configuration)}, {configuration.model.precision}, {configuration.batch.seq_len} tokens"


def reason_lines(found: Survey) -> list[str]:
    """Returns why, what was looked at, and what to know."""
    lines = ["why", *(f"  - {reason.text}" for reason in found.proposals[0].reasons)]
    if found.num_estimated + found.num_excluded > 1:
        lines.append(f"  - {considered(found)}")
    if found.notes:
        lines += ["", "know", *(f"  - {note}" for note in found.notes)]
    return lines


def wrapped(line: str, width: int) -> str:
    """Returns a line wrapped under the text after its label or dash; a number stays with its unit."""
    whole = _QUANTITY.sub("\\1\xa0\\2", line)
    lead = _LEAD.match(line)
    indent = " " * len(lead[0]) if lead else ""
    filled = textwrap.fill(whole, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return filled.replace("\xa0", " ")


def considered(found: Survey) -> str:
    """Returns how many configurations were looked at, and how."""
    whole = found.num_estimated + found.num_excluded
    return (
        f"{whole:,} configurations considered: {found.num_estimated:,} estimated, {found.num_excluded:,} excluded by"
        " a bound of their memory or time"
    )


def table_lines(found: Survey) -> list[str]:
    """Returns the figures of each plan, in columns of `COLUMNS` altogether."""
    heads = (
        ("", "", "GiB/", "host", "step", "tokens/", "", ""),
        ("", "plan", "GPU", "GiB", "s", "s/GPU", "MFU", "limited by"),
    )
    rows = [*heads, *(_row(number, each.estimate) for number, each in enumerate(found.proposals, 1))]
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


def _row(number: int, each: Estimate) -> tuple[str, ...]:
    known = each.speed
    figures = (UNKNOWN,) * 4
    if known is not None:
        step = f"{known.step_s:.{0 if known.step_s >= 100 else 1 if known.step_s >= 10 else 2}f}"
        tokens = f"{known.tokens_per_s_per_gpu:.0f}"
        figures = (step, tokens, percent(known.mfu_ratio), LIMITS[known.limited_by])
    device = f"{each.memory.device_bytes_per_gpu / GIB:.1f}"
    host = f"{each.memory.host_bytes_per_node / GIB:.0f}"
    return (str(number), short_label(each.configuration), device, host, *figures)


def plan_document(found: Survey, workload: Workload) -> dict[str, Any]:
    """Returns the answer as JSON-ready data; what is not known is None. Units are in the names."""
    model = workload.model
    return {
        "schema": 1,
        "model": {
            "name": model.name,
            "num_params": model.num_params,
            "num_active_params": model.num_active_params,
            "num_trainable_params": found.first.num_trainable_params,
        },
        "cluster": asdict(workload.cluster),
        "plans": [_entry(each) for each in found.proposals],
        "chosen": 0 if found.fits else None,
        "considered": {"estimated": found.num_estimated, "excluded_by_bound": found.num_excluded},
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
)
_SPEED = ("step_s", "tokens_per_s_per_gpu", "mfu_ratio", "limited_by", "uncertainty_ratio")


def _entry(proposal: Proposal) -> dict[str, Any]:
    estimate = proposal.estimate
    memory, speed = asdict(estimate.memory), asdict(estimate.speed) if estimate.speed else {}
    return {
        "title": label(estimate.configuration),
        **flat(estimate.configuration),
        "fits": estimate.fits,
        "memory": {name: memory[name] for name in _MEMORY},
        "speed": {name: speed.get(name) for name in _SPEED},
        "reasons": [reason.text for reason in proposal.reasons],
    }
