"""PyTorch's attention over packed rows, sample by sample, which so needs no mask: in one kernel where CUDA has it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dstrain.plan.memory.layers.attention import AT_ONCE_TOKENS, MOST_APART, WIDEST_AT_ONCE
from dstrain.train.data.collate import without_adapter

Attend = Callable[..., tuple[torch.Tensor, Any]]
"""Attention as Transformers calls it: queries, keys and values (batch, heads, seq, width) become (batch, seq, heads,
width)."""

_NAME = "sdpa_by_sample"
_KINDS = {"full_attention", "sliding_attention", "linear_attention"}
"""Kinds of layers whose attention reaches back to the beginning of a sample, or as far as a window; linear attention
has no masks."""


class NoPositions(TypeError):
    """Raised by attention that is not told where samples begin."""


def attend_by_sample(model: Any, *, is_on: bool = True, attention: Attend | None = None) -> bool:
    """Lets a model's text layers call PyTorch's attention for each sample, or for whole rows again.

    `attention` stands for it if it keeps samples apart already. Returns False, and changes nothing, if layers have
    another kind of attention, such as one in chunks. Transformers makes no mask for attention that it does not know.
    Source: transformers 5.23 masking_utils.py: _preprocess_mask_arguments.
    """
    config = without_adapter(model).config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds <= _KINDS or getattr(config, "attention_chunk_size", None):
        return False
    ALL_ATTENTION_FUNCTIONS.register(_NAME, attention or by_sample(_sdpa))
    config._attn_implementation = _NAME if is_on else "sdpa"
    return True


@contextmanager
def attending_whole_rows(model: Any) -> Iterator[None]:
    """Lets a model's text layers attend whole rows for a while, as generation with a cache of keys needs it."""
    config = without_adapter(model).config.get_text_config()
    is_by_sample = config._attn_implementation == _NAME
    if is_by_sample:
        config._attn_implementation = "sdpa"
    try:
        yield
    finally:
        if is_by_sample:
            config._attn_implementation = _NAME


def by_sample(attention: Attend) -> Attend:
    """Returns causal attention that calls `attention` for each sample of packed rows, with a mask only for a window.

    It takes queries, keys and values as (batch, heads, seq, width) and `position_ids` as (batch or 1, seq), which count
    from 0 in each sample, and returns (batch, seq, heads, width) and None. One kernel attends all of them if
    `is_at_once`. Raises NoPositions without `position_ids`.
    """
    lengths_of = _Remembered(lambda position_ids: [sample_lengths(row) for row in position_ids])

    def attended(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, **options: Any
    ) -> tuple[torch.Tensor, None]:
        if options.get("position_ids") is None:
            raise NoPositions(f"{type(module).__name__} passes no position_ids to its attention")
        if is_at_once(query, value, options):
            return _at_once(query, key, value, **options), None
        window = options.get("sliding_window")
        rows = []
        row_lengths = lengths_of(options["position_ids"])
        for index, row in enumerate(zip(query, key, value, strict=True)):
            lengths = row_lengths[index % len(row_lengths)]
            samples = zip(*(tensor.unsqueeze(0).split(lengths, dim=2) for tensor in row), strict=True)
            outputs = [
                attention(module, *sample, _banded(length, window, query.device), **options)[0]
                for length, sample in zip(lengths, samples, strict=True)
            ]
            rows.append(torch.cat(outputs, dim=1))
        return torch.cat(rows), None

    eager: Attend = torch.compiler.disable(attended)  # type: ignore[no-untyped-call]  # the lengths of samples decide its shapes
    return eager


def is_at_once(query: torch.Tensor, value: torch.Tensor, options: Mapping[str, Any]) -> bool:
    """Returns whether one kernel attends all samples: if there is one, and the collator's borders come along.

    Long rows of few samples keep PyTorch's choice, which on Hopper is cuDNN: for 8 rows of 4,096 tokens an H200 takes
    57 ms one by one and 1.9 ms at once with 64 samples a row, 6.5 and 3.0 ms with 4, 6.3 and 7.4 ms with one.
    Source: benchmarks/results/gpu_kernels-h200.json.
    """
    borders = options.get("cu_seq_lens_q")
    if borders is None or options.get("dropout") or not has_kernel(query, value):
        return False
    return query.shape[2] <= AT_ONCE_TOKENS or len(borders) - 1 > MOST_APART * len(query)


def has_kernel(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Returns whether PyTorch's FlashAttention takes tensors (batch, heads, seq, width), and has their gradients.

    On AMD's GPUs the operator has another implementation, which was not tried.

    Source: torch 2.13 ATen/native/transformers/cuda/flash_attn/flash_api.cpp: mha_varlen_fwd; cuda/sdp_utils.cpp:
    check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120.
    """
    if query.device.type != "cuda" or torch.version.hip or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    width, capability = query.shape[-1], torch.cuda.get_device_capability(query.device)
    widest = 256 if capability in ((8, 0), (9, 0), (10, 0)) else WIDEST_AT_ONCE
    return capability >= (8, 0) and width == value.shape[-1] and width % 8 == 0 and width <= widest


def _at_once(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> torch.Tensor:
    """Returns the attention of all samples, (batch, seq, heads, width), by PyTorch's FlashAttention.

    `cu_seq_lens_q`: the borders of the samples of all rows together, (samples + 1,). The operator is that of
    `torch.nn.attention.varlen`, which PyTorch 2.9 lacks, and 2.10 for fewer keys than queries.
    """
    rows = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    borders, longest = (cu_seq_lens_q, cu_seq_lens_q), (max_length_q, max_length_q)
    left = None if sliding_window is None else sliding_window - 1
    output: torch.Tensor = torch.ops.aten._flash_attention_forward(
        *rows, *borders, *longest, 0.0, True, False, scale=scaling, window_size_left=left
    )[0]
    return output.view(query.shape[0], query.shape[2], *output.shape[1:])


def _sdpa(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **options: Any
) -> tuple[torch.Tensor, Any]:
    """Returns PyTorch's attention; in bf16 on a CPU it computes in fp32, and keeps its tensors in bf16.

    PyTorch 2.13 takes a third of the CPU time of bf16 for samples of 64 tokens, and 0.93 of it for 512.
    """
    if query.device.type != "cpu" or query.dtype != torch.bfloat16:
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    def narrow(tensor: torch.Tensor) -> torch.Tensor:
        is_sum = tensor.dim() < 4  # of exponentials
        return tensor if is_sum or not tensor.is_floating_point() else tensor.bfloat16()

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.is_floating_point() else tensor

    with torch.autograd.graph.saved_tensors_hooks(narrow, wide):
        output, weights = sdpa_attention_forward(module, query.float(), key.float(), value.float(), mask, **options)
    return output.bfloat16(), weights


class _Remembered:
    """A function of a tensor that every layer asks for the same one, and that waits for the GPU: asked once."""

    def __init__(self, function: Callable[[torch.Tensor], list[list[int]]]) -> None:
        self._function = function
        self._tensor: Callable[[], torch.Tensor | None] = lambda: None
        self._version = 0
        self._value: list[list[int]] = []

    def __call__(self, tensor: torch.Tensor) -> list[list[int]]:
        if self._tensor() is not tensor or self._version != tensor._version:
            self._value = self._function(tensor)
            self._tensor, self._version = weakref.ref(tensor), tensor._version
        return self._value


def sample_lengths(positions: torch.Tensor) -> list[int]:
    """Returns the tokens of each sample of a packed row; `positions` count from 0 in each: (seq,).

    >>> sample_lengths(torch.tensor([0, 1, 2, 0, 1]))
    [3, 2]
    """
    begins = [0, *(positions[1:] == 0).nonzero().flatten().add(1).tolist(), len(positions)]
    return [end - begin for begin, end in itertools.pairwise(begins)]


def _banded(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Returns the mask of a window over a sample that is longer than it, (1, 1, length, length); else None.

    Source: transformers 5.23 masking_utils.py: sliding_window_overlay.
    """
    if window is None or length <= window:
        return None
    return torch.ones((1, 1, length, length), dtype=torch.bool, device=device).tril_().triu_(1 - window)
