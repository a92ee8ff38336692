"""The choice: candidates in the order of lost speed, and the first that fits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import TypeVar

from dstrain.choices import Attention, Method, Offload
from dstrain.errors import DoesNotFit, InvalidConfig
from dstrain.facts.cluster import Cluster
from dstrain.facts.model import ModelFacts
from dstrain.plan.configuration import DEFAULTS, Configuration
from dstrain.plan.estimate import assess, supported_precision
from dstrain.plan.plan import Estimate
from dstrain.plan.request import Request

T = TypeVar("T")

DEFAULT_SEQ_LEN = 4096
"""Sequence length where none is asked for, and the model reaches so far."""
DEFAULT_GLOBAL_BATCH = 64
"""Samples of one step where none are asked for: the usual size of supervised fine-tuning on a few nodes."""
SATURATING_TOKENS = 4096
"""Tokens of a micro-batch from which matrix products run near their best; a smaller one loses speed first.
Source: achievable-FLOP/s sweeps of stas00/ml-engineering (2,048 and more for h of 4,096 and more)."""
_OFFLOAD_RULE = "an optimizer is offloaded under ZeRO-2 and 3, parameters and NVMe under ZeRO-3 only"
LARGEST_TOKENS = 16384
"""Tokens of a micro-batch beyond which a larger one brings nothing."""


def candidates(model: ModelFacts, cluster: Cluster, request: Request) -> Iterator[Configuration]:
    """Yields configurations from the fastest to the most frugal.

    The order of lost speed, outermost first: no offload, optimizer, parameters, NVMe; then micro-batches from the one
    that saturates the GPU down to 1; then without and with checkpointing; then ZeRO-1/2 before ZeRO-3; each with roomy
    and then tight engine buffers, and offloaded states at last in pageable memory, which is not rounded up. What the
    request fixes does not vary.
    """
    start = _settled(model, cluster, request)
    ways = product(
        _offloads(cluster, request),
        _micro_batches(cluster, request, start),
        _choices(request.grad_ckpt, (False, True)),
    )
    for offload, micro_batch, grad_ckpt in ways:
        accum = _grad_accum(cluster, request, micro_batch)
        if accum is None:
            continue
        for stage in _stages(request, offload, accum, cluster):
            chosen = replace(
                start, offload=offload, micro_batch=micro_batch, grad_ckpt=grad_ckpt, grad_accum=accum, zero_stage=stage
            )
            yield _sized(model, chosen, tight=False)
            yield _sized(model, chosen, tight=True)
            if offload is not Offload.NONE:
                yield replace(_sized(model, chosen, tight=True), pin_memory=False)


def fastest_fit(model: ModelFacts, cluster: Cluster, request: Request) -> tuple[Estimate | None, list[Estimate]]:
    """Returns the first candidate that fits, grown to a larger micro-batch where memory allows, and what came before.

    The first is None when nothing fits; the list then holds every candidate.
    """
    before: list[Estimate] = []
    for configuration in candidates(model, cluster, request):
        found = assess(model, cluster, configuration)
        if found.fits:
            return _grown(model, cluster, request, found), before
        before.append(found)
    return None, before


def _settled(model: ModelFacts, cluster: Cluster, request: Request) -> Configuration:
    """Returns the start of the search: all that does not vary."""
    seq_len = request.seq_len or min(DEFAULT_SEQ_LEN, model.max_position_embeddings)
    if seq_len > model.max_position_embeddings:
        raise InvalidConfig(
            f"--seq-len {seq_len} is longer than {model.name} was made for ({model.max_position_embeddings})",
            hint=f"Write --seq-len {model.max_position_embeddings} or less.",
        )
    return replace(
        DEFAULTS,
        method=request.method,
        lora=request.lora,
        seq_len=seq_len,
        precision=request.precision or supported_precision(cluster),
        attn=request.attn
        or Attention.SDPA,  # PyTorch's own: a flash kernel where there is one, and no package to install
        packing=request.packing,
        overlap_comm=cluster.num_gpus > 1,
    )


def _choices(given: T | None, otherwise: tuple[T, ...]) -> tuple[T, ...]:
    return otherwise if given is None else (given,)


def _offloads(cluster: Cluster, request: Request) -> tuple[Offload, ...]:
    if request.offload is Offload.NVME and cluster.nvme_path is None:
        raise InvalidConfig("--offload nvme needs a folder on an NVMe drive", hint="Add --nvme /path/on/nvme.")
    everywhere = (Offload.NONE, Offload.OPTIMIZER, Offload.PARAMS)
    return _choices(request.offload, (*everywhere, Offload.NVME) if cluster.nvme_path else everywhere)


def _stages(request: Request, offload: Offload, accum: int, cluster: Cluster) -> tuple[int, ...]:
    """Returns the stages to try: ZeRO-1 reduces once a step where ZeRO-2 reduces every micro-batch."""
    if offload in (Offload.PARAMS, Offload.NVME):
        stages: tuple[int, ...] = (3,)
    elif cluster.num_gpus == 1 and offload is Offload.NONE:
        stages = (2,)  # with nobody to share with, ZeRO-3 only adds work
    elif offload is Offload.OPTIMIZER or accum == 1:
        stages = (2, 3)
    else:
        stages = (1, 2, 3)
    if request.zero_stage is None:
        return stages
    legal = {Offload.NONE: (1, 2, 3), Offload.OPTIMIZER: (2, 3)}.get(offload, (3,))
    return (request.zero_stage,) if request.zero_stage in legal else ()


def _micro_batches(cluster: Cluster, request: Request, start: Configuration) -> tuple[int, ...]:
    """Returns micro-batches to try, largest first."""
    if request.micro_batch is not None:
        return (request.micro_batch,)
    largest = 2 ** max(0, math.ceil(math.log2(SATURATING_TOKENS / start.seq_len)))
    per_rank = _samples_per_rank(cluster, request)
    if per_rank is None:
        per_rank = max(1, DEFAULT_GLOBAL_BATCH // cluster.num_gpus)
    largest = min(largest, per_rank)
    sizes = []
    while largest >= 1:
        sizes.append(largest)
        largest //= 2
    return tuple(sizes)


def _samples_per_rank(cluster: Cluster, request: Request) -> int | None:
    """Returns the samples of one step on one GPU that the request fixes; raises InvalidConfig if they do not divide."""
    if request.global_batch is None:
        return None
    if request.global_batch % cluster.num_gpus:
        below = request.global_batch // cluster.num_gpus * cluster.num_gpus
        options = [str(size) for size in (below, below + cluster.num_gpus) if size]
        raise InvalidConfig(
            f"--global-batch {request.global_batch} cannot be shared by {cluster.num_gpus} GPUs",
            hint=f"Write --global-batch {' or '.join(options)}.",
        )
    return request.global_batch // cluster.num_gpus


def _grad_accum(cluster: Cluster, request: Request, micro_batch: int) -> int | None:
    """Returns the micro-batches of one step, or None where this micro-batch cannot give the asked global batch."""
    per_rank = _samples_per_rank(cluster, request)
    if request.grad_accum is not None:
        return request.grad_accum if per_rank in (None, request.grad_accum * micro_batch) else None
    if per_rank is None:
        return max(1, round(DEFAULT_GLOBAL_BATCH / (cluster.num_gpus * micro_batch)))
    return per_rank // micro_batch if per_rank % micro_batch == 0 else None


def _sized(model: ModelFacts, configuration: Configuration, *, tight: bool) -> Configuration:
    """Returns the configuration with engine buffers sized to the model, roomy or tight.

    A reduce bucket of one layer hides latency without a copy of the model; the prefetch bucket gathers one layer ahead;
    norms and biases stay gathered; a sub-group is a power of two, so that pinned memory wastes nothing.
    """
    layer = sum(g.numel * g.count for g in model.tensors) // max(1, model.num_hidden_layers)
    bucket = min(200_000_000, max(20_000_000, layer)) if not tight else 20_000_000
    bucket = max(2, min(bucket, model.num_params) // 2 * 2)
    return replace(
        configuration,
        reduce_bucket_size=bucket,
        prefetch_bucket_size=bucket if not tight else bucket // 4,
        param_persistence_threshold=10 * model.hidden_size,
        max_live_parameters=1_000_000_000 if not tight else 100_000_000,
        max_reuse_distance=1_000_000_000 if not tight else 0,
        sub_group_size=2**28 if not tight else 2**26,
    )


def _grown(model: ModelFacts, cluster: Cluster, request: Request, found: Estimate) -> Estimate:
    """Returns the same way to train with the micro-batch doubled as often as memory and the global batch allow."""
    while request.micro_batch is None:
        present = found.configuration
        micro_batch = 2 * present.micro_batch
        accum = _grad_accum(cluster, request, micro_batch)
        larger = cluster.num_gpus * micro_batch * (accum or 0) > DEFAULT_GLOBAL_BATCH
        if accum is None or micro_batch * present.seq_len > LARGEST_TOKENS or (request.global_batch is None and larger):
            break
        grown = assess(model, cluster, replace(present, micro_batch=micro_batch, grad_accum=accum))
        if not grown.fits:
            break
        found = grown
    return found


def nearest_that_fits(model: ModelFacts, cluster: Cluster, request: Request) -> list[str]:
    """Returns what would fit, each as one sentence in numbers: more GPUs, an adapter, a shorter sequence."""
    ways = []
    for factor in (2, 4, 8, 16, 32, 64):
        more = replace(cluster, num_nodes=cluster.num_nodes * factor)
        found, _ = fastest_fit(model, more, replace(request, global_batch=None))
        if found is not None:
            nodes = "" if more.gpus_per_node == 8 else f" --gpus-per-node {more.gpus_per_node}"
            ways.append(f"--gpus {more.num_gpus}{nodes}: {found.configuration.title}")
            break
    for method in (Method.LORA, Method.QLORA):
        if request.method is Method.FULL:
            found, _ = fastest_fit(model, cluster, replace(request, method=method))
            if found is not None:
                ways.append(f"--method {method}: {found.configuration.title}")
                break
    seq_len = request.seq_len or min(DEFAULT_SEQ_LEN, model.max_position_embeddings)
    while seq_len > 256:
        seq_len //= 2
        found, _ = fastest_fit(model, cluster, replace(request, seq_len=seq_len))
        if found is not None:
            ways.append(f"--seq-len {seq_len}: {found.configuration.title}")
            break
    return ways


def _bytes_that_decide(each: Estimate) -> int:
    """Returns the bytes that decide how far a candidate is from fitting."""
    return each.memory.host_bytes_per_node if each.fits_gpu else each.memory.device_bytes_per_gpu


def does_not_fit(
    model: ModelFacts, cluster: Cluster, request: Request, tried: list[Estimate]
) -> DoesNotFit | InvalidConfig:
    """Returns the error of a search that found nothing: the most frugal candidate in numbers, and what would fit.

    InvalidConfig where no candidate agrees with all options given.
    """
    if not tried:
        return InvalidConfig(
            f"the options contradict each other: {_contradiction(cluster, request)}", hint="Leave one of them out."
        )
    # what the GPU could hold is nearer to fitting than what it could not
    least = min(tried, key=lambda each: (not each.fits_gpu, _bytes_that_decide(each)))
    ways = nearest_that_fits(model, cluster, request)
    hint = "What would fit:\n" + "\n".join(f"  {way}" for way in ways) if ways else "Nothing near would fit either."
    return DoesNotFit(
        f"{model.name} does not fit on {cluster.num_gpus} × {cluster.gpu.name}: the most frugal way,"
        f" {least.configuration.title}, needs {least.shortage}",
        hint=hint,
    )


def _contradiction(cluster: Cluster, request: Request) -> str:
    """Returns the two options that no configuration satisfies together."""
    if request.zero_stage is not None and request.offload not in (None, Offload.NONE):
        return f"--zero-stage {request.zero_stage} and --offload {request.offload}; {_OFFLOAD_RULE}"
    return (
        f"--global-batch {request.global_batch} is no multiple of {cluster.num_gpus} GPUs"
        f" × micro-batch {request.micro_batch}"
    )
