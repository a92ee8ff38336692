"""Shortens a model to the layers that ZeRO-3's coordinator treats differently; the rest repeat."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from dstrain.facts.model.model_facts import ModelFacts
from dstrain.plan.configuration import Zero
from dstrain.plan.memory.params import is_inside

LAYERS_BESIDE = 12
"""Layers played beside those that prefetching or reuse can reach from either end: enough for a bucket of gradients to
be full at many different places of a layer."""


def shortened(model: ModelFacts, zero: Zero, *, most: int) -> ModelFacts:
    """Returns the model without layers in the middle, `most` of them, whose gathering repeats that of others.

    The coordinator looks at most `max_live_parameters` ahead, a prefetch bucket more, or `max_reuse_distance`.
    """
    reach = max(zero.max_live_parameters, zero.max_reuse_distance) + zero.prefetch_bucket_size
    return _shortened(model, reach, most)


@cache
def _shortened(model: ModelFacts, reach: int, most: int) -> ModelFacts:
    depth = model.num_hidden_layers
    alike = model.moe.num_moe_layers if model.moe else depth
    inside = [group for group in model.tensors if is_inside(group)]
    each = sum(group.numel for group in inside if group.count >= alike)
    needed = 2 * -(-reach // max(1, each)) + LAYERS_BESIDE
    removed = min(alike - needed, most)
    if removed <= 0:
        return model
    tensors = tuple(
        replace(group, count=group.count - removed) if is_inside(group) and group.count >= alike else group
        for group in model.tensors
    )
    moe = model.moe and replace(model.moe, num_moe_layers=alike - removed)
    return replace(model, num_hidden_layers=depth - removed, tensors=tensors, moe=moe)
