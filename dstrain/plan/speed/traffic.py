"""Bytes that a step moves through GPU memory, over links and to the host; and the kernels it launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Generic, TypeVar

from dstrain.choices import Method, Precision
from dstrain.facts.model.families import fused_parts
from dstrain.facts.model.model_facts import Kind, ModelFacts, TensorGroup, Vision
from dstrain.plan.configuration import Configuration, TrainedModel
from dstrain.plan.memory.params import Trained, adapted, kept_whole, trained
from dstrain.plan.speed.flops import Product, flops_per_token, products
from dstrain.plan.speed.kernel_costs import (
    ADAPTER_INPUT,
    ADAPTER_OUTPUT,
    CAST,
    CONVOLUTION,
    DELTA_RULE,
    FP32_ADAPTER_INPUT,
    FP32_ADAPTER_OUTPUT,
    GATED_NORM,
    JOINED_GRADIENT,
    SHARED_EXPERTS,
    Cost,
    costs,
)
from dstrain.plan.training_code import TrainingCode

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The cost of one pass over all decoder layers beside its matrix products and attention."""

    sharded_bytes_per_token: float
    """Bytes for each token that AutoTP divides among ranks."""
    bytes_per_token: float
    """Bytes for each token that every rank moves."""
    kernels: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """The work of a model, summed over its layers; computed once for each model, compared by identity."""

    products: tuple[Product, ...]
    """The matrix products of the decoder and its head."""
    vision_products: tuple[Product, ...]
    """The matrix products of the vision tower."""
    attention_width: float
    """Widths of query and value heads together, over all layers: FLOPs of a token and position, forward."""
    windowed_share: float
    """Part of that in layers that attend to a window of tokens alone, 0…1."""
    window: int
    """Tokens of the window; 0 without such layers."""
    vision: Vision | None
    """The vision tower."""
    num_heads: int
    """Attention heads over all layers."""
    num_layers: int
    """Decoder layers."""
    num_attention_layers: int
    """Those with attention over all positions or a window."""
    hidden_size: int
    """Width of the residual stream."""
    vocab_size: int
    """Logits of a token."""
    num_moe_layers: int
    """Those with experts."""
    num_experts: int
    """Experts of all layers together."""
    num_expert_params: int
    """Elements of their weights."""
    routed_width: int
    """Hidden size times experts that a token visits, over all layers."""
    num_adapters: int
    """Linears with an adapter that shards as modules of its own."""
    num_modules: int
    """Modules with parameters of their own, which ZeRO-3 gathers one by one."""
    layer_width: int
    """Hidden size times layers: elements of all checkpoints of a token."""
    query_width: int
    """Width of the queries over all layers."""
    key_width: int
    """Width of the keys over all layers; the values have the same."""
    num_quantized_params: int
    """Elements of weights in 4 bits."""
    counts: Trained
    """Counts of trained and frozen parameters."""
    model_flops: tuple[float, float]
    """Model FLOPs of a trained token: without attention, and for each position of the sequence."""
    forward: Pass
    backward: Pass
    """The backward pass, without recomputation."""
    recompute: Pass
    """The recomputation under checkpointing."""
    mlps: Pass
    """The part of the forward pass that dense MLPs are."""


class _Same(Generic[T]):
    """A key that is equal to itself alone: a model's tensors take too long to hash at every call."""

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value


def work(model: ModelFacts, configuration: Configuration) -> Work:
    """Returns the work of the model under a configuration's method, adapter, kernels and precision.

    PEFT keeps adapters in fp32 (`autocast_adapter_dtype`); DeepSpeed casts them with the model.
    """
    kernels, shares_experts = configuration.kernels, configuration.parallel.ep > 1
    return _work(_Same(model), configuration.model, kernels.liger, shares_experts, configuration.code)


@lru_cache(maxsize=64)
def _work(
    key: _Same[ModelFacts], trained_model: TrainedModel, liger: bool, shares_experts: bool, code: TrainingCode
) -> Work:
    model, method = key.value, trained_model.method
    layers, heads, scored = model.num_hidden_layers, model.num_attention_heads, model.num_attention_layers
    multiplied = products(model, method=method, lora=trained_model.lora)
    has_copy, inside = _has_copied_head(model, trained_model), [p for p in multiplied if not p.is_vision]
    decoder = tuple(replace(p, is_copy=p.is_copy or (has_copy and not p.is_in_layer)) for p in inside)
    forward, backward, recompute, mlps = _passes(model, trained_model, liger, shares_experts, code)
    launched = layers + sum(product.count for product in decoder if product.is_in_layer)
    wrapped = [] if method is Method.FULL or code.adapter_costs is not None else adapted(model, trained_model.lora)
    return Work(
        products=decoder,
        vision_products=tuple(product for product in multiplied if product.is_vision),
        attention_width=scored * heads * (model.head_dim + model.v_head_dim),
        windowed_share=model.num_windowed_layers / max(1, scored),
        window=model.sliding_window or 0,
        vision=model.vision,
        num_heads=scored * heads,
        layer_width=layers * model.hidden_size,
        num_layers=layers,
        num_attention_layers=scored,
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        query_width=layers * heads * model.head_dim,
        key_width=layers * model.num_key_value_heads * model.head_dim,
        num_moe_layers=model.moe.num_moe_layers if model.moe else 0,
        num_experts=model.moe.num_moe_layers * model.moe.num_experts if model.moe else 0,
        num_expert_params=model.num_params_of(Kind.EXPERT),
        routed_width=model.moe.num_moe_layers * model.moe.experts_per_token * model.hidden_size if model.moe else 0,
        num_adapters=sum(group.count for group in wrapped),
        # ZeRO-3 gathers by module: a bias comes with its weight
        num_modules=sum(group.count for group in model.tensors if not group.name.endswith("bias")),
        counts=trained(model, method, trained_model.lora),
        model_flops=_model_flops(model, method),
        num_quantized_params=sum(product.num_params for product in decoder if product.is_quantized),
        forward=replace(forward, kernels=forward.kernels + launched),
        backward=replace(backward, kernels=backward.kernels + launched * (2 if method is Method.FULL else 1)),
        recompute=replace(recompute, kernels=recompute.kernels + launched - _num_ends(decoder)),
        mlps=mlps,
    )


def _num_ends(decoder: Sequence[Product]) -> int:
    """Returns the products that a recomputation leaves out."""
    return sum(product.count for product in decoder if product.is_last)


def _model_flops(model: ModelFacts, method: Method) -> tuple[float, float]:
    """Returns the model FLOPs of a trained token without attention, and for each position."""
    apart, further = (flops_per_token(model, method=method, seq_len=seq_len) for seq_len in (0, 1))
    return apart, further - apart


class _Tally:
    """Sums of the costs of parts, forward and backward."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.bytes = [0.0, 0.0]
        self.sharded = [0.0, 0.0]
        self.kernels = [0.0, 0.0]

    def add(self, cost: Cost, width: float, count: float, *, is_sharded: bool, scale: float | None = None) -> None:
        """Adds `count` parts whose widths sum to `width`."""
        into = self.sharded if is_sharded else self.bytes
        for way, (element_bytes, kernels) in enumerate(
            ((cost.forward, cost.forward_kernels), (cost.backward, cost.backward_kernels))
        ):
            into[way] += (self.scale if scale is None else scale) * element_bytes * width
            self.kernels[way] += kernels * count

    def passed(self, way: int) -> Pass:
        """Returns the sums of a way, 0 forward or 1 backward."""
        return Pass(
            bytes_per_token=self.bytes[way], sharded_bytes_per_token=self.sharded[way], kernels=self.kernels[way]
        )


def _passes(
    model: ModelFacts, trained_model: TrainedModel, liger: bool, shares_experts: bool, code: TrainingCode
) -> tuple[Pass, Pass, Pass, Pass]:
    """Returns the forward pass, the backward pass without recomputation, what checkpointing computes again, and MLPs.

    Norms compute in fp32 whatever the precision is. Recomputation ends before the last residual sum.
    """
    layers, scored, hidden, moe = model.num_hidden_layers, model.num_attention_layers, model.hidden_size, model.moe
    is_trained = trained_model.is_full
    cost = costs(fused_parts(model.model_type, liger=liger, otherwise=code.fused), is_trained=is_trained)
    tally = _Tally(2.0 if trained_model.precision is Precision.FP32 or code.has_fp32_residual else 1.0)
    width, count = _norm_width(model)
    tally.add(cost.norm, width, count, is_sharded=False, scale=1.0)
    queries, keys = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    is_latent = model.v_head_dim != model.head_dim
    turned, width = (cost.latent, queries) if is_latent else (cost.rotary, queries + keys)
    tally.add(turned, scored * width, scored, is_sharded=True)
    width, count = _gated_width(model)
    tally.add(cost.gated, width, count, is_sharded=True)
    mlps = _Tally(tally.scale)
    mlps.add(cost.gated, width, count, is_sharded=True)
    tally.add(cost.residual, layers * hidden, layers, is_sharded=False)
    _add_linear_attention(tally, model)
    if moe is not None:
        visited = moe.num_moe_layers * moe.experts_per_token
        tally.add(cost.gated, visited * moe.intermediate_size, moe.num_moe_layers, is_sharded=True)
        if not shares_experts:
            tally.add(JOINED_GRADIENT, visited * moe.intermediate_size, moe.num_moe_layers, is_sharded=True)
        routing = SHARED_EXPERTS if shares_experts else cost.experts
        tally.add(routing, visited * hidden, moe.num_moe_layers, is_sharded=False)
    if not is_trained:
        _add_adapters(tally, adapted(model, trained_model.lora), trained_model, code)
    if code.has_fp32_residual:
        # each linear has its input cast, and its output cast back
        linears = [group for group in model.tensors if group.is_linear and group.kind in (Kind.ATTENTION, Kind.MLP)]
        width = sum(sum(group.shape) * group.count for group in linears)
        tally.add(CAST, width, 2 * sum(group.count for group in linears), is_sharded=True, scale=1.0)
    forward = tally.passed(0)
    # bytes of the last sum of a layer: two tensors are read and one is written, 2 B an element in bf16
    kept = 6 * tally.scale * hidden * layers
    recompute = replace(forward, bytes_per_token=forward.bytes_per_token - kept, kernels=forward.kernels - layers)
    return forward, tally.passed(1), recompute, mlps.passed(0)


def _add_linear_attention(tally: _Tally, model: ModelFacts) -> None:
    """Adds the kernels of gated DeltaNet; of other linear attention only the products are counted."""
    for group in model.tensors:
        if group.name == "linear_attn.conv1d.weight":
            tally.add(CONVOLUTION, group.shape[0] * group.count, group.count, is_sharded=False)
        if group.name == "linear_attn.out_proj.weight":
            for cost in (DELTA_RULE, GATED_NORM):
                tally.add(cost, group.shape[1] * group.count, group.count, is_sharded=False)


def _has_copied_head(model: ModelFacts, trained_model: TrainedModel) -> bool:
    """Returns whether a copy of the head trains beside an adapter."""
    head = Kind.EMBEDDING if model.tie_word_embeddings else Kind.HEAD
    return not trained_model.is_full and any(group.kind is head for group in kept_whole(model, trained_model.lora))


def _norm_width(model: ModelFacts) -> tuple[float, int]:
    """Returns the widths of all norms that a token passes, summed, and how many there are."""
    width, count = 0, 0
    heads = {"self_attn.q_norm.weight": model.num_attention_heads, "self_attn.k_norm.weight": model.num_key_value_heads}
    for group in model.tensors:
        if group.kind is Kind.NORM:
            width += group.numel * group.count * heads.get(group.name, 1)
            count += group.count
    return width, count


def _gated_width(model: ModelFacts) -> tuple[float, int]:
    """Returns the inner widths of all dense and shared MLPs, summed, and how many there are."""
    ends = [group for group in model.tensors if group.kind is Kind.MLP and group.name.endswith("down_proj.weight")]
    return sum(group.shape[1] * group.count for group in ends), sum(group.count for group in ends)


def _add_adapters(tally: _Tally, groups: list[TensorGroup], trained_model: TrainedModel, code: TrainingCode) -> None:
    """Adds the adapters' kernels; their products are so thin that reading and writing is all they cost.

    Forward: input 2 (5 more with dropout), output of both products 2, scaled 4, summed 6. Backward: output's gradient
    scaled 4 and read twice 4, input read 2, its gradient written 2 and summed 6. In fp32 the same in 4 bytes, with
    casts there and back. An embedding's input is an index. Source: traces of peft 0.21 on Transformers 5.23, exact.
    """
    inputs = sum(group.shape[1] * group.count for group in groups if group.kind is not Kind.EMBEDDING)
    outputs = sum(group.shape[group.kind is Kind.EMBEDDING] * group.count for group in groups)
    count = sum(group.count for group in groups)
    dropped, also = (5.0, 1) if trained_model.lora.dropout > 0 else (0.0, 0)
    dropout = Cost(forward=dropped, backward=dropped, forward_kernels=also, backward_kernels=also)
    plain = (FP32_ADAPTER_INPUT, FP32_ADAPTER_OUTPUT) if code.has_fp32_adapters else (ADAPTER_INPUT, ADAPTER_OUTPUT)
    into, out = code.adapter_costs or plain
    for cost, width in ((into, inputs), (out, outputs), (dropout, inputs)):
        tally.add(cost, width, count, is_sharded=True, scale=2.0 if trained_model.precision is Precision.FP32 else 1.0)
