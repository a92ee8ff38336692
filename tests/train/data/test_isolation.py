"""Attention over packed rows, sample by sample, in half precision on a CPU."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dstrain.train.data import isolation

LENGTHS = (7, 40, 17)


def kernel() -> Any:
    """Returns the attention that a model gets."""
    config = SimpleNamespace(get_text_config=SimpleNamespace)
    assert isolation.attend_by_sample(SimpleNamespace(config=config))
    return ALL_ATTENTION_FUNCTIONS["sdpa_by_sample"]


def attended(dtype: Any, window: int | None) -> list[Any]:
    """Returns the output and the gradients of queries, keys and values, in fp32."""
    torch.manual_seed(0)
    shapes = ((1, 4, 64, 16), (1, 2, 64, 16), (1, 2, 64, 16))
    inputs: list[Any] = [torch.randn(shape).bfloat16().to(dtype).requires_grad_() for shape in shapes]
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).unsqueeze(0)
    output, _ = kernel()(
        module, *inputs, None, position_ids=positions, sliding_window=window, scaling=0.25, dropout=0.0
    )
    assert output.dtype == dtype
    output.backward(torch.ones_like(output).tril())
    return [output.float(), *(tensor.grad.float() for tensor in inputs)]


@pytest.mark.parametrize("window", [None, 8])
def test_bf16_rounds_what_fp32_computes(window: int | None) -> None:
    for rounded, exact in zip(attended(torch.bfloat16, window), attended(torch.float32, window), strict=True):
        torch.testing.assert_close(rounded, exact, rtol=2**-7, atol=2**-7)


def test_attention_in_bf16_is_computed_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes = []

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> tuple[Any, None]:
        dtypes.append(query.dtype)
        return query.transpose(1, 2), None

    monkeypatch.setattr(isolation, "sdpa_attention_forward", attention)
    rows = torch.zeros(1, 1, 3, 2, dtype=torch.bfloat16)
    output, _ = kernel()(None, rows, rows, rows, None, position_ids=torch.tensor([[0, 1, 0]]))
    assert dtypes == [torch.float32] * 2
    assert output.dtype == torch.bfloat16


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.parametrize("window", [None, 8])
def test_the_kernel_for_all_samples_says_what_one_after_the_other_does(window: int | None, width: int) -> None:
    torch.manual_seed(0)
    borders = torch.tensor([0, *itertools.accumulate((*LENGTHS, *LENGTHS))], dtype=torch.int32, device="cuda")
    options = {
        "position_ids": torch.cat([torch.arange(length) for length in LENGTHS]).repeat(2, 1).cuda(),
        "sliding_window": window,
        "scaling": 0.25,
    }
    found = []
    for further in ({}, {"cu_seq_lens_q": borders, "max_length_q": max(LENGTHS)}):
        torch.manual_seed(1)
        shapes = ((2, 4, sum(LENGTHS), width), (2, 2, sum(LENGTHS), width), (2, 2, sum(LENGTHS), width))
        inputs = [torch.randn(shape).bfloat16().cuda().requires_grad_() for shape in shapes]
        module = SimpleNamespace(num_key_value_groups=2, is_causal=True)
        output, _ = kernel()(module, *inputs, None, **options, **further)
        output.float().square().sum().backward()
        found.append([output, *(tensor.grad for tensor in inputs)])
    for one_by_one, at_once in zip(*found, strict=True):
        torch.testing.assert_close(at_once, one_by_one, rtol=2**-5, atol=2**-4)
