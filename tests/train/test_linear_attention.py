"""The stand-ins of linear attention on tensors without data, against Transformers' own code with data."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.qwen3_5 import modeling_qwen3_5

from dstrain.train.tracing import kernels
from dstrain.train.tracing.tracker import StorageTracker

B, S, KEYS, VALUES, D, WIDTH = 2, 100, 2, 4, 16, 8


def inputs(device: str) -> dict[str, Any]:
    """Returns what a layer of gated DeltaNet gives to the rule: views of one tensor, as after its convolution."""
    shapes = {"query": (B, S, KEYS, D), "key": (B, S, KEYS, D), "value": (B, S, VALUES, WIDTH)}
    tensors = {name: torch.rand(shape, device=device, dtype=torch.bfloat16) for name, shape in shapes.items()}
    tensors |= {"g": -torch.rand((B, S, VALUES), device=device), "beta": torch.rand((B, S, VALUES), device=device)}
    tensors["beta"] = tensors["beta"].bfloat16()
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}


def looks(tensors: list[Any]) -> list[tuple[Any, ...]]:
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


def test_the_delta_rule_returns_what_transformers_own_does() -> None:
    found = []
    rules = (modeling_qwen3_5.torch_chunk_gated_delta_rule, kernels.chunk_gated_delta_rule)
    for device, rule in zip(("cpu", "meta"), rules, strict=True):
        given = inputs(device)
        out, state = rule(**given, use_qk_l2norm_in_kernel=True)
        assert state is None
        out.sum().backward()
        found.append(looks([out, *(tensor.grad for tensor in given.values())]))
    assert found[0] == found[1]


def test_the_convolution_returns_what_transformers_own_does() -> None:
    found = []
    convolutions = (modeling_qwen3_5.causal_conv1d_fn, kernels.causal_conv1d_fn)
    for device, convolution in zip(("cpu", "meta"), convolutions, strict=True):
        states = torch.rand((B, S, D), device=device, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.rand((D, 4), device=device, dtype=torch.bfloat16, requires_grad=True)
        out = convolution(states.transpose(1, 2), weight, activation="silu")
        out.sum().backward()
        found.append(looks([out, states.grad, weight.grad]))
    assert found[0] == found[1]


def test_the_delta_rule_keeps_what_fla_saves() -> None:
    given = inputs("meta")
    with StorageTracker(round_bytes=1, known=list(given.values())) as tracker:
        out, _ = kernels.chunk_gated_delta_rule(**given)
        kept = tracker.live_bytes
    tokens = B * S
    queries_and_keys = 2 * KEYS * (2 * D + 4)  # normalised, with a reciprocal norm in fp32
    solved, decay = VALUES * 64 * 2, VALUES * 4
    assert out.shape == given["value"].shape
    assert kept == tokens * (queries_and_keys + solved + decay) + out.nbytes
