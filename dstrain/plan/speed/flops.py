"""Floating-point operations: per token for MFU, and per matrix product for the step time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dstrain.choices import Method, Precision
from dstrain.facts.cluster.gpus import Gpu
from dstrain.facts.model.model_facts import Kind, ModelFacts, TensorGroup
from dstrain.job.model_changes import Lora

LINEAR_FLOPS_PER_ELEMENT = 6.0
"""FLOPs of the forward pass of a token for each element of a recurrent state: read by the key, written, read by the
query, a product each. Source: arXiv 2412.06464 (gated DeltaNet), equation 10; its chunks compute more."""


def flops_per_token(model: ModelFacts, *, method: Method, seq_len: int) -> float:
    """Returns the model FLOPs of one trained token: 6·N + 6·L·H·d·s, or 4·N + 6·L·H·d·s with a frozen base.

    N are the active parameters without the embedding table (its lookup multiplies nothing; a tied head does), L layers
    of H heads of d elements, s the sequence length, halved for causal attention, also where a window leaves less. A
    layer with linear attention has 18 for each element of its states instead of scores. Recomputation does not count,
    nor does the gradient of experts' weights from which PEFT makes their adapters': they are not the model's.
    Sources: PaLM (arXiv 2204.02311), appendix B, with the causal half; LoRA has no weight gradients;
    `LINEAR_FLOPS_PER_ELEMENT`.
    """
    multiplied = model.num_active_params - model.num_params_of(Kind.EMBEDDING)
    if model.tie_word_embeddings:
        multiplied += model.vocab_size * model.hidden_size
    per_param = 6 if method is Method.FULL else 4
    per_head = (model.head_dim + model.v_head_dim) / 2
    attention = 6 * model.num_attention_layers * model.num_attention_heads * per_head * seq_len
    return per_param * multiplied + attention + 3 * LINEAR_FLOPS_PER_ELEMENT * model.linear_state_numel


def peak_flops_per_s(gpu: Gpu, precision: Precision) -> float:
    """Returns the data sheet's dense FLOP/s of matrix products in a precision; 0 if unknown.

    fp16 stands in for bf16 where a GPU has none: PyTorch then computes in fp32 what it stores in bf16, which nobody
    wants.
    """
    if precision is Precision.FP32:
        return gpu.fp32_flops_per_s
    return gpu.fp16_flops_per_s if precision is Precision.FP16 else gpu.bf16_flops_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Equal matrix products of the forward pass: rows × inputs by inputs × outputs, `count` times."""

    inputs: int
    """Input width of a row."""
    outputs: int
    """Output width of a row."""
    count: int
    """Number of such products in the model."""
    experts: int = 1
    """Weights of this shape in each of them, among which the rows are shared."""
    rows_per_token: float = 1.0
    """Rows for each token, or for each patch in the vision tower: experts visited, or patches merged into one."""
    is_sharded: bool = True
    """Whether AutoTP gives each rank a part: everything inside the decoder layers but the router."""
    is_in_layer: bool = True
    """Whether checkpointing may compute it again: all but the head."""
    is_last: bool = False
    """Whether a dense layer ends with it, so that non-reentrant checkpointing does not compute it again."""
    is_mlp: bool = False
    """Whether it belongs to a dense MLP."""
    is_quantized: bool = False
    """Whether QLoRA keeps its weight in 4 bits."""
    is_vision: bool = False
    """Whether it belongs to the vision tower."""
    trains: bool = True
    """Whether a weight has a gradient if all of the model trains but what a job freezes."""
    is_copy: bool = False
    """Whether its weight is a copy that has a gradient beside an adapter, while the others are frozen: one that trains,
    or one of experts with their adapters added."""

    @property
    def num_params(self) -> int:
        """Elements of the weights."""
        return self.inputs * self.outputs * self.count * self.experts


_MULTIPLIED = (Kind.ATTENTION, Kind.MLP, Kind.EXPERT, Kind.ROUTER, Kind.HEAD, Kind.VISION)


def products(model: ModelFacts, *, method: Method, lora: Lora | None = None) -> tuple[Product, ...]:
    """Returns every matrix product of the forward pass but those inside attention, and of adapters.

    Experts with adapters are multiplied with a copy of their weights to which these are added, so that it has a
    gradient.

    Non-reentrant checkpointing stops when the last saved tensor is there, so the down projection that a dense layer
    ends with is not computed again. Source: torch 2.13 utils/checkpoint.py: _checkpoint_without_reentrant_generator;
    counted in traces of Transformers 5.23's layers: 13 products of 14 in a dense layer, all in one with experts.
    """
    from dstrain.plan.memory.params import adapted_experts  # here: a rank counts FLOPs without it

    copied = [] if method is Method.FULL or lora is None else adapted_experts(model, lora)
    matrix_products = [
        replace(_product(model, group, method), is_copy=group in copied)
        for group in model.tensors
        if _is_multiplied(group)
    ]
    if model.tie_word_embeddings:
        head = Product(inputs=model.hidden_size, outputs=model.vocab_size, count=1, is_sharded=False, is_in_layer=False)
        matrix_products.append(head)
    return tuple(matrix_products)


def _is_multiplied(group: TensorGroup) -> bool:
    """Returns whether a tensor is the weight of a matrix product: two dimensions, or three for experts."""
    if group.kind not in _MULTIPLIED:
        return False
    if group.kind is Kind.VISION:
        return group.is_linear or group.name.endswith("projection_weight")
    return len(group.shape) == (3 if group.kind is Kind.EXPERT else 2)


def _product(model: ModelFacts, group: TensorGroup, method: Method) -> Product:
    moe, kind = model.moe, group.kind
    outputs, inputs = group.shape[-2:]
    rows = 1.0
    if kind is Kind.EXPERT and moe is not None:
        rows = float(moe.experts_per_token)
    elif kind is Kind.VISION and model.vision is not None and ("merger" in group.name or "projector" in group.name):
        rows = 1 / model.vision.spatial_merge_size**2
    return Product(
        inputs=inputs,
        outputs=outputs,
        count=group.count,
        experts=group.shape[0] if kind is Kind.EXPERT else 1,
        rows_per_token=rows,
        is_sharded=kind in (Kind.ATTENTION, Kind.MLP, Kind.EXPERT),
        is_in_layer=kind is not Kind.HEAD,
        is_last=kind is Kind.MLP and group.name.endswith("down_proj.weight") and "expert" not in group.name,
        is_mlp=kind is Kind.MLP,
        is_quantized=method is Method.QLORA and group.is_quantizable,
        is_vision=kind is Kind.VISION,
        trains=group.num_trained > 0,
    )
