"""Forward and backward passes outside of training, which leave the engine and the random numbers as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer  # type: ignore[import-untyped]
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer  # type: ignore[import-untyped]
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer  # type: ignore[import-untyped]
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3  # type: ignore[import-untyped]
from deepspeed.runtime.zero.stage_1_and_2 import (  # type: ignore[import-untyped]
    INITIAL_MICRO_STEP_ID,
    DeepSpeedZeroOptimizer,
)

_OF_STAGE_0 = (BF16_Optimizer, FP16_Optimizer, FP16_UnfusedOptimizer)


@dataclass(slots=True, kw_only=True)
class Norms:
    """The norms of this rank's own gradients, before they are reduced."""

    by_name: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """Parameter → norms of its gradients: several of one that checkpointing visits again."""

    def total(self, scale: float) -> float:
        """Returns the norm of all gradients; `scale` is the factor of the loss."""
        every = [norm for norms in self.by_name.values() for norm in norms]
        return float(torch.stack(every).norm()) / scale if every else 0.0

    def first_nonfinite(self) -> str | None:
        """Returns a parameter whose gradient is not finite; None without one."""
        every = [(name, norm) for name, norms in self.by_name.items() for norm in norms]
        if not every:
            return None
        is_finite = torch.stack([norm for _, norm in every]).isfinite().tolist()
        return next((name for (name, _), finite in zip(every, is_finite, strict=True) if not finite), None)


@contextmanager
def norms_of(model: torch.nn.Module) -> Iterator[Norms]:
    """Notes the norm of each gradient when autograd has it, as ZeRO does not keep the gradients of a rank."""
    norms = Norms()

    def noting(name: str) -> Callable[[torch.Tensor], None]:
        def note(grad: torch.Tensor) -> None:
            norm = torch.linalg.vector_norm(grad.detach(), dtype=torch.float32)  # without a copy of the gradient
            norms.by_name.setdefault(name, []).append(norm)

        return note

    handles = [
        parameter.register_hook(noting(name))  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    try:
        yield norms
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def without_step(engine: Any) -> Iterator[None]:
    """Passes within it make no optimizer step, and leave no gradients, counters or random numbers behind."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    was_training = engine.training
    engine.step = lambda *arguments, **options: None
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        del engine.step  # restores the method of the class
        engine.train(was_training)
    _discard(engine)


def can_discard(engine: Any) -> bool:
    """Returns whether `without_step` leaves no trace in this engine.

    It is not tried with optimizers that write gradients to NVMe, nor with kinds of them that DeepSpeed adds.
    """
    optimizer = engine.optimizer
    if type(optimizer) in (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3):
        return not getattr(optimizer, "swap_optimizer", False)
    return type(optimizer) in _OF_STAGE_0 or isinstance(optimizer, torch.optim.Optimizer)


def _discard(engine: Any) -> None:
    """Discards gradients as DeepSpeed does when a step is skipped, and zeroes the buffers that the next step reuses.

    Source: deepspeed 0.19.8 runtime/zero/stage_1_and_2.py: step; runtime/zero/stage3.py: _pre_step, _overflow_clean_up.
    """
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        optimizer.micro_step_id = INITIAL_MICRO_STEP_ID
        optimizer.zero_grad(set_to_none=True)
        optimizer._release_preflattened_grad_buffers()
        for tensors in (optimizer.averaged_gradients, optimizer.all_grad_tensors):
            tensors.update(dict.fromkeys(tensors))
        if optimizer.cpu_offload:
            optimizer.reset_cpu_buffers()
            optimizer._offload_accumulated_param_ids = set()
            optimizer.accumulated_grads_in_cpu.clear()
            _zero(master.grad for master in optimizer.single_partition_of_fp32_groups)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        optimizer._pre_step()
        optimizer._overflow_clean_up(optimizer.loss_scale)
        _zero([optimizer.grad_partitions_flat_buffer])
        if optimizer.offload_optimizer:
            _zero(master.grad for master in optimizer.fp32_partitioned_groups_flat)
    else:
        optimizer.zero_grad()
    engine.zero_grad()


def _zero(gradients: Any) -> None:
    for gradient in gradients:
        if gradient is not None:
            gradient.zero_()


def loss_scale(engine: Any) -> float:
    """Returns the factor by which DeepSpeed multiplies the loss: 1 except in fp16."""
    return float(engine._get_optimizer_loss_scale()) if engine.fp16_enabled() else 1.0
