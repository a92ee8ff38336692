"""Kernels of linear attention on tensors without data: their allocations, and tensors kept for the backward pass.

Transformers calls flash-linear-attention and causal-conv1d if they are installed, as plans assume; without
them its own PyTorch code keeps several times as much.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

_CHUNK = 64
"""Tokens of a chunk of the delta rule."""


def stand_ins() -> Iterator[tuple[Any, str, Any]]:
    """Yields the loaded models' modules, the names of their functions, and what stands for these functions."""
    functions = {"torch_chunk_gated_delta_rule": chunk_gated_delta_rule, "causal_conv1d_fn": causal_conv1d_fn}
    for module in [module for name, module in sys.modules.items() if name.startswith("transformers.models.")]:
        yield from ((module, name, function) for name, function in functions.items() if name in vars(module))


def causal_conv1d_fn(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **options: Any,
) -> torch.Tensor:
    """Stands in for causal_conv1d's function of the same name: (batch, channels, tokens)."""
    out: torch.Tensor = _Convolution.apply(hidden_states, weight, bias)  # type: ignore[no-untyped-call]
    return out


def chunk_gated_delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, None]:
    """Stands in for fla's function of the same name in training: (batch, tokens, heads, width)."""
    out: torch.Tensor = _DeltaRule.apply(query, key, value, g, beta)  # type: ignore[no-untyped-call]
    return out, None


class _Convolution(torch.autograd.Function):
    """Source: causal_conv1d 1.6 causal_conv1d_interface.py: CausalConv1dFn."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        wide = [None if each is None else torch.empty_like(each, dtype=torch.float32) for each in (weight, bias)]
        narrow = [None if each is None else each.to(x.dtype) for each in wide]
        return torch.empty_like(x), *narrow


class _DeltaRule(torch.autograd.Function):
    """Source: flash-linear-attention of August 2026, ops/gated_delta_rule/chunk.py: ChunkGatedDeltaRuleFunction."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
    ) -> torch.Tensor:
        inputs = [tensor.contiguous() for tensor in (q, k, v, g, beta)]  # fla/utils.py: input_guard
        queries, keys = (torch.empty_like(tensor) for tensor in inputs[:2])
        scales = [torch.empty(tensor.shape[:-1], dtype=torch.float32, device="meta") for tensor in (queries, keys)]
        decay = torch.empty_like(inputs[3], dtype=torch.float32)
        solved = torch.empty((*v.shape[:3], _CHUNK), dtype=k.dtype, device="meta")
        passed = _states(keys, inputs[2])
        out = torch.empty_like(inputs[2])
        ctx.save_for_backward(queries, keys, *scales, inputs[2], decay, inputs[4], solved)
        del passed
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        _, keys, _, _, v, decay, beta, _ = ctx.saved_tensors
        out_grad = grads[0].contiguous()
        passed = _states(keys, v)
        inside = torch.empty_like(out_grad)
        state_grads = torch.empty_like(passed[2])
        v_grad = torch.empty_like(inside)
        del inside
        wide = (*v.shape[:3], keys.shape[-1])
        q_grad, k_grad = (torch.empty(wide, dtype=keys.dtype, device="meta") for _ in range(2))
        decay_grad, w_grad = torch.empty_like(decay), torch.empty_like(passed[0])
        q_grad, k_grad = _summed(q_grad, keys), _summed(k_grad, keys)
        k_more = _summed(torch.empty(wide, dtype=keys.dtype, device="meta"), keys)
        v_grad, beta_grad = torch.empty_like(v), torch.empty_like(beta)
        del passed, state_grads, w_grad, k_more
        return torch.empty_like(q_grad), torch.empty_like(k_grad), v_grad, decay_grad, beta_grad


def _states(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns w, u, the states between chunks, and the new values, which forward and backward pass both make."""
    batch, length, heads, value_width = values.shape
    width = keys.shape[-1]
    between = (batch, -(-length // _CHUNK), heads, width, value_width)
    return (
        torch.empty((batch, length, heads, width), dtype=keys.dtype, device="meta"),
        torch.empty_like(values),
        torch.empty(between, dtype=keys.dtype, device="meta"),
        torch.empty_like(values),
    )


def _summed(gradient: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of keys that several value heads share."""
    if gradient.shape == keys.shape:
        return gradient
    batch, length, heads, width = keys.shape
    return gradient.view(batch, length, heads, -1, width).sum(3)
