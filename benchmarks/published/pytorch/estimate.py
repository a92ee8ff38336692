"""Estimates a run of PyTorch without DeepSpeed with a replay of the caching allocator.

With context and NCCL, published nvidia-smi figures of 136 runs on A100 (fms-acceleration: one GPU and FSDP, segments
that cannot grow) are met to 3.2 % on average, 1.8 % on one GPU. Furthest off, up to -30 %, are 4-bit Mixtrals under
FSDP, perhaps as one rank loads the whole model.
"""

from __future__ import annotations

from functools import lru_cache

from benchmarks.published.pytorch import fsdp, live_bytes, unsharded
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.facts.workload import Workload
from dstrain.plan import estimate
from dstrain.plan.configuration import Configuration
from dstrain.plan.estimate_records import Estimate
from dstrain.plan.memory.caching_allocator import Allocator
from dstrain.plan.memory.layers.activations import has_layer_code
from dstrain.plan.memory.layers.attention import as_attended
from dstrain.plan.memory.memory import assembled
from dstrain.plan.memory.outside import outside_bytes
from dstrain.plan.memory.peak import Peak
from dstrain.plan.memory.reserved import AMPERE_WORKSPACE_BYTES, Held, Reserved, replayed, workspace_bytes
from dstrain.plan.memory.zero import sharing_ranks


def assess(workload: Workload, configuration: Configuration) -> Estimate:
    """Returns the product's estimate; of PyTorch alone with its own live bytes and a replay of its allocations."""
    if configuration.code.sharding is None:
        return estimate.assess(workload, configuration)
    model, gpu, attended = workload.model, workload.cluster.gpu, as_attended(configuration, workload.cluster.gpu)
    ranks = sharing_ranks(workload.cluster, attended)
    peak = live_bytes.peak(model, attended, ranks)
    needs = assembled(
        workload, attended, live_bytes.states(model, attended, ranks), peak, _held(workload, attended, ranks, peak)
    )
    return estimate.estimate_of(workload, configuration, needs, round(estimate.USABLE_GPU_RATIO * gpu.memory_bytes))


def _held(workload: Workload, configuration: Configuration, ranks: int, peak: Peak) -> Held:
    """Returns the memory of the allocator: replayed, or an upper estimate."""
    model, gpu = workload.model, workload.cluster.gpu
    workspace, outside = workspace_bytes(gpu), outside_bytes(workload.cluster, configuration, workload.measured)
    live = peak.total + 2 * workspace
    most = round(live_bytes.quick_ratio(model, configuration, ranks, peak) * live)
    if not _is_scripted(model, configuration):
        return Held(least=live, most=most, settled=most)
    for capacity in (gpu.memory_bytes - outside, None):
        held = reserved(model, configuration, ranks, capacity_bytes=capacity, workspace_bytes=workspace)
        if not held.out_of_memory:
            break
    return Held(
        least=live,
        most=max(live, held.reserved_bytes),
        settled=max(live, held.settled_bytes),
        retries_per_step=held.settled_retries * configuration.step.grad_accum // min(configuration.step.grad_accum, 2),
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
    """Returns the allocator's bytes on one rank of `num_ranks`, whose GPU leaves it `capacity_bytes`."""
    writer = unsharded.steps if configuration.zero.stage < 3 else fsdp.steps
    steps = writer(model, configuration, num_ranks, workspace_bytes)
    allocator = Allocator(
        expandable_segments=configuration.expandable_segments, capacity_bytes=capacity_bytes, most_bytes=None
    )
    return replayed(allocator, steps, is_enough=allocator.feed(next(steps)))
