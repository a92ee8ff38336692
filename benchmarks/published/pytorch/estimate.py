"""Estimates a run of PyTorch without DeepSpeed with a replay of the caching allocator.

With context and NCCL, published nvidia-smi figures of 136 runs on A100 (fms-acceleration: one GPU and FSDP, segments
that cannot grow) are met to 3.2 % on average, 1.8 % on one GPU. Furthest off, up to -30 %, are 4-bit Mixtrals under
FSDP, perhaps as one rank loads the whole model.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from benchmarks.published.pytorch import fsdp, unsharded
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.workload import Workload
from dstrain.plan import estimate
from dstrain.plan.configuration import Configuration
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.memory.caching_allocator import Allocator
from dstrain.plan.memory.deepspeed.settings import micro_batches_played
from dstrain.plan.memory.layers.activations import has_layer_code
from dstrain.plan.memory.layers.attention import as_attended
from dstrain.plan.memory.outside import outside_bytes
from dstrain.plan.memory.reserved import AMPERE_WORKSPACE_BYTES, Reserved, replayed, workspace_bytes
from dstrain.plan.memory.zero import sharing_ranks
from dstrain.plan.speed.step_time import delayed


def assess(workload: Workload, configuration: Configuration) -> Estimate:
    """Returns the product's estimate of any configuration; of PyTorch alone with the replay of its allocations."""
    found = estimate.assess(workload, configuration)
    if configuration.model.is_deepspeed or not _is_scripted(workload.model, configuration):
        return found
    attended, gpu = as_attended(configuration, workload.cluster.gpu), workload.cluster.gpu
    outside = outside_bytes(workload.cluster, attended, workload.measured)
    ranks = sharing_ranks(workload.cluster, attended)
    for capacity in (gpu.memory_bytes - outside, None):
        held = reserved(workload.model, attended, ranks, capacity_bytes=capacity, workspace_bytes=workspace_bytes(gpu))
        if not held.out_of_memory:
            break
    return _with_held(found, held)


def _with_held(found: Estimate, held: Reserved) -> Estimate:
    needs = found.memory
    live, parts = needs.live_bytes_per_gpu, needs.breakdown_bytes
    parts = replace(parts, fragmentation=max(live, held.settled_bytes) - live)
    configuration = found.configuration
    retries = held.settled_retries * configuration.step.grad_accum // micro_batches_played(configuration)
    return replace(
        found,
        memory=replace(
            needs,
            reserved_bytes_per_gpu=max(live, held.reserved_bytes),
            device_bytes_per_gpu=parts.total,
            retries_per_step=retries,
            breakdown_bytes=parts,
        ),
        fits_gpu=needs.load.fits_gpu and parts.total <= found.usable_bytes_per_gpu,
        speed=None if found.speed is None else delayed(found.speed, retries),
    )


def _is_scripted(model: ModelFacts, configuration: Configuration) -> bool:
    """Returns whether it is known what a run allocates: PyTorch alone offloads all of it or nothing."""
    zero = configuration.zero
    return has_layer_code(model) and (not zero.is_offloaded or (zero.stage == 3 and zero.offloads_params))


@lru_cache(256)
def reserved(
    model: ModelFacts,
    configuration: Configuration,
    num_ranks: int,
    *,
    capacity_bytes: int | None,
    workspace_bytes: int = AMPERE_WORKSPACE_BYTES,
) -> Reserved:
    """Returns what the caching allocator holds on one rank of `num_ranks`, whose GPU leaves it `capacity_bytes`."""
    writer = unsharded.steps if configuration.zero.stage < 3 else fsdp.steps
    steps = writer(model, configuration, num_ranks, workspace_bytes)
    allocator = Allocator(
        expandable_segments=configuration.expandable_segments, capacity_bytes=capacity_bytes, most_bytes=None
    )
    return replayed(allocator, steps, is_enough=allocator.feed(next(steps)))
