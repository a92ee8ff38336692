"""Estimates what the caching allocator reserves beyond live bytes without a replay, for searches.

Blocks that are free lie in holes too small for what comes next, and free blocks of one stream serve no other. Both are
bytes, not a share: some of the largest tensors, and what other streams have at other times than the peak. So the share
is large where little is live, and a few percent where a GPU is full.
"""

from __future__ import annotations

import math

from dstrain.choices import LossKernel, StateDtypes
from dstrain.facts.model.model_facts import Kind, ModelFacts
from dstrain.plan.configuration import Configuration, Parallel
from dstrain.plan.memory.params import shard, trained_on_rank
from dstrain.plan.memory.peak import Peak
from dstrain.plan.memory.zero import gathered_bytes

FULL_LOGITS = 1.2
"""Copies of the logits in the training precision that lie in holes beside those of the loss, in full training: the
first ones are freed before a larger tensor is asked for. Source, here and below: the upper edge of `reserved` over
500 configurations of seven models drawn at random; tests/plan/memory/test_fragmentation.py compares another draw."""
ADAPTER_LOGITS = 2.0
"""The same where the base is frozen, except under ZeRO-3."""
FIXED_LOGITS = 2.5
"""The same if segments cannot grow."""
GATHERED_UNITS = 2.7
"""ZeRO-3: units that were given back, or gathered ahead, while computation has yet to get past others; a unit is the
embedding, or a block of experts where that is larger."""
EXPERT_UNITS = 0.3
"""The same of mixtures beyond what streams hold at their own peaks; a unit is the experts of a layer on this rank.
Source, with the two below: the upper edge of `reserved` over 180 configurations of five mixtures drawn at random."""
EXPERT_HOLES = {True: 0.17, False: 0.03}
"""Share of the activations of mixtures in other holes, with and without recomputation."""
STREAM_HOLES = 0.04
"""Share of all that their streams hold in others."""
WHOLE_ROOTS = 2.0
"""FSDP: root units that making the units leaves behind: its tensors, and all of them flat."""
HOLES = {
    ("engine", "full"): 0.05,
    ("engine", "adapter"): 0.02,
    ("engine", "resting"): 0.12,
    ("engine", "sharded"): 0.03,
    ("pytorch", "full"): 0.05,
    ("pytorch", "adapter"): 0.02,
    ("pytorch", "resting"): 0.05,
    ("pytorch", "sharded"): 0.03,
}
"""Share of live bytes in other holes by who holds the states and what is trained; `resting`: gradients lie between
saved tensors, because several micro-batches add to them or nothing is recomputed."""
FIXED_HOLES = 0.10
"""Additional share if segments cannot grow."""


def quick_ratio(model: ModelFacts, configuration: Configuration, num_ranks: int, peak: Peak) -> float:
    """Returns reserved over live bytes at most, with `peak` the live peak of one rank of `num_ranks`.

    In draws of configurations the replay is more than 2 % above it in 9 of 250 under DeepSpeed, 2 of 150 of PyTorch
    alone and 2 of 100 where segments cannot grow; it is on average 6 %, 8 % and 18 % above the replay.
    """
    item = configuration.model.item
    kind = _kind(configuration)
    holder = "engine" if configuration.model.is_deepspeed else "pytorch"
    base = float(peak.total)
    if kind == "sharded":
        most = _engine_streams if holder == "engine" else _fsdp_streams
        base += most(model, configuration, num_ranks, peak)
    elif configuration.zero.overlap_comm and holder == "engine":
        base += _bucket(model, configuration)
    share, logits = HOLES[holder, kind], FULL_LOGITS
    if not configuration.model.is_full and (kind != "sharded" or holder == "pytorch"):
        logits = ADAPTER_LOGITS
    if not configuration.expandable_segments:
        share, logits = share + FIXED_HOLES, FIXED_LOGITS
    reserved = base * (1 + share)
    if configuration.kernels.loss is LossKernel.FULL:
        reserved += logits * item * model.vocab_size * configuration.batch.tokens / configuration.parallel.sp
    if kind != "sharded":
        reserved += 0.5 * item * model.vocab_size * model.hidden_size
        reserved += _step_copies(model, configuration, num_ranks, peak)
    return reserved / peak.total


def most_of_streams(model: ModelFacts, configuration: Configuration, peak: Peak) -> float:
    """Returns an upper bound of the memory that streams reserve for a mixture under ZeRO-3; infinite if unknown.

    Tighter than `quick_ratio`, which knows no streams: 10 % above the replay on average, and more than 2 % below it in
    one of 183 draws, with 2 GiB live.
    """
    is_fused = configuration.kernels.loss is not LossKernel.FULL
    if model.moe is None or not peak.apart or not configuration.expandable_segments or not is_fused:
        return math.inf
    experts = _experts(shard(model, Parallel(ep=configuration.parallel.ep))) / model.moe.num_moe_layers
    whole = configuration.model.item * (EXPERT_UNITS * experts + configuration.zero.max_reuse_distance)
    holes = EXPERT_HOLES[configuration.checkpointing.enabled] * peak.activations
    return (1 + STREAM_HOLES) * (peak.total + peak.apart) + whole + holes


def _kind(configuration: Configuration) -> str:
    if configuration.zero.stage == 3:
        return "sharded"
    if not configuration.model.is_full:
        return "adapter"
    return "resting" if configuration.step.grad_accum > 1 or not configuration.checkpointing.enabled else "full"


def _step_copies(model: ModelFacts, configuration: Configuration, num_ranks: int, peak: Peak) -> float:
    """Returns the copies of a partition's gradient that fit in no hole under ZeRO-1 and 2: half of the 2 + 4 bytes."""
    is_partitioned = configuration.model.is_deepspeed and configuration.zero.stage in (1, 2)
    if not is_partitioned or configuration.zero.is_offloaded or not configuration.model.is_full:
        return 0.0
    return 3 * model.num_params / num_ranks if peak.name == "optimizer step" else 0.0


def _engine_streams(model: ModelFacts, configuration: Configuration, num_ranks: int, peak: Peak) -> float:
    """Returns the bytes of ZeRO-3's gather and reduce streams beyond those live at the peak."""
    item = configuration.model.item
    unit = max(group.numel for group in model.tensors if group.kind is not Kind.VISION)
    if model.moe is not None:
        unit = max(unit, _experts(model) // model.moe.num_moe_layers)
    counts = trained_on_rank(model, configuration)
    most = gathered_bytes(counts, configuration, unit)
    whole = GATHERED_UNITS * item * min(unit, model.num_params / 3)
    return max(0, most - peak.gathered) + whole + _bucket(model, configuration)


def _bucket(model: ModelFacts, configuration: Configuration) -> int:
    """Returns the copy of a bucket of gradients that is reduced in its own stream."""
    counts = trained_on_rank(model, configuration)
    return configuration.model.item * min(configuration.zero.reduce_bucket_size, counts.trainable)


def _experts(model: ModelFacts) -> int:
    return sum(group.numel * group.count for group in model.tensors if group.kind in (Kind.EXPERT, Kind.ROUTER))


def _fsdp_streams(model: ModelFacts, configuration: Configuration, num_ranks: int, peak: Peak) -> float:
    """Returns the same of FSDP: root and two layers gathered, gradient shards, and what making the units left."""
    item = configuration.model.item
    root = item * model.num_params_of(Kind.EMBEDDING, Kind.HEAD)
    layer = item * model.num_params / model.num_hidden_layers
    beyond = WHOLE_ROOTS * root + max(0.0, root + 2 * layer - peak.gathered)
    if configuration.model.is_full:
        wide = 4 if configuration.model.state_dtypes is StateDtypes.AUTOCAST else item
        beyond += wide * model.num_params / num_ranks
    return beyond
