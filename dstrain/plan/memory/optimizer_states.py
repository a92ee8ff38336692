"""Bytes of master copies and optimizer states, as DeepSpeed 0.19 holds them."""

from __future__ import annotations

from dstrain.choices import Optimizer, Precision
from dstrain.plan.configuration import Configuration, OptimizerStep, TrainedModel, Zero

STATES: dict[Optimizer, int] = {
    Optimizer.ADAMW: 2,
    Optimizer.ADAMW_8BIT: 2,  # in fp32 where it is offloaded: CPU Adam takes its place
    Optimizer.ADAMW_BF16: 2,
    Optimizer.LION: 1,
    Optimizer.SGD: 0,
    Optimizer.MUON: 2,  # AdamW's, less what `saved_by_muon` says of matrices
}
"""Tensors in the dtype of the master copy that an optimizer keeps beside it. Source: torch 2.13 optim;
bitsandbytes 0.49 optim/lion.py."""
EIGHT_BIT_STATE = 1 + 4 / 256
"""Bytes of an element of an 8-bit state: one, and an fp32 scale for 256. Source: bitsandbytes 0.49
optim/optimizer.py: Optimizer2State.init_state."""


def are_early(configuration: Configuration) -> bool:
    """Returns whether the optimizer states on the GPU exist before the first step: PyTorch's AdamW has them early.

    The part of an offloaded optimizer that stays on the GPU has another AdamW (deepspeed 0.19.8 runtime/zero/stage3.py:
    backup_optimizer); an optimizer that is offloaded as a whole has no states there.
    """
    adamw = (Optimizer.ADAMW, Optimizer.ADAMW_BF16)
    zero = configuration.zero
    if zero.is_offloaded:
        return zero.offload_ratio == 1
    return configuration.code.has_early_states and configuration.step.optimizer in adamw


def master_item(optimizer: Optimizer) -> int:
    """Returns the bytes of an element of master weights, and of the gradients and moments that step them.

    Source: deepspeed 0.19.8 runtime/base_optimizer.py: _configure_master_weights.
    """
    return 2 if optimizer is Optimizer.ADAMW_BF16 else 4


def optimizer_bytes_per_param(optimizer: Optimizer) -> float:
    """Returns the bytes of the master copy and of what the optimizer keeps beside it, for each trained parameter.

    With AdamW in mixed precision: fp32 master copy 4, first moment 4, second moment 4. DeepSpeed keeps a separate copy
    for a model in that dtype too. Source: ZeRO (arXiv 1910.02054), 3.1; deepspeed 0.19.8 stage_1_and_2.py: __init__.

    >>> [optimizer_bytes_per_param(each) for each in (Optimizer.ADAMW, Optimizer.ADAMW_8BIT, Optimizer.ADAMW_BF16)]
    [12, 6.03125, 6]
    """
    moment = EIGHT_BIT_STATE if optimizer is Optimizer.ADAMW_8BIT else master_item(optimizer)
    return master_item(optimizer) + STATES[optimizer] * moment


def has_master(model: TrainedModel, zero: Zero) -> bool:
    """Returns whether a copy of the parameters is stepped in place of them; ZeRO-0 steps fp32 parameters themselves.

    Source: deepspeed 0.19.8 runtime/engine.py: _configure_optimizer.
    """
    return zero.stage > 0 or model.precision is not Precision.FP32


def stepped_bytes_per_param(configuration: Configuration) -> float:
    """Returns the bytes of a configuration's master copy and optimizer states for each trained parameter."""
    optimizer = configuration.step.optimizer
    return optimizer_bytes_per_param(optimizer) - (
        0 if has_master(configuration.model, configuration.zero) else master_item(optimizer)
    )


def saved_by_muon(matrices: int, model: TrainedModel, step: OptimizerStep, zero: Zero, ranks: int) -> int:
    """Returns the bytes that Muon's states are below AdamW's: of matrices, given by their elements on one rank before
    ZeRO shares them out, one fp32 moment of two.

    ZeRO-1 and 2 keep the moment twice, both times in the gradients' dtype. Source: deepspeed 0.19.8
    runtime/zero/stage_1_and_2.py: _muon_momentum_buffer, _muon_staging_momentum.
    """
    if step.optimizer is not Optimizer.MUON:
        return 0
    share = matrices // (ranks if zero.stage else 1)
    if zero.stage in (1, 2):
        return (8 - 2 * (step.grad_accum_dtype or model.precision).num_bytes) * share
    return 4 * share


def muon_flops(rows: int, columns: int) -> int:
    """Returns the FLOPs with which Muon orthogonalises a matrix: five Newton-Schulz iterations on its Gram matrix, or
    on a square one itself.

    Source: deepspeed 0.19.8 runtime/zero/muon/original_muon.py: zeropower_via_gram_newtonschulz, matrix products.
    """
    small, large = sorted((rows, columns))
    return 30 * small**3 if small == large else small**2 * (8 * large + 28 * small)


_MUON_BUFFERS = 256 * 2**20
"""Bytes of the buffers that DeepSpeed's Muon keeps, at most. Source: deepspeed 0.19.8 runtime/zero/stage3.py:
_muon_allgather_max_cached_bytes."""


def muon_buffers(matrices: int, model: TrainedModel, ranks: int) -> int:
    """Returns the bytes that Muon keeps of what it gathers under ZeRO-3, at most: two parts and a whole.

    Source: deepspeed 0.19.8 runtime/zero/stage3.py: _muon_update_sub_group.
    """
    return min(_MUON_BUFFERS, model.item * (matrices // ranks + matrices))
