"""Finds weights and optimizer states that are NaN or infinite, in the part of a model that this rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

Named = tuple[str, torch.Tensor]


def nonfinite_weights(model: Any, *, only_trained: bool = False) -> list[str]:
    """Returns the names of weights with values that are not finite; parts on NVMe are not looked at."""
    return _broken(
        (name, _valid(parameter, getattr(parameter, "ds_tensor", parameter)))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad or not only_trained
    )


def nonfinite_states(model: Any, optimizer: Any) -> list[str]:
    """Returns the names of states of the optimizer with values that are not finite, likewise."""
    return _broken(_states(optimizer, {id(parameter): name for name, parameter in model.named_parameters()}))


def _valid(parameter: Any, part: torch.Tensor) -> torch.Tensor:
    """Returns a part of a parameter without the padding behind it, which ZeRO-3 leaves uninitialised.

    Source: deepspeed 0.19.8 runtime/zero/partition_parameters.py: _partition_param.
    """
    if not hasattr(parameter, "ds_tensor"):
        return part.detach()
    size = parameter.ds_tensor.ds_numel
    rest = parameter.ds_numel - parameter.ds_zero_partition_rank * size
    return part.detach().reshape(-1)[: max(0, min(size, rest))]


def _states(optimizer: Any, names: dict[int, str]) -> Iterator[Named]:
    """Yields the states of the optimizer inside DeepSpeed's: of flat groups of weights, or of single weights."""
    flat = {id(group): number for number, group in enumerate(getattr(optimizer, "fp32_partitioned_groups_flat", []))}
    for number, (weights, states) in enumerate(getattr(optimizer, "optimizer", optimizer).state.items()):
        for kind, state in states.items():
            if not isinstance(state, torch.Tensor) or state.numel() < weights.numel():
                continue  # a count of steps, or swapped out
            if id(weights) not in flat:
                yield f"{kind} of {names.get(id(weights), f'group {number}')}", state
                continue
            begin = 0
            for parameter in optimizer.fp16_groups[flat[id(weights)]]:
                part = state.reshape(-1)[begin : begin + parameter.ds_tensor.ds_numel]
                begin += parameter.ds_tensor.ds_numel
                yield f"{kind} of {names.get(id(parameter), 'a weight')}", _valid(parameter, part)


def _broken(tensors: Iterable[Named]) -> list[str]:
    """Returns the names of tensors with values that are not finite; their largest values take no memory to find."""
    kept = [(name, tensor) for name, tensor in tensors if tensor.numel() and tensor.dtype in _CHECKED]
    largest = [torch.linalg.vector_norm(tensor, ord=float("inf")).float().cpu() for _, tensor in kept]
    if not largest:
        return []
    is_finite = torch.stack(largest).isfinite().tolist()
    return [name for (name, _), finite in zip(kept, is_finite, strict=True) if not finite]


_CHECKED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
