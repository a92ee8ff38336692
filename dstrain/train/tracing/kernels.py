"""Reproduces CUDA's choices on tensors without data: attention kernels, dropout masks, attention masks.

On the meta device PyTorch would take attention apart into s × s matrices, keep dropout masks as wide as the data, and
fail where Transformers looks into a mask. Sources are named at each function.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F  # noqa: N812
from transformers import masking_utils, modeling_flash_attention_utils
from transformers.integrations import moe

from dstrain.plan.memory.layers.attention import WIDEST_AT_ONCE
from dstrain.train import loss
from dstrain.train.data import isolation

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


_aten = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)
_WIDEST_FLASH_HEAD = 256
_ALIGNMENT = 8
"""Elements to which CUDA's half-precision attention kernels align a head and a row of the bias."""


@contextmanager
def as_on_cuda(*, is_packed: bool) -> Iterator[None]:
    """Within it, operations on meta tensors allocate what they would on CUDA.

    `is_packed` says whether positions begin anew within a row, which Transformers would look for in the data.
    """
    flash = modeling_flash_attention_utils
    with ExitStack() as stack:
        for owner, name, stand_in in (
            (F, "scaled_dot_product_attention", scaled_dot_product_attention),
            (F, "dropout", dropout),
            (torch, "autocast", _autocast),
            *([] if is_packed else [(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)]),
            (flash, "lazy_import_flash_attention", _flash_functions),
            (flash, "_get_unpad_data", _unpad_data),
            (flash, "_is_packed_sequence", lambda position_ids, batch_size: False),
            (isolation, "sample_lengths", lambda positions: [len(positions)]),
            (isolation, "has_kernel", _has_kernel),
            (loss, "token_losses", token_losses),
            (moe, "_can_use_grouped_mm", lambda states, weight, offs: weight.dtype is torch.bfloat16),
            *stand_ins(),
        ):
            stack.enter_context(patch.object(owner, name, stand_in))
        yield


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Stands in for `F.scaled_dot_product_attention`, by the kernel that CUDA takes.

    Flash without a mask, in half precision, for queries and values of one width of up to 256; else the
    memory-efficient kernel, which cannot group queries; else plain matrices. A boolean mask becomes an additive one.
    Source: torch 2.13 aten/src/ATen/native/transformers/attention.cpp: scaled_dot_product_attention,
    convert_boolean_attn_mask_, preprocess_mask; cuda/sdp_utils.cpp: can_use_flash_attention,
    can_use_mem_efficient_attention.
    """
    width, is_half = query.shape[-1], query.dtype in _HALF
    if attn_mask is None and is_half and width == value.shape[-1] <= _WIDEST_FLASH_HEAD:
        return _flash(query, key, value, dropout_p=dropout_p, is_causal=is_causal, scale=scale)
    bias = attn_mask
    if bias is not None and bias.dtype is torch.bool:
        bias = torch.where(bias, 0.0, torch.full((), float("-inf"), dtype=query.dtype, device="meta"))
    alignment = _ALIGNMENT if is_half else _ALIGNMENT // 2
    fits = width % alignment == 0 and value.shape[-1] % alignment == 0 and query.shape[1] == key.shape[1]
    if not fits or query.dim() != 4:
        options = {"scale": scale, "enable_gqa": enable_gqa}
        plain = _aten._scaled_dot_product_attention_math
        return plain(query, key, value, bias, dropout_p, is_causal, None, **options)[0]  # type: ignore[no-any-return]
    if bias is not None:
        if any(stride % _ALIGNMENT for stride in bias.stride()[:-1]):
            # the kernel reads rows of a mask at aligned addresses, so PyTorch pads them and takes a slice
            length = bias.shape[-1]
            bias = F.pad(bias, (0, _ALIGNMENT - length % _ALIGNMENT))[..., :length]
        bias = bias.expand(*query.shape[:3], key.shape[2])
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    efficient = _aten._scaled_dot_product_efficient_attention
    out: torch.Tensor = efficient(query, key, value, bias, needs_grad, dropout_p, is_causal, scale=scale)[0]
    return out


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Returns flash attention of (batch, heads, tokens, width), with heads padded to a multiple of 8 elements."""
    width = query.shape[-1]
    missing = -width % _ALIGNMENT
    if missing:
        query, key, value = (F.pad(tensor, (0, missing)) for tensor in (query, key, value))
    out = _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    return out[..., :width] if missing else out  # type: ignore[no-any-return]


def _has_kernel(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Returns whether every GPU from compute capability 8.0 on has the kernel of `isolation.has_kernel`."""
    width = query.shape[-1]
    return query.dtype in _HALF and width == value.shape[-1] and width % _ALIGNMENT == 0 and width <= WIDEST_AT_ONCE


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> torch.Tensor:
    """Stands in for flash_attn 2's function of the same name: (batch, tokens, heads, width).

    It keeps queries, keys, values, output and the log-sum-exp, as PyTorch's own flash kernel does.
    Source: flash_attn 2.8 flash_attn_interface.py: FlashAttnFunc.
    """
    heads_first = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    return _flash(*heads_first, dropout_p=dropout_p, is_causal=causal, scale=softmax_scale).transpose(1, 2)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> torch.Tensor:
    """Stands in for flash_attn 2's function of the same name: sequences one after the other, as one row."""
    return flash_attn_func(q[None], k[None], v[None], dropout_p, softmax_scale, causal)[0]


def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Stands in for `F.dropout` on CUDA, which keeps one byte of mask per element.

    Source: torch 2.13 aten/src/ATen/native/Dropout.cpp: dropout, is_fused_kernel_acceptable.
    """
    if not training or p == 0.0:
        return input
    out: torch.Tensor = torch.native_dropout(input, p, True)[0]
    return out


def _autocast(device_type: str, *args: Any, _original: Any = torch.autocast, **kwargs: Any) -> Any:
    """Returns the context manager of PyTorch, which does not know the meta device; PEFT switches it off by device."""
    return _original("cuda" if device_type == "meta" else device_type, *args, **kwargs)


def _flash_functions(*_: Any, **__: Any) -> tuple[tuple[Any, ...], tuple[Any, Any]]:
    """Stands in for Transformers' `lazy_import_flash_attention`, without the package."""
    flash = modeling_flash_attention_utils
    process = flash._lazy_define_process_function(flash_attn_varlen_func)  # type: ignore[no-untyped-call]
    functions = (flash_attn_func, flash_attn_varlen_func, None, flash._pad_input, flash._unpad_input)
    return functions, (process, process)


def _unpad_data(attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Returns the places of real tokens, all of them: the longest rows are what memory is planned for."""
    batch, length = attention_mask.shape
    indices = torch.arange(batch * length, device="meta")
    return indices, torch.empty(batch + 1, dtype=torch.int32, device="meta"), length


def token_losses(logits: torch.Tensor, targets: torch.Tensor, ignored: int) -> torch.Tensor:
    """Returns zeros with the bytes of DeepSpeed's kernel for the chunked loss."""
    losses: torch.Tensor = _CrossEntropy.apply(logits)  # type: ignore[no-untyped-call]
    return losses


class _CrossEntropy(torch.autograd.Function):
    """Source: deepspeed 0.19.8 runtime/chunked_cross_entropy.py: _TritonCrossEntropy."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        log_sum_exp, losses = (logits.new_zeros(len(logits), dtype=torch.float32) for _ in range(2))
        ctx.save_for_backward(logits, log_sum_exp)
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        logits, _ = ctx.saved_tensors
        return torch.zeros_like(logits)
