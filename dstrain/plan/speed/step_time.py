"""The time of one optimizer step, from compute, memory traffic, communication and their overlap, and its error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from dstrain.facts.cluster.cluster import Cluster
from dstrain.facts.workload import Workload
from dstrain.plan.configuration import Configuration
from dstrain.plan.estimate_records import Limit, Speed
from dstrain.plan.speed.collectives import Collective, Phase, collectives
from dstrain.plan.speed.compute import Setting, passes, setting
from dstrain.plan.speed.efficiency import RETRY_S, Efficiency, efficiency
from dstrain.plan.speed.flops import peak_flops_per_s
from dstrain.plan.speed.optimizer_step import Stepping, stepping
from dstrain.plan.speed.traffic import Work, work


class Extent(StrEnum):
    """How many GPUs a run has."""

    ONE_GPU = "one GPU"
    ONE_NODE = "one node"
    SEVERAL_NODES = "several nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRange:
    """One kind of question: A100, A800 and H100 with NVLink, and InfiniBand or RoCE between nodes."""

    extent: Extent
    """How many GPUs."""
    is_full: bool
    """Whether the whole model trains; else an adapter."""
    ratio: float
    """Error that 80 % of the predictions stay within, over the measured throughput; each published table counts as
    much as any other."""
    runs: int
    """Published runs of the kind."""
    tables: int
    """Tables that they are from."""


ERROR_RANGES = (
    ErrorRange(extent=Extent.ONE_GPU, is_full=False, ratio=0.1, runs=23, tables=2),
    ErrorRange(extent=Extent.ONE_GPU, is_full=True, ratio=0.07, runs=12, tables=2),
    ErrorRange(extent=Extent.ONE_NODE, is_full=False, ratio=0.09, runs=48, tables=2),
    ErrorRange(extent=Extent.ONE_NODE, is_full=True, ratio=0.08, runs=68, tables=5),
    ErrorRange(extent=Extent.SEVERAL_NODES, is_full=True, ratio=0.1, runs=47, tables=3),
)
"""Source: `python benchmarks/predict.py --ranges`; tests/test_published.py compares."""


def extent(cluster: Cluster) -> Extent:
    """Returns how many GPUs a cluster has, in words."""
    if cluster.num_gpus == 1:
        return Extent.ONE_GPU
    return Extent.ONE_NODE if cluster.num_nodes == 1 else Extent.SEVERAL_NODES


def error_ratio(cluster: Cluster, *, is_full: bool) -> float | None:
    """Returns the range of a kind of question that published runs have, or None for any other.

    Other cards, and GPUs of a node that PCIe joins, have too few runs.
    """
    if not is_compared(cluster):
        return None
    kind = (extent(cluster), is_full)
    return next((found.ratio for found in ERROR_RANGES if (found.extent, found.is_full) == kind), None)


def is_compared(cluster: Cluster) -> bool:
    """Returns whether the GPUs are of a generation, and joined as those, that published runs cover."""
    return cluster.gpu.link.startswith("nvlink") and cluster.gpu.compute_capability in ((8, 0), (9, 0))


PRODUCTS, ATTENTION, ELEMENTWISE = "matrix products", "attention", "elementwise kernels"
OPTIMIZER, LAUNCHES = "optimizer", "kernel launches"
INTRA, INTER = "links inside the node", "links between nodes"
CPU, PCIE, NVME = "CPU optimizer", "PCIe", "NVMe"
ALLOCATOR = "memory allocator"

LIMITS: Mapping[str, Limit] = MappingProxyType(
    {
        PRODUCTS: Limit.COMPUTE,
        ATTENTION: Limit.COMPUTE,
        ELEMENTWISE: Limit.MEMORY_BANDWIDTH,
        OPTIMIZER: Limit.MEMORY_BANDWIDTH,
        LAUNCHES: Limit.LAUNCHES,
        INTRA: Limit.INTRA_LINK,
        INTER: Limit.INTER_LINK,
        CPU: Limit.CPU_OPTIMIZER,
        PCIE: Limit.PCIE,
        NVME: Limit.NVME,
        ALLOCATOR: Limit.ALLOCATOR,
    }
)
"""The limit of each part of a step."""


def speed(workload: Workload, configuration: Configuration) -> Speed | None:
    """Predicts the speed of a configuration; None if the speed of the device is unknown, as of a CPU.

    Step = accumulation × (forward + backward) + what collectives and copies show beyond what computation hides +
    optimizer. A hidden collective shows its first message, what outlasts the computation, and a share of the rest by
    which it slows the computation down. Tokens of padding count as tokens.
    A CPU has no peak to start from: rates of products, attention and copies measured on two cores put the step of
    `dstrain demo` at 4 to 6 times what it took, and it took 1 to 5 times as long while others used the cores.
    Source of the form: Calculon (SC'23); distance from published runs: `benchmarks/predict.py`.
    """
    c, cluster, gpu = configuration, workload.cluster, workload.cluster.gpu
    peak = peak_flops_per_s(gpu, c.model.precision)
    if peak <= 0 or gpu.hbm_bytes_per_s <= 0:
        return None
    rates = efficiency(cluster, workload.measured)
    done = work(workload.model, c)
    chosen = setting(c, peak, gpu, workload.contents)
    parts, hidden = _parts(cluster, c, done, rates, chosen)
    step_s = sum(parts.values())
    # ranks that share a sequence or the tensors share its tokens
    tokens = c.batch.tokens * c.step.grad_accum / (c.parallel.sp * c.parallel.tp)
    flops = done.model_flops[0] + done.model_flops[1] * chosen.attended_tokens
    return Speed(
        step_s=step_s,
        tokens_per_s_per_gpu=tokens / step_s,
        mfu_ratio=flops * tokens / step_s / peak,
        limited_by=_limit(parts),
        uncertainty_ratio=_uncertainty(workload, c, parts, rates),
        parts_s=parts,
        hidden_s=hidden,
    )


def delayed(known: Speed, retries: int) -> Speed:
    """Returns the speed if the caching allocator gives everything back `retries` times in each step."""
    if not retries:
        return known
    parts = {**known.parts_s, ALLOCATOR: retries * RETRY_S}
    step_s = sum(parts.values())
    faster = known.step_s / step_s
    apart = PRIOR_UNCERTAINTY[ALLOCATOR][0] * parts[ALLOCATOR] / step_s
    return replace(
        known,
        step_s=step_s,
        tokens_per_s_per_gpu=known.tokens_per_s_per_gpu * faster,
        mfu_ratio=known.mfu_ratio * faster,
        limited_by=_limit(parts),
        uncertainty_ratio=known.uncertainty_ratio * faster + apart,
        parts_s=parts,
    )


def forward_s(workload: Workload, configuration: Configuration) -> float | None:
    """Returns the seconds of one forward pass without a backward pass, as an evaluation has it, on every GPU.

    Parameters are gathered as in a step; gathers during computation are hidden as there. None if the speed
    of the GPU is unknown.
    """
    c, cluster, gpu = configuration, workload.cluster, workload.cluster.gpu
    peak = peak_flops_per_s(gpu, c.model.precision)
    if peak <= 0 or gpu.hbm_bytes_per_s <= 0:
        return None
    rates, done = efficiency(cluster, workload.measured), work(workload.model, c)
    forward, _ = passes(done, rates, setting(c, peak, gpu, workload.contents))
    copies = stepping(cluster, c, done, rates).pcie_forward
    sent = _shown(collectives(cluster, c, done), Phase.FORWARD, forward.total, cluster, rates)
    return max(forward.total, copies) + sum(exposed for _, exposed, _ in sent)


def _parts(
    cluster: Cluster, c: Configuration, done: Work, rates: Efficiency, chosen: Setting
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the seconds of a step by part, and of collectives and copies that computation hides."""
    forward, backward = passes(done, rates, chosen)
    copies = stepping(cluster, c, done, rates)
    again = c.step.grad_accum
    shown = _shown_copies(copies, forward.total, backward.total)
    # copies of what is offloaded run beside the pass that needs them: only what outlasts it shows
    copied = copies.pcie_forward + copies.pcie_backward
    hidden = {INTRA: 0.0, INTER: 0.0, PCIE: again * (copied - shown)}
    parts = {
        PRODUCTS: again * (forward.products + backward.products),
        ATTENTION: again * (forward.attention + backward.attention),
        ELEMENTWISE: again * (forward.elementwise + backward.elementwise),
        LAUNCHES: again * (forward.launches + backward.launches),
        OPTIMIZER: copies.optimizer,
        INTRA: 0.0,
        INTER: 0.0,
        CPU: copies.cpu_optimizer,
        PCIE: copies.pcie_step + again * shown,
        NVME: copies.nvme,
        ALLOCATOR: 0.0,
    }
    sent = collectives(cluster, c, done)
    if sent:
        times = {
            Phase.FORWARD: (forward.total, again),
            Phase.BACKWARD: (backward.total, again),
            # gradients that are reduced once a step hide behind one backward pass alone
            Phase.LAST_BACKWARD: (backward.total, 1),
            Phase.STEP: (0.0, 1),
        }
        for phase, (computing, count) in times.items():
            for part, exposed, rest in _shown(sent, phase, computing, cluster, rates):
                parts[part] += count * exposed
                hidden[part] += count * rest
    return parts, hidden


def _shown(
    sent: list[Collective], phase: Phase, computing: float, cluster: Cluster, rates: Efficiency
) -> list[tuple[str, float, float]]:
    """Returns the exposed and the hidden time of a phase's collectives, by link.

    In the order given, each hides behind what is left of the computation, `computing` seconds.
    """
    exposed = []
    for collective in sent:
        if collective.phase is not phase:
            continue
        seconds, hidden = collective.seconds(cluster, rates), 0.0
        if collective.is_hidden:
            first = seconds / max(1.0, collective.messages)
            hidden = min(seconds - first, max(0.0, computing))
            computing -= hidden
        shown = seconds - hidden + rates.overlap_slowdown * hidden
        exposed.append((INTER if collective.spans_nodes(cluster) else INTRA, shown, hidden))
    return exposed


def _shown_copies(copies: Stepping, forward_s: float, backward_s: float) -> float:
    """Returns the time by which copies over PCIe outlast the passes of a micro-batch."""
    if not copies.is_pcie_hidden:
        return copies.pcie_forward + copies.pcie_backward
    return max(0.0, copies.pcie_forward - forward_s) + max(0.0, copies.pcie_backward - backward_s)


def _limit(parts: Mapping[str, float]) -> Limit:
    """Returns the resource that limits the largest part of a step; parts with the same limit count together."""
    sums = dict.fromkeys(Limit, 0.0)
    for part, seconds in parts.items():
        sums[LIMITS[part]] += seconds
    return max(sums, key=lambda limit: sums[limit])


PRIOR_UNCERTAINTY: Mapping[str, tuple[float, str]] = MappingProxyType(
    {
        PRODUCTS: (0.20, "gemm_ratio"),
        ATTENTION: (0.30, "attention_ratio"),
        ELEMENTWISE: (0.25, "hbm_ratio"),
        OPTIMIZER: (0.30, "hbm_ratio"),
        LAUNCHES: (0.60, "launch_s"),
        INTRA: (0.40, "intra_bus_bytes_per_s"),
        INTER: (0.50, "inter_bus_bytes_per_s"),
        CPU: (0.50, "cpu_adam_bytes_per_s"),
        PCIE: (0.40, "pcie_bytes_per_s"),
        NVME: (0.60, "nvme_read_bytes_per_s"),
        ALLOCATOR: (1.00, ""),
    }
)
"""How far each part may be off, over itself, and the measurement that halves it: a judgement. It weighs parts where two
plans are compared, and stands for the range where published runs give none (`error_ranges`)."""
_NOT_COMPARED = (LAUNCHES, CPU, PCIE, NVME, ALLOCATOR)
"""Parts that published runs hardly have, so that they add to the range of a kind that is otherwise compared. Launches
took 1.0 to 1.6 times as planned on two machines with the same GPU (Qwen3-0.6B under ZeRO-2 on an H200)."""

_EXPERTS_UNCERTAINTY = 0.20
"""Added by experts: the spread of tokens over them, and the grouping of their products."""
_ETHERNET_FACTOR = 1.5
"""The part on links between nodes over Ethernet without RDMA: congestion and untuned sockets."""


def _uncertainty(workload: Workload, c: Configuration, parts: Mapping[str, float], rates: Efficiency) -> float:
    """Returns half the width of the range of the step time, over the step time.

    The range of published runs of the kind, corrected for calibrated and for missing parts; without such runs
    each part's own, weighted by its share of the step.
    """
    step_s = sum(parts.values())
    known = _weighted(parts, rates) / step_s
    compared = error_ratio(workload.cluster, is_full=c.model.is_full)
    if compared is not None and not rates.is_ethernet:
        prior = _weighted(parts, replace(rates, calibrated=frozenset())) / step_s
        apart = _weighted({part: parts[part] for part in _NOT_COMPARED}, rates) / step_s
        known = compared * known / prior + apart
    return known + (_EXPERTS_UNCERTAINTY if workload.model.moe is not None else 0.0)


def _weighted(parts: Mapping[str, float], rates: Efficiency) -> float:
    """Returns the seconds by which parts may be off together."""
    return sum(_part_error(part, rates) * seconds for part, seconds in parts.items())


def _part_error(part: str, rates: Efficiency) -> float:
    """Returns how far a part may be off, over itself."""
    ratio, measurement = PRIOR_UNCERTAINTY[part]
    if measurement in rates.calibrated:
        return ratio / 2
    return ratio * _ETHERNET_FACTOR if part == INTER and rates.is_ethernet else ratio


def difference_error_s(first: Speed, second: Speed, rates: Efficiency, *, scales: tuple[float, float]) -> float:
    """Returns how far the difference of two plans' times may be off: of each part, the seconds in which they differ.

    Their common parts have the same error. Hidden parts count too, since they show if they are not hidden after all.
    `scales`: factors of both times.
    """
    times = [
        {part: scale * (seconds + known.hidden_s.get(part, 0.0)) for part, seconds in known.parts_s.items()}
        for known, scale in zip((first, second), scales, strict=True)
    ]
    return sum(_part_error(part, rates) * abs(seconds - times[1][part]) for part, seconds in times[0].items())
