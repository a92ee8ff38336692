"""Decoder layers that torch.compile turns into a few kernels each, inside ZeRO's hooks and activation checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from dstrain.choices import CompileBackend
from dstrain.errors import InvalidConfig
from dstrain.train.data.collate import without_adapter
from dstrain.train.tracing.anatomy import dissect


def compile_layers(model: Any, *, zero_stage: int, backend: str = CompileBackend.INDUCTOR) -> None:
    """Compiles the forward pass of every decoder layer when it is called first; all layers share the result.

    A layer gets a class of the same name whose `forward` is compiled. Transformers checkpoints around it, and hooks of
    ZeRO-3, which cannot be compiled, run before and after it: a layer is a leaf module, whose weights are gathered
    together. DeepSpeed reduces the gradients of a leaf when that of its input is known, so the first layer's input
    needs one too. Raises InvalidConfig for layers that are not written for Transformers' checkpoints.
    Source: transformers 5.23 modeling_layers.py: GradientCheckpointingLayer.__init_subclass__; deepspeed 0.19.8
    runtime/zero/parameter_offload.py: _register_deepspeed_module, stage3.py: reduce_leaf_module_grads.
    """
    from deepspeed.utils import set_z3_leaf_module  # type: ignore[import-untyped]

    anatomy = dissect(model)
    layers = anatomy.layers
    if not all(isinstance(layer, GradientCheckpointingLayer) for layer in layers):
        problem = f"layers of {type(without_adapter(model)).__name__} have no forward pass of their own to compile"
        raise InvalidConfig(f"torch_compile is true, but {problem}", hint="torch_compile: false")
    kinds = {kind: _compiled(kind, backend) for kind in {type(layer) for layer in layers}}
    for layer in layers:
        layer.__class__ = kinds[type(layer)]
        if zero_stage == 3:
            set_z3_leaf_module(layer, True)
    anatomy.embedding.register_forward_hook(_with_gradient)


def _compiled(kind: Any, backend: str) -> type:
    """Returns a class of layers like another one, compiled once for all lengths; its base wraps checkpoints around."""
    forward = torch.compile(kind.forward.__wrapped__, backend=str(backend), dynamic=True)
    return type(kind.__name__, (kind,), {"forward": forward})


def _with_gradient(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Returns hidden states that have a gradient, in a pass that has any."""
    return output.requires_grad_() if torch.is_grad_enabled() else output
