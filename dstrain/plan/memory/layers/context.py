"""The context of layer code on the tape: sizes of this rank's work, parameters, and variants."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from dstrain.choices import Attention, Method
from dstrain.facts.model.families import fused_parts
from dstrain.facts.model.model_facts import Kind, ModelFacts, Moe
from dstrain.plan.configuration import (
    Checkpointing,
    Configuration,
    Kernels,
    MicroBatch,
    Parallel,
    TrainedModel,
)
from dstrain.plan.memory.layers import ops
from dstrain.plan.memory.layers.tape import GradRelease, Param, Storage, Tape, Tensor, Tensors
from dstrain.plan.memory.params import adapted, is_inside, is_target, kept_whole
from dstrain.plan.training_code import TrainingCode, needs_reentrant


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Settings of the tape: most parts of a configuration, and how long parameters and gradients stay alive."""

    model: TrainedModel
    batch: MicroBatch
    kernels: Kernels
    checkpointing: Checkpointing
    parallel: Parallel
    code: TrainingCode
    keeps_inputs: bool
    """Whether linear layers keep what they multiply even if the weight is frozen, as ZeRO-3 has it."""
    stops_early: bool
    """Whether a recomputation ends as soon as all that was saved exists again."""
    kernel_workspaces: bool
    """Whether allocations inside kernels are counted, which CPU ranks do not have and a trace does not see."""
    release: GradRelease = GradRelease.AT_ONCE
    """How long autograd keeps parameter gradients."""
    gathers: bool = False
    """Whether parameters are whole only while their module works, and no engine is played that gathers them."""
    holds_layers: bool = False
    """Whether each layer's input and its gradient stay to the end."""

    @property
    def item(self) -> int:
        """Bytes of one element in the training precision."""
        return self.model.item

    @property
    def residual_item(self) -> int:
        """Bytes of one element of the residual stream."""
        return 4 if self.code.has_fp32_residual else self.item

    @property
    def adapter_item(self) -> int:
        """Bytes of one element of an adapter."""
        return 4 if self.code.has_fp32_adapters else self.item

    @property
    def seq_len(self) -> int:
        """Tokens of a sample that this rank has."""
        return -(-self.batch.seq_len // self.parallel.sp)

    @property
    def has_mask(self) -> bool:
        """Whether there is a mask of padding, or under SDPA of packed samples."""
        if self.batch.packing:
            return not self.code.splits_packed_rows and self.kernels.attn is Attention.SDPA
        return self.code.masks_padding and self.batch.is_padded and self.parallel.sp == 1

    @property
    def is_by_sample(self) -> bool:
        """Whether attention is called for each sample of packed rows, which so needs no mask."""
        return self.batch.packing and self.kernels.attn is Attention.SDPA and self.code.splits_packed_rows


def variant_of(configuration: Configuration, *, kernel_workspaces: bool = True) -> Variant:
    """Returns the settings of the tape beside the engine, which gathers parameters and takes gradients at once."""
    c = configuration
    is_reentrant = c.checkpointing.enabled and needs_reentrant(c.model.method, c.zero.stage)
    return Variant(
        model=c.model,
        batch=c.batch,
        kernels=c.kernels,
        checkpointing=c.checkpointing,
        parallel=c.parallel,
        code=c.code,
        keeps_inputs=c.zero.stage == 3,
        stops_early=c.code.stops_early and not is_reentrant,
        kernel_workspaces=kernel_workspaces,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """The weight of a linear layer."""

    outputs: int
    """Rows of the weight."""
    inputs: int
    """Columns of the weight."""
    has_bias: bool
    """Whether a bias is added."""


@cache
def linears(model: ModelFacts) -> dict[str, Linear]:
    """Returns the linear layers by their name below the decoder layer, vision tower by full name."""
    biases = {group.name.removesuffix(".bias") for group in model.tensors if group.name.endswith(".bias")}
    layers = {}
    for group in model.tensors:
        if len(group.shape) == 2 and group.name.endswith("weight"):
            name = group.name.removesuffix(".weight")
            outputs, inputs = group.shape
            layers[name] = Linear(outputs=outputs, inputs=inputs, has_bias=name in biases)
    return layers


def _trains_layers(model: ModelFacts) -> bool:
    """Returns whether something inside the decoder layers trains if the model does."""
    return any(group.num_trained for group in model.tensors if is_inside(group))


class Context:
    """One run of layer code on a tape."""

    __slots__ = (
        "cos",
        "has_mask",
        "is_tiling",
        "kept_tensors",
        "kernels",
        "linears",
        "mask",
        "model",
        "moment",
        "outside",
        "router_logits",
        "rows",
        "sin",
        "tape",
        "trains",
        "variant",
    )

    def __init__(self, model: ModelFacts, variant: Variant, tape: Tape) -> None:
        self.model, self.variant, self.tape = model, variant, tape
        self.linears = linears(model)
        self.outside = {group.name: group for group in model.tensors if group.kind is Kind.VISION}
        self.kernels = fused_parts(model.model_type, liger=variant.kernels.liger, otherwise=variant.code.fused)
        self.rows = variant.batch.rows * variant.seq_len
        self.trains = variant.model.is_full and _trains_layers(model)
        self.cos: Tensor | None = None
        self.sin: Tensor | None = None
        self.mask: Storage | None = None
        self.has_mask = variant.has_mask
        """Whether the current layer has a mask."""
        self.is_tiling = False
        """Whether the current operations belong to one tile of an MLP."""
        self.kept_tensors: list[Tensor] = []
        """Tensors that a caller's frame keeps alive until the loss exists."""
        self.router_logits: list[Tensor] = []
        """Logits of each layer's router, if the loss that balances experts is computed of them."""

    def trains_whole(self, kind: Kind) -> bool:
        """Returns whether the embedding or the head trains: with everything, or beside an adapter."""
        if self.variant.model.is_full:
            return any(group.num_trained for group in self.model.tensors if group.kind is kind)
        return any(group.kind is kind for group in kept_whole(self.model, self.variant.model.lora))

    def adapts(self, kind: Kind) -> bool:
        """Returns whether the embedding or the head gets an adapter."""
        lora = self.variant.model.lora
        return not self.variant.model.is_full and any(group.kind is kind for group in adapted(self.model, lora))

    def param(self, name: str) -> Param:
        """Returns a parameter of the vision tower by its full name, in which a star stands for the block."""
        group = self.outside[name]
        return Param(group.numel, trains=self.variant.model.is_full and group.num_trained > 0)

    @property
    def moe(self) -> Moe:
        """The mixture of experts of a model that has one."""
        assert self.model.moe is not None
        return self.model.moe

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every position."""
        assert self.cos is not None
        assert self.sin is not None
        return self.cos, self.sin

    def linear(self, x: Tensor, name: str, *, shards: str = "") -> Tensor:
        """A linear layer of the model, with its adapter if it has one.

        `shards` is `columns` or `rows` where tensor parallelism cuts the weight that way.
        """
        shape = self.linears[name]
        outputs = shape.outputs // (self.variant.parallel.tp if shards == "columns" else 1)
        inputs = shape.inputs // (self.variant.parallel.tp if shards == "rows" else 1)
        base = self._quantized if self._is_quantized(name) else self._plain
        result = base(x, outputs, inputs, shape.has_bias)
        if self.variant.model.is_full or not self._is_adapted(name):
            return result
        return self.with_adapter(x, result, outputs, inputs)

    def product(self, x: Tensor, outputs: int, inputs: int) -> Tensor:
        """A linear layer without bias and adapter."""
        make = self._quantized if self.variant.model.method is Method.QLORA else self._plain
        return make(x, outputs, inputs, False)

    def adapts_experts(self, name: str) -> bool:
        """Returns whether a parameter with a matrix of all experts gets an adapter for each of them."""
        return not self.variant.model.is_full and self.variant.model.lora.adapts_experts(name)

    def _is_adapted(self, name: str) -> bool:
        lora = self.variant.model.lora
        if lora.targets != ("all-linear",):
            return is_target(name, lora)
        return name.startswith("self_attn.") if self.model.moe is not None else name.split(".")[-1] != "lm_head"

    def _is_quantized(self, name: str) -> bool:
        return self.variant.model.method is Method.QLORA and name != "lm_head" and not name.startswith("model.visual")

    def _plain(self, x: Tensor, outputs: int, inputs: int, has_bias: bool) -> Tensor:
        tape, item = self.tape, self.variant.item
        rows = x.numel // inputs
        weight = Param(outputs * inputs, trains=self.trains)
        result = ops.matmul(tape, ops.cast(tape, x, item), weight, rows * outputs, item)
        return ops.bias(tape, result, Param(outputs, trains=self.trains)) if has_bias else result

    def _quantized(self, x: Tensor, outputs: int, inputs: int, has_bias: bool) -> Tensor:
        """A 4-bit linear: the weight is written out in the compute dtype for the product, forward and backward.

        Source: bitsandbytes 0.49 autograd/_functions.py: MatMul4Bit; nn/modules.py: Linear4bit.forward.
        """
        tape, item, back = self.tape, self.variant.item, x.item
        x = ops.cast(tape, x, item)
        node = None
        numel, x_numel = outputs * inputs, x.numel
        if tape.needs(x):
            saved = tape.save(ops.view_without_node(x) if self.variant.code.keeps_quantized_inputs else None)

            def backward(grad: Tensor) -> Tensors:
                saved.take()
                whole = tape.new(numel, item)
                grad_x = tape.new(x_numel, item)
                del whole
                return (grad_x,)

            node = tape.node((x,), backward)
        whole = tape.new(numel, item)
        result = tape.new(x_numel // inputs * outputs, item, node)
        del whole
        return ops.cast(tape, result, back)

    def with_adapter(self, x: Tensor, result: Tensor, outputs: int, inputs: int) -> Tensor:
        """Adds the adapter's two products. Source: peft 0.21 tuners/lora/layer.py: Linear.forward."""
        tape, lora, rows = self.tape, self.variant.model.lora, x.numel // inputs
        item = self.variant.adapter_item
        down, up = Param(lora.rank * inputs, trains=True), Param(lora.rank * outputs, trains=True)
        if self.variant.code.is_autocast:  # the input is cast to the adapter's dtype, and back for the product
            dropped = ops.dropout(tape, ops.cast(tape, x, item), lora.dropout)
            item = self.variant.item
            dropped = ops.cast(tape, dropped, item)
        else:
            dropped = ops.dropout(tape, ops.cast(tape, x, item), lora.dropout)
        inner = ops.matmul(tape, dropped, down, rows * lora.rank, item)
        del dropped
        outer = ops.matmul(tape, inner, up, rows * outputs, item)
        del inner
        scaled = ops.unary(tape, outer)
        del outer
        return ops.cast(tape, ops.add_up(tape, result, scaled), result.item)
