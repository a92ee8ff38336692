"""Sizes of the engine's buffers: levels from the smallest that work to what free memory allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from dstrain.choices import Offload
from dstrain.facts.model.model_facts import ModelFacts
from dstrain.plan.configuration import DEFAULTS, Configuration
from dstrain.plan.estimate import auto_sizes
from dstrain.plan.estimate_records import Estimate

TIGHT, ROOMY = 0, 2
"""The rungs that a search tries: the smallest buffers, and those that cost little and hide latency."""
SHARE_OF_ROOM = 0.5
"""Share of the memory left over that larger buffers may take; the rest stays for longer samples and fragments."""
NO_SLOWER_RATIO = 0.005
"""The slowdown that larger buffers may cause: they lengthen the first message of a hidden collective, which is
exposed."""
RATIO_STEP = 0.05
"""Step in which the offloaded share of an optimizer is lowered."""

_LARGEST_BUCKET, _SMALLEST_BUCKET = 200_000_000, 20_000_000
_LEAST_LIVE = 100_000_000
_LARGEST_SUB_GROUP_RUNG = 4


@cache
def sizes(model: ModelFacts, rung: int) -> Mapping[str, Any]:
    """Returns the engine's buffers of one rung; each rung needs as much memory as the last, or more.

    Above the lowest rung a reduce bucket of one layer hides latency without a copy of the model, and the prefetch
    bucket gathers one layer ahead. Norms and biases stay gathered. A sub-group is a power of two, so that pinned memory
    wastes nothing: 2^26 elements, doubled on each rung up to DeepSpeed's 10^9. Layers stay gathered from forward to
    backward within 0, 0.5, 1, 2, 4 … ·10^9 elements (DeepSpeed's default is 10^9).
    """
    layer = sum(g.numel * g.count for g in model.tensors) // max(1, model.num_hidden_layers)
    bucket = _SMALLEST_BUCKET if rung == TIGHT else min(_LARGEST_BUCKET, max(_SMALLEST_BUCKET, layer))
    bucket = max(2, min(bucket, model.num_params) // 2 * 2)
    reuse = 0 if rung == TIGHT else round(DEFAULTS.zero.max_reuse_distance * 2.0 ** (rung - ROOMY))
    return {
        "reduce_bucket_size": bucket,
        "prefetch_bucket_size": bucket // 4 if rung == TIGHT else bucket,
        "param_persistence_threshold": 10 * model.hidden_size,
        "max_live_parameters": max(_LEAST_LIVE, reuse),
        "max_reuse_distance": reuse,
        "sub_group_size": 2 ** (26 + min(rung, _LARGEST_SUB_GROUP_RUNG)),
    }


@cache
def sizes_of_transformers(model: ModelFacts) -> Mapping[str, Any]:
    """Returns the buffers of most published runs: "auto" as Transformers fills it in, and DeepSpeed's defaults."""
    return {key.removeprefix("stage3_"): size for key, size in auto_sizes(model.hidden_size).items()}


def sized(model: ModelFacts, configuration: Configuration, rung: int) -> Configuration:
    """Returns the configuration with the engine's buffers of one rung."""
    return replace(configuration, zero=replace(configuration.zero, **sizes(model, rung)))


def top_rung(model: ModelFacts) -> int:
    """Returns the rung on which the whole model stays gathered: a reuse distance of twice its parameters."""
    ratio = 2 * model.num_params / DEFAULTS.zero.max_reuse_distance
    return max(_LARGEST_SUB_GROUP_RUNG, ROOMY + math.ceil(math.log2(max(1.0, ratio))))


def sized_to_room(
    model: ModelFacts, estimate: Estimate, rung: int, *, assess: Callable[[Configuration], Estimate]
) -> tuple[Estimate, int]:
    """Returns the estimate with the largest buffers that the memory left over pays for, and their rung.

    Bisects the ladder above `rung`: the new total may take `SHARE_OF_ROOM` of what was left, must fit the host, and
    must not be slower. Below ZeRO-3 nothing above the roomy rung has a meaning.
    """
    limit = estimate.memory.device_bytes_per_gpu + SHARE_OF_ROOM * (
        estimate.usable_bytes_per_gpu - estimate.memory.device_bytes_per_gpu
    )
    low, high = rung, top_rung(model) if estimate.configuration.zero.stage == 3 else max(rung, ROOMY)
    while low < high:
        middle = (low + high + 1) // 2
        larger = assess(sized(model, estimate.configuration, middle))
        if larger.fits and larger.memory.device_bytes_per_gpu <= limit and not _is_slower(larger, estimate):
            low, estimate = middle, larger
        else:
            high = middle - 1
    return estimate, low


def _is_slower(one: Estimate, other: Estimate) -> bool:
    if one.speed is None or other.speed is None:
        return False
    return one.speed.step_s > (1 + NO_SLOWER_RATIO) * other.speed.step_s


def least_offloaded(estimate: Estimate, *, assess: Callable[[Configuration], Estimate]) -> Estimate:
    """Returns the estimate with as little of the optimizer offloaded as fits, where a part of it is (Twin-Flow).

    Source: deepspeed 0.19.8 runtime/zero/stage3.py: subgroup_to_device.
    """
    configuration = estimate.configuration
    while configuration.zero.offload is Offload.OPTIMIZER and configuration.zero.offload_ratio < 1:
        lower = round(configuration.zero.offload_ratio - RATIO_STEP, 2)
        zero = replace(configuration.zero, offload_ratio=lower)
        less = assess(replace(configuration, zero=zero)) if lower > 0 else None
        if less is None or not less.fits or _is_slower(less, estimate):
            break
        estimate, configuration = less, less.configuration
    return estimate
