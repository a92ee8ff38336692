"""Bytes that kernels move and kernel counts, for each part of a decoder layer except GEMMs and attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dstrain.facts.model.traits import FusedParts


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of the kernels of one part of a layer, without products and attention; bf16."""

    forward: float
    """Bytes read and written by the forward pass, for each element of the part's width and each token."""
    backward: float
    """The same of the backward pass, without recomputation."""
    forward_kernels: int
    """Kernels of the forward pass."""
    backward_kernels: int
    """Kernels of the backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The parts of a decoder layer."""

    norm: Cost
    """One RMSNorm, of its width."""
    rotary: Cost
    """Rotary embedding, of the width of queries and keys together."""
    latent: Cost
    """The same with latent attention: also the parts put together and padded, of the width of the queries."""
    gated: Cost
    """Activation and product of gate and up, of the inner width."""
    residual: Cost
    """Both residual sums, and gradients that meet, of the hidden size."""
    experts: Cost
    """Choosing, sorting, weighting and summing, of the hidden size times the experts visited."""


EAGER = Costs(
    norm=Cost(forward=36, backward=92, forward_kernels=8, backward_kernels=16),
    rotary=Cost(forward=20, backward=32, forward_kernels=10, backward_kernels=16),
    latent=Cost(forward=21, backward=54, forward_kernels=20, backward_kernels=34),
    gated=Cost(forward=10, backward=18, forward_kernels=2, backward_kernels=3),
    residual=Cost(forward=12, backward=30, forward_kernels=2, backward_kernels=5),
    experts=Cost(forward=14, backward=30, forward_kernels=19, backward_kernels=27),
)
"""Transformers' own layers. Source: inputs and outputs of every kernel in a trace of Transformers 5.23's layers on meta
tensors (Llama, Qwen 3, Qwen 3 MoE, DeepSeek V3), exact for dense layers, within 5 % with experts or latents."""

LIGER = Costs(
    norm=Cost(forward=4, backward=6, forward_kernels=1, backward_kernels=2),
    rotary=Cost(forward=4, backward=8, forward_kernels=1, backward_kernels=3),
    latent=Cost(forward=21, backward=54, forward_kernels=20, backward_kernels=34),
    gated=Cost(forward=6, backward=10, forward_kernels=1, backward_kernels=1),
    residual=EAGER.residual,
    experts=EAGER.experts,
)
"""Fused kernels: each input read and each output written once. Source: liger-kernel 0.8.5 ops/rms_norm.py, rope.py (in
place, gradients copied as in `EAGER`) and swiglu.py (which computes the activation again in its backward pass)."""

JOINED_GRADIENT = Cost(forward=0, backward=8, forward_kernels=0, backward_kernels=1)
"""Gradients of gate and up put together where both are one weight. Source: as `EAGER`."""

SHARED_EXPERTS = Cost(forward=36, backward=54, forward_kernels=30, backward_kernels=30)
"""Experts that ranks share, in place of `Costs.experts`: tokens are gathered, sent, sorted by expert, put back, sent
back, put in place, and weighted and summed in fp32. Bytes and kernels counted in the source: deepspeed 0.19.8
module_inject/auto_ep_layer.py: _forward, permute_by_local_expert, combine_from_routed."""

CONVOLUTION = Cost(forward=8, backward=14, forward_kernels=4, backward_kernels=5)
"""Gated DeltaNet's causal convolution, for each of its channels: read and written, then copied once into queries, keys
and values. Source: causal_conv1d 1.6 causal_conv1d_interface.py; fla/utils.py: input_guard."""
DELTA_RULE = Cost(forward=40, backward=104, forward_kernels=17, backward_kernels=24)
"""The gated delta rule in chunks of 64, for each element of the value heads, of heads 128 wide. Source: inputs and
outputs of every kernel of flash-linear-attention of August 2026, ops/gated_delta_rule/chunk.py, counted in the source;
its products are too thin to count. Not compared with a measurement of it alone."""
GATED_NORM = Cost(forward=66, backward=140, forward_kernels=13, backward_kernels=26)
"""Its norm with a gate, in fp32 and not fused. Source: Transformers 5.23 modeling_qwen3_5.py: Qwen3_5RMSNormGated."""

ADAPTER_INPUT = Cost(forward=2, backward=10, forward_kernels=4, backward_kernels=6)
ADAPTER_OUTPUT = Cost(forward=12, backward=8, forward_kernels=0, backward_kernels=0)
FP32_ADAPTER_INPUT = Cost(forward=10, backward=20, forward_kernels=6, backward_kernels=9)
FP32_ADAPTER_OUTPUT = Cost(forward=28, backward=28, forward_kernels=0, backward_kernels=0)
"""Adapters, for each element of the adapted linears' inputs and outputs (`_add_adapters`)."""

NORM_WEIGHT_GRADIENT_BYTES = 8.0
"""Bytes of the weight's gradient in a norm's backward pass, which a frozen model lacks."""

CAST = Cost(forward=6, backward=6, forward_kernels=1, backward_kernels=1)
"""One copy between bf16 and fp32, and its gradient's way back."""


def costs(fused: FusedParts, *, is_trained: bool) -> Costs:
    """Returns the costs of a layer's parts, of which some are fused.

    A frozen model has no gradients of norms' weights, unless they are fused.
    """
    weight_gradient = 0.0 if is_trained else NORM_WEIGHT_GRADIENT_BYTES
    plain_norm = replace(EAGER.norm, backward=EAGER.norm.backward - weight_gradient)
    return replace(
        EAGER,
        norm=LIGER.norm if fused.norm else plain_norm,
        rotary=LIGER.rotary if fused.rotary else EAGER.rotary,
        gated=LIGER.gated if fused.mlp else EAGER.gated,
    )
