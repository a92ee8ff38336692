"""Explains that no configuration fits: how far the nearest one is over, and what would fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from dstrain.choices import Method, Offload, Optimizer
from dstrain.errors import DoesNotFit, InvalidConfig
from dstrain.facts.cluster.cluster import Cluster, Origin
from dstrain.facts.workload import Workload
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.labels import label
from dstrain.plan.request import Request
from dstrain.plan.search.alternatives import gain_ratio
from dstrain.plan.search.contradictions import option
from dstrain.plan.search.search import EQUAL_RATIO, fastest, least_plan, something_seems_to_fit
from dstrain.plan.search.search_space import DEFAULT_SEQ_LEN
from dstrain.units import GIB, format_bytes

OPENED = ("zero_stage", "offload", "offload_ratio", "hpz", "grad_ckpt", "grad_ckpt_every_n_layers", "loss", "sp", "ep")
"""Choices of a request that are left open, one at a time, where nothing fits with them."""
SHORTEST = 256
"""Tokens of the shortest sequence that is proposed."""


def does_not_fit(workload: Workload, request: Request, nearest: Estimate) -> DoesNotFit:
    """Returns the error of a search that found nothing: the closest configuration in numbers, and changes that fit."""
    model, cluster = workload.model, workload.cluster
    is_assumed = cluster.host_memory_origin is Origin.ASSUMED and not nearest.fits_host
    ways = nearest_that_fits(workload, request)
    hint = (
        "These options fit:\n" + "\n".join(f"  {way}" for way in ways)
        if ways
        else "No similar configuration was found that fits either."
    )
    title = label(nearest.configuration)
    the_way = f"{title} needs" if request.is_one_configuration else f"the closest configuration, {title}, needs"
    problem = f"{model.name} does not fit on {cluster.num_gpus} × {cluster.gpu.name}: {the_way} {nearest.shortage}"
    assumed = [ram_assumed(cluster)] if is_assumed else []
    assumed += [gpu_assumed(cluster)] if cluster.gpu_origin is Origin.ASSUMED else []
    return DoesNotFit("\n".join([problem, *assumed]), hint=hint)


def ram_assumed(cluster: Cluster) -> str:
    """Returns which RAM was assumed, and the option that sets it."""
    return f"assumed: {format_bytes(cluster.host_memory_bytes)} of RAM on each node; change it with --host-memory"


def gpu_guessed(cluster: Cluster) -> str:
    """Returns a note that the speed of the GPU is a guess."""
    return f"{cluster.gpu.name} is not in the table of GPUs: its speed is a guess from its cores and clocks"


def gpu_assumed(cluster: Cluster) -> str:
    """Returns which GPU was assumed, and the option that sets it."""
    gpu = cluster.gpu
    size = format_bytes(gpu.memory_bytes)
    return f"assumed: {gpu.name} ({size}), as none is here; name yours with --gpu"


def nearest_that_fits(workload: Workload, request: Request) -> list[str]:
    """Returns changes that fit, each as one sentence in numbers: more RAM than was assumed, a smaller micro-batch than
    the one asked for, one choice of the request less, more GPUs, an 8-bit optimizer, an adapter, a shorter sequence.

    Where an adapter fits only with states in RAM, one of 4-bit weights is named too if it is faster.
    """
    said: dict[str, tuple[str, Estimate]] = {}
    for kind, words, changed, cluster in _changes(workload, request):
        before = said[kind][1] if kind in said else None
        if before is not None and not (kind == "method" and before.configuration.zero.is_offloaded):
            continue
        if (estimate := _fastest(workload, changed, cluster)) is not None:
            gain = gain_ratio(cluster, estimate, before) if before is not None else None
            if before is None or (gain or 0) > EQUAL_RATIO:
                said[kind if before is None else f"{kind} too"] = f"{words}: {label(estimate.configuration)}", estimate
    return [sentence for sentence, _ in said.values()]


def _fastest(workload: Workload, request: Request, cluster: Cluster) -> Estimate | None:
    """Returns the best plan on other machines; None if nothing fits or the options contradict each other there."""
    try:
        return fastest(replace(workload, cluster=cluster), request)
    except InvalidConfig:
        return None


def _changes(workload: Workload, request: Request) -> Iterator[tuple[str, str, Request, Cluster]]:
    """Yields kinds of change, each from the smallest on: its name, the option, the request and the machines."""
    cluster = workload.cluster
    alone = replace(request, sp=request.sp or 1, tp=request.tp or 1)  # sequence parallelism needs less, and is slow
    if cluster.host_memory_origin is Origin.ASSUMED:
        least = 1 << (cluster.host_memory_bytes // GIB).bit_length()
        for changed, gib in product((alone, request), (least, 2 * least, 4 * least, 8 * least)):
            yield "host-memory", f"--host-memory {gib}GiB", changed, replace(cluster, host_memory_bytes=gib * GIB)
    micro_batch = (request.micro_batch or 1) // 2
    while micro_batch:  # accumulation makes up for it
        changed = replace(request, micro_batch=micro_batch, grad_accum=None)
        yield "micro-batch", f"--micro-batch {micro_batch}", changed, cluster
        micro_batch //= 2
    for name in OPENED:
        if getattr(request, name) is not None:
            opened: dict[str, Any] = {name: None}
            yield name, f"without {option(request, name)}", replace(request, **opened), cluster
    for changed in (replace(each, global_batch=None) for each in (alone, request)):
        more = [replace(cluster, num_nodes=cluster.num_nodes * factor) for factor in (2, 4, 8, 16)]
        if not something_seems_to_fit(replace(workload, cluster=more[-1]), changed):
            continue
        for each in more:
            nodes = "" if each.gpus_per_node == 8 else f" --gpus-per-node {each.gpus_per_node}"
            yield "gpus", f"--gpus {each.num_gpus}{nodes}", changed, each
    if request.optimizer is Optimizer.ADAMW and request.offload in (None, Offload.NONE):
        eight_bit = replace(request, optimizer=Optimizer.ADAMW_8BIT)
        yield "optimizer", f"--optimizer {eight_bit.optimizer}", eight_bit, cluster
    others = {Method.FULL: (Method.LORA, Method.QLORA), Method.LORA: (Method.QLORA,), Method.QLORA: (Method.LORA,)}
    for method in others[request.method]:  # with 4-bit weights each GPU loads the whole model, whatever the stage
        yield "method", f"--method {method}", replace(request, method=method), cluster
    seq_len = request.seq_len or min(DEFAULT_SEQ_LEN, workload.model.max_position_embeddings)
    if least_plan(workload, replace(request, seq_len=min(seq_len, SHORTEST))) is None:
        return
    while seq_len > SHORTEST:
        seq_len //= 2
        yield "seq-len", f"--seq-len {seq_len}", replace(request, seq_len=seq_len), cluster
