"""qgZ, the quantized gradients of ZeRO++: which tensors DeepSpeed's kernels do not take."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from dstrain.facts.model.model_facts import ModelFacts, TensorGroup

LONGEST_GROUP = 40_960
"""Elements of one group at most: 512 threads × 16 elements × 5 steps; for more, no kernel is launched.
Source: deepspeed 0.19.8 ops/csrc/quantization/swizzled_quantize.cu: launch_swizzled_quant_impl (read, not run)."""
PER_LOAD = 8
"""fp16 elements of one load. Source: quantize::h_per_load."""


def is_quantized(shape: Sequence[int], ranks: int) -> bool:
    """Returns whether gradients of a shape are quantized; vectors, and what 2 × `ranks` do not divide, are not.

    Source: deepspeed 0.19.8 runtime/comm/coalesced_collectives.py: all_to_all_quant_reduce.

    >>> is_quantized((25_600, 5_120), 16), is_quantized((25_600, 5_120), 24), is_quantized((5_120,), 16)
    (True, False, False)
    """
    return len(shape) > 1 and prod(shape) % (2 * ranks) == 0


def is_garbled(shape: Sequence[int], ranks: int) -> bool:
    """Returns whether the kernels leave a part of such gradients unwritten, without an error.

    They quantize max(shape[0], shape[1], ranks) groups, an equal number for each rank, and drop the remainder; a group
    that is too long, such as of merged experts, is not quantized at all, and groups must be whole loads.

    >>> is_garbled((25_600, 5_120), 16), is_garbled((128_258, 4_096), 16), is_garbled((128, 1_536, 2_048), 16)
    (False, True, True)
    """
    if not is_quantized(shape, ranks):
        return False
    groups = max(shape[0], shape[1], ranks)
    elements = prod(shape) // groups
    return groups % ranks != 0 or elements % PER_LOAD != 0 or elements > LONGEST_GROUP


def garbled(model: ModelFacts, ranks: int) -> list[TensorGroup]:
    """Returns the trained tensors of a model of which qgZ loses gradients on that many ranks."""
    return [group for group in model.tensors if group.num_trained and is_garbled(group.shape, ranks)]
